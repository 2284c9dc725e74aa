"""The host's side of a relay, which makes a server on the host reachable at a port inside a sandbox."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import cache
from pathlib import Path

from agentgym.agent_api.http import Handle
from agentgym.agent_api.http_connection import HttpConnection
from agentgym.agent_api.relay import HEAD
from agentgym.errors import EnvError, WireError
from agentgym.sandboxes.protocol import Sandbox
from agentgym.sandboxes.protocol.programs import SandboxProcess

log = logging.getLogger(__name__)

_START_S = 30.0
_MAX_FRAME = 1 << 20
MAX_OPEN = 256
"""Maximum number of simultaneous connections. The code in the sandbox opens them, and each takes memory on the host."""
MAX_HELD = 128 << 20
"""Maximum number of bytes of unanswered requests, on all connections of a sandbox together."""
FRAMES_A_TURN = 64
"""Number of frames to process before other work of the event loop gets a turn. The code in the sandbox may send many
tiny frames.
"""
MAX_SAID = 1000
"""Maximum number of frames that wait to be written to the sandbox. If there are more, nothing is read from the sandbox
until all of them are written.
"""


@asynccontextmanager
async def listening(sandbox: Sandbox, handle: Handle) -> AsyncIterator[int]:
    """Listen on 127.0.0.1 inside the sandbox, and serve requests until the `async with` block ends.

    The sandbox needs a loopback and `python3`, but no access to the outside.

    Args:
        sandbox: The sandbox to listen in.
        handle: The function that responds to each request. It runs on the host.

    Yields:
        The port inside the sandbox.

    Raises:
        EnvError: If the loopback or `python3` is missing.
    """
    async with sandbox.start(["python3", "-I", "-S", "-c", _source()]) as process:
        port = await _port(process)
        relay = RelayLink(process, handle)
        carrying = [asyncio.create_task(relay.read()), asyncio.create_task(relay.write())]
        try:
            yield port
        finally:
            for task in carrying:
                task.cancel()
            await asyncio.gather(*carrying, return_exceptions=True)
            await relay.close()


@cache
def _source() -> str:
    return Path(__file__).with_name("relay.py").read_text()


async def _port(process: SandboxProcess) -> int:
    line = b""
    with suppress(TimeoutError):
        async with asyncio.timeout(_START_S):
            while not line.endswith(b"\n") and (piece := await process.stdout.read(1)):
                line += piece
    if line[:-1].isdigit():
        return int(line)
    said = b""
    while process.exit_code is not None and (piece := await process.stderr.read()):
        said += piece
    why = " ".join(said.decode("utf-8", "replace").split())[-200:] or f"exit code {process.exit_code}"
    raise EnvError(
        f"the agent's API cannot be reached from inside the sandbox ({why}); it needs `python3` there, and a loopback: "
        'give the sandbox network="loopback" or network=ag.Allow(...)'
    )


class RelayLink:
    """The connections of one relay, each served by an HttpConnection."""

    def __init__(self, process: SandboxProcess, handle: Handle) -> None:
        self._process, self._handle = process, handle
        self._open: dict[int, HttpConnection] = {}
        self._at_most = 0
        """Upper bound on the bytes of unanswered requests: their number when last counted, plus all bytes received
        since.
        """
        self._said: asyncio.Queue[bytes] = asyncio.Queue()
        self._ending: set[asyncio.Task[None]] = set()
        self._cut = False
        """Whether a connection has been cut off. Only the first time is logged."""

    async def read(self) -> None:
        """Read the data that clients in the sandbox send. When the relay ends, close every connection."""
        held = bytearray()
        try:
            while piece := await self._process.stdout.read():
                held += piece
                while self._take_frames(held):  # noqa: ASYNC110  This doesn't wait for anything; it lets other tasks run.
                    await asyncio.sleep(0)
                if self._said.qsize() > MAX_SAID:
                    await self._said.join()
        except WireError as error:
            log.warning("an agent can no longer reach its API: %s", error)
        finally:
            for number in list(self._open):
                self.lose(number)

    def _take_frames(self, held: bytearray) -> bool:
        """Process some complete frames, and return whether there may be more.

        The processed bytes are removed from `held`.
        """
        for _ in range(FRAMES_A_TURN):
            if len(held) < HEAD.size:
                return False
            number, length = HEAD.unpack_from(held)
            if length > _MAX_FRAME:
                raise WireError(
                    f"the relay sent a frame of {length} bytes, so the code in the sandbox must have changed it"
                )
            if len(held) < HEAD.size + length:
                return False
            data = bytes(held[HEAD.size : HEAD.size + length])
            del held[: HEAD.size + length]
            self.take(number, data)
        return True

    async def write(self) -> None:
        """Forward queued data to the clients, in order. This never returns."""
        while True:
            await self._process.write(await self._said.get())
            self._said.task_done()

    def say(self, number: int, data: bytes) -> None:
        """Queue bytes for a client. Empty data ends its connection."""
        self._said.put_nowait(HEAD.pack(number, len(data)) + data)

    def lose(self, number: int) -> None:
        """Forget a connection, and cancel its request in progress."""
        connection = self._open.pop(number, None)
        if connection is not None:
            task = asyncio.create_task(connection.close())
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)

    async def close(self) -> None:
        """Cancel all requests in progress, and wait for them to end."""
        for number in list(self._open):
            self.lose(number)
        await asyncio.gather(*self._ending)

    @property
    def open(self) -> int:
        """Number of open connections."""
        return len(self._open)

    def take(self, number: int, data: bytes) -> None:
        """Process bytes that a client sent, or the end of its connection if `data` is empty.

        If there are too many connections or unanswered bytes, the connection is cut off.
        """
        if not data:
            self.lose(number)
            return
        if not self._has_room(len(data)) or (number not in self._open and len(self._open) >= MAX_OPEN):
            self._cut_off(number)
            return
        self._at_most += len(data)
        if number not in self._open:
            self._open[number] = HttpConnection(self._handle)
            self._open[number].connection_made(_RelayTransport(self, number))
        self._open[number].data_received(data)

    def _has_room(self, length: int) -> bool:
        """Return whether `length` more bytes of requests are allowed.

        The limit is MAX_HELD unanswered bytes. Usually `_at_most` decides, which is never below the true number. Only
        if it exceeds the limit is it replaced with an exact count.
        """
        if self._at_most + length > MAX_HELD:
            self._at_most = self._held()
        return self._at_most + length <= MAX_HELD

    def _held(self) -> int:
        return sum(connection.held for connection in self._open.values())

    def _cut_off(self, number: int) -> None:
        if not self._cut:
            log.warning(
                "an agent's connection is cut off, because there are too many connections or unanswered bytes: "
                "%d connections, %d bytes",
                len(self._open),
                self._held(),
            )
        self._cut = True
        self.lose(number)
        self.say(number, b"")


class _RelayTransport(asyncio.BaseTransport):
    """The methods of a transport that an HttpConnection uses."""

    def __init__(self, relay: RelayLink, number: int) -> None:
        super().__init__()
        self._relay, self._number = relay, number
        self._closed = False

    def write(self, data: bytes) -> None:
        """Forward bytes to the client, in frames of a size that the relay accepts."""
        for at in range(0, 0 if self._closed else len(data), _MAX_FRAME):
            self._relay.say(self._number, data[at : at + _MAX_FRAME])

    def close(self) -> None:
        """End the connection once everything written so far is sent."""
        if not self._closed:
            self._closed = True
            self._relay.say(self._number, b"")
            self._relay.lose(self._number)
