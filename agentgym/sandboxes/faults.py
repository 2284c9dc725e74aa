"""Helpers of every kind of box: an error's causes, and work that must not be cancelled."""

import asyncio
import errno
import os
import resource
from collections.abc import Iterator
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")


def causes(error: BaseException) -> Iterator[BaseException]:
    """Yield the error and its causes, the latest first."""
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        yield cause
        seen.add(id(cause))
        cause = cause.__cause__ or cause.__context__


def is_exhausted(error: BaseException) -> bool:
    """Whether the error came because this process could open no more files."""
    return any(isinstance(cause, OSError) and cause.errno in (errno.EMFILE, errno.ENFILE) for cause in causes(error))


def exhausted() -> str:
    """Return the advice for the limit on open files."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return f"this process has too many open files (RLIMIT_NOFILE is {limit}): raise it with `ulimit -n`"


async def finished(task: "asyncio.Future[T]") -> T:
    """Return the result of work that cannot be undone: it is waited for even where the caller is cancelled."""
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        if not task.done():
            await asyncio.wait({task})
        raise


def _settle(gone: "asyncio.Future[None]") -> None:
    if not gone.done():
        gone.set_result(None)


async def exits(pid: int, timeout_s: float) -> bool:
    """Whether the child ends within `timeout_s`; False where no descriptor is left to watch it."""
    loop = asyncio.get_running_loop()
    gone = loop.create_future()
    try:
        fd = os.pidfd_open(pid)
    except OSError:
        return False
    loop.add_reader(fd, _settle, gone)
    try:
        with suppress(TimeoutError):
            await asyncio.wait_for(gone, timeout_s)
            return True
        return False
    finally:
        loop.remove_reader(fd)
        os.close(fd)
