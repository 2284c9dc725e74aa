"""The calls of the host, one by one; the only process here that the host listens to."""

from __future__ import annotations

import os
import signal
import time

from .arena import Arena, show_processes
from .call import ERR, OUT, Call, OomCounter
from .children import Child, start
from .files import list_folder, read_file, remove_folder, write_file
from .folder_copy import copy_folder, open_whatever_its_mode
from .frames import Wire, zero
from .limits import MAX_BODY, PATIENCE_S, TRUNK, NotAFile, Refused
from .process_tree import descendants, go_on, kill_all_but, reap, stop_all
from .sessions import Session, Sessions
from .space import Space, raised
from .worker import own_folder

TYPE_CHECKING = False  # Importing typing would cost each new box some milliseconds.
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, NoReturn


class Supervisor(Sessions):
    """Answers the host's calls one by one; the only process here that the host listens to."""

    def __init__(
        self,
        host: Wire,
        config: dict[str, Any],
        begin_anew: Callable[[int], NoReturn],
        oom: OomCounter,
        arena: Arena | None = None,
        space: Space | None = None,
    ) -> None:
        self.arena = arena
        self.shell = "/bin/bash" if os.path.exists("/bin/bash") else "/bin/sh"
        self.oom = oom
        super().__init__(host, config, begin_anew, space)
        self.operations = {
            "python": self.python,
            "exec": self.exec,
            "write": self.write,
            "read": self.read,
            "list": self.list,
            "fork": self.fork,
            "end": self.end,
            "reset": self.reset,
        }

    def serve(self) -> None:
        """Answer until the wire closes."""
        while True:
            envelope, body = self.host.read(None)
            operation = self.operations.get(envelope.get("op", ""))
            if operation is not None:  # Else an answer or a cancel that crossed the end of its call.
                answer, parts = self.attempt(operation, envelope, body)
                self.host.write({"id": envelope["id"], **answer}, parts)
                for part in parts:
                    if type(part) is bytearray:
                        zero(part)
            zero(body)
            OUT.clear()
            ERR.clear()
            reap()

    def attempt(self, operation: Callable[..., Any], envelope: dict[str, Any], body: bytearray) -> Any:
        session = self.sessions.get(envelope.get("session", TRUNK))
        if session is None:
            return {"gone": True}, []
        try:
            return operation(session, envelope, body)
        except Refused as error:
            return {"error": str(error), "not_a_file": isinstance(error, NotAFile)}, []
        except OSError as error:
            return {"error": error.strerror or str(error), "errno": error.errno}, []
        except ValueError as error:
            return {"error": str(error)}, []

    def python(self, session: Session, envelope: dict[str, Any], body: bytearray) -> Any:
        """Run a cell in the session, or in a worker that earlier code never touched."""
        if envelope["fresh"]:
            return self.python_fresh(session, envelope, body)
        self.revive(session)
        call = self.cell(session.worker, envelope, body)
        if call.lost:
            self.restart(session)
        else:
            self.claim(session)
        call.lost |= session.take_loss()
        return call.answer()

    def python_fresh(self, session: Session, envelope: dict[str, Any], body: bytearray) -> Any:
        """Everything else in the box is stopped meanwhile, and goes on afterwards."""
        bystanders = stop_all()
        if self.space is None:
            call = self.fresh_in_place(session, bystanders, envelope, body)
        else:
            call = self.fresh_in_a_copy(session, envelope, body)
        go_on(bystanders)
        call.lost = session.take_loss()
        return call.answer()

    def fresh_in_a_copy(self, session: Session, envelope: dict[str, Any], body: bytearray) -> Call:
        """In a place that nothing of the session sees or reaches, with a copy of its folder that ends with the call."""
        source = open_whatever_its_mode(session.work)
        try:
            worker = self.make_room(lambda patience_s: self.worker_in_a_copy(session.work, source, patience_s))
        finally:
            os.close(source)
        call = self.cell(worker, envelope, body, patience_s=envelope["timeout_s"])
        worker.close()
        assert worker.space is not None
        worker.space.close()
        return call

    def worker_in_a_copy(self, work: str, source: int, patience_s: float) -> Child:
        private = os.path.join(self.branches, "fresh")
        arena, ours, end = self.arena, self.space, time.monotonic() + patience_s
        assert arena is not None
        assert ours is not None

        def fill(stderr: int) -> None:
            with raised():
                arena.enter()
                show_processes()
            try:
                for folder in (private, work):
                    if not os.path.isdir(folder):
                        os.mkdir(folder)
                copy_folder(source, os.open(work, os.O_RDONLY | os.O_DIRECTORY))
            except (OSError, Refused) as error:
                os.write(stderr, f"the working folder cannot be copied: {error}\n".encode())
                os._exit(1)

        while True:
            try:
                with Space(lambda: None).while_entered(ours) as space:
                    return self.new_worker(work, private=private, space=space, before=fill)
            except BlockingIOError:
                if time.monotonic() >= end:
                    raise
                time.sleep(0.002)

    def fresh_in_place(
        self, session: Session, bystanders: dict[int, int], envelope: dict[str, Any], body: bytearray
    ) -> Call:
        """Where there is no namespace for it: in the session's folder itself."""
        private = os.path.join(self.branches, os.urandom(16).hex())
        os.mkdir(private)
        worker = self.make_room(lambda patience_s: self.new_worker(session.work, patience_s, private=private))
        call = self.cell(worker, envelope, body)
        worker.close()
        if not kill_all_but(self.bystanders(bystanders)):
            self.restart_all()
        remove_folder(private)
        return call

    def cell(self, worker: Child, envelope: dict[str, Any], body: bytearray, *, patience_s: float = PATIENCE_S) -> Call:
        assert worker.channel is not None
        killed = self.oom.read()
        call = Call(self.host, worker, envelope)
        try:
            worker.channel.write({"id": call.id, "functions": envelope["functions"]}, [body], patience_s)
        except OSError:
            if not worker.ends(time.monotonic() + PATIENCE_S):  # Else its exit says more.
                call.end("protocol", -signal.SIGKILL, lost=True)
        zero(body)  # Before any fork that follows the call.
        call.run()
        self.note_oom(call, killed)
        return call

    def note_oom(self, call: Call, before: int) -> None:
        if call.status in ("error", "killed") and self.oom.read() > before:
            call.status = "oom"

    def exec(self, session: Session, envelope: dict[str, Any], body: bytearray) -> Any:
        """Run a shell command; what it started ends with the call."""

        def run() -> None:
            try:
                command = [self.shell.encode(), b"-c", bytes(body)]
                os.execve(self.shell, command, {**os.environ, **own_folder(session.work)})
            except (OSError, ValueError) as error:
                os.write(2, f"the shell cannot start: {error}\n".encode())
                os._exit(126)

        before = set(descendants(os.getpid()))
        killed = self.oom.read()

        def fork_shell(patience_s: float) -> Child:
            return start(run, session.work, self.limits, patience_s, self.host.fd, channel=False, sealed=False)

        child = self.make_room(fork_shell)
        call = Call(self.host, child, envelope)
        call.run()
        child.close()
        self.note_oom(call, killed)
        spared = self.bystanders(before)
        for pid in self.workers():
            spared.update(descendants(pid))
        if not kill_all_but(spared):
            self.restart_all()
        call.lost = session.take_loss()
        return call.answer()

    def write(self, session: Session, envelope: dict[str, Any], body: bytearray) -> Any:
        at = 0
        for path, size, executable in envelope["files"]:
            write_file(session.work, path, memoryview(body)[at : at + size], executable=executable)
            at += size
        return {}, []

    def read(self, session: Session, envelope: dict[str, Any], _body: bytearray) -> Any:
        data, executable = read_file(session.work, envelope["path"], envelope["limit"])
        return {"executable": executable}, [data]

    def list(self, session: Session, envelope: dict[str, Any], _body: bytearray) -> Any:
        names = b"\0".join(list_folder(session.work, envelope["path"]))
        if len(names) > MAX_BODY:
            raise Refused(f"{envelope['path']!r} holds too many names")
        return {}, [names]
