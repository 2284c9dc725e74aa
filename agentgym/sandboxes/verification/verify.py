"""Hidden tests over the files of a box: their plan, and their run in a copy that no process of the episode reaches."""

import ast
import base64
import functools
import shlex
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from agentgym.boxes import ExecResult, Expected, HostFunction, Verdict
from agentgym.sandboxes.host_functions import MAX_ASKS
from agentgym.sandboxes.verification.judging import Judging

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
    copied: bool,
    code: str | None,
    command: str | None,
    files: Mapping[str, str | bytes] | None,
    expect: Mapping[str, Expected] | None,
    timeout_s: float,
) -> Verdict:
    """Run hidden tests in fresh processes of a box, and judge what they say; see `Box.verify`.

    `copied` is whether a fresh process runs in a copy of the working folder already.
    """
    orders = plan(code, command, expect)
    judging = Judging(orders["kind"], orders["names"], expect)
    files = files or {}
    if len(files) + len(orders["names"]) > MAX_ASKS:
        raise ValueError(f"files: {len(files)} files and {len(orders['names'])} cases are over {MAX_ASKS} together")
    contents = [base64.b64encode(content_of(path, text)).decode() for path, text in files.items()]
    orders |= {"files": list(files), "seconds": timeout_s, "case": program("case"), "copied": copied}
    result = await run(
        # On two lines: where the second one fails, a traceback shows it, and what is hidden is not in it.
        f"{program('harness')}\norders = {orders!r}\nverify(orders, hidden, report)",
        {"hidden": contents.__getitem__, "report": judging.report},
        timeout_s + MARGIN_S,
    )
    return judging.verdict(result)


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
        return {"kind": "shell", "command": command, "names": list(expect), "compared": True}
    words = python_words(command)
    if words is None:
        return {"kind": "shell", "command": command, "names": [command], "compared": False}
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
