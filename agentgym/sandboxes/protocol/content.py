"""What a sandbox says if its content is not what was asked for, by reason."""

import asyncio
import errno
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from agentgym.errors import SandboxContentError


class WrongContent(SandboxContentError, ValueError):
    """It is of another kind, too large or no text, or the sandbox cannot be given it."""


class NotAFile(WrongContent):
    """The path of a file call names a link, a folder, a pipe, a socket or a device."""


class MissingContent(SandboxContentError, FileNotFoundError):
    """Nothing has this path."""


class LateContent(SandboxContentError, TimeoutError):
    """There was so much of it that it could not be moved within the time limit."""


class NoMoreInput(SandboxContentError, BrokenPipeError):
    """A program of the sandbox takes no more input."""


class UnusablePath(SandboxContentError, OSError, ValueError):
    """What a sandbox's kernel says against a path, by its number: no permission, a file in the way, a full disk."""


class NoPermission(UnusablePath, PermissionError):
    """A path whose permissions forbid what was asked."""


class NotAFolder(UnusablePath, NotADirectoryError):
    """A path in which something that is no folder stands for one."""


class IsAFolder(UnusablePath, IsADirectoryError):
    """The path of a folder, where a file's was needed."""


KINDS: dict[int, type[MissingContent] | type[UnusablePath]] = {
    errno.ENOENT: MissingContent,
    errno.EACCES: NoPermission,
    errno.EPERM: NoPermission,
    errno.ENOTDIR: NotAFolder,
    errno.EISDIR: IsAFolder,
}


def of_number(number: int, path: str | None = None, text: str | None = None) -> MissingContent | UnusablePath:
    """Return the error for a number of the kernel's, with its text unless another one is given."""
    said: list[Any] = [number, os.strerror(number) if text is None else text]
    return KINDS.get(number, UnusablePath)(*said, *([] if path is None else [path]))


@asynccontextmanager
async def in_time(timeout_s: float | None, what: str) -> AsyncIterator[None]:
    """Raise LateContent if the block takes longer; None waits without a limit."""
    try:
        async with asyncio.timeout(timeout_s) as limit:
            yield
    except TimeoutError as error:
        if not limit.expired():
            raise
        raise LateContent(f"{what} took longer than {timeout_s:g} s") from error
