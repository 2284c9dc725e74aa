"""The writer of a run's rollout store, which works in a separate thread so that the event loop never waits for it."""

import asyncio
import logging
import queue
import sqlite3
import threading
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self, TypeAlias

from agentgym.data.content import refuse_unkept, task_fields
from agentgym.files.disk import Refusals, is_gone
from agentgym.files.names import whole_path
from agentgym.store.rows import packed, stored_text
from agentgym.store.schema import FILE, open_store
from agentgym.store.statements import (
    GroupsJob,
    SignsJob,
    StepJob,
    close,
    in_transaction,
    parts_of,
    rollouts_in,
    rollouts_of,
    said_of,
    waits,
    write_rollout,
    write_signs,
    write_step,
)
from agentgym.store.suspicious import signs_of_group
from agentgym.store.training_step import Trained
from agentgym.store.vocabulary import TokenBytes, VocabularyWriter
from agentgym.types.rollout import Group, Rollout
from agentgym.types.task import Task

__all__ = ["RolloutWriter", "Trained"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Place:
    folder: Path
    lost: bool
    """Whether the store is missing from its folder. It is then written again in `folder`, from the connection that is
    still open.
    """


_Work: TypeAlias = GroupsJob | SignsJob | StepJob
_Job: TypeAlias = _Work | _Place | threading.Event

HELD_MOST = 4096
"""Maximum number of rollouts kept in memory while the store can't be written. Beyond it, the oldest are dropped."""
LOOK_S = 1.0
"""Seconds between checks in `flush` of whether the writer's thread is still alive."""


class RolloutWriter:
    """Writes rollouts to the store of a run; `add` returns at once, and added rollouts survive a crash.

    A rollout is on disk either whole or not at all. If the store is locked or the disk is full, a rollout stays in
    memory, and the write is retried with the next job and when the writer is closed. Rollouts that can't be written
    even then, and those that the store refuses for good, are counted in `lost` and logged as a warning; the run
    continues.

    Args:
        folder: The run's folder.
        done: Number of steps that an earlier run in the folder finished. The rollouts of these steps are kept, and
            later ones are removed.
        token_bytes: Returns the bytes of token ids. Each id's bytes are stored once, so that a copied store shows its
            tokens without the model. None stores no bytes.
    """

    def __init__(self, folder: Path, *, done: int = 0, token_bytes: TokenBytes | None = None) -> None:
        self.path = whole_path(folder) / FILE
        self.vocabulary = VocabularyWriter(token_bytes)
        self.lost = 0
        self._done = done
        self._cut_tried = False
        self._following = False
        """Whether the store was moved or is being rewritten, and has not been opened at its new path yet."""
        self._task_refused = False
        self._stuck: Exception | None = None
        """The error of the last attempt to write the first pending job; None if it succeeded."""
        self._held: deque[_Work] = deque()
        self._refusals = Refusals(lambda said: log.warning("%s: %s", self.path, said))
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="agentgym-store", daemon=True)

    def __enter__(self) -> Self:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        open_store(self.path).close()  # a store that can't be opened raises here, not in the thread
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._jobs.put(None)
        self._thread.join()
        while not self._jobs.empty():  # the thread ended early
            if isinstance(job := self._jobs.get(), GroupsJob):
                self._held.append(job)
        self._lose(sum(map(rollouts_in, self._held)), self._stuck)

    async def __aenter__(self) -> Self:
        return self.__enter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wait until everything added is written, without blocking the event loop, even if the wait is cancelled."""
        closing = asyncio.ensure_future(asyncio.to_thread(self.__exit__, kind, error, trace))
        try:
            await asyncio.shield(closing)
        except asyncio.CancelledError:
            await asyncio.wait([closing])
            raise

    def add(self, groups: Iterable[Group], *, phase: str = "train", step: int, whole: bool = True) -> None:
        """Write the rollouts of these groups, including failed ones, and the groups' tasks if they have them.

        Args:
            groups: The groups to write.
            phase: "train", or the name of an evaluation.
            step: The step that the rollouts were run for.
            whole: Whether these are all rollouts of their groups. If False, the rollouts get no suspicious signs until
                `sign` is called.
        """
        self._jobs.put(GroupsJob(list(groups), phase, step, whole))

    def sign(self, group: Group, *, phase: str, step: int) -> None:
        """Write the suspicious signs of a whole group whose rollouts were added one by one."""
        self._jobs.put(SignsJob(group, phase, step))

    def add_step(self, trained: Iterable[Trained], *, phase: str = "train", step: int) -> None:
        """Write the training results of a step into the rollouts that were added for it.

        A generator is consumed in the writer's thread.
        """
        self._jobs.put(StepJob(trained, phase, step))

    def flush(self) -> None:
        """Block until the writer has tried to write everything added so far.

        Rollouts that were written survive a power failure.
        """
        written = threading.Event()
        self._jobs.put(written)
        while self._thread.is_alive() and not written.wait(LOOK_S):
            pass

    def follow(self, folder: Path, *, lost: bool) -> None:
        """Write into this folder from now on.

        Args:
            folder: The folder to which the store was moved or, if `lost`, the one in which it is written again.
            lost: Whether the store was removed. Its content is then copied from the connection that is still open.
        """
        self.path = folder / FILE
        self._following = True
        self._jobs.put(_Place(folder, lost))

    def is_removed(self) -> bool:
        """Return whether the store was removed from the folder that the writer currently uses.

        Returns False between a call of `follow` and the opening of the store in the new folder.
        """
        return not self._following and is_gone(self.path)

    # Methods that run in the thread

    def _run(self) -> None:
        connection = self._tried(None, self._opened)
        while (job := self._jobs.get()) is not None:
            connection = self._tried(connection, partial(self._do, job=job))
            if isinstance(job, threading.Event):
                job.set()
        close(self._tried(connection, self._write_held))

    def _tried(
        self,
        connection: sqlite3.Connection | None,
        work: Callable[[sqlite3.Connection | None], sqlite3.Connection | None],
    ) -> sqlite3.Connection | None:
        """Call `work` with the connection, and return the connection for the next job.

        `work` returns that connection. If it raises an Exception, the error is handled here and never ends the
        thread, because callers wait for the thread. Any other error closes the connection and ends the thread.
        """
        try:
            return work(connection)
        except Exception as error:
            self._wait_for(error)
            close(connection)
            return None
        except BaseException:
            close(connection)
            raise

    def _opened(self, connection: sqlite3.Connection | None) -> sqlite3.Connection | None:
        """Return the connection, opening one if necessary, or None if the store can't be opened now."""
        if connection is not None:
            return connection
        try:
            connection = open_store(self.path)
        except Exception as error:
            self._wait_for(error)
            return None
        self.vocabulary.forget()
        self._following = False
        if not self._cut_tried:
            self._cut_done_again(connection)
            self._cut_tried = True
        return connection

    def _wait_for(self, error: Exception) -> None:
        """Report that the store can't be written for now, unless that was already reported."""
        if self._stuck is None:
            said = "they stay in memory and are retried, and the run continues"
            self._refusals.refused("rollouts", said_of(error), then=said)
        self._stuck = error

    def _do(self, connection: sqlite3.Connection | None, job: _Job) -> sqlite3.Connection | None:
        """Do a job and return the connection for the next one."""
        if isinstance(job, _Place):
            return self._moved(connection, job)
        if isinstance(job, StepJob):
            job = self._listed(job)
        if isinstance(job, GroupsJob | SignsJob | StepJob):
            self._held.append(job)
        if self._stuck is None or self._jobs.empty():  # wait for a locked store once, not for each job
            connection = self._write_held(connection)
        if isinstance(job, threading.Event) and connection is not None:
            self._checkpoint(connection)
        return connection

    def _listed(self, job: StepJob) -> StepJob:
        """Return the job with its results as a list, since a generator couldn't be read again by a retry."""
        try:
            return replace(job, trained=list(job.trained))
        except Exception as error:
            self._lose_beside(job, error)
            return replace(job, trained=())

    def _write_held(self, connection: sqlite3.Connection | None) -> sqlite3.Connection | None:
        """Write the pending jobs in order until the store doesn't accept one; return the connection."""
        try:
            connection = self._opened(connection)
            while self._held and connection is not None:
                if (error := self._written(connection, self._held[0])) is not None:
                    self._wait_for(error)
                    break
                if self._stuck is not None:
                    log.warning("%s: it can be written again; writing the rollouts that stayed in memory", self.path)
                self._stuck = None
            return connection
        finally:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        """Drop the oldest pending jobs until at most HELD_MOST rollouts are left; count the dropped ones as lost."""
        many = sum(map(rollouts_in, self._held))
        while many > HELD_MOST:
            many -= (dropped := rollouts_in(self._held.popleft()))
            self._lose(dropped, self._stuck)

    def _written(self, connection: sqlite3.Connection, job: _Work) -> Exception | None:
        """Write the first pending job and remove it from the queue; return the error if it stays there to be retried.

        If the store refuses a job with several groups or rollouts, the job is replaced in the queue by its parts. If
        it refuses any other job, the loss is reported.
        """
        try:
            if isinstance(job, StepJob):
                in_transaction(connection, lambda to: write_step(to, job))
            elif isinstance(job, SignsJob):
                in_transaction(connection, lambda to: write_signs(to, job))
            else:
                in_transaction(connection, lambda to: self._write_groups(to, job))
                self.vocabulary.keep()
        except Exception as error:
            self.vocabulary.drop()
            if waits(error):
                return error
            self._held.popleft()
            parts = parts_of(job) if isinstance(job, GroupsJob) else []
            if not isinstance(job, GroupsJob):
                self._lose_beside(job, error)
            elif len(parts) < 2:
                self._lose(rollouts_in(job), error)
            self._held.extendleft(reversed(parts if len(parts) > 1 else []))
            return None
        self._held.popleft()
        return None

    def _lose(self, many: int, error: Exception | None) -> None:
        """Count rollouts as lost and report why; the run continues."""
        if many:
            self.lost += many
            why = said_of(error) if error is not None else "the store was never opened"
            self._refusals.refused("some rollouts", why, then=f"{self.lost} are lost so far, and the run continues")

    def _lose_beside(self, job: StepJob | SignsJob, error: Exception) -> None:
        """Report that a job's additions to stored rollouts are lost; the rollouts themselves stay stored."""
        what = "a step's training results" if isinstance(job, StepJob) else "a group's suspicious signs"
        self._refusals.refused(what, said_of(error), then="its rollouts are stored without them")

    def _checkpoint(self, connection: sqlite3.Connection) -> None:
        """Move the content of the write-ahead log into the store's file, so that it survives a power failure."""
        try:
            connection.execute("PRAGMA wal_checkpoint(PASSIVE)")
        except sqlite3.Error as error:
            self._refusals.refused(
                "the store's write-ahead log", said_of(error), then="rollouts stay in the log until the next attempt"
            )

    def _moved(self, connection: sqlite3.Connection | None, place: _Place) -> sqlite3.Connection | None:
        """Return a connection to the store at its new path, or None if it can't be opened there now.

        Closing the last connection to a store removes files by the path at which the store was opened. If the store was
        moved, the new connection is therefore opened before the old one is closed. If the store is rewritten, the old
        connection is closed before the new store gets that path.
        """
        if connection is None:
            return self._opened(None)
        if not place.lost:
            opened = self._opened(None)
            close(connection)
            return opened
        fresh, many = place.folder / f".{FILE}-new", rollouts_of(connection)
        try:
            with closing(open_store(fresh)) as copy:
                connection.backup(copy)
            close(connection)
            fresh.replace(place.folder / FILE)
        except Exception as error:
            close(connection)
            self._lose(many, error)
            with suppress(OSError):
                fresh.unlink(missing_ok=True)
        return self._opened(None)

    def _cut_done_again(self, connection: sqlite3.Connection) -> None:
        """Remove the rollouts of steps that will be repeated, or warn that they stay; the run continues either way."""
        try:
            in_transaction(connection, self._cut)
        except Exception as error:
            log.warning(
                "%s: rollouts that an earlier run wrote for step %d and later could not be removed, and stay "
                "next to those of this run: %s",
                self.path,
                self._done,
                said_of(error),
            )

    def _cut(self, connection: sqlite3.Connection) -> None:
        """Remove the rollouts of steps that will be repeated, and of evaluations after `done` steps or more."""
        connection.execute("DELETE FROM rollouts WHERE step >= ?", (self._done,))
        connection.execute("DELETE FROM tasks WHERE group_id NOT IN (SELECT group_id FROM rollouts)")

    def _write_groups(self, connection: sqlite3.Connection, job: GroupsJob) -> None:
        for group in job.groups:
            if group.task is not None:
                self._write_task(connection, group.group_id, group.task)
            signs = signs_of_group(group) if job.whole else {}
            for rollout in group.rollouts:
                write_rollout(connection, rollout, job, signs.get(rollout.rollout_id, ()))
        self._write_vocabulary(connection, [rollout for group in job.groups for rollout in group.rollouts])

    def _write_vocabulary(self, connection: sqlite3.Connection, rollouts: Iterable[Rollout]) -> None:
        """Write the bytes of the rollouts' token ids; if the vocabulary is damaged, undo only that and write no more.

        An error after which the write may succeed later is raised, so that the rollouts are retried with their bytes.
        """
        done = "read"
        connection.execute("SAVEPOINT vocabulary")
        try:
            self.vocabulary.read(connection)
            done = "written"
            self.vocabulary.add(connection, rollouts)
        except Exception as error:
            if waits(error) or not connection.in_transaction:
                raise
            connection.execute("ROLLBACK TO vocabulary")
            self._stop_vocabulary(done, error)
        connection.execute("RELEASE vocabulary")

    def _stop_vocabulary(self, done: str, error: Exception) -> None:
        """Store rollouts without token texts from now on, and warn that the vocabulary can't be `done`."""
        self.vocabulary.token_bytes = None
        log.warning(
            "%s: the vocabulary in it cannot be %s, so no further token texts are stored, and `agentgym view` may "
            "show none; rollouts are stored without them, and the run continues: %s",
            self.path,
            done,
            said_of(error),
        )

    def _write_task(self, connection: sqlite3.Connection, group_id: str, task: Task) -> None:
        """Write the task, or warn the first time that a task can't be written; its rollouts are written either way."""
        try:
            refuse_unkept([task])
            row = (stored_text(group_id), packed(task_fields(task)))
            connection.execute("INSERT OR REPLACE INTO tasks VALUES (?, ?)", row)
        except Exception as error:
            if not connection.in_transaction:  # SQLite has rolled back the whole transaction, e.g. on a full disk
                raise
            if not self._task_refused:
                said = "%s: task %r could not be written, but its rollouts are stored: %s"
                log.warning(said, self.path, group_id, said_of(error))
            self._task_refused = True
