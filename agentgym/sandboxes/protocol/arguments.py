"""Checks of the arguments of sandbox calls. Each raises a ValueError that names the argument and what it must be."""

import keyword
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, TypeAlias

from pydantic import Field

from agentgym.sandboxes.protocol.content import WrongContent

SandboxMemory: TypeAlias = Annotated[int, Field(ge=32)]
"""Memory of a sandbox in MB; the minimum is enough to start Python."""
MAX_OUTPUT = 16 << 20
"""Maximum bytes of output that a call can request."""
MAX_SECONDS = 7 * 24 * 3600
"""Maximum time limit of a call in seconds: one week."""
MAX_PATH = 4096
"""Maximum length of a path in bytes; the server has the same limit."""


def check_text(name: str, value: object) -> None:
    """Raise ValueError if the value of the argument `name` is not a str."""
    if not isinstance(value, str):
        raise ValueError(f"{name}: must be text, got {value!r:.80}")


def check_path(path: object, name: str = "path") -> None:
    """Check that a path in a sandbox has a valid type and length; `name` is the argument's name in the error.

    Raises:
        ValueError: If it is not a str. A PathLike is refused, too: paths in a sandbox are text.
        WrongContent: If it is longer than MAX_PATH bytes.
    """
    check_text(name, path)
    size = len(str(path).encode("utf-8", "surrogatepass"))
    if size > MAX_PATH:
        raise WrongContent(f"{name}: {str(path)[:50]!r}... has {size} bytes, but the limit is {MAX_PATH}")


def check_data(name: str, value: object) -> None:
    """Raise ValueError if the value is neither str nor bytes."""
    if not isinstance(value, str | bytes):
        raise ValueError(f"{name}: must be text or bytes, got {value!r:.80}")


def check_path_here(name: str, value: object) -> None:
    """Raise ValueError if the value is not a path on this machine: a str, or a PathLike of one, without nulls."""
    path = os.fspath(value) if isinstance(value, str | os.PathLike) else value
    if not isinstance(path, str):
        raise ValueError(f"{name}: must be a path on this machine, as text, got {path!r:.80}")
    if "\0" in path:
        raise ValueError(f"{name}: must be a path without null characters, got {path!r:.80}")


def check_timeout(timeout_s: object, most: int = MAX_SECONDS) -> None:
    """Raise ValueError unless `timeout_s` is a number of seconds above 0 and at most `most`, by default a week."""
    if not isinstance(timeout_s, int | float) or isinstance(timeout_s, bool) or not 0 < timeout_s <= most:
        raise ValueError(f"timeout_s: must be a number of seconds above 0 and at most {most}, got {shown(timeout_s)}")


def check_patience(timeout_s: object) -> None:
    """Raise ValueError if `timeout_s` is neither a time limit nor None, which means no limit."""
    if timeout_s is not None:
        check_timeout(timeout_s)


def shown(value: object) -> str:
    """Return an argument's repr, cut to 80 characters.

    An int of over 4300 digits, which Python refuses to print, is described instead.
    """
    try:
        return f"{value!r:.80}"
    except ValueError:
        return f"a {type(value).__name__} that is too long to print"


def check_cell(code: object, functions: object, fresh: object) -> None:
    """Raise ValueError if a Python cell can't be run with these arguments."""
    check_text("code", code)
    check_functions(functions)
    if not isinstance(fresh, bool):
        raise ValueError(f"fresh: must be True or False, got {fresh!r:.80}")


def check_progress(progress: object) -> None:
    """Raise ValueError if `progress` is neither callable nor None."""
    if progress is not None and not callable(progress):
        raise ValueError(f"progress: must be a function that takes a number of bytes, got {progress!r:.80}")


def check_size(size: object) -> None:
    """Raise ValueError if `size` is not a valid number of sandboxes for a pool, an int of at least 1."""
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise ValueError(f"size: must be a whole number of sandboxes, at least 1, got {size!r:.80}")


def check_limit(name: str, value: object, least: int = 0, most: int | None = None) -> None:
    """Raise ValueError unless the value is an int from `least` to `most`; `most=None` means no upper bound."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least or (most is not None and value > most):
        bounds = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise ValueError(f"{name}: must be a whole number of bytes {bounds}, got {value!r:.80}")


def check_files(name: str, files: object) -> None:
    """Raise ValueError if `files` is not a mapping from paths to contents (str or bytes)."""
    if not isinstance(files, Mapping):
        raise ValueError(
            f"{name}: must be a mapping from paths to contents, such as {{'a': 'text'}}, got {files!r:.80}"
        )
    for path, content in files.items():
        check_path(path, f"{name}: a path")
        check_data(f"{name}[{path!r}]", content)


def check_functions(functions: object) -> None:
    """Raise ValueError if `functions` is not a mapping from Python identifiers to callables."""
    if not isinstance(functions, Mapping):
        raise ValueError(f"functions: must be a mapping such as {{'get': get}}, got {functions!r:.80}")
    for name, function in functions.items():
        if not isinstance(name, str) or not name.isidentifier() or keyword.iskeyword(name):
            raise ValueError(f"functions: {name!r} is not a valid Python name")
        if not callable(function):
            raise ValueError(f"functions[{name!r}]: must be a function, got {function!r:.80}")


def check_command(command: object) -> None:
    """Raise ValueError if `command` is neither text nor a non-empty list of a program and its arguments."""
    words = [command] if isinstance(command, str) else command
    if not isinstance(words, Sequence) or not words or not all(isinstance(word, str) for word in words):
        raise ValueError(f"command: must be text, or a list of a program and its arguments, got {command!r:.80}")


@dataclass(frozen=True, slots=True)
class Program:
    """The command, folder, environment and input of a program in a sandbox; None leaves the default."""

    command: str | Sequence[str] | None
    """The shell command, or a program and its arguments; None for a shell that reads its commands later."""
    cwd: str | None = None
    env: Mapping[str, str] | None = None
    stdin: str | bytes | None = None

    def __post_init__(self) -> None:
        if self.cwd is not None:
            check_text("cwd", self.cwd)
        if self.env is not None:
            check_variables(self.env)
        if self.stdin is not None:
            check_data("stdin", self.stdin)


def check_variables(env: object) -> None:
    """Raise ValueError if `env` is not a mapping from variable names to text.

    Raises:
        WrongContent: If a name is empty or contains "=", or a name or value contains NUL.
    """
    if not isinstance(env, Mapping):
        raise ValueError(f"env: must be a mapping from names to text, such as {{'PORT': '8000'}}, got {env!r:.80}")
    for name, value in env.items():
        check_text("env: a name", name)
        check_text(f"env[{name!r}]", value)
        if not name or "=" in name or "\0" in name + value:
            raise WrongContent(f"env: {name!r} with the value {value!r:.80} is not a valid environment variable")
