"""Paths and names of the folders that runs, evaluations and exports write to."""

import errno
import os
import shlex
import shutil
import sys
from collections.abc import Iterable
from contextlib import suppress
from datetime import datetime
from functools import cache
from itertools import count
from pathlib import Path

_OF_A_PATH = frozenset(
    (errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.EACCES, errno.EPERM)
)
"""The system's error codes for a path that can't be read or created."""


def whole_path(path: str | Path) -> Path:
    """Return the absolute path, so that later changes to the working directory don't affect it.

    Raises:
        ValueError: If the path is relative and the working directory no longer exists.
    """
    try:
        return Path(path).absolute()
    except FileNotFoundError:
        raise ValueError(
            f"output_dir, resume: {path} is relative to the working directory, which was removed; change to "
            "one that exists"
        ) from None


def free_name(path: Path) -> Path:
    """Return the path if it is free, otherwise the first free one of PATH-2, PATH-3 and so on."""
    return next(name for name in _names(path) if not os.path.lexists(name))


def new_folder(within: Path, prefix: str = "") -> Path:
    """Create a folder named after the current time, and return its absolute path.

    No other process gets the same folder: if several call this within a second, the later ones get a number after the
    time, such as 20260801-101500-2.

    Args:
        within: The parent folder.
        prefix: Text before the time in the folder's name.

    Raises:
        ValueError: If it can't be created.
    """
    within = whole_path(within)
    for folder in _names(within / f"{prefix}{datetime.now().strftime('%Y%m%d-%H%M%S')}"):
        with suppress(FileExistsError):
            make_parents(folder)
            return folder
    raise AssertionError("unreachable: `_names` never ends")


def make_parents(folder: Path) -> None:
    """Create a folder and its parents.

    Raises:
        FileExistsError: If the folder already exists.
        ValueError: If it can't be created.
    """
    while True:
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
        except (OSError, ValueError) as error:
            raise cannot_be_made(folder, error) from None
        try:
            folder.mkdir()
            return
        except FileExistsError:
            raise
        except FileNotFoundError:
            continue  # another process has just removed the parent, which was empty
        except OSError as error:
            raise cannot_be_made(folder, error) from None


def cache_folder(name: str) -> Path:
    """Return the path of a folder in this user's cache: `agentgym/NAME` in $XDG_CACHE_HOME, or in ~/.cache.

    Raises:
        RuntimeError: If there is no home folder.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (cache if cache.is_absolute() else Path.home() / ".cache") / "agentgym" / name


def cannot_be_made(folder: Path, error: OSError | ValueError) -> ValueError:
    """Return the error that says why a run's folder can't be created; a ValueError means that its name has a NUL."""
    named = repr(str(folder)) if isinstance(error, ValueError) else folder
    return ValueError(f"output_dir: {named} cannot be created ({_reason(error)}); choose another folder")


def refused_path(error: OSError, words: Iterable[str]) -> str | None:
    """Return a sentence about a path on the command line that the system refuses, or None for any other error.

    Args:
        error: The error.
        words: The words of the command line. An error about a path that none of them names is a bug, not a mistake of
            the user.
    """
    if error.errno not in _OF_A_PATH or not isinstance(error.filename, str | bytes | os.PathLike):
        return None
    here = Path()
    with suppress(FileNotFoundError):  # if the working directory was removed, only paths of one kind are compared
        here = Path.cwd()
    refused = here / os.fsdecode(error.filename)
    values = (value for word in words for value in (word, word.partition("=")[2]) if value)
    for named in (here / value for value in values):
        beside = str(refused).startswith(f"{named}.")  # such as NAME.part
        if beside or refused.is_relative_to(named) or named.is_relative_to(refused):
            return f"{os.fsdecode(error.filename)} cannot be used ({_reason(error)}); give another path"
    return None


def _reason(error: OSError | ValueError) -> str:
    if isinstance(error, FileExistsError | NotADirectoryError):
        return "a file is in its way"
    return str(error.strerror if isinstance(error, OSError) else error)


def drop_unused(folder: Path) -> None:
    """Remove an empty folder that `new_folder` created, and the two folders above it if they are empty too."""
    with suppress(OSError):
        for empty in (folder, *list(folder.parents)[:2]):
            empty.rmdir()


def remove(path: Path) -> None:
    """Remove a file, a folder with its content, or a link (but not its target); do nothing if it doesn't exist."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def command(*words: str | Path) -> str:
    """Return an agentgym command line, quoted for the shell where needed, that a user can paste."""
    return shlex.join([*_program(), *(shown(word) if isinstance(word, Path) else word for word in words)])


@cache
def _program() -> list[str]:
    """Return the words that start agentgym in the shell that started this process."""
    if shutil.which("agentgym") is not None:
        return ["agentgym"]
    typed = Path(sys.argv[0])
    return [str(typed)] if typed.name == "agentgym" and typed.is_file() else [sys.executable, "-m", "agentgym"]


def shown(path: Path) -> str:
    """Return a path as the user would type it in the shell: relative if it is below the shell's working directory.

    A relative path that could be mistaken for a flag begins with "./".
    """
    with suppress(OSError, ValueError):
        here = Path(os.environ["PWD"]) if "PWD" in os.environ else Path.cwd()
        if here.samefile(Path.cwd()):  # otherwise the process changed its working directory, or PWD is stale
            path = path.relative_to(here)
    return f"./{path}" if str(path).startswith("-") else str(path)


def _names(path: Path) -> Iterable[Path]:
    return (path if number == 1 else path.with_name(f"{path.name}-{number}") for number in count(1))
