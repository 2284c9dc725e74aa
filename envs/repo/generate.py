"""The files of a repository, and what its sound modules come to: the parts of this folder, under another name."""

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
"""What the hidden tests are made of; it runs in the sandbox over what was submitted, and here over the sound parts."""


@cache
def part_source(part: str, package: str) -> str:
    """Return the sound source of a part in a package of that name."""
    text = (Path(__file__).parent / "parts" / f"{part}.py").read_text()
    return text.replace("envs.repo.parts", package)


@cache
def visible_tests(part: str, package: str) -> str:
    """Return the tests of a part that the repository has."""
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
    """Return the expression that runs all cases of a part, and its right value as JSON has it: so sandboxes compare
    it."""
    cases = [*VISIBLE[part], *(case for bug in BUGS if bug.part == part for case in bug.hidden)]
    return f"outcomes({part}, {cases!r})", json.loads(json.dumps(_outcomes(part, cases)))


def _outcomes(part: str, cases: list[str]) -> list[Any]:
    names: dict[str, Any] = {}
    exec(OUTCOMES, names)
    found: list[Any] = names["outcomes"](_sound(part), cases)
    return found


def _sound(part: str) -> ModuleType:
    return importlib.import_module(f"envs.repo.parts.{part}")
