"""The program that runs one case of hidden tests, in a separate process inside the sandbox.

It uses only the standard library and needs Python 3.9 or later. It reads its orders as JSON from stdin and writes one
line to the descriptor `report`: the token from the orders, then JSON. A case whose process ends without writing this
line has not passed, whatever the exit code. `verify.case_program` puts the import finder and the runners before this
text, and a call to `main` after it.
"""

import ctypes
import inspect
import json
import os
import runpy
import shlex
import sys
import traceback
import types
from collections.abc import Callable
from importlib import util
from json import dumps
from os import write
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # In the sandbox, these functions come earlier in the same program.
    from agentgym.sandboxes.hidden_tests.runners import (
        note_pytest,
        read,
        reason,
        returned,
        returns_fail,
        run_pytest,
        run_unittest,
        skips_fail,
    )

PR_SET_DUMPABLE = 4


def main(own_imports: Callable[..., Any]) -> None:
    """Run the case that the orders on stdin describe, and report its outcome.

    `own_imports` is the class `OwnImports` of the import finder, which this function installs.
    """
    orders = json.loads(sys.stdin.buffer.read())
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    seal(orders["report"])
    orders["places"] = list(sys.path)
    own_imports(orders["folder"], ("<hidden>", "<command>", orders["hidden"] + os.sep), asked_for(orders)).install()
    sys.path += import_folders(orders)  # Last, so no file of the sandbox shadows the standard library.
    try:
        said = {"function": run_function, "value": run_value, "command": run_command}[orders["kind"]](orders)
    except BaseException as error:
        said = {"failed": reason(error)}
    data = (orders["token"] + dumps(said) + "\n").encode()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    while data:
        data = data[write(orders["report"], data) :]


def seal(report: int) -> None:
    """Protect our memory and the descriptor `report` from the processes that tests start.

    Those processes run the code under test.
    """
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    os.set_inheritable(report, False)
    sys.modules["__main__"] = types.ModuleType("__main__")


def asked_for(orders: dict[str, Any]) -> "list[str]":
    """Return the modules of the working folder that the command itself names."""
    words = orders.get("words", [])
    return ["__main__", words[1].partition(".")[0]] if words[:1] == ["-m"] else ["__main__"]


def import_folders(orders: dict[str, Any]) -> "list[str]":
    """Return the folders to import from: the hidden files' folders first, the working folder last."""
    found = {os.path.dirname(path) for path in orders["files"] if path.endswith(".py")} if "words" in orders else set()
    folders = [os.path.join(orders["hidden"], folder) for folder in sorted(found - {""})]
    return [orders["hidden"], *folders, orders["folder"]]


def names_of(orders: dict[str, Any]) -> dict[str, Any]:
    """Run the hidden code as an importable module and return the module's namespace."""
    module = types.ModuleType("hidden")
    sys.modules["hidden"] = module
    exec(compile(orders["code"], "<hidden>", "exec", dont_inherit=True), module.__dict__)
    return module.__dict__


def run_function(orders: dict[str, Any]) -> dict[str, Any]:
    """Run one test function of the hidden code; it passes if it returns None."""
    import asyncio  # Before any code under test runs; the other kinds skip this slow import.

    # Called from a frame of the hidden code, so that imports made by its decorators count as the hidden code's.
    value = eval(compile(f"{orders['name']}()", "<hidden>", "eval"), names_of(orders))
    if inspect.iscoroutine(value):
        value = asyncio.run(value)
    return {"passed": True} if value is None else {"failed": returned(value)}


def run_value(orders: dict[str, Any]) -> dict[str, Any]:
    """Return the value of an expression, evaluated with the names of the hidden code."""
    value = eval(compile(orders["name"], "<hidden>", "eval", dont_inherit=True), names_of(orders))
    return {"value": json.dumps(value)}


def run_command(orders: dict[str, Any]) -> dict[str, Any]:
    """Run a Python command: options and a file, `-m unittest`, `-m pytest`, `-m MODULE` or `-c CODE`."""
    words: list[str] = orders["words"]
    sys.argv = words[1:] if words[0] in ("-m", "-c") else words
    try:
        if words[:2] == ["-m", "unittest"]:
            return {"cases": run_unittest(words[2:], orders)}
        if words[:2] == ["-m", "pytest"]:
            return {"cases": run_pytest(words[2:], orders)}
        hidden = "\n".join([*words, *(read(path) for path in orders["files"] if path.endswith(".py"))])
        if "unittest" in hidden:
            skips_fail()
            returns_fail()
        if "pytest" in hidden and util.find_spec("pytest"):
            note_pytest(orders)
        if words[0] == "-c":
            exec(compile(words[1], "<command>", "exec"), {"__name__": "__main__"})
        elif words[0] == "-m":
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(script(words[0], orders), run_name="__main__")
    except SystemExit as leaving:
        return of_exit(leaving, orders)
    return {"cases": {shlex.join(words): None}}


def script(word: str, orders: dict[str, Any]) -> str:
    """Return the path of the file that a command runs and that `word` names.

    It is the hidden file if there is one, else the working folder's.
    """
    if os.path.normpath(word) in orders["files"]:
        return os.path.join(orders["hidden"], os.path.normpath(word))
    sys.path.append(os.path.dirname(os.path.abspath(word)))
    return word


def of_exit(leaving: SystemExit, orders: dict[str, Any]) -> dict[str, Any]:
    """Return the outcome of a command that exited.

    A `sys.exit(0)` by the test passes, but one by the tested code fails.
    """
    main: dict[str, Any] | None = None
    for frame, _ in traceback.walk_tb(leaving.__traceback__):
        names, path = frame.f_globals, frame.f_code.co_filename
        if names is globals() or is_of_a_module(names, orders):
            continue
        if main is None and (path == "<command>" or is_trusted(path, orders)):
            main = names
        if names is not main:
            return {"failed": f"SystemExit raised by {os.path.relpath(path, orders['folder'])}"}
    if leaving.code in (None, 0, False):
        return {"cases": {shlex.join(orders["words"]): None}}
    return {"failed": f"the test exited with {leaving.code!r}"}


def is_of_a_module(names: dict[str, Any], orders: dict[str, Any]) -> bool:
    """Return whether a frame's globals, `names`, are those of an imported module that is trusted.

    A module is trusted if it is a hidden file, or comes from outside the working folder, such as an installed
    package.
    """
    module = sys.modules.get(str(names.get("__name__")))
    if module is None or vars(module) is not names or module.__spec__ is None:
        return False
    return module.__spec__.origin == "frozen" or is_trusted(str(module.__spec__.origin), orders)


def is_trusted(path: str, orders: dict[str, Any]) -> bool:
    """Return whether a file is hidden, or exists outside the folder of the tested files."""
    folder = orders["folder"] + os.sep
    path = os.path.join(orders["folder"], path)
    return path[len(folder) :] in orders["files"] if path.startswith(folder) else os.path.exists(path)
