"""One running program: its output, its questions, its limits, and what the supervisor saw of its end."""

from __future__ import annotations

import os
import signal
import time

from .children import Child
from .frames import Channel, Wire, zero
from .limits import CHANNEL_LOST, GRACE_S, HARD_OUTPUT, KEEP, MAX_ASKS, OUTPUT_LATER_S, PATIENCE_S, ZEROS, Broken

TYPE_CHECKING = False  # Importing typing would cost each new box some milliseconds.
if TYPE_CHECKING:
    from typing import Any


class Capture:
    """The head and the tail of a stream, however long it is."""

    def __init__(self) -> None:
        # Views, because assigning a view to a slice of a bytearray makes a copy that nobody zeroes.
        self.head, self.tail = memoryview(bytearray(KEEP)), memoryview(bytearray(KEEP))
        self.total = 0

    def read(self, fd: int) -> int:
        """Take what one read gives; 0 at the end of the stream, BlockingIOError when there is nothing yet."""
        count = os.readv(fd, [SCRATCH])
        view = SCRATCH[:count]
        room = max(0, KEEP - self.total)
        self.head[self.total : self.total + len(view[:room])] = view[:room]
        rest = view[room:]
        if rest:
            at = max(0, self.total - KEEP) % KEEP
            first = rest[: KEEP - at]
            self.tail[at : at + len(first)] = first
            self.tail[: len(rest) - len(first)] = rest[len(first) :]
        self.total += count
        view[:] = ZEROS[:count]
        return count

    @property
    def cut(self) -> bool:
        return self.total > 2 * KEEP

    def parts(self) -> list[bytes | bytearray | memoryview]:
        """What was kept, in order, with the cut named in the middle."""
        if not self.cut:
            return [self.head[: self.total], self.tail[: max(0, self.total - KEEP)]]
        at = (self.total - KEEP) % KEEP
        note = f"\n[... {self.total - 2 * KEEP} bytes cut ...]\n".encode()
        return [self.head, note, self.tail[at:], self.tail[:at]]

    def clear(self) -> None:
        used = min(self.total, KEEP)
        self.head[:used] = ZEROS[:used]
        if self.total > KEEP:
            self.tail[:] = ZEROS
        self.total = 0


SCRATCH = memoryview(bytearray(KEEP))
OUT, ERR = Capture(), Capture()


class Call:
    """One program under a limit: drains its output, carries its questions to the host, says how it ended."""

    def __init__(self, host: Wire, child: Child, envelope: dict[str, Any]) -> None:
        self.host, self.child = host, child
        self.id: int = envelope["id"]
        self.began = time.monotonic()
        self.deadline = self.began + envelope["timeout_s"]
        self.status = ""
        self.exit_code = 0
        self.lost = False
        self.interrupted = False
        self.asks = 0

    def run(self) -> None:
        """Return when it has ended, by itself or not; nothing is killed yet."""
        poll, later = self.child.urgent, self.began + OUTPUT_LATER_S
        while not self.status:
            now = time.monotonic()
            if now >= later:
                poll, later = self.child.all, self.deadline
            if now >= self.deadline:
                self.expire()
            elif self.host.pending:
                self.hear_host()
            else:
                self.hear(poll.poll((later - now) * 1000))
        self.drain_all()

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
            else:
                self.hear_host()

    def drain_all(self) -> None:
        """Take what the call left in its pipes."""
        waiting = {fd for fd, _ in self.child.all.poll(0)}
        for fd, capture in ((self.child.out, OUT), (self.child.err, ERR)):
            while fd in waiting and self.drain(fd, capture):
                pass

    def end(self, status: str, exit_code: int, *, lost: bool = False) -> None:
        self.status, self.exit_code, self.lost = status, exit_code, lost

    def expire(self) -> None:
        """At the limit a cell is interrupted, to keep its state; a shell, and a cell that goes on, are killed."""
        if self.child.channel is None or self.interrupted:
            self.end("timeout", -signal.SIGKILL, lost=True)
            return
        self.interrupted = True
        self.deadline += GRACE_S
        os.kill(self.child.pid, signal.SIGINT)

    def drain(self, fd: int, capture: Capture) -> bool:
        """Whether there may be more; over the hard limit the call ends."""
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
        elif envelope.get("id") == self.id and type(envelope.get("ask")) is int and self.asks < MAX_ASKS:
            self.asks += 1
            self.host.write({"id": self.id, "ask": envelope["ask"]}, [body])
        else:
            self.end("protocol", -signal.SIGKILL, lost=True)
        zero(body)

    def closed_channel(self, soon: float) -> None:
        """The worker is ending, or the code closed the channel under it."""
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
            self.end("error", code or 1, lost=True)  # It left without an answer: never a success.
        else:
            self.end("error" if code else "ok", code)

    def hear_host(self) -> None:
        envelope, body = self.host.read(None)
        if envelope.get("id") != self.id:
            return
        if envelope.get("op") == "cancel":
            self.end("killed", -signal.SIGKILL, lost=True)
        elif self.child.channel is not None and not self.interrupted:
            try:
                self.child.channel.write({"answer": envelope["answer"]}, [body])
            except OSError:
                self.end("protocol", -signal.SIGKILL, lost=True)
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


class OomCounter:
    """How many processes of this box the kernel has killed for want of memory; always 0 without a cgroup."""

    FILES = (("/sys/fs/cgroup/memory.events", b"oom_kill "), ("/sys/fs/cgroup/memory/memory.oom_control", b"oom_kill "))

    def __init__(self) -> None:
        self.fd: int | None = None
        for path, key in self.FILES:
            try:
                self.fd, self.key = os.open(path, os.O_RDONLY), key
                break
            except OSError:
                continue

    def read(self) -> int:
        if self.fd is None:
            return 0
        for line in os.pread(self.fd, 4096, 0).splitlines():
            if line.startswith(self.key):
                return int(line.split()[1])
        return 0
