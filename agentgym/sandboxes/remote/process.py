"""A program that runs alongside the calls of its sandbox: its output, its input, and its end."""

import asyncio
import errno
import signal
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import suppress

from agentgym.errors import SandboxError, WireError
from agentgym.sandboxes.protocol import Lifetime
from agentgym.sandboxes.protocol.arguments import check_data, check_limit, check_patience
from agentgym.sandboxes.protocol.content import NoMoreInput, in_time
from agentgym.sandboxes.remote.calls import MARGIN_S
from agentgym.sandboxes.remote.link import Link
from agentgym.sandboxes.remote.wire import Frame

WINDOW = 256 << 10
"""Maximum bytes of a stream that may be sent before they are read at the other end; the server has the same limit."""
PIECE = 64 << 10


class News:
    """Wakes the asyncio tasks that wait for something new about a program, such as output or its end."""

    def __init__(self) -> None:
        self._waiting: set[asyncio.Future[None]] = set()

    def tell(self) -> None:
        for waiter in self._waiting:
            if not waiter.done():
                waiter.set_result(None)

    async def until(self, happened: Callable[[], bool], timeout_s: float | None) -> None:
        """Wait until `happened` returns true; it is called now and after each event.

        Raises:
            TimeoutError: After `timeout_s`.
        """
        async with in_time(timeout_s, "the program in the sandbox"):
            while not happened():
                waiter = asyncio.get_running_loop().create_future()
                self._waiting.add(waiter)
                try:
                    await waiter
                finally:
                    self._waiting.discard(waiter)


class RemoteStream:
    """One output stream of a program. Implements `sandboxes.SandboxStream`."""

    def __init__(self, process: "RemoteProcess", name: str) -> None:
        self._process, self._name = process, name
        self._pieces: deque[bytes] = deque()
        self._held = self._owed = 0
        self.ended = False

    async def read(self, size: int = PIECE, *, timeout_s: float | None = None) -> bytes:
        """Return at most `size` bytes as soon as there are any, or b"" at the end.

        Raises:
            TimeoutError: If nothing comes within `timeout_s`.
        """
        check_limit("size", size, 1)
        check_patience(timeout_s)
        await self._process.news.until(lambda: bool(self._pieces) or self.ended, timeout_s)
        if not self._pieces:
            await self._process.check()
            return b""
        piece = self._pieces.popleft()
        if len(piece) > size:
            self._pieces.appendleft(piece[size:])
            piece = piece[:size]
        self._owed += len(piece)
        if self._owed * 2 >= WINDOW and not self.ended:  # Allow that many more, in large steps.
            self._held -= self._owed
            await self._process.tell("credit", of=self._name, count=self._owed)
            self._owed = 0
        return piece

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """Yield the output piece by piece until it ends."""
        while piece := await self.read():
            yield piece

    def take(self, data: bytes) -> None:
        """Accept received output.

        Raises:
            WireError: If the sandbox sent more than was requested.
        """
        self._held += len(data)
        if self._held > WINDOW:
            raise WireError(f"the sandbox sent more output than the {WINDOW} bytes that were requested")
        self._pieces.append(data)


class RemoteProcess:
    """A program that runs in a sandbox. Implements `sandboxes.SandboxProcess`."""

    def __init__(self, link: Link, within: Lifetime) -> None:
        self.number = link.new_number()
        self.news = News()
        self.lifetime = Lifetime("the program", within)
        self._link = link
        self.stdout, self.stderr = RemoteStream(self, "out"), RemoteStream(self, "err")
        """The program's standard output and standard error."""
        self._streams = {"out": self.stdout, "err": self.stderr}
        self._room = WINDOW
        self._takes_input = True
        self.exit_code: int | None = None
        """The program's exit code, or the negative number of the signal that killed it; None while it runs."""
        self._lost = self._gone = False
        link.processes[self.number] = self

    async def write(self, data: str | bytes, *, timeout_s: float | None = None) -> None:
        """Write to the program's standard input, and wait until all of it is accepted.

        Raises:
            BrokenPipeError: If the program accepts no more input.
            TimeoutError: After `timeout_s`.
        """
        check_data("data", data)
        check_patience(timeout_s)
        self.lifetime.check()
        left = memoryview(data.encode() if isinstance(data, str) else data)
        async with in_time(timeout_s, "the input of the program in the sandbox"):
            while left:
                await self.news.until(lambda: self._room > 0 or not self._takes_input, None)
                await self._check_input()
                piece = left[: min(self._room, PIECE)]
                left = left[len(piece) :]
                self._room -= len(piece)
                await self.tell("input", bytes(piece))
            await self.news.until(lambda: self._room == WINDOW or not self._takes_input, None)
        await self._check_input()

    async def _check_input(self) -> None:
        await self.check()
        if not self._takes_input:
            raise NoMoreInput(errno.EPIPE, "the program accepts no more input")

    async def close_stdin(self) -> None:
        """Close the program's standard input after everything written so far; closing it twice is harmless."""
        self.lifetime.check()
        if self._takes_input:
            self._takes_input = False
            await self.tell("input", last=True)

    async def wait(self, *, timeout_s: float | None = None) -> int:
        """Return the program's exit code as soon as it has ended.

        Raises:
            TimeoutError: After `timeout_s`; the program keeps running.
        """
        check_patience(timeout_s)
        await self.news.until(lambda: self.exit_code is not None or self._lost, timeout_s)
        if self.exit_code is None:
            await self.check()
        assert self.exit_code is not None
        return self.exit_code

    async def kill(self, number: int = signal.SIGKILL) -> None:
        """Kill the program and everything that it started, and wait for its end.

        Signals other than SIGKILL go to the program's process group, and are not waited for.
        """
        if self.exit_code is None:
            await self.check()
            await self.tell("signal", signal=int(signal.Signals(number)))
            if number == signal.SIGKILL:
                await self.wait()

    async def close(self, timeout_s: float) -> None:
        """End the program and everything that it started; cut off the sandbox if it doesn't confirm the end in time.

        A missing confirmation is attributed to code in the sandbox: later calls of the link raise SandboxKilledError.
        """
        self.lifetime.end("its `async with` block ended")
        try:
            if not (self._lost or self._gone):
                await self.tell("close")
                await self.news.until(lambda: self._lost or self._gone, timeout_s + MARGIN_S)
        except TimeoutError:
            self._link.cut("a program in it did not end", by_its_code=True)
        except SandboxError:
            pass  # The program ended with its sandbox.
        finally:
            self._link.processes.pop(self.number, None)
            self.lose()

    async def tell(self, op: str, body: bytes = b"", **fields: object) -> None:
        """Send a message about the program to the sandbox at once.

        Raises:
            SandboxError: If the sandbox is gone.
        """
        with suppress(WireError):
            self._link.tell({"process": self.number, "op": op, **fields}, body)
            return
        raise await self._link.lost()

    async def check(self) -> None:
        """Raise an error if the program was lost before its exit code arrived.

        Raises:
            ClosedError: If the program's `async with` statement or its lease has ended.
            SandboxKilledError: If code in the sandbox ended the sandbox.
            SandboxError: If the sandbox was lost for another reason.
        """
        if not self._lost or self.exit_code is not None:
            return
        self.lifetime.check()
        raise await self._link.lost()

    def hear(self, frame: Frame) -> None:
        """Handle a message from the sandbox about the program.

        Raises:
            WireError: If the message is invalid.
        """
        said = frame.envelope
        if (written := self._stream(said.get("of"))) is not None:
            written.take(frame.body)
        elif (closed := self._stream(said.get("closed"))) is not None:
            closed.ended = True
        elif said.get("closed") == "in":
            self._takes_input = False
        elif said.get("closed") == "all":
            self._gone = True
        elif type(said.get("took")) is int and 0 < said["took"] <= WINDOW - self._room:
            self._room += said["took"]
        elif type(said.get("exit")) is int:
            self.exit_code, self._takes_input = said["exit"], False
        else:
            raise WireError(f"the sandbox sent an unexpected message about a program: {said!r}")
        self.news.tell()

    def _stream(self, name: object) -> RemoteStream | None:
        return self._streams.get(name) if isinstance(name, str) else None

    def lose(self) -> None:
        """Record that no more messages about the program will come."""
        self._lost, self._takes_input = True, False
        for stream in self._streams.values():
            stream.ended = True
        self.news.tell()
