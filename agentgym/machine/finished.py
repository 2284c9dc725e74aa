"""Work that is awaited to its end even if its caller is cancelled."""

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")


async def finished(work: Awaitable[T]) -> T:
    """Return the result of work that can't be undone, waiting for it no matter how often the caller is cancelled.

    Args:
        work: The work to wait for.

    Raises:
        CancelledError: When the work is done, if the caller was cancelled meanwhile. If the work failed, its error is
            the cause.
    """
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled from (None if task.cancelled() else task.exception())
    return task.result()
