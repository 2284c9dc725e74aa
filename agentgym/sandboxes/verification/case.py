"""The program that runs one case of hidden tests, in a process of its own inside the box.

Standard library only, Python 3.9 and later. It reads its orders as JSON from stdin, and writes one line to the
descriptor `report`: the token, then JSON. A process that ends without this line has not passed, whatever its exit code.
"""

import asyncio
import inspect
import json
import os
import runpy
import shlex
import sys
import traceback
import types
from typing import Any

Outcomes = dict[str, "str | None"]
"""By the name of a case: None where it passed, else the reason."""


def main() -> None:
    """Run what the orders say, and report."""
    orders = json.loads(sys.stdin.buffer.read())
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.path.append(orders["folder"])  # Last: no file of the box stands in for a module of the standard library.
    try:
        said = {"function": run_function, "value": run_value, "command": run_command}[orders["kind"]](orders)
    except BaseException as error:
        said = {"failed": reason(error)}
    line = orders["token"] + json.dumps(said) + "\n"
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    data = line.encode()
    while data:
        data = data[os.write(orders["report"], data) :]


def reason(error: BaseException) -> str:
    """Return the last line of a traceback, and where it was raised."""
    text = traceback.format_exception_only(type(error), error)[-1].strip()
    frames = traceback.extract_tb(error.__traceback__)
    return f"{text} ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else text


def names_of(orders: dict[str, Any]) -> dict[str, Any]:
    """Return the names that the hidden code defines, as a module that can be imported."""
    module = types.ModuleType("hidden")
    sys.modules["hidden"] = module
    exec(compile(orders["code"], "<hidden>", "exec", dont_inherit=True), module.__dict__)
    return module.__dict__


def run_function(orders: dict[str, Any]) -> dict[str, Any]:
    """Run one test function of the hidden code; it passes where it returns."""
    value = names_of(orders)[orders["name"]]()
    if inspect.iscoroutine(value):
        asyncio.run(value)
    return {"passed": True}


def run_value(orders: dict[str, Any]) -> dict[str, Any]:
    """Return the value of an expression, with the names of the hidden code."""
    value = eval(compile(orders["name"], "<hidden>", "eval", dont_inherit=True), names_of(orders))
    return {"value": json.dumps(value)}


def run_command(orders: dict[str, Any]) -> dict[str, Any]:
    """Run a Python command that is made of options and a file, `-m unittest`, `-m pytest`, `-m MODULE` or `-c CODE`."""
    words: list[str] = orders["words"]
    sys.argv = words[1:] if words[0] in ("-m", "-c") else words
    try:
        if words[:2] == ["-m", "unittest"]:
            return {"cases": run_unittest(words[2:])}
        if words[:2] == ["-m", "pytest"]:
            return {"cases": run_pytest(words[2:], orders["files"])}
        if words[0] == "-c":
            exec(compile(words[1], "<command>", "exec"), {"__name__": "__main__"})
        elif words[0] == "-m":
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as leaving:
        return of_exit(leaving, orders)
    return {"cases": {shlex.join(words): None}}


def of_exit(leaving: SystemExit, orders: dict[str, Any]) -> dict[str, Any]:
    """Tell a test that ends with `sys.exit(0)` from a tested file that does."""
    folder = orders["folder"] + os.sep
    for frame in traceback.extract_tb(leaving.__traceback__):
        path = os.path.join(orders["folder"], frame.filename)
        if (
            frame.filename[:1] != "<"
            and path.startswith(folder)
            and os.path.relpath(path, folder) not in orders["files"]
        ):
            return {"failed": f"SystemExit raised by {os.path.relpath(path, folder)}"}
    if leaving.code in (None, 0, False):
        return {"cases": {shlex.join(orders["words"]): None}}
    return {"failed": f"it exited with {leaving.code!r}"}


def run_unittest(words: list[str]) -> Outcomes:
    """Run tests by the standard library's runner, and note each one."""
    import unittest

    outcomes: Outcomes = {}

    class Noted(unittest.TextTestResult):
        def stopTest(self, test: unittest.TestCase) -> None:  # unittest's own name.
            outcomes.setdefault(test.id(), None)
            super().stopTest(test)

        def addFailure(self, test: unittest.TestCase, err: Any) -> None:
            outcomes[test.id()] = reason(err[1])
            super().addFailure(test, err)

        def addError(self, test: unittest.TestCase, err: Any) -> None:
            outcomes[test.id()] = reason(err[1])
            super().addError(test, err)

        def addSubTest(self, test: unittest.TestCase, subtest: unittest.TestCase, err: Any) -> None:
            if err is not None:
                outcomes[test.id()] = reason(err[1])
            super().addSubTest(test, subtest, err)

        def addUnexpectedSuccess(self, test: unittest.TestCase) -> None:
            outcomes[test.id()] = "an unexpected success"
            super().addUnexpectedSuccess(test)

    runner = unittest.TextTestRunner(resultclass=Noted)  # type: ignore[arg-type]
    unittest.main(module=None, argv=["unittest", *words], testRunner=runner, exit=False)
    return outcomes


def run_pytest(words: list[str], given: list[str]) -> Outcomes:
    """Run tests by pytest, without the configuration that the box's own files give, and note each one."""
    import pytest

    outcomes: Outcomes = {}

    class Noting:
        def pytest_runtest_logreport(self, report: Any) -> None:
            if report.failed:
                outcomes[report.nodeid] = str(report.longrepr).strip().rpartition("\n")[2]
            elif report.when == "call":
                outcomes.setdefault(report.nodeid, None)

        def pytest_collectreport(self, report: Any) -> None:
            if report.failed:
                outcomes[report.nodeid] = str(report.longrepr).strip().rpartition("\n")[2]

    own = {os.path.basename(path) for path in given}
    plain = ["-p", "no:cacheprovider"]
    plain += [] if "conftest.py" in own else ["--noconftest"]
    plain += [] if own & {"pytest.ini", "pyproject.toml", "tox.ini", "setup.cfg"} else ["-c", os.devnull, "--rootdir=."]
    pytest.main([*plain, *words], plugins=[Noting()])
    return outcomes


if __name__ == "__main__":
    main()
