"""Coroutines that run concurrently and are awaited one after the other."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Coroutine, Generator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Generic, TypeVar

T = TypeVar("T")


@asynccontextmanager
async def started(work: Sequence[Coroutine[Any, Any, T]], *, most: int) -> AsyncIterator[Sequence[Awaitable[T]]]:
    """Run the coroutines concurrently, while an `async with` block awaits their results.

    The block awaits them in its own order, so the first result or error that it sees doesn't depend on which one is
    faster. When the block ends, coroutines that still run are cancelled, and their end is awaited. Errors of
    coroutines that the block never awaits are discarded. A coroutine that is the only one runs in the asyncio task that
    awaits it.

    Args:
        work: The coroutines.
        most: Maximum number that run at once; the others wait, and start in order.

    Yields:
        One awaitable for each coroutine, in order.
    """
    if len(work) == 1:
        yield work
        return
    places = asyncio.Semaphore(most)
    tasks = [asyncio.create_task(_in_place(piece, places)) for piece in work]
    try:
        yield [_Waited(task) for task in tasks]
    finally:
        try:
            await ended(tasks, cancel=True)
        finally:
            for piece in work:
                piece.close()  # Those that never got a slot were never started.


async def _in_place(piece: Coroutine[Any, Any, T], places: asyncio.Semaphore) -> T:
    async with places:
        return await piece


class _Waited(Generic[T]):
    """Awaits an asyncio task, which keeps running if the wait is cancelled; the end of the block cancels all tasks."""

    def __init__(self, task: "asyncio.Task[T]") -> None:
        self.task = task

    def __await__(self) -> Generator[Any, Any, T]:
        yield from asyncio.wait((self.task,)).__await__()
        return self.task.result()


async def ended(tasks: Sequence["asyncio.Task[T]"], *, cancel: bool) -> None:
    """Wait until the asyncio tasks have ended; raise a cancellation of this wait only afterwards.

    Args:
        tasks: The asyncio tasks.
        cancel: Whether to cancel them first, and again each time this wait is cancelled.
    """
    cancelled = False
    while running := [task for task in tasks if not task.done()]:
        for task in running if cancel else ():
            task.cancel()
        try:
            await asyncio.wait(running)
        except asyncio.CancelledError:
            cancelled = True
    for task in tasks:
        if not task.cancelled():
            task.exception()  # Mark it as retrieved, or asyncio would log it: the block didn't await this task.
    if cancelled:
        raise asyncio.CancelledError
