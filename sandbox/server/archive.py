"""The programs that write and unpack tar archives, each in a separate process that streams through stdin or stdout."""

from __future__ import annotations

import json
import os

from .files import open_below, open_file, parts_of
from .limits import Refused, WrongArgument
from .packing import pack, unpack

TYPE_CHECKING = False  # Importing typing would cost each new sandbox some milliseconds.
if TYPE_CHECKING:
    from typing import NoReturn


def run_task(name: str, work: str, path: str) -> NoReturn:
    """Run the program `name`, which is "archive" or "unpack", in this process, and exit when it has ended.

    On failure, the exit code is 1, and the reason is written to stderr as JSON.
    """
    try:
        {"archive": archive, "unpack": unpack_below}[name](work, path)
    except WrongArgument as error:
        fail(str(error), argument=True)
    except (Refused, ValueError) as error:
        fail(str(error))
    except OSError as error:
        fail(error.strerror or str(error), error.errno)
    except BaseException as error:
        fail(f"{type(error).__name__}: {error}")
    os._exit(0)


def fail(text: str, number: int | None = None, *, argument: bool = False) -> NoReturn:
    said = {"error": text[:4000] or "it failed", "argument": argument, **({} if number is None else {"errno": number})}
    os.write(2, json.dumps(said).encode())
    os._exit(1)


def archive(work: str, path: str) -> None:
    """Write the file, or the content of the folder, as a tar archive."""
    parts = parts_of(path, work)
    with open(1, "wb", closefd=False) as out:
        try:
            folder = open_below(work, parts)
        except NotADirectoryError:
            os.close(open_file(work, path))  # The same refusals as for a single file.
            pack(open_below(work, parts[:-1]), out, parts[-1])
        else:
            pack(folder, out)


def unpack_below(work: str, path: str) -> None:
    with open(0, "rb", closefd=False) as given:
        unpack(work, parts_of(path, work), given)
