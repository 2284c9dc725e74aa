"""What led to an error, and work that cannot be undone: small things that every kind of box needs."""

import asyncio
import errno
import resource
from collections.abc import Iterator
from typing import TypeVar

T = TypeVar("T")


def causes(error: BaseException) -> Iterator[BaseException]:
    """The error, and what led to it, the latest first."""
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        yield cause
        seen.add(id(cause))
        cause = cause.__cause__ or cause.__context__


def is_exhausted(error: BaseException) -> bool:
    """Whether this process could open no more files, and that is why."""
    return any(isinstance(cause, OSError) and cause.errno in (errno.EMFILE, errno.ENFILE) for cause in causes(error))


def exhausted() -> str:
    """What to do about it."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return f"this process has too many open files (RLIMIT_NOFILE is {limit}): raise it with `ulimit -n`"


async def finished(task: "asyncio.Future[T]") -> T:
    """Its result; where we are cancelled meanwhile it is waited for all the same, because it cannot be undone."""
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        if not task.done():
            await asyncio.wait({task})
        raise
