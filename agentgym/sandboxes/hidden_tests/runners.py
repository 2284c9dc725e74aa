"""The runners of hidden tests, unittest and pytest, with an outcome for each test.

This text comes before that of `case` in the program that runs in the sandbox. It uses only the standard library and
needs Python 3.9 or later.
"""

import os
import sys
import traceback
import types
from collections.abc import Callable
from importlib import util
from typing import Any

Outcomes = dict[str, "str | None"]
"""Outcomes by case name: None if the case passed, else why it failed."""
NOT_RUN = "the test did not finish"


def reason(error: BaseException) -> str:
    """Return the last line of a traceback, with the file and line where the error was raised."""
    text = traceback.format_exception_only(type(error), error)[-1].strip()
    frames = traceback.extract_tb(error.__traceback__)
    return f"{text} ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else text


def read(path: str) -> str:
    """Return the text of a hidden file."""
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read()


def skips_fail() -> None:
    """Make unittest count each skipped test as a failure, for a program that runs unittest itself."""
    import unittest  # Imported only if needed: loading it takes longer than most cases run.

    def add_skip(self: Any, test: unittest.TestCase, reason: str) -> None:
        error = AssertionError(skipped(reason))
        self.addFailure(test, (type(error), error, None))

    for kind in (unittest.TestResult, unittest.TextTestResult):
        kind.addSkip = add_skip  # type: ignore[method-assign]


def returns_fail() -> None:
    """Make a unittest test that returns a value fail: the value may be a comparison, or a coroutine that never ran."""
    import unittest

    def call(self: unittest.TestCase, method: Callable[[], object]) -> None:
        if (value := method()) is not None:
            raise AssertionError(returned(value))

    unittest.TestCase._callTestMethod = call  # type: ignore[attr-defined]


def returned(value: object) -> str:
    """Return why a test that returned a value counts as failed."""
    return f"it returned a {type(value).__name__} instead of None: check values with assert, and await coroutines"


def skipped(why: object) -> str:
    """Return why a skipped test counts as failed: the tested code can skip a test, just as the test itself can."""
    return f"the test was skipped: {why}"


def tests_in(given: list[str]) -> list[str]:
    """Return those of the hidden files `given` that can contain tests.

    If there are any, tests are collected only from them.
    """
    found = [path for path in given if path.endswith(".py")]
    return [path for path in found if os.path.basename(path) not in ("conftest.py", "__init__.py")]


def run_unittest(words: list[str], orders: dict[str, Any]) -> Outcomes:
    """Run tests with the standard library's runner.

    Args:
        words: The words of the command line that follow `python -m unittest`.
        orders: The run's settings from this machine, with the paths of the hidden files (`files`) and their folder.

    Returns:
        The outcome of each test by its id: None if it passed, or the reason why it didn't.
    """
    import unittest

    outcomes: Outcomes = {}
    tests = tests_in(orders["files"])

    class Finder(unittest.TestLoader):
        def discover(
            self, start_dir: str, pattern: str = "test*.py", top_level_dir: "str | None" = None
        ) -> unittest.TestSuite:
            if tests:
                start_dir = os.path.join(orders["hidden"], start_dir)
                top_level_dir = top_level_dir and os.path.join(orders["hidden"], top_level_dir)
            return super().discover(start_dir, pattern, top_level_dir)

        def loadTestsFromName(self, name: str, module: Any = None) -> unittest.TestSuite:  # The name is unittest's.
            words = name.split(".")
            for end in range(len(words), 0, -1):
                if "/".join(words[:end]) + ".py" in tests:
                    hidden = hidden_module(words[:end], orders)
                    rest = ".".join(words[end:])
                    return super().loadTestsFromName(rest, hidden) if rest else self.loadTestsFromModule(hidden)
            return super().loadTestsFromName(name, module)

    class Noted(unittest.TextTestResult):
        def stopTest(self, test: unittest.TestCase) -> None:  # The name is unittest's.
            if outcomes.get(test.id(), NOT_RUN) == NOT_RUN:
                outcomes[test.id()] = None
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

        def addSkip(self, test: unittest.TestCase, why: str) -> None:
            outcomes[test.id()] = skipped(why)
            super().addSkip(test, why)

        def addUnexpectedSuccess(self, test: unittest.TestCase) -> None:
            outcomes[test.id()] = "an unexpected success"
            super().addUnexpectedSuccess(test)

    class Runner(unittest.TextTestRunner):
        def run(self, test: Any) -> Any:
            outcomes.update(dict.fromkeys(ids(test), NOT_RUN))  # The tested code can interrupt the run.
            return super().run(test)

    returns_fail()
    runner = Runner(resultclass=Noted)  # type: ignore[arg-type]
    unittest.main(module=None, argv=["unittest", *words], testRunner=runner, testLoader=Finder(), exit=False)
    return outcomes


def ids(test: Any) -> "list[str]":
    """Return the names of the tests in a unittest suite."""
    return [name for part in test for name in ids(part)] if hasattr(test, "__iter__") else [test.id()]


def hidden_module(words: list[str], orders: dict[str, Any]) -> types.ModuleType:
    """Import a hidden file under the dotted name whose components are `words`.

    Its parent folders are not imported as packages.
    """
    name = ".".join(words)
    if name not in sys.modules:
        spec = util.spec_from_file_location(name, os.path.join(orders["hidden"], *words) + ".py")
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def run_pytest(words: list[str], orders: dict[str, Any]) -> Outcomes:
    """Run tests with pytest, and record each outcome."""
    outcomes = note_pytest(orders)
    import pytest

    pytest.main(words)
    return outcomes


def note_pytest(orders: dict[str, Any]) -> Outcomes:
    """Patch pytest.main to ignore configuration in the sandbox's files, and return the dict of outcomes.

    The patched function's exit code is nonzero if a test has not passed, so that a program that calls it can't overlook
    the failure.
    """
    import pytest
    from _pytest import config

    outcomes: Outcomes = {}

    class Noting:
        def pytest_configure(self) -> None:
            os.chdir(orders["folder"])  # pytest collects in the folder where it started, but tests run here.

        def pytest_collection_finish(self, session: Any) -> None:
            outcomes.update((item.nodeid, NOT_RUN) for item in session.items)

        def pytest_runtest_logreport(self, report: Any) -> None:
            marked = "xfail" in report.keywords and hasattr(report, "wasxfail")
            if report.failed:
                outcomes[report.nodeid] = last_line(report)
            elif report.skipped and not marked:
                outcomes[report.nodeid] = skipped(getattr(report, "wasxfail", report.longrepr))
            elif report.when == "teardown" and outcomes.get(report.nodeid, NOT_RUN) == NOT_RUN:
                outcomes[report.nodeid] = None  # The test and its subtests have ended.

        def pytest_collectreport(self, report: Any) -> None:
            if not report.passed:
                outcomes[report.nodeid] = skipped(report.longrepr) if report.skipped else last_line(report)

    def run(args: Any = None, plugins: Any = None) -> int:
        os.chdir(orders["hidden"] if tests_in(orders["files"]) else orders["folder"])
        plain = ["-p", "no:cacheprovider", "--import-mode=append", *installed(orders["places"]), *settings(orders)]
        if hasattr(pytest, "PytestReturnNotNoneWarning"):
            plain += ["-W", "error::pytest.PytestReturnNotNoneWarning"]
        words = sys.argv[1:] if args is None else [args] if isinstance(args, os.PathLike) else args
        code = int(own_main([*plain, *words], plugins=[*(plugins or ()), Noting()]))
        return code or int(any(outcomes.values()))

    own_main = pytest.main
    returns_fail()
    pytest.main = config.main = run
    return outcomes


def last_line(report: Any) -> str:
    """Return the last line of pytest's text for a failure."""
    return str(report.longrepr).strip().rpartition("\n")[2]


def settings(orders: dict[str, Any]) -> list[str]:
    """Return the options that make pytest read configuration only from the hidden files."""
    given = {os.path.basename(path): path for path in sorted(orders["files"], key=lambda path: -path.count("/"))}
    known = [given[name] for name in ("pytest.ini", "pyproject.toml", "tox.ini", "setup.cfg") if name in given]
    found = [path for path in known if path.endswith("pytest.ini") or "pytest" in read(path)]
    config = os.path.join(orders["hidden"], found[0]) if found else os.devnull
    own = [] if "conftest.py" in given else ["--noconftest"]
    return ["-c", config, f"--rootdir={os.getcwd()}", f"--confcutdir={os.getcwd()}", *own]


def installed(places: list[str]) -> list[str]:
    """Return the options that make pytest load the plugins of installed packages only.

    Plugins in the sandbox's own files are not loaded. `places` are the folders that are searched for packages:
    `sys.path` as it was before the sandbox's own folders were added.
    """
    from importlib import metadata

    found = [entry for package in metadata.distributions(path=places) for entry in package.entry_points]
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    names = dict.fromkeys(entry.value for entry in found if entry.group == "pytest11")
    return [word for name in names for word in ("-p", name)]
