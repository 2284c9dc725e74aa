"""The sessions of a sandbox from start to end: started, forked, lost, restarted and reset."""

from __future__ import annotations

import os
import select
import socket
import stat
import time

from .background import BACKGROUND
from .bounds import OwnLimits
from .call import ERR, Call
from .children import Child, Exits, channel_pair, start, start_in_space
from .counters import OomCounter
from .files import empty_folder, empty_ipc, remove_folder, words_of_error
from .folder_copy import copy_folder
from .frames import Wire, discard, wait
from .limits import ALONE, CREDENTIAL, CREDENTIALS, FORK_S, KILL_S, MAX_BRANCHES, MAX_DEPTH, REMOVE_S, TRUNK, Refused
from .process_tree import children, descendants, family, go_on, kill_all, kill_all_but, reap, stop_all
from .space import Space
from .stillness import WOKEN, Stillness
from .worker import run_cells

TYPE_CHECKING = False  # Importing typing would cost each new sandbox some milliseconds.
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from typing import Any, NoReturn, TypeVar

    T = TypeVar("T")


class Session:
    """A Python session: its worker, its working folder, and the processes that it is known to have started."""

    def __init__(self, worker: Child, work: str, *, lost: bool = False) -> None:
        self.worker, self.work = worker, work
        self.lost = lost
        """Whether the session's state was lost and no answer has reported that yet."""
        self.started: set[int] = set()

    def own(self, tree: dict[int, int]) -> set[int]:
        """Return the worker and the processes that it started, out of those in `tree`."""
        return family(tree, {self.worker.pid, *self.started})

    def take_loss(self) -> bool:
        lost, self.lost = self.lost, False
        return lost


class Sessions:
    """All sessions: the trunk (the first one), its branches, and the processes of each (`Session.started`)."""

    oom: OomCounter

    def __init__(
        self,
        host: Wire,
        config: dict[str, Any],
        begin_anew: Callable[[int], NoReturn],
        furnish: Callable[[], object] | None,
    ) -> None:
        self.host, self.begin_anew = host, begin_anew
        self.furnish = furnish
        """Sets up the code's process namespace from its first process; None if there is no such namespace."""
        self.space: Space | None = None
        """The namespace of the code's processes, or None if they are in our own."""
        self.work: str = config["work"]
        self.branches: str = config["branches"]
        self.wipe: list[str] = [] if furnish else [path for path in config["wipe"] if os.path.isdir(path)]
        self.limits: dict[str, int] = config["limits"]
        self.reserve: int = config.get("reserve", 0)
        """Number of processes that a verifier may have in addition to the code's, which count toward the same limit."""
        self.modes = {path: stat.S_IMODE(os.stat(path).st_mode) for path in self.wipe}
        self.sessions: dict[int, Session] = {}
        self.own_limits = OwnLimits()

    def begin(self) -> None:
        """Start the trunk, in a separate process namespace if possible."""
        worker = self.new_worker(self.work, furnish=self.furnish)
        self.space = worker.space
        self.sessions[TRUNK] = Session(worker, self.work)

    def new_worker(
        self,
        work: str,
        patience_s: float = KILL_S,
        *,
        private: str = "",
        furnish: Callable[[], object] | None = None,
        before: Callable[[int], Sequence[int]] | None = None,
    ) -> Child:
        """Start a worker: next to the code, or in a new process namespace if `furnish` is given.

        The namespace's first process calls `furnish` to set it up. `private` is a folder for a worker that no file in
        `work` can affect, or "" for a session's worker. `before` is as for `children.become`.
        """

        def run() -> None:
            run_cells(work, private)

        limits, host, sealed = self.limits_of(private), self.host.fd, bool(private)
        if furnish is not None:
            return start_in_space(run, furnish, work, limits, patience_s, host, sealed=sealed, before=before)
        return start(run, work, limits, patience_s, host, channel=True, sealed=sealed)

    def limits_of(self, private: str) -> dict[str, int]:
        """Return a worker's limits; a worker with a private folder may start processes in addition to the code's."""
        more = {"NPROC": self.limits["NPROC"] + self.reserve} if private and "NPROC" in self.limits else {}
        return {**self.limits, **more}

    def make_room(self, start: Callable[[float], T]) -> T:
        """Call `start`, which forks a process.

        If the sandbox is full of processes, they are killed first, and every session's state is lost.
        """
        try:
            return start(0.0)
        except BlockingIOError:
            self.restart_all()
            return start(KILL_S)

    def renew(self, session: Session) -> None:
        """Start a new worker for a session whose processes are gone.

        Raises:
            BlockingIOError: If the sandbox is full of other processes.
        """
        session.started &= BACKGROUND.leaders
        session.lost = True
        ended, session.worker = session.worker, self.new_worker(session.work)
        ended.close()

    def restart(self, session: Session) -> None:
        """Kill a session with everything that its cells started, and restart it.

        The other sessions, the background programs and the shells continue if possible.
        """
        alone = len(self.sessions) == 1
        if (not alone or BACKGROUND.leaders) and self.kill(session, all_but=BACKGROUND.leaders, alone=alone):
            try:
                return self.renew(session)
            except BlockingIOError:
                pass  # Processes that others started fill the sandbox.
        self.restart_all()

    def restart_all(self) -> None:
        kill_all()
        if self.space is not None or ALONE:
            empty_ipc()  # System V memory belongs to no process, and would otherwise stay in use.
        for session in self.sessions.values():
            try:
                self.renew(session)
            except OSError as error:
                raise SystemExit(1) from error  # There is no sandbox without a session: the host starts another.

    def kill(self, session: Session, *, all_but: Iterable[int] = (), alone: bool = False) -> bool:
        """Kill everything that belongs to one session, and nothing else; return whether nothing of it is left.

        If the session is `alone`, everything belongs to it. The processes in `all_but` and everything that they started
        are spared.
        """
        tree = stop_all()  # Nothing can fork while we look.
        own = {*(tree if alone else session.own(tree))} - family(tree, all_but)
        others = {pid: parent for pid, parent in tree.items() if pid not in own}
        gone = kill_all_but(set(others))
        go_on(others)
        return gone

    def claim(self, session: Session) -> None:
        """Record the processes that each session started; unknown orphans are assigned to the session called last.

        A process's session is recorded before the process loses its parent, and stays recorded afterward.
        """
        if len(self.sessions) == 1:
            return
        reap()
        tree = descendants(os.getpid())
        strays = set(tree)
        for each in self.sessions.values():
            each.started |= each.own(tree)
            strays -= each.started
        session.started |= strays

    def revive(self, session: Session) -> None:
        """Restart the session if it ended or wrote to its channel between two calls.

        Its output from that time is dropped, because an answer contains only its own call's output.
        """
        worker = session.worker
        assert worker.channel is not None
        ready = {fd for fd, _ in worker.all.poll(0)}
        # The poll reports the worker's end, too, unless one pipe reports the ends of all children, and only once.
        ended = (Exits.pipe is not None or worker.exit in ready) and worker.ended()
        if worker.channel.pending or worker.channel.fd in ready or ended:
            self.restart(session)
            return
        for fd in ready.intersection((worker.out, worker.err)):
            discard(fd)

    def bystanders(self, before: Iterable[int]) -> set[int]:
        """Return the processes from before a call, and the sessions' workers, in case the call restarted them."""
        return {*before, *self.workers()}

    def workers(self) -> set[int]:
        return {session.worker.pid for session in self.sessions.values()}

    def fork(self, session: Session, envelope: dict[str, Any], _body: bytearray) -> Any:
        """Create a session that continues from the state of this one, with a copy of its folder."""
        if len(self.sessions) > MAX_BRANCHES:
            raise Refused(f"more than {MAX_BRANCHES} branches")
        self.revive(session)
        session.started = set(descendants(os.getpid())) if len(self.sessions) == 1 else session.started
        folder = os.path.join(self.branches, str(envelope["branch"]))
        os.mkdir(folder)
        try:
            self.copy(session.work, folder, envelope)
            worker = self.split(session.worker, folder)
        except BaseException:
            self.remove(folder, time.monotonic() + REMOVE_S)
            raise
        self.sessions[envelope["branch"]] = Session(worker, folder, lost=session.lost)
        return {}, []

    def copy(self, source: str, target: str, envelope: dict[str, Any]) -> None:
        """Copy a working folder in a process under limits, while everything else is stopped."""
        if not os.listdir(source):
            return

        def run() -> None:
            try:
                copy_folder(os.open(source, os.O_RDONLY), os.open(target, os.O_RDONLY), MAX_DEPTH)
            except (OSError, Refused) as error:
                os.write(2, words_of_error(error).encode("utf-8", "replace"))
                os._exit(1)
            os._exit(0)

        killed = self.oom.read()
        bystanders = stop_all()
        try:
            stillness = Stillness()
            child = start(run, source, self.limits, 0.0, self.host.fd, channel=False, sealed=True)
            call = Call(self.host, child, envelope)
            call.run()
            child.close()
            self.note_oom(call, killed)
            kill_all_but(self.bystanders(bystanders))
            woken = stillness.broken(by_others_than=child.pid)
        finally:
            go_on(bystanders)
        if call.status != "ok" or woken:
            said = WOKEN if woken else b"".join(map(bytes, ERR.parts())).decode("utf-8", "replace")
            raise Refused(f"the working folder cannot be copied: {said or call.status}")

    def note_oom(self, call: Call, before: int) -> None:
        if call.status in ("error", "killed") and self.oom.read() > before:
            call.status = "oom"

    def split(self, worker: Child, folder: str) -> Child:
        """Have a worker fork, and return the new process, which becomes a branch.

        The worker gets the ends of new pipes. With the first byte from the new process, the kernel reports the id of
        the process that sent it. Whichever process of the session that is, it is the branch from now on.
        """
        assert worker.channel is not None
        out, out_end = os.pipe()
        err, err_end = os.pipe()
        ours, theirs = channel_pair()
        try:
            worker.channel.write({"fork": folder})
            socket.send_fds(worker.channel.end, [b"\0"], [theirs.fileno(), out_end, err_end])
            theirs.close()
            wait(ours.fileno(), select.POLLIN, time.monotonic() + FORK_S)
            said, credentials, _, _ = ours.recvmsg(1, CREDENTIALS)
            pid = CREDENTIAL.unpack(credentials[0][2])[0] if said else 0
            if pid not in descendants(os.getpid()) or pid in self.workers():
                raise Refused("the session could not be forked: no more processes or no more memory")
            if self.space is not None:
                self.space.adopt(pid)
            return Child(pid, out, err, ours, self.host.fd, self.space)
        except BaseException as error:
            ours.close()
            os.close(out)
            os.close(err)
            if isinstance(error, OSError):
                raise Refused("the session could not be forked: it does not respond") from error
            raise
        finally:
            theirs.close()
            os.close(out_end)
            os.close(err_end)

    def end(self, _session: Session, envelope: dict[str, Any], _body: bytearray) -> Any:
        """End a branch: its processes and its files."""
        session = self.sessions.pop(envelope["branch"], None)
        if session is not None:
            if not self.kill(session):
                self.restart_all()
            session.worker.close()
            self.remove(session.work, envelope["deadline"])
        return {}, []

    def remove(self, folder: str, deadline: float) -> None:
        """Remove a branch's folder while everything else is stopped, since other sessions could write into it.

        Files that can't be removed by the deadline are left for the next reset, which verifies that nothing is left.
        """
        bystanders = stop_all()
        try:
            remove_folder(folder, deadline)
        except OSError:
            pass
        finally:
            go_on(bystanders)

    def reset(self, _session: Session, envelope: dict[str, Any], _body: bytearray) -> Any:
        """End the episode; the next supervisor answers the call.

        If anything is left, the answer's `clean` is false, and no session remains.
        """
        while self.host.pending:
            self.host.read(None)  # Frames that crossed the end of an earlier call; no frame may be left half read.
        try:
            for session in self.sessions.values():
                session.worker.close()
            if self.space is not None:
                self.space.close()
            elif not self.is_emptied(envelope["deadline"]):
                raise OSError("processes or files are left")
        except Exception as error:
            self.sessions = {}
            return {"clean": False, "why": f"{type(error).__name__}: {error}"[:500]}, []
        self.begin_anew(envelope["id"])

    def is_emptied(self, deadline: float) -> bool:
        """End every process and remove every file; return whether nothing is left."""
        clean = kill_all()
        self.forget_background()
        for path in self.wipe:
            self.empty(path, deadline)
        if ALONE:
            empty_ipc()
        self.own_limits.restore()  # The program that replaces this one inherits them.
        return clean and not any(os.listdir(path) for path in self.wipe) and not children(os.getpid())

    def forget_background(self) -> None:
        """Close our descriptors of ended programs; subclasses that have more of them close those, too."""
        BACKGROUND.forget()

    def empty(self, path: str, deadline: float) -> None:
        try:
            if stat.S_IMODE(os.lstat(path).st_mode) != self.modes[path]:
                os.chmod(path, self.modes[path])
        except FileNotFoundError:
            os.mkdir(path, self.modes[path])
        for mark in os.listxattr(path):
            os.removexattr(path, mark)
        empty_folder(path, deadline)
        os.utime(path)

    def leave(self) -> None:
        """End everything below us; if we are alone in a namespace, the kernel does that."""
        if self.space is None and not ALONE:
            kill_all()
            for path in self.wipe:
                remove_folder(path, float("inf"))  # Without a deadline, because nobody waits.
