"""The jobs of a store's writer, and the SQL statements that write them."""

import json
import sqlite3
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np

from agentgym.files.disk import disk_trouble
from agentgym.store.rows import ROLLOUT_COLUMNS, SEGMENT_COLUMNS, rollout_row, segment_row, stored_text
from agentgym.store.suspicious import signs_of_group
from agentgym.store.tool_counts import call_counts
from agentgym.store.training_step import Trained
from agentgym.types.rollout import Group, Rollout

_INSERT_ROLLOUT = (
    f"INSERT INTO rollouts ({ROLLOUT_COLUMNS}, suspicious, tool_calls, tool_errors) VALUES ({', '.join('?' * 14)})"
)
_INSERT_SEGMENT = f"INSERT INTO segments (rollout, {SEGMENT_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"


WAITING = (
    *(sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL, sqlite3.SQLITE_PERM),
    *(sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN),
)
"""SQLite error codes after which the same write may succeed later."""


@dataclass(frozen=True, slots=True)
class GroupsJob:
    """A job that writes the rollouts of a phase and step, grouped by task."""

    groups: Sequence[Group]
    phase: str
    step: int
    whole: bool = True
    """Whether these are all rollouts of their groups, so that they can be compared with each other."""


@dataclass(frozen=True, slots=True)
class SignsJob:
    """A job that writes the suspicious signs of a group's rollouts, which are already stored."""

    group: Group
    phase: str
    step: int


@dataclass(frozen=True, slots=True)
class StepJob:
    """A job that writes the training results of a step."""

    trained: Iterable[Trained]
    phase: str
    step: int


def parts_of(job: GroupsJob) -> list[GroupsJob | SignsJob]:
    """Split a job that the store refused into parts; those that the store accepts are still written.

    A job with several groups becomes one job per group, and a job with a single group one job per rollout. The signs
    of a group's rollouts depend on the whole group, so they are written by a last job.
    """
    if len(job.groups) != 1:
        return [replace(job, groups=[group]) for group in job.groups]
    (group,) = job.groups
    alone = [Group(group_id=group.group_id, rollouts=(rollout,), task=group.task) for rollout in group.rollouts]
    signs = [SignsJob(group, job.phase, job.step)] if job.whole and len(alone) > 1 else []
    return [*(replace(job, groups=[part], whole=False) for part in alone), *signs]


def rollouts_in(job: GroupsJob | SignsJob | StepJob) -> int:
    """Return how many rollouts a job adds to the store."""
    return sum(len(group.rollouts) for group in job.groups) if isinstance(job, GroupsJob) else 0


def in_transaction(connection: sqlite3.Connection, work: Callable[[sqlite3.Connection], object]) -> None:
    """Wait if another process is writing, then run `work` in one transaction, so that all or nothing is written."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        work(connection)
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def write_rollout(connection: sqlite3.Connection, rollout: Rollout, job: GroupsJob, signs: Sequence[str]) -> None:
    """Write a rollout with its segments; `signs` are the names of its suspicious signs."""
    row = rollout_row(rollout, phase=job.phase, step=job.step)
    columns = (*row, " ".join(signs) or None, *call_counts(rollout))
    number = connection.execute(_INSERT_ROLLOUT, columns).lastrowid
    connection.executemany(_INSERT_SEGMENT, [(number, *segment_row(segment)) for segment in rollout.segments])


def write_signs(connection: sqlite3.Connection, job: SignsJob) -> None:
    """Write the signs of a group's rollouts, which are found by comparing all of them."""
    signs = signs_of_group(job.group)
    connection.executemany(
        "UPDATE rollouts SET suspicious = ? WHERE rollout_id = ? AND phase = ? AND step = ?",
        [
            (" ".join(signs.get(name, ())) or None, stored_text(name), stored_text(job.phase), job.step)
            for name in (rollout.rollout_id for rollout in job.group.rollouts)
        ],
    )


def write_step(connection: sqlite3.Connection, job: StepJob) -> None:
    """Write a step's training results into the rows of their segments."""
    ids = connection.execute(
        "SELECT rollout_id, number FROM rollouts WHERE phase = ? AND step = ?", (stored_text(job.phase), job.step)
    )
    numbers = dict(ids.fetchall())
    gaps: dict[int, float] = {}
    for made in job.trained:
        if (number := numbers.get(stored_text(made.rollout_id))) is None:
            continue  # its rollout is already counted as lost
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


def close(connection: sqlite3.Connection | None) -> None:
    """Close the connection if it is open."""
    if connection is not None:
        with suppress(sqlite3.Error):
            connection.close()


def rollouts_of(connection: sqlite3.Connection) -> int:
    """Return how many rollouts a store has, to report them as lost.

    Returns 1 if they can't be counted, so that a loss is reported all the same.
    """
    try:
        return int(connection.execute("SELECT count(*) FROM rollouts").fetchone()[0])
    except sqlite3.Error:
        return 1


def waits(error: Exception) -> bool:
    """Return whether a write that failed with this error may succeed later."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF in WAITING or disk_trouble(error) is not None


def said_of(error: Exception) -> str:
    """Return the error's class name and message."""
    return f"{type(error).__name__}: {error}"
