"""Frames over the host's connection and over a worker's channel; every buffer is zeroed after use."""

from __future__ import annotations

import os
import select
import socket
import time

from .limits import (
    AHEAD,
    CHANNEL,
    CREDENTIAL,
    CREDENTIALS,
    LENGTH,
    LONGEST_POLL_MS,
    MAX_ASK,
    MAX_BODY,
    MAX_ENVELOPE,
    MAX_WORKER_ENVELOPE,
    PATIENCE_S,
    SCRATCH,
    ZEROS,
    Broken,
    decode,
    encode,
)

TYPE_CHECKING = False  # Importing typing would cost each new sandbox some milliseconds.
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any


def wait(fd: int, event: int, deadline: float | None) -> None:
    """Return when `fd` is ready.

    Raises:
        TimeoutError: At `deadline`.
    """
    poll = select.poll()
    poll.register(fd, event)
    while not poll.poll(milliseconds_until(deadline)):
        if deadline is not None:
            check_time(deadline)


def milliseconds_until(deadline: float | None) -> float | None:
    """Return the timeout of a poll, which may end before the deadline without events; None without a deadline."""
    if deadline is None:
        return None
    return min(max(0.0, deadline - time.monotonic()) * 1000, LONGEST_POLL_MS)


def check_time(deadline: float) -> None:
    """Raise TimeoutError at or after the deadline."""
    if time.monotonic() >= deadline:
        raise TimeoutError("it took longer than its time limit")


def write_fully(fd: int, parts: Iterable[bytes | bytearray | memoryview], deadline: float | None) -> None:
    """Write every part, in order."""
    left: list[bytes | bytearray | memoryview] = [part for part in parts if len(part)]
    while left:
        try:
            count = os.writev(fd, left)
        except BlockingIOError:
            wait(fd, select.POLLOUT, deadline)
            continue
        if count == sum(map(len, left)):
            return
        while count >= len(left[0]):
            count -= len(left.pop(0))
        left[0] = memoryview(left[0])[count:]


def write_frame(
    fd: int,
    envelope: dict[str, Any],
    body: Iterable[bytes | bytearray | memoryview] = (),
    deadline: float | None = None,
) -> None:
    """Write one frame; `body` contains the parts of its body."""
    parts = list(body)
    if parts:
        envelope["body"] = sum(map(len, parts))
    head = encode(envelope).encode()
    write_fully(fd, [LENGTH.pack(len(head)), head, *parts], deadline)


def discard(fd: int) -> None:
    """Drop the content of a pipe."""
    try:
        for _ in range(64):
            count = os.readv(fd, [SCRATCH])
            SCRATCH[:count] = ZEROS[:count]
            if not count:
                return
    except BlockingIOError:
        return


def zero(buffer: bytearray) -> None:
    """Overwrite a buffer in place, so that no later fork finds the content."""
    buffer[:] = bytes(len(buffer))


class Inlet:
    """Reads whole frames from one descriptor, and reads ahead into a buffer.

    The buffer is zeroed as data is taken from it.
    """

    def __init__(self, fd: int, *, max_envelope: int, max_body: int) -> None:
        self.fd, self.max_envelope, self.max_body = fd, max_envelope, max_body
        self.ahead = memoryview(bytearray(AHEAD))
        self.start = self.stop = 0

    @property
    def pending(self) -> bool:
        """Whether the buffer contains data that no frame has used yet; a poll does not report it."""
        return self.start < self.stop

    def read(self, deadline: float | None) -> tuple[dict[str, Any], bytearray]:
        """Return one frame.

        Raises:
            Broken: If the frame is malformed or too large.
            EOFError: At the end of the connection.
        """
        if self.start == self.stop:  # Here, so that everything that arrived together is read ahead at once.
            self.start, self.stop = 0, self.receive(self.ahead, deadline)
        (size,) = LENGTH.unpack(self.take(LENGTH.size, deadline))
        if size > self.max_envelope:
            raise Broken
        try:
            text = self.take(size, deadline).decode()
            envelope, end = decode(text)
        except (ValueError, RecursionError):
            raise Broken from None
        if type(envelope) is not dict or end != len(text):
            raise Broken
        length = envelope.get("body", 0)
        if type(length) is not int or not 0 <= length <= self.max_body:
            raise Broken
        return envelope, self.take(length, deadline)

    def take(self, size: int, deadline: float | None) -> bytearray:
        """Return `size` bytes in a buffer of exactly that size.

        Raises:
            EOFError: If the other end was closed.
        """
        if size <= self.stop - self.start:
            return self.take_ahead(size)
        data = bytearray(size)
        view = memoryview(data)
        got = 0
        while got < size:
            if self.start == self.stop:
                if size - got >= AHEAD:
                    got += self.receive(view[got:], deadline)
                    continue
                self.start, self.stop = 0, self.receive(self.ahead, deadline)
            count = min(size - got, self.stop - self.start)
            part = self.ahead[self.start : self.start + count]
            view[got : got + count] = part
            part[:] = ZEROS[:count]
            got += count
            self.start += count
        return data

    def take_ahead(self, size: int) -> bytearray:
        """Return the next `size` bytes of the data that was read ahead."""
        part = self.ahead[self.start : self.start + size]
        data = bytearray(part)
        part[:] = ZEROS[:size]
        self.start += size
        return data

    def receive(self, into: memoryview, deadline: float | None) -> int:
        """Return how many bytes were received, at least one.

        Raises:
            EOFError: If the other end was closed.
        """
        while True:
            try:
                count = self.receive_some(into)
            except BlockingIOError:
                wait(self.fd, select.POLLIN, deadline)
                continue
            except ConnectionResetError:
                count = 0
            if count == 0:
                raise EOFError
            return count

    def receive_some(self, into: memoryview) -> int:
        return os.readv(self.fd, [into])


class Wire(Inlet):
    """The host's connection: one socket, or two pipes if an engine forwards our input and output."""

    def __init__(self, inlet: int, outlet: int) -> None:
        super().__init__(inlet, max_envelope=MAX_ENVELOPE, max_body=MAX_BODY)
        self.outlet = outlet

    def write(self, envelope: dict[str, Any], body: Iterable[bytes | bytearray | memoryview] = ()) -> None:
        write_frame(self.outlet, envelope, body)


class Channel(Inlet):
    """The supervisor's end of a worker's channel; only frames from that process are accepted."""

    def __init__(self, end: socket.socket, pid: int) -> None:
        super().__init__(end.fileno(), max_envelope=MAX_WORKER_ENVELOPE, max_body=MAX_ASK)
        self.end, self.pid = end, pid

    def receive_some(self, into: memoryview) -> int:
        """Receive bytes from the worker; the kernel reports who wrote them and never mixes two writers' bytes.

        Raises:
            Broken: If another process wrote them.
        """
        count, facts, _, _ = self.end.recvmsg_into([into], CREDENTIALS)
        if count and (not facts or CREDENTIAL.unpack(facts[0][2])[0] != self.pid):
            raise Broken
        return count

    def write(
        self,
        envelope: dict[str, Any],
        body: Iterable[bytes | bytearray | memoryview] = (),
        patience_s: float = PATIENCE_S,
    ) -> None:
        """Write a frame; raise OSError if the worker does not read it in time."""
        write_frame(self.fd, envelope, body, time.monotonic() + patience_s)

    def close(self) -> None:
        self.end.close()


class WorkerEnd(Inlet):
    """The worker's end of its channel, with the file descriptors that it received."""

    def __init__(self) -> None:
        super().__init__(CHANNEL, max_envelope=MAX_ENVELOPE, max_body=MAX_BODY)
        self.end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, 0, fileno=CHANNEL)
        self.fds: list[int] = []

    def receive_some(self, into: memoryview) -> int:
        count, extras, _, _ = self.end.recvmsg_into([into], CREDENTIALS)
        for _, _, data in extras:
            self.fds += CREDENTIAL.unpack(data)
        return count
