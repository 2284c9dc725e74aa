"""Background programs: their exits, and their streams, on which neither side sends more than the other can accept."""

from __future__ import annotations

import os
import select
import signal

from .children import Child, Exits
from .frames import Wire, zero
from .limits import SCRATCH, WINDOW, ZEROS
from .process_tree import kill_family

TYPE_CHECKING = False  # Importing typing would cost each new sandbox some milliseconds.
if TYPE_CHECKING:
    from typing import Any


class Process:
    """A background program: its open streams, the bytes that the host can accept (`credit`), and its input."""

    def __init__(self, number: int, child: Child, stdin: int) -> None:
        self.number, self.child = number, child
        self.streams = {child.out: "out", child.err: "err"}
        self.credit = {child.out: WINDOW, child.err: WINDOW}
        self.stdin: int | None = stdin
        os.set_blocking(stdin, False)
        self.input: list[bytearray] = []
        """Input that the program has not read yet: at most WINDOW bytes."""
        self.last = False
        """Whether the program's input ends after `input`."""
        self.ended = False


class Background:
    """All background programs. Their output waits in their pipes until the host can accept it."""

    def __init__(self) -> None:
        self.processes: dict[int, Process] = {}
        self.leaders: set[int] = set()
        """Ids of the first processes of all programs and shells.

        These processes and everything that they started outlive other calls.
        """
        self.owners: dict[int, Process] = {}
        """The program of each descriptor that is polled."""
        self.poll: select.epoll | None = None

    def add(self, number: int, child: Child, stdin: int) -> None:
        process = self.processes[number] = Process(number, child, stdin)
        self.leaders.add(child.pid)
        for fd in (child.out, child.err, child.exit):
            self.watch(process, fd, select.EPOLLIN)

    def watch(self, process: Process, fd: int, event: int) -> None:
        if self.poll is None:
            self.poll = select.epoll()
        if fd not in self.owners:
            self.poll.register(fd, event)
            self.owners[fd] = process

    def ignore(self, fd: int) -> None:
        if self.owners.pop(fd, None) is not None and self.poll is not None:
            self.poll.unregister(fd)

    def wait(self, wire: Wire) -> None:
        """Return when a frame from the host is ready; until then, forward the programs' output."""
        if self.poll is None or wire.pending:
            return
        poll = select.poll()
        poll.register(wire.fd, select.POLLIN)
        poll.register(self.poll.fileno(), select.POLLIN)
        while self.processes:
            self.notice_exits(wire)
            ready = [fd for fd, _ in poll.poll()]
            if wire.fd in ready:
                return
            self.pump(wire)

    def notice_exits(self, wire: Wire) -> None:
        """Check all programs for exits, if this kernel has one pipe that signals the exits of all children.

        Another wait may already have read the signal from that pipe.
        """
        if Exits.pipe is not None:
            for process in [*self.processes.values()]:
                self.look(process, wire)

    def pump(self, wire: Wire) -> None:
        """Forward one piece of each stream that has data."""
        if self.poll is None:
            return
        for fd, _ in self.poll.poll(0):
            process = self.owners.get(fd)
            if process is None:
                continue
            if fd in process.streams:
                self.pull(process, fd, wire)
            elif fd == process.stdin:
                self.feed(process, wire)
            else:
                self.look(process, wire)

    def pull(self, process: Process, fd: int, wire: Wire) -> bool:
        """Send a piece of a stream to the host; return whether there may be more that the host can accept."""
        room = process.credit[fd]
        if not room:
            self.ignore(fd)
            return False
        try:
            count = os.readv(fd, [SCRATCH[:room]])
        except BlockingIOError:
            if not process.ended:
                return False
            count = 0  # The program has ended; a process that still has the pipe open isn't part of it.
        if not count:
            self.close_stream(process, fd, wire)
            return False
        wire.write({"process": process.number, "of": process.streams[fd]}, [SCRATCH[:count]])
        SCRATCH[:count] = ZEROS[:count]
        process.credit[fd] -= count
        return True

    def close_stream(self, process: Process, fd: int, wire: Wire) -> None:
        self.ignore(fd)
        wire.write({"process": process.number, "closed": process.streams.pop(fd)})
        if process.ended and not process.streams:
            self.remove(process)

    def feed(self, process: Process, wire: Wire) -> None:
        """Write as much of the input as the program accepts now."""
        took = 0
        try:
            while process.stdin is not None and process.input:
                piece = process.input[0]
                count = os.write(process.stdin, piece)
                took += count
                piece[:count] = bytes(count)
                if count < len(piece):
                    process.input[0] = piece[count:]
                    zero(piece)
                else:
                    process.input.pop(0)
        except BlockingIOError:
            assert process.stdin is not None
            self.watch(process, process.stdin, select.EPOLLOUT)
        except OSError:
            self.close_input(process)
            wire.write({"process": process.number, "closed": "in"})
        if took:
            wire.write({"process": process.number, "took": took})
        if not process.input:
            if process.stdin is not None:
                self.ignore(process.stdin)
            if process.last:
                self.close_input(process)

    def close_input(self, process: Process) -> None:
        for piece in process.input:
            zero(piece)
        process.input.clear()
        if process.stdin is not None:
            self.ignore(process.stdin)
            os.close(process.stdin)
            process.stdin = None

    def look(self, process: Process, wire: Wire) -> None:
        """If the program's first process has ended, kill the others and notify the host."""
        if process.ended or not process.child.ended():
            return
        process.ended = True
        self.ignore(process.child.exit)
        code = process.child.exited()
        kill_family(process.child.pid)
        self.leaders.discard(process.child.pid)
        self.close_input(process)
        wire.write({"process": process.number, "exit": code})
        for fd in [*process.streams]:
            self.pull_all(process, fd, wire)

    def pull_all(self, process: Process, fd: int, wire: Wire) -> None:
        while self.pull(process, fd, wire):
            pass

    def hear(self, wire: Wire, envelope: dict[str, Any], body: bytearray) -> None:
        """Carry out the host's message about one program, which may have ended meanwhile."""
        op, process = envelope["op"], self.processes.get(envelope["process"])
        if op == "close":
            if process is not None:
                self.end(process)
            wire.write({"process": envelope["process"], "closed": "all"})
        elif process is None:
            return
        elif op == "credit":
            self.credit(process, envelope, wire)
        elif op == "signal":
            self.signal(process, envelope["signal"])
        elif process.stdin is not None:  # "input"
            process.last |= envelope.get("last", False)
            process.input += [bytearray(body)] if body else []
            self.feed(process, wire)

    def credit(self, process: Process, envelope: dict[str, Any], wire: Wire) -> None:
        for fd, name in [*process.streams.items()]:
            if name == envelope["of"]:
                process.credit[fd] += envelope["count"]
                if process.ended:
                    self.pull_all(process, fd, wire)
                else:
                    self.watch(process, fd, select.EPOLLIN)

    def signal(self, process: Process, number: int) -> None:
        """Send a signal to a program; SIGKILL kills the program and everything that it started.

        Other signals go to the program's process group, as from a terminal.
        """
        if process.ended or process.child.ended():
            return
        if number == signal.SIGKILL:
            kill_family(process.child.pid)
        else:
            try:
                os.killpg(process.child.pid, number)
            except ProcessLookupError:  # Code stopped the program before it had its own group.
                os.kill(process.child.pid, number)

    def end(self, process: Process) -> None:
        if not process.ended:  # Once the program has ended, another process may get its number.
            kill_family(process.child.pid)
        self.remove(process)

    def remove(self, process: Process) -> None:
        self.close_input(process)
        for fd in (process.child.out, process.child.err, process.child.exit):
            self.ignore(fd)
        process.child.close()
        self.leaders.discard(process.child.pid)
        del self.processes[process.number]

    def forget(self) -> None:
        """Forget all programs, because all processes of the sandbox are gone."""
        for process in [*self.processes.values()]:
            self.remove(process)
        self.leaders.clear()


BACKGROUND = Background()
