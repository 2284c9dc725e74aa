"""One running program: its output, host function calls and limits, and how the supervisor saw it end."""

from __future__ import annotations

import json
import os
import select
import signal
import time

from .background import BACKGROUND
from .children import Child, Exits
from .frames import Channel, Wire, milliseconds_until, zero
from .limits import (
    CHANNEL_LOST,
    GRACE_S,
    HARD_OUTPUT,
    KEEP,
    MAX_ASKS,
    MAX_OPEN_ASKS,
    OUTPUT_LATER_S,
    PATIENCE_S,
    SCRATCH,
    ZEROS,
    Broken,
)

TYPE_CHECKING = False  # Importing typing would cost each new sandbox some milliseconds.
if TYPE_CHECKING:
    from typing import Any


class Capture:
    """The head and the tail of a stream of any length."""

    def __init__(self) -> None:
        self.total = 0
        self.keep(2 * KEEP)

    def keep(self, size: int) -> None:
        """Make room for this many bytes of head and tail together; earlier content is dropped."""
        self.half = size // 2
        # Views, because assigning a view to a slice of a bytearray makes a copy that nobody zeroes.
        self.head, self.tail = memoryview(bytearray(self.half)), memoryview(bytearray(self.half))

    def read(self, fd: int) -> int:
        """Store the result of one read; return 0 at the end of the stream.

        Raises:
            BlockingIOError: If there is no data yet.
        """
        count = os.readv(fd, [SCRATCH])
        view = SCRATCH[:count]
        room = max(0, self.half - self.total)
        self.head[self.total : self.total + len(view[:room])] = view[:room]
        rest = view[room:]
        if rest:
            self.keep_last(rest, max(0, self.total - self.half))
        self.total += count
        view[:] = ZEROS[:count]
        return count

    def keep_last(self, rest: memoryview, before: int) -> None:
        """Add data to the ring buffer of the tail; `before` is the number of bytes between the head and this data."""
        skipped = max(0, len(rest) - self.half)
        rest = rest[skipped:]
        at = (before + skipped) % self.half
        first = rest[: self.half - at]
        self.tail[at : at + len(first)] = first
        self.tail[: len(rest) - len(first)] = rest[len(first) :]

    @property
    def cut(self) -> bool:
        return self.total > 2 * self.half

    def parts(self) -> list[bytes | bytearray | memoryview]:
        """Return the stored data in order, with a note of the cut in the middle."""
        if not self.cut:
            return [self.head[: self.total], self.tail[: max(0, self.total - self.half)]]
        at = (self.total - self.half) % self.half
        note = f"\n[... {self.total - 2 * self.half} bytes cut ...]\n".encode()
        return [self.head, note, self.tail[at:], self.tail[:at]]

    def clear(self) -> None:
        if not self.total and self.half == KEEP:
            return
        used = min(self.total, self.half)
        self.head[:used] = bytes(used)
        more = min(self.total - used, self.half)
        self.tail[:more] = bytes(more)
        self.total = 0
        if self.half != KEEP:
            self.keep(2 * KEEP)


OUT, ERR = Capture(), Capture()


class Call:
    """One program under a limit: drains its output, forwards its host function calls, and reports how it ended."""

    def __init__(self, host: Wire, child: Child, envelope: dict[str, Any]) -> None:
        self.host, self.child = host, child
        self.id: int = envelope["id"]
        self.began = time.monotonic()
        self.deadline: float = envelope["deadline"]
        self.status = ""
        self.exit_code = 0
        self.lost = False
        self.interrupted = False
        self.functions = bool(envelope.get("functions"))
        self.asks = self.open_asks = 0
        if "keep" in envelope:
            OUT.keep(envelope["keep"])
            ERR.keep(envelope["keep"])

    def run(self) -> None:
        """Follow the program until it has ended or exceeded a limit; nothing is killed yet."""
        beside = BACKGROUND.poll.fileno() if BACKGROUND.poll is not None and BACKGROUND.processes else None
        if beside is not None:
            self.child.watch(beside)
        self.follow(beside)
        if beside is not None:
            self.child.deafen(beside)
        self.drain_all()

    def follow(self, beside: int | None) -> None:
        """Handle all events until the program has ended; `beside` signals events of background programs."""
        channel = self.child.channel
        poll, later = self.child.urgent, self.began + OUTPUT_LATER_S
        while not self.status:
            now = time.monotonic()
            if now >= later:
                poll, later = self.child.all, self.deadline
            if now >= self.deadline:
                self.expire()
            elif self.host.pending:
                self.hear_host()
            elif channel is not None and channel.pending:
                self.hear_worker(channel)
            else:
                events = poll.poll(milliseconds_until(later))
                if beside is not None and (beside, select.POLLIN) in events:
                    self.hear_background()
                    events.remove((beside, select.POLLIN))
                self.hear(events)

    def hear_background(self) -> None:
        BACKGROUND.pump(self.host)
        if Exits.pipe is not None and self.child.ended():
            Exits.tell_again()

    def hear(self, events: list[tuple[int, int]]) -> None:
        child = self.child
        for fd, _ in events:
            if self.status:
                return
            if child.channel is not None and fd == child.channel.fd:
                self.hear_worker(child.channel)
            elif fd == child.out:
                self.drain(fd, OUT)
            elif fd == child.err:
                self.drain(fd, ERR)
            elif fd == child.exit:
                if child.ended():
                    self.hear_exit()
                BACKGROUND.notice_exits(self.host)
            else:
                self.hear_host()

    def drain_all(self) -> None:
        """Read what the call left in its pipes."""
        waiting = {fd for fd, _ in self.child.all.poll(0)}
        for fd, capture in ((self.child.out, OUT), (self.child.err, ERR)):
            while fd in waiting and self.drain(fd, capture):
                pass

    def end(self, status: str, exit_code: int, *, lost: bool = False) -> None:
        self.status, self.exit_code, self.lost = status, exit_code, lost

    def expire(self) -> None:
        """Handle the time limit.

        A cell is interrupted first, so that its session keeps its state. A shell command, or a cell that continues
        after the interrupt, is killed.
        """
        if self.child.channel is None or self.interrupted:
            self.end("timeout", -signal.SIGKILL, lost=True)
            return
        self.interrupted = True
        self.deadline += GRACE_S
        self.child.interrupt()

    def drain(self, fd: int, capture: Capture) -> bool:
        """Store available output and return whether there may be more; over the hard limit, the call ends."""
        try:
            count = capture.read(fd)
        except BlockingIOError:
            return False
        if count == 0:
            self.child.deafen(fd)
            return False
        if OUT.total + ERR.total <= HARD_OUTPUT:
            return count == len(SCRATCH)
        if self.status in ("", "ok", "error"):
            self.end("output_limit", -signal.SIGKILL, lost=True)
        return False

    def hear_worker(self, channel: Channel) -> None:
        soon = time.monotonic() + PATIENCE_S
        try:
            envelope, body = channel.read(soon)
        except EOFError:
            self.child.deafen(channel.fd)
            self.closed_channel(soon)
            return
        except (Broken, OSError):
            self.end("protocol", -signal.SIGKILL, lost=True)
            return
        if envelope.get("id") == self.id and type(envelope.get("done")) is int and not body:
            self.answered(envelope["done"])
        elif envelope.get("id") == self.id and type(envelope.get("ask")) is int:
            self.asked(channel, envelope["ask"], body)
        else:
            self.end("protocol", -signal.SIGKILL, lost=True)
        zero(body)

    def asked(self, channel: Channel, number: int, body: bytearray) -> None:
        """Forward a host function call to the host, unless too many are open or the host offered no functions."""
        self.asks += 1
        if self.asks > MAX_ASKS or self.open_asks == MAX_OPEN_ASKS:
            self.end("protocol", -signal.SIGKILL, lost=True)
        elif not self.functions:
            self.answer_worker(channel, number, refusal("no host functions are available in this call"))
        elif self.interrupted:
            self.answer_worker(channel, number, refusal("the time limit of this call has passed"))
        else:
            self.open_asks += 1
            self.host.write({"id": self.id, "ask": number}, [body])

    def answer_worker(self, channel: Channel, number: int, body: bytes | bytearray) -> None:
        try:
            channel.write({"answer": number}, [body])
        except OSError:
            self.end("protocol", -signal.SIGKILL, lost=True)

    def closed_channel(self, soon: float) -> None:
        """Handle a closed channel: the worker is ending, or the code closed the channel."""
        if self.child.ends(soon):
            self.hear_exit()
        else:
            self.end("protocol", -signal.SIGKILL, lost=True)

    def answered(self, code: int) -> None:
        if self.interrupted:
            self.end("timeout", -signal.SIGINT)
        else:
            self.end("error" if code else "ok", code & 0xFF)

    def hear_exit(self) -> None:
        code = self.child.exited()
        worker = self.child.channel is not None
        if self.interrupted:
            self.end("timeout", -signal.SIGINT, lost=True)
        elif code < 0:
            self.end("killed", code, lost=worker)
        elif worker and code == CHANNEL_LOST:
            self.end("protocol", code, lost=True)
        elif worker:
            self.end("error", code or 1, lost=True)  # The worker exited without an answer, which is never a success.
        else:
            self.end("error" if code else "ok", code)

    def hear_host(self) -> None:
        envelope, body = self.host.read(None)
        channel = self.child.channel
        if "process" in envelope:
            BACKGROUND.hear(self.host, envelope, body)
        elif envelope.get("id") != self.id:
            pass
        elif envelope.get("op") == "cancel":
            self.end("killed", -signal.SIGKILL, lost=True)
        elif channel is not None:
            self.open_asks -= 1
            if not self.interrupted:
                self.answer_worker(channel, envelope["answer"], body)
        zero(body)

    def answer(self) -> tuple[dict[str, Any], list[bytes | bytearray | memoryview]]:
        out, err = OUT.parts(), ERR.parts()
        return {
            "status": self.status,
            "exit_code": self.exit_code,
            "state_lost": self.lost,
            "truncated": OUT.cut or ERR.cut,
            "seconds": round(time.monotonic() - self.began, 6),
            "stdout": sum(map(len, out)),
            "stderr": sum(map(len, err)),
        }, out + err


def refusal(text: str) -> bytes:
    """Return an answer to a host function call that makes the code raise RuntimeError."""
    return json.dumps({"error": text}).encode()
