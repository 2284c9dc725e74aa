"""The plan of hidden tests: the orders for the sandbox, and checks of the arguments before any sandbox is used."""

import ast
import base64
import inspect
import re
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from agentgym.sandboxes.protocol import Expected
from agentgym.sandboxes.protocol.arguments import check_text
from agentgym.sandboxes.protocol.content import WrongContent

MAX_CASES = 900
MAX_HIDDEN = 8 << 20
MAX_ALL_HIDDEN = 64 << 20
MAX_NAME = 255
"""Maximum size of a file name in bytes, as in the kernel."""
OPTIONS = ("-B", "-E", "-I", "-s", "-S", "-u", "-q")
PYTHON = re.compile(r"python[0-9.]*")
SHELL = re.compile(r"[|&;<>()$`\\\"'*?\[\n]|^[#~]")
"""Matches words of a command that need a shell."""


def plan(
    code: str | None, command: str | Sequence[str] | None, expect: Mapping[str, Expected] | None
) -> dict[str, Any]:
    """Return the orders for the sandbox: the kind of the cases, their names, and the code or command.

    Raises:
        ValueError: If an argument is invalid; the message names it.
    """
    if (code is None) == (command is None):
        raise ValueError("verify: give either code= (Python tests) or command= (a command that runs tests)")
    if expect is not None:
        check_cases(expect)
    if code is not None:
        check_sayable("code", code)
        if expect is not None:
            return {"kind": "value", "code": code, "names": list(expect)}
        return {"kind": "function", "code": code, "names": test_functions(code)}
    assert command is not None
    line = command_line(command)
    if expect is not None:
        check_printed(expect)
        return {"kind": "shell", "command": line, "names": list(expect), "compared": True}
    words = python_words(line) if isinstance(command, str) else after_python(list(command))
    if words is None:
        return {"kind": "shell", "command": line, "names": [line], "compared": False}
    return {"kind": "command", "words": words, "names": [line]}


def check_sayable(field: str, text: str) -> None:
    """Raise ValueError naming the field if the text can't be written to a file or passed to a program."""
    check_text(field, text)
    if "\0" in text:
        raise WrongContent(f"{field}: contains a null character, which can't be passed to a program")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise WrongContent(f"{field}: can't be encoded as UTF-8: {error}") from None


def check_cases(expect: Mapping[str, Expected]) -> None:
    """Raise ValueError if the mapping from cases to expected values is invalid."""
    if not isinstance(expect, Mapping):
        raise ValueError(f"expect: expected a mapping from cases to expected values, got a {type(expect).__name__}")
    if not 1 <= len(expect) <= MAX_CASES:
        raise WrongContent(f"expect: expected 1 to {MAX_CASES} cases, got {len(expect)}")
    for name, value in expect.items():
        check_sayable("expect", name)
        if inspect.iscoroutinefunction(value):
            raise ValueError(f"expect: the function for {name!r} is async; give a function that is not")


def check_printed(expect: Mapping[str, Expected]) -> None:
    """Raise ValueError if an expected value can't be compared with printed text."""
    for name, value in expect.items():
        if not isinstance(value, str | int | float) and not callable(value):
            raise ValueError(
                f"expect: the value for {name!r} is a {type(value).__name__}; give a string or a number to compare the "
                "command's output with, or a function that takes the output"
            )


def test_functions(code: str) -> list[str]:
    """Return the names of the top-level test functions.

    Raises:
        ValueError: If there are none or too many, or if two have the same name: only the last one would run.
    """
    try:
        tree = ast.parse(code)
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise WrongContent(f"code: {error}") from error
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            check_class(node)
    counts = Counter(node.name for node in functions if node.name.startswith("test"))
    twice = [name for name, count in counts.items() if count > 1]
    if twice:
        raise WrongContent(f"code: {', '.join(twice)} is defined twice; give each test function a unique name")
    if not 1 <= len(counts) <= MAX_CASES:
        raise WrongContent(
            f"code: expected 1 to {MAX_CASES} top-level functions whose names start with `test`, got {len(counts)}; to "
            "check values instead, give expect= with expressions and their values"
        )
    return list(counts)


def check_class(node: ast.ClassDef) -> None:
    """Raise ValueError for a class with tests, because none of them would run."""
    cases = node.name.startswith("Test") or any("TestCase" in ast.unparse(base) for base in node.bases)
    methods = [part.name for part in node.body if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef)]
    if cases and any(name.startswith("test") for name in methods):
        raise WrongContent(
            f"code: the tests of class {node.name} would not run; make them top-level functions, or "
            "give the class in files= and command='python3 -m pytest' or 'python3 -m unittest'"
        )


def command_line(command: str | Sequence[str]) -> str:
    """Return a command as one line for a shell.

    Raises:
        ValueError: If it is not a command.
    """
    if isinstance(command, str):
        check_sayable("command", command)
        if not command.strip():
            raise WrongContent("command: expected a command, got an empty string")
        return command
    if not isinstance(command, Sequence) or isinstance(command, (bytes, bytearray)):
        raise ValueError(f"command: expected a string or a sequence of words, got a {type(command).__name__}")
    for word in command:
        check_sayable("command", word)
    if not command or not command[0]:
        raise WrongContent("command: the first word, the program, is empty")
    return shlex.join(command)


def python_words(command: str) -> list[str] | None:
    """Return the words after Python and its options in a plain Python command, or None for any other command.

    The words are a file, `-m MODULE` or `-c CODE`, followed by its arguments.

    Raises:
        ValueError: As in `after_python`.
    """
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise WrongContent(f"command: {error}") from error
    start = next((at for at, word in enumerate(words) if at and word not in OPTIONS), len(words))
    quoted = start + 1 if words[start : start + 1] == ["-c"] else None
    if any(SHELL.search(word) for at, word in enumerate(words) if at != quoted):
        return None
    return after_python(words)


def after_python(words: list[str]) -> list[str] | None:
    """Return a command's words after Python and its options, or None if it runs another program.

    Raises:
        ValueError: If Python would run neither a file, `-m MODULE` nor `-c CODE`. Such tests would run in a shell,
            exposed to anything that the episode left in the sandbox.
    """
    if not words or not PYTHON.fullmatch(PurePosixPath(words[0]).name):
        return None
    rest = words[1:]
    while rest and rest[0] in OPTIONS:
        rest = rest[1:]
    if rest and rest[0][:2] in ("-m", "-c") and rest[0][2:]:
        rest = [rest[0][:2], rest[0][2:], *rest[1:]]
    if not rest or (rest[0].startswith("-") and (rest[0] not in ("-m", "-c") or len(rest) < 2)):
        raise WrongContent(
            f"command: Python and its options ({' '.join(OPTIONS)}) must be followed by a file, -m MODULE or -c CODE, "
            f"got {' '.join(rest[:1]) or 'nothing'!r}; run anything else in a shell: sh -c '...'"
        )
    return rest


def hidden_files(files: Mapping[str, str | bytes] | None) -> dict[str, str]:
    """Return the hidden files in base64, keyed by path.

    Raises:
        ValueError: If a file is invalid; the message names it.
    """
    if files is None:
        return {}
    if not isinstance(files, Mapping) or not files:
        raise ValueError(
            f"files: expected a mapping from paths to contents, got {files!r}; leave it out if there are no files"
        )
    for path in files:
        check_path(path)
    for path in files:
        check_alone(path, files)
    contents = {path: content_of(path, content) for path, content in files.items()}
    total = sum(map(len, contents.values()))
    if total > MAX_ALL_HIDDEN:
        raise WrongContent(f"files: the contents have {total} bytes in total, but the limit is {MAX_ALL_HIDDEN}")
    return {path: base64.b64encode(content).decode() for path, content in contents.items()}


def check_path(path: str) -> None:
    """Raise ValueError for a path that leads out of the working folder or that can't exist."""
    check_sayable("files", path)
    parts = path.split("/")
    if any(part in ("", ".", "..") for part in parts):
        raise WrongContent(f"files: {path!r} is not a plain path below the working folder")
    if max(len(part.encode()) for part in parts) > MAX_NAME:
        raise WrongContent(f"files: {path[:100]!r} has a name longer than {MAX_NAME} bytes")


def check_alone(path: str, files: Mapping[str, str | bytes]) -> None:
    """Raise ValueError if another hidden file would replace this one."""
    in_the_way = [str(parent) for parent in PurePosixPath(path).parents if str(parent) in files]
    if path.endswith("/__init__.py") and path[: -len("/__init__.py")] + ".py" in files:
        in_the_way.append(path[: -len("/__init__.py")] + ".py")
    if in_the_way:
        raise WrongContent(f"files: {in_the_way[0]!r} and {path!r} conflict; rename one of them")


def content_of(path: str, content: str | bytes) -> bytes:
    """Return the bytes of a hidden file.

    Raises:
        ValueError: If it is neither a string nor bytes, or if it is too large.
    """
    if not isinstance(content, (str, bytes)):
        raise ValueError(f"files: the content of {path!r} is a {type(content).__name__}; give a string or bytes")
    try:
        data = content.encode() if isinstance(content, str) else content
    except UnicodeEncodeError as error:
        raise WrongContent(f"files: the text of {path!r} can't be encoded as UTF-8: {error}; give bytes") from None
    if len(data) > MAX_HIDDEN:
        raise WrongContent(f"files: {path!r} has {len(data)} bytes, but the limit is {MAX_HIDDEN}")
    return data
