"""Helpers for every kind of sandbox: an error's causes, and waiting for descriptors and child processes."""

import asyncio
import errno
import os
import resource
from collections.abc import Iterator
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")


def causes(error: BaseException) -> Iterator[BaseException]:
    """Yield the error and its causes, the error itself first."""
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        yield cause
        seen.add(id(cause))
        cause = cause.__cause__ or cause.__context__


def is_exhausted(error: BaseException) -> bool:
    """Return whether the error, or one of its causes, is that this process or this machine could open no more files."""
    return any(isinstance(cause, OSError) and cause.errno in (errno.EMFILE, errno.ENFILE) for cause in causes(error))


def exhausted() -> str:
    """Return a message with advice about the limit on open files."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return f"this process has too many open files (RLIMIT_NOFILE is {limit}); raise the limit with `ulimit -n`"


def _settle(news: "asyncio.Future[None]") -> None:
    if not news.done():
        news.set_result(None)


async def readable(fd: int, timeout_s: float) -> None:
    """Return when the descriptor has something to read or accept.

    Nothing is read from the descriptor. A caller that reads without another `await` in between can't be cancelled
    before its read.

    Raises:
        TimeoutError: If nothing arrives within `timeout_s`.
    """
    loop = asyncio.get_running_loop()
    news = loop.create_future()
    loop.add_reader(fd, _settle, news)
    try:
        async with asyncio.timeout(timeout_s):
            await news
    finally:
        loop.remove_reader(fd)


async def exits(pid: int, timeout_s: float) -> bool:
    """Return whether the child process exits within `timeout_s` seconds.

    False is also returned if this process has no free descriptor to watch the child with.
    """
    try:
        fd = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        with suppress(TimeoutError):
            await readable(fd, timeout_s)
            return True
        return False
    finally:
        os.close(fd)
