"""The host's calls, answered one by one in the only process here that the host listens to."""

from __future__ import annotations

import os
import select
import time

from .archive import run_task
from .arena import Arena
from .background import BACKGROUND
from .call import ERR, OUT, Call
from .children import Child, start
from .counters import OomCounter, Places
from .files import list_folder, stand
from .frames import Wire, check_time, wait, zero
from .fresh import Fresh
from .limits import (
    FORK_S,
    KILL_S,
    MAX_BACKGROUND,
    MAX_BODY,
    REMOVE_S,
    SANDBOX_KILLED,
    SHELL_BEGINS_S,
    TRUNK,
    NotAFile,
    Refused,
    WrongArgument,
)
from .process_tree import descendants, kill_all_but, reap
from .program import Program
from .sessions import Session
from .shell import Shell, ShellRun
from .transfer import Transfers, write_file

TYPE_CHECKING = False  # Importing typing would cost each new sandbox some milliseconds.
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any, NoReturn


class Supervisor(Fresh):
    """Answers the host's calls one by one; the only process here that the host listens to."""

    def __init__(
        self,
        host: Wire,
        config: dict[str, Any],
        begin_anew: Callable[[int], NoReturn],
        oom: OomCounter,
        places: Places,
        arena: Arena | None = None,
    ) -> None:
        self.arena = arena
        self.oom = oom
        self.places = places
        self.transfers = Transfers()
        self.shells: dict[int, tuple[Shell | None, Program]] = {}
        super().__init__(host, config, begin_anew, arena.show_processes if arena else None)
        self.operations = {
            "python": self.python,
            "exec": self.exec,
            "start": self.start,
            "shell": self.open_shell,
            "run": self.run_in_shell,
            "end_shell": self.end_shell,
            "write": self.write,
            "write_on": self.write_on,
            "read": self.read,
            "read_on": self.read_on,
            "end_transfer": self.end_transfer,
            "list": self.list,
            "fork": self.fork,
            "end": self.end,
            "snapshot": self.snapshot,
            "restore": self.restore,
            "reset": self.reset,
        }

    def serve(self) -> None:
        """Answer calls until the connection closes."""
        while True:
            BACKGROUND.wait(self.host)
            envelope, body = self.host.read(None)
            operation = self.operations.get(envelope.get("op", ""))
            if operation is not None:  # None: an answer or a cancel that came after the end of its call.
                answer, parts = self.attempt(operation, envelope, body)
                self.host.write({"id": envelope["id"], **answer}, parts)
                for part in parts:
                    if type(part) is bytearray:
                        zero(part)
            elif "process" in envelope:
                BACKGROUND.hear(self.host, envelope, body)
            zero(body)
            OUT.clear()
            ERR.clear()
            reap(adopted=False)

    def attempt(self, operation: Callable[..., Any], envelope: dict[str, Any], body: bytearray) -> Any:
        """Make a call; all its parts share one deadline, so no step gets the full time again."""
        envelope["deadline"] = time.monotonic() + envelope.get("timeout_s", REMOVE_S)
        self.hold_limits()
        session = self.sessions.get(envelope.get("session", TRUNK))
        if session is None:
            return {"gone": True}, []
        try:
            stand(session.work)
            return operation(session, envelope, body)
        except Refused as error:
            return {"error": str(error), **kind_of(error)}, []
        except TimeoutError as error:
            return {"error": str(error) or "it took longer than its time limit", "late": True}, []
        except OSError as error:
            self.hold_limits()  # If code lowered our limits and so caused this error, end the sandbox.
            return {"error": error.strerror or str(error), "errno": error.errno}, []
        except ValueError as error:
            return {"error": str(error)}, []

    def hold_limits(self) -> None:
        """Restore our own limits; if code has permanently lowered them, the sandbox ends as killed by its code."""
        if self.arena is not None:
            return  # Code in such a sandbox can't see our process.
        try:
            self.own_limits.restore()
        except OSError as error:
            raise SystemExit(SANDBOX_KILLED) from error

    def python(self, session: Session, envelope: dict[str, Any], body: bytearray) -> Any:
        """Run a cell in the session, or in a worker that earlier code never touched."""
        if envelope["fresh"]:
            return self.python_fresh(session, envelope, body)
        self.revive(session)
        call = self.cell(session.worker, envelope, body, self.oom.read())
        if call.lost:
            self.restart(session)
        else:
            self.claim(session)
        call.lost |= session.take_loss()
        return call.answer()

    def exec(self, session: Session, envelope: dict[str, Any], body: bytearray) -> Any:
        """Run a shell command; everything that it started ends with the call."""
        before = set(descendants(os.getpid()))
        killed = self.oom.read()
        program = Program(envelope, body)
        given = program.input()
        try:
            child = self.fork_program(session, program, given)
        finally:
            if given is not None:
                os.close(given)
        call = Call(self.host, child, envelope)
        call.run()
        child.close()
        self.note_oom(call, killed)
        if not kill_all_but(before, roots={*self.workers(), *BACKGROUND.leaders}):
            self.restart_all()
        call.lost = session.take_loss()
        return call.answer()

    def fork_program(self, session: Session, program: Program, stdin: int | None, extra: Sequence[int] = ()) -> Child:
        def run() -> None:
            program.run(session.work)

        def fork(patience_s: float) -> Child:
            return start(
                run,
                session.work,
                self.limits,
                patience_s,
                self.host.fd,
                channel=False,
                sealed=False,
                stdin=stdin,
                extra=extra,
            )

        return self.make_room(fork)

    def start(self, session: Session, envelope: dict[str, Any], body: bytearray) -> Any:
        """Start a program, or one of our own archive programs, that continues between calls."""
        if len(BACKGROUND.processes) + len(self.shells) >= MAX_BACKGROUND:
            raise WrongArgument(f"more than {MAX_BACKGROUND} background programs and shells")
        stdin, ours = os.pipe()
        begun, beginning = os.pipe()
        try:
            if "task" in envelope:
                child = self.fork_task(session, envelope["task"], envelope["path"], stdin)
            else:
                child = self.fork_program(session, Program(envelope, body), stdin, extra=(beginning,))
        except BaseException:
            os.close(ours)
            os.close(begun)
            raise
        finally:
            os.close(stdin)
            os.close(beginning)
        wait_for_close(begun)
        BACKGROUND.add(envelope["process"], child, ours)
        session.started.add(child.pid)
        return {}, []

    def fork_task(self, session: Session, task: str, path: str, stdin: int) -> Child:
        def run() -> None:
            run_task(task, session.work, path)

        return start(run, session.work, self.limits, KILL_S, self.host.fd, channel=False, sealed=True, stdin=stdin)

    def open_shell(self, session: Session, envelope: dict[str, Any], body: bytearray) -> Any:
        if len(BACKGROUND.processes) + len(self.shells) >= MAX_BACKGROUND:
            raise WrongArgument(f"more than {MAX_BACKGROUND} background programs and shells")
        # A copy, for a restart of the shell if this one is lost; it is zeroed when the shell is closed.
        self.begin_shell(session, envelope["shell"], Program(envelope, bytearray(body)))
        return {}, []

    def begin_shell(self, session: Session, number: int, program: Program) -> Shell:
        """Start a new shell under that number; if it can't start, the number has no shell until the next run."""
        self.shells[number] = None, program

        def begin(patience_s: float) -> Shell:
            return Shell(program, session.work, self.limits, self.host, patience_s)

        shell = self.make_room(begin)
        try:
            shell.begin(time.monotonic() + SHELL_BEGINS_S)
        except BaseException:
            shell.close()
            raise
        self.shells[number] = shell, program
        session.started.add(shell.child.pid)
        return shell

    def run_in_shell(self, session: Session, envelope: dict[str, Any], body: bytearray) -> Any:
        """Run a command in a shell, which is restarted if it has ended."""
        number = envelope["shell"]
        if number not in self.shells:
            raise WrongArgument("the shell was closed")
        shell, program = self.shells[number]
        lost = shell is not None and not shell.ready()
        if shell is None or lost:
            if shell is not None:
                shell.close()
            shell = self.begin_shell(session, number, program)
        if not shell.give(body):
            shell.close()
            shell, lost = self.begin_shell(session, number, program), True
            shell.give(body)
        killed = self.oom.read()
        call = ShellRun(self.host, shell, envelope)
        call.run()
        self.note_oom(call, killed)
        if call.lost:
            shell.close()
            self.shells[number] = None, program
        call.lost |= lost
        return call.answer()

    def end_shell(self, _session: Session, envelope: dict[str, Any], _body: bytearray) -> Any:
        if envelope["shell"] in self.shells:
            shell, program = self.shells.pop(envelope["shell"])
            if shell is not None:
                shell.close()
            program.forget()
        return {}, []

    def forget_background(self) -> None:
        super().forget_background()
        for shell, program in self.shells.values():
            if shell is not None:
                shell.leave()
            program.forget()
        self.shells.clear()
        self.transfers.end_all()

    def write(self, session: Session, envelope: dict[str, Any], body: bytearray) -> Any:
        at = 0
        for path, size, executable in envelope["files"]:
            check_time(envelope["deadline"])
            write_file(session.work, path, memoryview(body)[at : at + size], executable=executable)
            at += size
        return {}, []

    def read(self, session: Session, envelope: dict[str, Any], _body: bytearray) -> Any:
        answer, data = self.transfers.begin_reading(session.work, envelope)
        return answer, [data]

    def read_on(self, _session: Session, envelope: dict[str, Any], _body: bytearray) -> Any:
        answer, data = self.transfers.read_on(envelope["transfer"])
        return answer, [data]

    def write_on(self, session: Session, envelope: dict[str, Any], body: bytearray) -> Any:
        self.transfers.write_on(session.work, envelope, body)
        return {}, []

    def end_transfer(self, _session: Session, envelope: dict[str, Any], _body: bytearray) -> Any:
        self.transfers.end(envelope["transfer"])
        return {}, []

    def list(self, session: Session, envelope: dict[str, Any], _body: bytearray) -> Any:
        names = b"\0".join(list_folder(session.work, envelope["path"]))
        if len(names) > MAX_BODY:
            raise Refused(f"{envelope['path']!r} contains too many names")
        return {}, [names]


def kind_of(error: Refused) -> dict[str, bool]:
    """Return the kind of a refusal, as flags that the host reads."""
    return {"not_a_file": isinstance(error, NotAFile), "argument": isinstance(error, WrongArgument)}


def wait_for_close(fd: int) -> None:
    """Close our end of a pipe once the other end is closed: the child has then become the program, or ended.

    A signal before that would be lost, because the child ignores all signals. Code that stops the child can delay it,
    but not us.
    """
    try:
        wait(fd, select.POLLIN, time.monotonic() + FORK_S)
    except TimeoutError:
        pass
    finally:
        os.close(fd)
