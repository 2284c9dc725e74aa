"""Hidden tests over the files of a box: their plan, their run in a sealed copy, and the verdict of the host."""

import ast
import base64
import functools
import json
import math
import shlex
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from agentgym.boxes import ExecResult, Expected, HostFunction, Verdict
from agentgym.sandboxes.host_functions import MAX_ASKS

MARGIN_S = 2.0
"""Seconds for the copy and the start, beside the time of the cases."""
MAX_CASES = 900
MAX_HIDDEN = 8 << 20
OPTIONS = {"-B", "-E", "-I", "-s", "-S", "-u", "-q"}
SHELL = frozenset("|&;<>()$`\\\"'*?[#~=%\n")
"""What makes a command more than words."""


Run = Callable[[str, Mapping[str, HostFunction], float], Awaitable[ExecResult]]
"""How a box runs a cell in a fresh process: its code, its host functions and its limit in seconds."""


async def verify(
    run: Run,
    *,
    code: str | None,
    command: str | None,
    files: Mapping[str, str | bytes] | None,
    expect: Mapping[str, Expected] | None,
    timeout_s: float,
) -> Verdict:
    """Run hidden tests in fresh processes of a box, and judge what they say; see `Box.verify`."""
    orders = plan(code, command, expect)
    files = files or {}
    if len(files) + len(orders["names"]) > MAX_ASKS:
        raise ValueError(f"files: {len(files)} files and {len(orders['names'])} cases are over {MAX_ASKS} together")
    contents = [base64.b64encode(content_of(path, text)).decode() for path, text in files.items()]
    orders |= {"files": list(files), "seconds": timeout_s, "case": program("case")}
    said: dict[str, Any] = {}
    result = await run(
        # On two lines: where the second one fails, a traceback shows it, and what is hidden is not in it.
        f"{program('harness')}\norders = {orders!r}\nverify(orders, hidden, report)",
        {"hidden": contents.__getitem__, "report": said.__setitem__},
        timeout_s + MARGIN_S,
    )
    return verdict(orders["names"], said, expect, result)


def plan(code: str | None, command: str | None, expect: Mapping[str, Expected] | None) -> dict[str, Any]:
    """Return the orders for the box; ValueError that names the argument that makes no sense."""
    if (code is None) == (command is None):
        raise ValueError("verify: give either code= (Python tests) or command= (a command that runs tests)")
    if expect is not None and not 1 <= len(expect) <= MAX_CASES:
        raise ValueError(f"expect: {len(expect)} cases; give 1 to {MAX_CASES}")
    if code is not None:
        if expect is not None:
            return {"kind": "value", "code": code, "names": list(expect)}
        return {"kind": "function", "code": code, "names": test_functions(code)}
    assert command is not None
    if expect is not None:
        return {"kind": "shell", "command": command, "names": list(expect), "stdin": {text: text for text in expect}}
    words = python_words(command)
    if words is None:
        return {"kind": "shell", "command": command, "names": [command], "stdin": {command: ""}}
    return {"kind": "command", "words": words, "names": [command]}


def test_functions(code: str) -> list[str]:
    """Return the names of the test functions at the top of the code; ValueError where there is none, or too many."""
    try:
        tree = ast.parse(code)
    except SyntaxError as error:
        raise ValueError(f"code: {error}") from error
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    names = list(dict.fromkeys(node.name for node in functions if node.name.startswith("test")))
    if not 1 <= len(names) <= MAX_CASES:
        raise ValueError(
            f"code: {len(names)} functions whose names begin with `test` stand at its top; there must be 1 to "
            f"{MAX_CASES}, or give expect= with expressions and their values"
        )
    return names


def python_words(command: str) -> list[str] | None:
    """Return what a plain Python command runs: a file, `-m MODULE` or `-c CODE`, with arguments; None for any other."""
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise ValueError(f"command: {error}") from error
    quoted = words[2:3] if words[1:2] == ["-c"] else []
    if not words or not PurePosixPath(words[0]).name.startswith("python"):
        return None
    if SHELL & set("".join(word for word in words if word not in quoted)):
        return None
    rest = words[1:]
    while rest and rest[0] in OPTIONS:
        rest = rest[1:]
    if not rest or (rest[0].startswith("-") and (rest[0] not in ("-m", "-c") or len(rest) < 2)):
        return None
    return rest


def content_of(path: str, content: str | bytes) -> bytes:
    """Return the bytes of a hidden file; ValueError for a path that leads out, or a file that is too large."""
    parts = path.split("/")
    if any(part in ("", ".", "..") for part in parts) or "\0" in path:
        raise ValueError(f"files: {path!r} is not a plain path below the working folder")
    data = content.encode() if isinstance(content, str) else content
    if len(data) > MAX_HIDDEN:
        raise ValueError(f"files: {path!r} has {len(data)} bytes, the limit is {MAX_HIDDEN}")
    return data


@functools.cache
def program(name: str) -> str:
    """Return the text of a program that runs in the box."""
    return Path(__file__).with_name(f"{name}.py").read_text()


def verdict(
    names: Sequence[str], said: Mapping[str, Any], expect: Mapping[str, Expected] | None, result: ExecResult
) -> Verdict:
    """Judge what the box said: a case without a word has failed, and a word that makes no sense is none."""
    cases: dict[str, str | None] = {}
    for name in names:
        heard = said.get(name)
        if not isinstance(heard, dict):
            why = result.text(500) or "the process ended"
            cases[name] = f"it did not run to its end: {why}"
        elif isinstance(found := heard.get("cases"), dict) and found:
            cases |= {str(case): None if why is None else str(why) for case, why in found.items()}
        else:
            cases[name] = judge(heard, None if expect is None else (expect[name],))
    output = "".join(str(heard.get("printed", "")) for heard in said.values() if isinstance(heard, dict))
    return Verdict(cases=cases, output=output, result=result)


def judge(heard: Mapping[str, Any], expected: tuple[Expected] | None) -> str | None:
    """Return why a case has failed; None where it has passed."""
    if "failed" in heard or "cases" in heard:
        return str(heard.get("failed", "no test ran"))
    if "exit_code" in heard and heard["exit_code"] != 0:
        return f"exit code {heard['exit_code']}"
    if expected is None:
        return (
            None
            if heard.get("passed") is True or heard.get("exit_code") == 0
            else "the test did not say that it passed"
        )
    if "exit_code" in heard:
        return of_value(str(heard.get("printed")), expected[0], printed=True)
    try:
        value = json.loads(heard["value"])
    except (KeyError, TypeError, ValueError, RecursionError):
        return "the value is not JSON"
    return of_value(value, expected[0], printed=False)


def of_value(value: Any, expected: Expected, *, printed: bool) -> str | None:
    """Return why a value is not the expected one; a printed text is compared without the blanks at line ends."""
    if callable(expected):
        try:
            right = bool(expected(value))
        except Exception as error:  # The tested code chose the value: it must not end the episode without a reward.
            return f"the function raised {type(error).__name__} for {shown(value)}: {error}"
    elif printed:
        right = lines(value) == lines(str(expected))
    else:
        right = same(value, plain(expected))
    return None if right else f"{shown(value)} is not right"


def shown(value: Any) -> str:
    """Return the begin of a value's text."""
    try:
        return repr(str(value)[:200])
    except (RecursionError, ValueError):
        return f"a {type(value).__name__}"


def lines(text: str) -> list[str]:
    """Return the lines of a text without blanks at their ends, and without empty lines at its end."""
    return [line.rstrip() for line in text.rstrip().split("\n")]


def plain(value: object) -> Any:
    """Return a value as JSON gives it back; ValueError where it is not JSON."""
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError) as error:
        raise ValueError(f"expect: {value!r} is not JSON; give a function that takes the value instead") from error


def same(one: Any, other: Any) -> bool:
    """Return whether two values of JSON are equal; 1 and 1.0 are, 1 and true are not, and NaN equals itself."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, float) and isinstance(other, float) and math.isnan(one):
        return math.isnan(other)
    return bool(one == other)
