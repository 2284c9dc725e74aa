"""Paths and names of the folders that runs, evaluations and exports write to."""

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
        except OSError as error:
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


def cannot_be_made(folder: Path, error: OSError) -> ValueError:
    """Return the error that says why a run's folder can't be created."""
    what = "a file is in its way" if isinstance(error, FileExistsError | NotADirectoryError) else error.strerror
    return ValueError(f"output_dir: {folder} cannot be created ({what}); choose another folder")


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
    """Return a path as the user would type it in the shell: relative if it is below the shell's working directory."""
    with suppress(OSError, ValueError):
        here = Path(os.environ["PWD"]) if "PWD" in os.environ else Path.cwd()
        if here.samefile(Path.cwd()):  # otherwise the process changed its working directory, or PWD is stale
            return str(path.relative_to(here))
    return str(path)


def _names(path: Path) -> Iterable[Path]:
    return (path if number == 1 else path.with_name(f"{path.name}-{number}") for number in count(1))
