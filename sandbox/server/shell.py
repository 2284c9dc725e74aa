"""A shell that persists across calls with its folder, variables and functions."""

from __future__ import annotations

import os
import select
import signal

from .background import BACKGROUND
from .call import Call
from .children import ENDED, start
from .frames import Wire, discard, wait, write_fully
from .limits import GRACE_S, Refused
from .process_tree import kill_family
from .program import SHELL, Program, become

TYPE_CHECKING = False  # Importing typing would cost each new sandbox some milliseconds.
if TYPE_CHECKING:
    from typing import Any

STATUS, COMMAND = 3, 4
"""The shell's descriptors: it writes each exit code to the first and reads each command from the second."""
# Interactive, because only then does an interrupt end the whole command and leave the shell as it is.
WORDS = [SHELL.encode(), *([b"--norc", b"--noprofile", b"--noediting"] if SHELL.endswith("bash") else []), b"-i"]
ANSWER = f"command printf '%s\\n' \"$?\" >&{STATUS}; PS1= PS2=\n"
BEGIN = 'unset HISTFILE; set +m; test -z "$BASH" || set +H +o history; PROMPT_COMMAND=; true\n' + ANSWER
RUN = f"command . /proc/self/fd/{COMMAND} </dev/null {STATUS}>&-\n" + ANSWER


class Shell:
    """A shell in the folder of its session, with our ends of its pipes."""

    def __init__(self, program: Program, work: str, limits: dict[str, int], host: Wire, patience_s: float) -> None:
        stdin, self.lines = os.pipe()
        self.status, status_end = os.pipe()
        self.command = os.memfd_create("command")
        for fd in (self.status, self.lines):  # The code can fill the shell's input.
            os.set_blocking(fd, False)

        def run() -> None:
            for fd in (STATUS, COMMAND):
                os.set_inheritable(fd, True)
            become(WORDS, work, program.parts)

        try:
            self.child = start(
                run,
                work,
                limits,
                patience_s,
                host.fd,
                channel=False,
                sealed=False,
                stdin=stdin,
                extra=(status_end, self.command),
            )
        except BaseException:
            self.close_pipes()
            raise
        finally:
            os.close(stdin)
            os.close(status_end)
        self.child.watch(self.status)
        BACKGROUND.leaders.add(self.child.pid)

    def begin(self, deadline: float) -> None:
        """Wait until the shell is ready, and drop its output up to then.

        Raises:
            Refused: If it does not become ready.
        """
        os.write(self.lines, BEGIN.encode())
        try:
            wait(self.status, select.POLLIN, deadline)
        except TimeoutError:
            raise Refused("the shell does not respond") from None
        if not os.read(self.status, 64):
            said = os.read(self.child.err, 1000).decode("utf-8", "replace")
            raise Refused(said.strip() or "the shell ended at once")
        self.drop()

    def drop(self) -> None:
        """Drop output since the last command, for example that of a background job."""
        for fd in {fd for fd, _ in self.child.all.poll(0)}.intersection((self.child.out, self.child.err)):
            discard(fd)

    def ready(self) -> bool:
        """Return whether the shell waits for a command and reported no unexpected status.

        Output since the last command is dropped.
        """
        heard = {fd for fd, _ in self.child.all.poll(0)}
        if self.status in heard or self.child.ended():
            return False
        self.drop()
        return True

    def give(self, command: bytearray) -> bool:
        """Give the shell a command to run; return whether the shell could be notified."""
        os.ftruncate(self.command, 0)
        os.lseek(self.command, 0, os.SEEK_SET)
        write_fully(self.command, [command], None)
        try:
            os.write(self.lines, RUN.encode())
        except (BlockingIOError, BrokenPipeError):
            return False
        return True

    def close_pipes(self) -> None:
        for fd in (self.lines, self.status, self.command):
            os.close(fd)

    def close(self) -> None:
        """End the shell and everything that it started."""
        if ENDED.get(self.child.pid) is None:  # Once reaped, its number may belong to another process.
            kill_family(self.child.pid)
        self.leave()

    def leave(self) -> None:
        """Close our descriptors of a shell whose processes are gone."""
        BACKGROUND.leaders.discard(self.child.pid)
        self.child.close()
        self.close_pipes()


class ShellRun(Call):
    """One command in a shell, which is interrupted at its time limit; if that doesn't end it, the shell is lost."""

    def __init__(self, host: Wire, shell: Shell, envelope: dict[str, Any]) -> None:
        super().__init__(host, shell.child, envelope)
        self.shell = shell

    def hear(self, events: list[tuple[int, int]]) -> None:
        super().hear([event for event in events if event[0] != self.shell.status])
        if not self.status and any(fd == self.shell.status for fd, _ in events):
            said = os.read(self.shell.status, 64).strip()
            if said.isdigit():
                self.answered(int(said))
            elif not said:
                self.child.deafen(self.shell.status)  # The shell ends, or the command closed it.
                self.hear_end()

    def hear_end(self) -> None:
        if self.child.ended():
            self.hear_exit()

    def hear_exit(self) -> None:
        super().hear_exit()
        self.lost = True

    def expire(self) -> None:
        if self.interrupted:
            self.end("timeout", -signal.SIGKILL, lost=True)
            return
        self.interrupted = True
        self.deadline += GRACE_S
        self.child.interrupt(its_group=True)
