"""Generates a repository's files from this folder's parts under another name, and the cases' right values."""

import importlib
import inspect
import json
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from envs.repo.bugs import BUGS, VISIBLE

ERROR_OF = '''
def error_of(function, *arguments):
    """Return the name of the exception that a call raises; "" where it raises none."""
    try:
        function(*arguments)
    except Exception as error:
        return type(error).__name__
    return ""
'''
OUTCOMES = f"""{ERROR_OF}
def outcomes(module, cases):
    return [eval(case, {{**vars(module), "error_of": error_of}}) for case in cases]
"""
"""Base of the hidden tests; it runs in the sandbox on the submitted code, and here on the correct parts."""


@cache
def part_source(part: str, package: str) -> str:
    """Return the correct source of a part in a package of that name."""
    text = (Path(__file__).parent / "parts" / f"{part}.py").read_text()
    return text.replace("envs.repo.parts", package)


@cache
def visible_tests(part: str, package: str) -> str:
    """Return the tests of a part that the repository contains."""
    module = _sound(part)
    names = [name for name, value in vars(module).items() if inspect.getmodule(value) is module]
    cases = zip(VISIBLE[part], _outcomes(part, VISIBLE[part]), strict=True)
    tests = [
        f"    def test_{number}(self):\n        self.assertEqual({case}, {value!r})\n"
        for number, (case, value) in enumerate(cases, 1)
    ]
    head = f"import unittest\n\nfrom {package}.{part} import {', '.join(names)}\nfrom tests import error_of\n\n\n"
    return f"{head}class Test{part.title()}(unittest.TestCase):\n" + "\n".join(tests)


@cache
def hidden_tests(part: str) -> tuple[str, list[Any]]:
    """Return the expression that runs all cases of a part, and its right value.

    The value has JSON types, because sandboxes compare values as JSON.
    """
    cases = [*VISIBLE[part], *(case for bug in BUGS if bug.part == part for case in bug.hidden)]
    return f"outcomes({part}, {cases!r})", json.loads(json.dumps(_outcomes(part, cases)))


def _outcomes(part: str, cases: list[str]) -> list[Any]:
    names: dict[str, Any] = {}
    exec(OUTCOMES, names)
    found: list[Any] = names["outcomes"](_sound(part), cases)
    return found


def _sound(part: str) -> ModuleType:
    return importlib.import_module(f"envs.repo.parts.{part}")
