"""A program inside a sandbox that listens on a port and connects its clients with a server on the host.

The data of all connections goes over the program's standard input and output. Its first line of output is the port.
After that, frames go both ways: the number of a connection, a length, and that many bytes of data. A frame of length 0
ends the connection.
"""

import asyncio
import os
import struct
import sys
from contextlib import suppress

HEAD = struct.Struct(">II")
PIECE = 64 << 10


class Relay:
    """The open connections, by their number."""

    def __init__(self, out: asyncio.StreamWriter) -> None:
        self.out, self.made = out, 0
        self.writers: dict[int, asyncio.StreamWriter] = {}

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward a client's data to the host until the client hangs up or the host ends the connection."""
        self.made += 1
        number = self.made
        self.writers[number] = writer
        try:
            while True:
                piece = await reader.read(PIECE)
                if not piece:
                    break
                self.out.write(HEAD.pack(number, len(piece)) + piece)
                await self.out.drain()
        except OSError:
            pass  # The client reset the connection. The host is told below.
        finally:
            if self.writers.pop(number, None) is not None:
                self.out.write(HEAD.pack(number, 0))
            writer.close()

    async def carry(self, source: asyncio.StreamReader) -> None:
        """Forward data from the host to the clients. Raise IncompleteReadError when the host ends the relay."""
        while True:
            number, length = HEAD.unpack(await source.readexactly(HEAD.size))
            piece = await source.readexactly(length)
            writer = self.writers.get(number) if length else self.writers.pop(number, None)
            if writer is not None:
                writer.write(piece) if length else writer.close()


async def streams() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Return the program's standard input and output as asyncio streams."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin.buffer)
    output = os.fdopen(1, "wb", 0)
    transport, protocol = await loop.connect_write_pipe(asyncio.streams.FlowControlMixin, output)
    return reader, asyncio.StreamWriter(transport, protocol, None, loop)


async def main() -> None:
    """Listen on a free port, and relay connections until the standard input ends."""
    source, out = await streams()
    relay = Relay(out)
    server = await asyncio.start_server(relay.accept, "127.0.0.1", 0)
    out.write(b"%d\n" % server.sockets[0].getsockname()[1])
    with suppress(asyncio.IncompleteReadError, OSError):  # The input ends when the host ends the relay.
        await relay.carry(source)


if __name__ == "__main__":
    try:
        asyncio.run(main())
    except OSError as error:
        sys.exit(f"the relay: {error}")
