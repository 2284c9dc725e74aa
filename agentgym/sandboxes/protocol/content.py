"""Errors for unusable sandbox content, one class per reason."""

import asyncio
import errno
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from agentgym.errors import SandboxContentError


class WrongContent(SandboxContentError, ValueError):
    """The content has the wrong kind, is too large, is not text, or can't be sent to the sandbox."""


class NotAFile(WrongContent):
    """The path of a file call names a link, a folder, a pipe, a socket or a device."""


class MissingContent(SandboxContentError, FileNotFoundError):
    """Nothing exists at this path."""


class LateContent(SandboxContentError, TimeoutError):
    """The content could not be transferred within the time limit."""


class NoMoreInput(SandboxContentError, BrokenPipeError):
    """A program in the sandbox accepts no more input."""


class UnusablePath(SandboxContentError, OSError, ValueError):
    """The sandbox's kernel refused a path, with its errno: no permission, a file in the way, a full disk."""


class NoPermission(UnusablePath, PermissionError):
    """The path's permissions forbid the operation."""


class NotAFolder(UnusablePath, NotADirectoryError):
    """The path goes through something that is not a folder, or the call needs a folder."""


class IsAFolder(UnusablePath, IsADirectoryError):
    """The path is a folder, but the call needs a file."""


KINDS: dict[int, type[MissingContent] | type[UnusablePath]] = {
    errno.ENOENT: MissingContent,
    errno.EACCES: NoPermission,
    errno.EPERM: NoPermission,
    errno.ENOTDIR: NotAFolder,
    errno.EISDIR: IsAFolder,
}


def of_number(number: int, path: str | None = None, text: str | None = None) -> MissingContent | UnusablePath:
    """Return the error for an errno.

    Args:
        number: The errno.
        path: The path that the error names; None for no path.
        text: The error's message; None for the kernel's message.
    """
    said: list[Any] = [number, os.strerror(number) if text is None else text]
    return KINDS.get(number, UnusablePath)(*said, *([] if path is None else [path]))


@asynccontextmanager
async def in_time(timeout_s: float | None, what: str) -> AsyncIterator[None]:
    """Raise LateContent if the `async with` block takes longer than `timeout_s` seconds; None means no limit.

    `what` says in the message which operation took too long.
    """
    try:
        async with asyncio.timeout(timeout_s) as limit:
            yield
    except TimeoutError as error:
        if not limit.expired():
            raise
        raise LateContent(f"{what} took longer than {timeout_s:g} s") from error
