"""Transfer of bytes between two connections."""

import asyncio
import socket
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeAlias

PIECE = 64 << 10
Count: TypeAlias = Callable[[int], None]
"""Called with the number of bytes that are about to be forwarded; if it raises, the connection ends."""


class Stream:
    """A connected socket as a reader and a writer; `close` cuts it at once."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def over(cls, connection: socket.socket, limit: int = PIECE) -> "Stream":
        """Return a Stream over a duplicate of the socket; the caller must still close the socket itself.

        `limit` is the reader's buffer limit in bytes, beyond which `readuntil` fails.
        """
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
        """Send the remaining data, and wait up to `seconds` for the other end to close; incoming data is dropped."""
        with suppress(OSError, TimeoutError):
            async with asyncio.timeout(seconds):
                await self.writer.drain()
                self.writer.write_eof()
                while await self.reader.read(PIECE):
                    pass


async def pump(source: Stream, target: Stream, count: Count) -> None:
    """Forward bytes until the source ends, then end the target's input; `count` is called before each piece is sent."""
    while data := await source.reader.read(PIECE):
        count(len(data))
        target.writer.write(data)
        await target.writer.drain()
    if target.writer.can_write_eof():
        target.writer.write_eof()


async def both_ways(one: Stream, other: Stream, sent: Count, received: Count) -> None:
    """Forward bytes in both directions until both sides have ended; if one fails, stop both and raise its error."""
    await first_error(pump(one, other, sent), pump(other, one, received))


async def first_error(*works: Coroutine[Any, Any, None]) -> None:
    """Await all coroutines; if one raises, or this task is cancelled, cancel and await the others."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
