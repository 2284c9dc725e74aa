"""Bytes on their way between two connections."""

import asyncio
import socket
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeAlias

PIECE = 64 << 10
Count: TypeAlias = Callable[[int], None]
"""A function that is told how many bytes are about to be carried; what it raises ends the connection."""


class Stream:
    """A connected socket as a reader and a writer; `close` cuts it at once."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def over(cls, connection: socket.socket, limit: int = PIECE) -> "Stream":
        """Open the streams over a duplicate of the socket, which stays the caller's to close."""
        twin = connection.dup()
        try:
            return cls(*await asyncio.open_connection(sock=twin, limit=limit))
        except BaseException:
            twin.close()
            raise

    def close(self) -> None:
        """Cut the connection."""
        self.writer.transport.abort()

    async def finish(self, seconds: float) -> None:
        """Send what is left, and wait a while for the other end to close; what it still says is dropped."""
        with suppress(OSError, TimeoutError):
            async with asyncio.timeout(seconds):
                await self.writer.drain()
                self.writer.write_eof()
                while await self.reader.read(PIECE):
                    pass


async def pump(source: Stream, target: Stream, count: Count) -> None:
    """Carry bytes until the source ends, and end the target's input then; `count` is told of each piece first."""
    while data := await source.reader.read(PIECE):
        count(len(data))
        target.writer.write(data)
        await target.writer.drain()
    if target.writer.can_write_eof():
        target.writer.write_eof()


async def both_ways(one: Stream, other: Stream, sent: Count, received: Count) -> None:
    """Carry bytes both ways until both ends have ended; an error of either ends both, and is raised."""
    await first_error(pump(one, other, sent), pump(other, one, received))


async def first_error(*works: Coroutine[Any, Any, None]) -> None:
    """Await all; where one raises, or this is cancelled, the others are cancelled and have ended."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
