"""Fresh cells: code in a new process that the session can't see or reach, on an exact copy of the session's folder.

Without a separate process namespace for the code, a fresh cell runs in the session's folder itself.
"""

from __future__ import annotations

import os
import select
import signal
import time

from .arena import Arena
from .call import Call
from .children import Child
from .counters import Places
from .files import remove_folder, stand, words_of_error
from .folder_copy import copy_folder, open_whatever_its_mode
from .frames import wait, zero
from .limits import KILL_S, PATIENCE_S, REMOVE_S, SANDBOX_KILLED, Refused
from .process_tree import go_on, kill_all_but, stop_all
from .sessions import Session
from .snapshots import Snapshots
from .space import raised
from .stillness import Stillness

TYPE_CHECKING = False  # Importing typing would cost each new sandbox some milliseconds.
if TYPE_CHECKING:
    from typing import Any


class Fresh(Snapshots):
    """Runs fresh cells; while one runs, everything else in the sandbox is stopped."""

    arena: Arena | None
    places: Places

    def python_fresh(self, session: Session, envelope: dict[str, Any], body: bytearray) -> Any:
        """Run a fresh cell while everything else is stopped; if too many processes run, they are killed first."""
        if self.places.are_few():
            self.restart_all()
        bystanders = stop_all()
        try:
            stand(session.work)
            if self.space is None:
                call = self.fresh_in_place(session, bystanders, envelope, body)
            else:
                call = self.fresh_in_a_copy(session, envelope, body)
        finally:
            go_on(bystanders)
        call.lost = session.take_loss()
        return call.answer()

    def fresh_in_a_copy(self, session: Session, envelope: dict[str, Any], body: bytearray) -> Call:
        """Run a cell in namespaces hidden from the session, on a copy of its folder that ends with the call."""
        killed = self.oom.read()  # Read before the copy, which itself may use up the memory.
        try:
            worker = self.worker_in_an_exact_copy(session.work, envelope["deadline"], hides=envelope["hides"])
        except TimeoutError:
            call = Call(self.host, session.worker, envelope)
            call.end("timeout", -signal.SIGKILL)
            return call
        patience_s = max(PATIENCE_S, envelope["deadline"] - time.monotonic())
        call = self.cell(worker, envelope, body, killed, patience_s=patience_s)
        end_place(worker)
        return call

    def worker_in_an_exact_copy(self, work: str, deadline: float, *, hides: bool) -> Child:
        stillness = Stillness()
        worker = self.make_room(lambda patience_s: self.worker_in_a_copy(work, patience_s, deadline, hides=hides))
        if not stillness.broken(by_others_than=worker.pid):
            return worker
        end_place(worker)
        self.restart_all()  # A process woken by a timer may have changed the folder meanwhile; from here on, none can.
        return self.worker_in_a_copy(work, KILL_S, deadline, hides=hides)

    def worker_in_a_copy(self, work: str, patience_s: float, deadline: float, *, hides: bool) -> Child:
        """Return a worker whose copy of the folder is complete.

        Raises:
            TimeoutError: If the copy is not complete at the deadline.
        """
        source = open_whatever_its_mode(work)
        filled, filling = os.pipe()
        try:
            worker = self.worker_in_a_place(work, source, patience_s, hides=hides)
        except BaseException:
            os.close(filled)
            raise
        finally:
            os.close(source)
            os.close(filling)
        try:
            wait(filled, select.POLLIN, deadline)  # Readable once the worker runs and so closes the other end.
        except TimeoutError:
            end_place(worker)
            raise
        finally:
            os.close(filled)
        return worker

    def worker_in_a_place(self, work: str, source: int, patience_s: float, *, hides: bool) -> Child:
        """Return a worker in new namespaces that first copies the folder `source`.

        If `hides`, the worker gets a descriptor of a folder that is otherwise read-only, and closes the descriptor
        before it starts any process.
        """
        private = os.path.join(self.branches, "fresh")
        arena = self.arena
        assert arena is not None

        def fill(stderr: int) -> list[int]:
            with raised():
                arena.enter_sealed()
                arena.show_processes()
                entrances = [arena.seal_hidden()] if hides else []
            try:
                for folder in (private, work):
                    if not os.path.isdir(folder):
                        os.mkdir(folder)
                copy_folder(source, os.open(work, os.O_RDONLY | os.O_DIRECTORY))
            except (OSError, Refused) as error:
                os.write(stderr, f"the working folder cannot be copied: {words_of_error(error)}\n".encode())
                os._exit(1)
            return entrances

        return self.new_worker(work, patience_s, private=private, furnish=lambda: None, before=fill)

    def fresh_in_place(
        self, session: Session, bystanders: dict[int, int], envelope: dict[str, Any], body: bytearray
    ) -> Call:
        """Run a cell in the session's folder itself, because there are no namespaces for it."""
        private = os.path.join(self.branches, os.urandom(16).hex())
        os.mkdir(private)
        worker = self.make_room(lambda patience_s: self.new_worker(session.work, patience_s, private=private))
        call = self.cell(worker, envelope, body, self.oom.read())
        worker.close()
        if not kill_all_but(self.bystanders(bystanders)):
            self.restart_all()
        try:
            remove_folder(private, time.monotonic() + REMOVE_S)
        except TimeoutError as error:
            raise SystemExit(SANDBOX_KILLED) from error  # The session could read hidden files in the folder.
        return call

    def cell(
        self, worker: Child, envelope: dict[str, Any], body: bytearray, killed: int, *, patience_s: float = PATIENCE_S
    ) -> Call:
        """Run a cell in a worker; `killed` is the kernel's count of out-of-memory kills from before the call."""
        assert worker.channel is not None
        call = Call(self.host, worker, envelope)
        try:
            worker.channel.write({"id": call.id, "functions": envelope["functions"]}, [body], patience_s)
        except OSError:
            late = time.monotonic() >= call.deadline
            if not late and not worker.ends(time.monotonic() + PATIENCE_S):  # If it ends, its exit code says more.
                call.end("protocol", -signal.SIGKILL, lost=True)
        zero(body)  # Zeroed before any later fork, which would copy the text.
        call.run()
        self.note_oom(call, killed)
        return call


def end_place(worker: Child) -> None:
    """End a worker and the process namespace that was created for it, with everything in it."""
    worker.close()
    assert worker.space is not None
    worker.space.close()
