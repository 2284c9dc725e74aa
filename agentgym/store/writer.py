"""The writer of a run's rollout store: a thread of its own, which the event loop never waits for."""

import asyncio
import json
import logging
import queue
import sqlite3
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self, TypeAlias

import numpy as np

from agentgym.store.rows import (
    ROLLOUT_COLUMNS,
    SEGMENT_COLUMNS,
    packed,
    rollout_row,
    segment_row,
    stored_text,
    task_fields,
)
from agentgym.store.schema import FILE, open_store
from agentgym.store.suspicious import signs_of_group
from agentgym.store.tool_counts import call_counts
from agentgym.store.training_step import Trained
from agentgym.store.vocabulary import TokenBytes, VocabularyWriter
from agentgym.types import Group, Rollout, Task

__all__ = ["RolloutWriter", "Trained"]

log = logging.getLogger(__name__)

_INSERT_ROLLOUT = (
    f"INSERT INTO rollouts ({ROLLOUT_COLUMNS}, suspicious, tool_calls, tool_errors) VALUES ({', '.join('?' * 14)})"
)
_INSERT_SEGMENT = f"INSERT INTO segments (rollout, {SEGMENT_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"


@dataclass(frozen=True, slots=True)
class _Groups:
    groups: Sequence[Group]
    phase: str
    step: int


@dataclass(frozen=True, slots=True)
class _Step:
    trained: Iterable[Trained]
    phase: str
    step: int


_Job: TypeAlias = _Groups | _Step | threading.Event


class RolloutWriter:
    """Writes rollouts to the store of a run; `add` returns at once, and what was added outlives a crash of the process.

    A rollout is on disk whole or not at all. Where the disk refuses, the run goes on: `lost` counts the rollouts that
    were not written, and the first refusal is a warning. Of what an earlier run left in the folder, the rollouts of its
    first `done` steps stay, and later ones are cut. With `token_bytes`, the bytes of each token id that occurs are kept
    once, so that a copied store shows its tokens without the model.
    """

    def __init__(self, folder: Path, *, done: int = 0, token_bytes: TokenBytes | None = None) -> None:
        self.path = folder / FILE
        self.vocabulary = VocabularyWriter(token_bytes)
        self.lost = 0
        self._done = done
        self._refused = False
        self._task_refused = False
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="agentgym-store", daemon=True)

    def __enter__(self) -> Self:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        open_store(self.path).close()  # a store that cannot be opened is said here, not in the thread
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._jobs.put(None)
        self._thread.join()

    async def __aenter__(self) -> Self:
        return self.__enter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wait for what was added to be written, without holding the event loop up; also where it is cancelled."""
        closing = asyncio.ensure_future(asyncio.to_thread(self.__exit__, kind, error, trace))
        try:
            await asyncio.shield(closing)
        except asyncio.CancelledError:
            await asyncio.wait([closing])
            raise

    def add(self, groups: Iterable[Group], *, phase: str = "train", step: int) -> None:
        """Write the rollouts of these groups, failed ones included, and their tasks where the groups have them."""
        self._jobs.put(_Groups(list(groups), phase, step))

    def add_step(self, trained: Iterable[Trained], *, phase: str = "train", step: int) -> None:
        """Write what the step's training computed, beside the rollouts that were added for it.

        A generator is run in the writer's thread.
        """
        self._jobs.put(_Step(trained, phase, step))

    def flush(self) -> None:
        """Return when all that was added before is on disk, so that it outlives a power cut too; it blocks."""
        written = threading.Event()
        self._jobs.put(written)
        written.wait()

    # In the thread

    def _run(self) -> None:
        connection: sqlite3.Connection | None = None
        try:
            connection = open_store(self.path)
            self.vocabulary.read(connection)
            self._cut_done_again(connection)
        except (sqlite3.Error, OSError, ValueError) as error:
            self._refuse(error)
        while (job := self._jobs.get()) is not None:
            self._do(connection, job)
        if connection is not None:
            connection.close()

    def _do(self, connection: sqlite3.Connection | None, job: _Job) -> None:
        match job:
            case threading.Event():
                if connection is not None:
                    self._try(connection, lambda to: to.execute("PRAGMA wal_checkpoint(PASSIVE)"), begin=False)
                job.set()
            case _Step():
                if connection is not None:
                    self._try(connection, lambda to: _write_step(to, job))
            case _Groups():
                for group in job.groups if not self._written(connection, job) else ():
                    for part in _parts(group) if not self._written(connection, _one(group, job)) else ():
                        self.lost += not self._written(connection, _one(part, job))

    def _written(self, connection: sqlite3.Connection | None, job: _Groups) -> bool:
        return connection is not None and self._try(connection, lambda to: self._write_groups(to, job))

    def _try(
        self, connection: sqlite3.Connection, work: Callable[[sqlite3.Connection], object], *, begin: bool = True
    ) -> bool:
        """Do it in one transaction; whether it is done. Whatever is wrong, the run goes on."""
        try:
            if begin:
                _in_transaction(connection, work)
                self.vocabulary.keep()
            else:
                work(connection)
        except Exception as error:
            self.vocabulary.drop()
            self._refuse(error)
            return False
        return True

    def _refuse(self, error: Exception) -> None:
        """Say it, the first time."""
        if not self._refused:
            said = f"{type(error).__name__}: {error}"
            log.warning("%s: rollouts are not written, and the run goes on: %s", self.path, said)
        self._refused = True

    def _cut_done_again(self, connection: sqlite3.Connection) -> None:
        """Drop the rollouts of steps that are done again, or say that they stay; either way the run goes on."""
        try:
            _in_transaction(connection, self._cut)
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
            log.warning(
                "%s: rollouts that an earlier run wrote for step %d and later could not be removed, and stay "
                "beside those of this run: %s",
                self.path,
                self._done,
                said,
            )

    def _cut(self, connection: sqlite3.Connection) -> None:
        """Drop what is done again; an evaluation after so many steps as well."""
        connection.execute("DELETE FROM rollouts WHERE step >= ?", (self._done,))
        connection.execute("DELETE FROM tasks WHERE group_id NOT IN (SELECT group_id FROM rollouts)")

    def _write_groups(self, connection: sqlite3.Connection, job: _Groups) -> None:
        for group in job.groups:
            if group.task is not None:
                self._write_task(connection, group.group_id, group.task)
            signs = signs_of_group(group)
            for rollout in group.rollouts:
                _write_rollout(connection, rollout, job, signs.get(rollout.rollout_id, ()))
        self.vocabulary.add(connection, [rollout for group in job.groups for rollout in group.rollouts])

    def _write_task(self, connection: sqlite3.Connection, group_id: str, task: Task) -> None:
        """Write the task, or say the first time that one is not written; its rollouts are written either way."""
        try:
            row = (stored_text(group_id), packed(task_fields(task)))
            connection.execute("INSERT OR REPLACE INTO tasks VALUES (?, ?)", row)
        except Exception as error:
            if not connection.in_transaction:  # SQLite has taken back the whole transaction, such as on a full disk
                raise
            if not self._task_refused:
                said = f"{type(error).__name__}: {error}"
                log.warning("%s: task %r is not written, and its rollouts are: %s", self.path, group_id, said)
            self._task_refused = True


def _one(group: Group, job: _Groups) -> _Groups:
    return _Groups([group], job.phase, job.step)


def _parts(group: Group) -> list[Group]:
    """A group for each rollout: what cannot be written takes no other rollout with it."""
    return [Group(group_id=group.group_id, rollouts=(rollout,), task=group.task) for rollout in group.rollouts]


def _in_transaction(connection: sqlite3.Connection, work: Callable[[sqlite3.Connection], object]) -> None:
    """Do it whole or not at all; where another process writes, wait for it first."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        work(connection)
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def _write_rollout(connection: sqlite3.Connection, rollout: Rollout, job: _Groups, signs: Sequence[str]) -> None:
    row = rollout_row(rollout, phase=job.phase, step=job.step)
    columns = (*row, " ".join(signs) or None, *call_counts(rollout))
    number = connection.execute(_INSERT_ROLLOUT, columns).lastrowid
    connection.executemany(_INSERT_SEGMENT, [(number, *segment_row(segment)) for segment in rollout.segments])


def _write_step(connection: sqlite3.Connection, job: _Step) -> None:
    ids = connection.execute(
        "SELECT rollout_id, number FROM rollouts WHERE phase = ? AND step = ?", (stored_text(job.phase), job.step)
    )
    numbers = dict(ids.fetchall())
    gaps: dict[int, float] = {}
    for made in job.trained:
        if (number := numbers.get(stored_text(made.rollout_id))) is None:
            continue  # it is counted as lost already
        logprobs = None if made.logprobs is None else np.asarray(made.logprobs, "<f4").tobytes()
        advantages = json.dumps([round(float(value), 6) for value in made.advantages])
        connection.execute(
            "UPDATE segments SET trained = ?, advantages = ? WHERE rollout = ? AND place = ?",
            (logprobs, advantages, number, made.segment),
        )
        if made.gap is not None:
            gaps[number] = max(made.gap, gaps.get(number, 0.0))
    connection.executemany(
        "UPDATE rollouts SET logprob_gap = ? WHERE number = ?", [(gap, number) for number, gap in gaps.items()]
    )
