"""The writer of a run's rollout store: a thread of its own, which the event loop never waits for."""

import json
import logging
import queue
import sqlite3
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from agentgym.store.rows import ROLLOUT_COLUMNS, SEGMENT_COLUMNS, packed, rollout_row, segment_row
from agentgym.store.schema import FILE, open_store
from agentgym.types import Floats, Group, Rollout, Task

log = logging.getLogger(__name__)

_INSERT_ROLLOUT = f"INSERT INTO rollouts ({ROLLOUT_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
_INSERT_SEGMENT = f"INSERT INTO segments (rollout, {SEGMENT_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """What a step made of one segment of a rollout."""

    rollout_id: str
    segment: int
    logprobs: Floats | None
    """The trainer's log-probabilities of the segment's sampled tokens, before the step; None where it kept none."""
    advantages: Sequence[float]
    """One number a turn."""


@dataclass(frozen=True, slots=True)
class _Rollouts:
    rollouts: Sequence[Rollout]
    tasks: Mapping[str, Task]
    phase: str
    step: int


@dataclass(frozen=True, slots=True)
class _Step:
    trained: Sequence[Trained]
    phase: str
    step: int


class RolloutWriter:
    """Writes rollouts to the store of a run; `add` returns at once, and what was added outlives a crash of the process.

    A rollout is on disk whole or not at all. Where the disk refuses, the run goes on: `lost` counts what was not
    written, and the first refusal is a warning. `done` cuts what a run that died wrote after that many steps.
    """

    def __init__(self, folder: Path, *, done: int = 0) -> None:
        self.path = folder / FILE
        self.lost = 0
        self._done = done
        self._jobs: queue.SimpleQueue[_Rollouts | _Step | threading.Event | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="agentgym-store", daemon=True)

    def __enter__(self) -> Self:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        open_store(self.path, write=True).close()  # a store that cannot be opened is said here, not in the thread
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._jobs.put(None)
        self._thread.join()

    def add(self, groups: Iterable[Group], *, phase: str = "train", step: int) -> None:
        """Write the rollouts of these groups, failed ones included."""
        groups = list(groups)
        tasks = {group.group_id: group.task for group in groups if group.task is not None}
        self._jobs.put(_Rollouts([r for group in groups for r in group.rollouts], tasks, phase, step))

    def add_step(self, trained: Sequence[Trained], *, phase: str = "train", step: int) -> None:
        """Write what the step's training computed, beside the rollouts that were added for it."""
        self._jobs.put(_Step(trained, phase, step))

    def flush(self) -> None:
        """Return when all that was added before is on disk; it blocks."""
        written = threading.Event()
        self._jobs.put(written)
        written.wait()

    # In the thread

    def _run(self) -> None:
        connection = open_store(self.path, write=True)
        try:
            if self._done:
                connection.execute("DELETE FROM rollouts WHERE phase = 'train' AND step >= ?", (self._done,))
            while (job := self._jobs.get()) is not None:
                if isinstance(job, threading.Event):
                    job.set()
                else:
                    self._write(connection, job)
        finally:
            connection.close()

    def _write(self, connection: sqlite3.Connection, job: _Rollouts | _Step) -> None:
        try:
            connection.execute("BEGIN")
            if isinstance(job, _Rollouts):
                _write_rollouts(connection, job)
            else:
                _write_step(connection, job)
            connection.execute("COMMIT")
        except (sqlite3.Error, OSError, ValueError) as error:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            if not self.lost:
                log.warning("%s: rollouts are not written, and the run goes on: %s", self.path, error)
            self.lost += len(job.rollouts) if isinstance(job, _Rollouts) else len(job.trained)


def _write_rollouts(connection: sqlite3.Connection, job: _Rollouts) -> None:
    for group_id, task in job.tasks.items():
        blob = packed(task.model_dump(mode="json"))
        connection.execute("INSERT OR REPLACE INTO tasks VALUES (?, ?)", (group_id, blob))
    for rollout in job.rollouts:
        row = rollout_row(rollout, phase=job.phase, step=job.step)
        number = connection.execute(_INSERT_ROLLOUT, row).lastrowid
        connection.executemany(_INSERT_SEGMENT, [(number, *segment_row(s)) for s in rollout.segments])


def _write_step(connection: sqlite3.Connection, job: _Step) -> None:
    ids = connection.execute(
        "SELECT rollout_id, number FROM rollouts WHERE phase = ? AND step = ?", (job.phase, job.step)
    )
    numbers = dict(ids.fetchall())
    connection.executemany(
        "UPDATE segments SET trained = ?, advantages = ? WHERE rollout = ? AND place = ?",
        [
            (
                None if made.logprobs is None else np.asarray(made.logprobs, "<f4").tobytes(),
                json.dumps([round(float(value), 6) for value in made.advantages]),
                numbers[made.rollout_id],
                made.segment,
            )
            for made in job.trained
            if made.rollout_id in numbers
        ],
    )
