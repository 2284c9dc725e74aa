"""The reader of a run's rollout store, which finds rollouts by their outcome and rebuilds them."""

import json
import sqlite3
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self, TypeAlias

import numpy as np

from agentgym.files.foreign.content import DAMAGE, Unpacker
from agentgym.files.foreign.database import ForeignDatabase, ReadCost
from agentgym.files.foreign.opening import UnreadableFileError
from agentgym.store.rows import (
    ROLLOUT_COLUMNS,
    SEGMENT_VALUES,
    SUMMARY_COLUMNS,
    advantages_of,
    rollout_of,
    segment_of,
    stored_text,
    trained_of,
)
from agentgym.store.schema import FILE, StoreError, damaged, misplaced, read_store
from agentgym.store.suspicious import LARGE_GAP, far_rewards, signs_of
from agentgym.store.vocabulary import found_among
from agentgym.types.arrays import Floats
from agentgym.types.rollout import Rollout

Order: TypeAlias = Literal["written", "latest", "worst", "best"]
LARGEST = 2**63 - 1
"""Largest integer that SQLite can store."""
_ORDERS = {
    "written": "number",
    "latest": "number DESC",
    "worst": "reward, step DESC, rollout_id, number",
    "best": "reward DESC, step DESC, rollout_id, number",
}
"""The number is the order of writing, which depends on which rollout finished first, so it decides last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRollout:
    """A rollout as it was run, with the results of the step that trained on it."""

    number: int
    """The rollout's position in the order of writing, from 1."""
    phase: str
    """"train", or the name of an evaluation."""
    step: int
    """The training step that it was run for; for an evaluation, the number of steps done before it."""
    rollout: Rollout
    trainer_logprobs: tuple[Floats | None, ...]
    """For each segment, the trainer's log-probabilities of its sampled tokens before the step, or None if the segment
    was not trained on.
    """
    advantages: tuple[tuple[float, ...] | None, ...]
    """For each segment, the advantage of each turn, or None if the segment was not trained on. An empty tuple means
    that not all of the segment's sampled tokens were trained on.
    """
    logprob_gap: float | None = None
    """Largest difference between the engine's and the trainer's log-probabilities, in nats. None if the rollout was not
    trained on, or if an earlier mini-batch of the same step had changed the policy.
    """
    suspicious: tuple[str, ...] = ()
    """Names of the rollout's suspicious signs, which `agentgym.store.suspicious.SIGNS` describes."""

    @property
    def turn_gaps(self) -> tuple[tuple[float, ...] | None, ...]:
        """Largest difference of engine and trainer log-probabilities in each turn of each segment, in nats.

        A segment that was not trained on, or whose trainer log-probabilities aren't known, has None. In a step with
        several mini-batches, the policy changes after each mini-batch. From the second mini-batch on, the differences
        therefore include that change, unless the run has old_logprobs="trainer".
        """
        found: list[tuple[float, ...] | None] = []
        for segment, trained in zip(self.rollout.segments, self.trainer_logprobs, strict=True):
            if trained is None:
                found.append(None)
                continue
            gap = np.abs(segment.logprobs[segment.sampled] - trained)
            cuts = np.cumsum([turn.stop - turn.start for turn in segment.turns])[:-1]
            found.append(tuple(float(part.max()) for part in np.split(gap, cuts)))
        return tuple(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSummary:
    """A summary of a stored rollout, found without reading its messages."""

    number: int
    phase: str
    step: int
    group_id: str
    rollout_id: str
    reward: float | None
    stop_reason: str
    failure: str | None
    """Type and message of the error that ended the rollout; None if it was scored."""
    turns: int
    tokens: int
    """How many tokens the policy sampled."""
    seconds: float
    suspicious: tuple[str, ...]


class RolloutStore:
    """Reads the rollouts of a run, during the run or later: `with RolloutStore("runs/mine") as store`.

    Each read has a time limit that depends on the size of the store; a read that exceeds it is stopped.

    Args:
        folder: The run's folder.
        one_read: Whether the time limit applies to all reads of this object together instead of to each read.

    Raises:
        FileNotFoundError: On entering, if the folder has no store.
        ValueError: On entering, if the store can't be read.
    """

    def __init__(self, folder: str | Path, *, one_read: bool = False) -> None:
        self.path = Path(folder) / FILE
        self._all = ReadCost() if one_read else None
        self._database: ForeignDatabase | None = None

    def __enter__(self) -> Self:
        self._database = read_store(self.path)
        return self

    def __exit__(self, *_: object) -> None:
        if self._database is not None:
            self._database.close()
            self._database = None

    def __len__(self) -> int:
        return int(self.query("SELECT count(*) FROM rollouts")[0][0])

    def find(
        self,
        *,
        order: Order = "written",
        failed: bool = False,
        suspicious: bool = False,
        step: int | None = None,
        phase: str | None = None,
        ids: Sequence[str] = (),
        limit: int | None = None,
    ) -> Iterator[StoredRollout]:
        """Yield the rollouts that meet every condition, holding one in memory at a time.

        Args:
            order: The order of writing ("written"), its reverse ("latest"), or the lowest ("worst") or highest
                ("best") reward first. "worst" and "best" leave out failed rollouts, unless `failed` is set; of equal
                rewards, the latest step comes first, and within a step the ids are in alphabetical order.
            failed: Whether to yield failed rollouts only.
            suspicious: Whether to yield rollouts with suspicious signs only.
            step: The only step to look at; None means all steps.
            phase: The only phase to look at; None means all.
            ids: The rollouts to look at, each named by its id (`task/0`), its task's id (`task`) or its number in the
                store; all if empty.
            limit: The largest number of rollouts to yield; None means all.
        """
        read = self._all or ReadCost()
        with self._opened().one_read(read):
            far = self.far_rewards(phase)
            where, values = _conditions(order, failed, suspicious, step, phase, ids, far)
            numbers = self._numbers(where, values, order, limit)
        for number in numbers:
            with self._opened().one_read(read):
                found = self._one(number, far)
            if found is not None:  # a resumed run may have removed it since
                yield found

    def get(self, number: int) -> StoredRollout | None:
        """Return the rollout with this number, or None if it doesn't exist."""
        with self.one_read():
            return self._one(number, self.far_rewards())

    def summaries(
        self,
        *,
        order: Order = "latest",
        failed: bool = False,
        suspicious: bool = False,
        step: int | None = None,
        phase: str | None = None,
        ids: Sequence[str] = (),
        limit: int | None = None,
    ) -> list[RolloutSummary]:
        """Return a summary of each rollout that `find` would yield."""
        far = self.far_rewards(phase)
        where, values = _conditions(order, failed, suspicious, step, phase, ids, far)
        sql = f"SELECT number, {SUMMARY_COLUMNS}, suspicious, logprob_gap FROM rollouts"
        rows = self.query(f"{sql} WHERE {where} ORDER BY {_ORDERS[order]} LIMIT ?", *values, _all(limit))
        names = [name.strip() for name in SUMMARY_COLUMNS.split(",")]
        return [
            RolloutSummary(
                number=number,
                **dict(zip(names, row, strict=True)),
                suspicious=signs_of(number, signs, gap, far),
            )
            for number, *row, signs, gap in rows
        ]

    def count(
        self,
        *,
        order: Order = "written",
        failed: bool = False,
        suspicious: bool = False,
        step: int | None = None,
        phase: str | None = None,
        ids: Sequence[str] = (),
        reward: float | None = None,
    ) -> int:
        """Return how many rollouts `find` would yield; with `reward`, only those with exactly this reward."""
        where, values = _conditions(order, failed, suspicious, step, phase, ids, self.far_rewards(phase))
        if reward is not None:
            where, values = f"{where} AND reward = ?", [*values, reward]
        return int(self.query(f"SELECT count(*) FROM rollouts WHERE {where}", *values)[0][0])

    def task(self, group_id: str) -> dict[str, Any] | None:
        """Return the fields of a group's task, or None if the run did not store it."""
        rows = self.query("SELECT group_id, task FROM tasks WHERE group_id = ?", stored_text(group_id))
        with self.sound(f"task {group_id!r}"):
            return Unpacker().unpacked(rows[0][1]) if rows else None

    def token_bytes(self, model: str, ids: Collection[int]) -> dict[int, bytes]:
        """Return the stored bytes of these token ids, leaving out ids that the run did not store.

        Args:
            model: The model role of the segment (`Segment.model`), "" for the policy.
            ids: The token ids to look up.
        """
        rows = self.query("SELECT model, ids, lengths, bytes FROM vocabulary WHERE model = ?", stored_text(model))
        with self.sound("vocabulary"):
            return found_among([of for _, *of in rows], ids)

    def _numbers(self, where: str, values: Sequence[object], order: Order, limit: int | None) -> list[int]:
        """Return the numbers of the matching rollouts, all at once.

        They are small enough to hold in memory. Reading them one by one would leave a transaction open meanwhile, which
        would delay the writer.
        """
        sql = f"SELECT number FROM rollouts WHERE {where} ORDER BY {_ORDERS[order]} LIMIT ?"
        return [row[0] for row in self.query(sql, *values, _all(limit))]

    def far_rewards(self, phase: str | None = None) -> set[int]:
        """Return the numbers of the rollouts whose reward is far from all others of their phase.

        Args:
            phase: The only phase to look at; None means all.
        """
        with self.one_moment(), self.one_read():
            return far_rewards(self.query, None if phase is None else stored_text(phase))

    def one_read(self) -> AbstractContextManager[ReadCost]:
        """Apply one time limit to all reads within the block together."""
        return self._opened().one_read(self._all)

    @contextmanager
    def one_moment(self) -> Iterator[None]:
        """Make all reads within the block see the same snapshot, even if a run writes meanwhile."""
        connection = self._opened().connection
        if connection.in_transaction:  # an enclosing block has started it
            yield
            return
        connection.execute("BEGIN")
        try:
            yield
        finally:
            connection.rollback()

    def _one(self, number: int, far: set[int]) -> StoredRollout | None:
        columns = f"number, {ROLLOUT_COLUMNS}, suspicious, logprob_gap"
        rows = self.query(f"SELECT {columns} FROM rollouts WHERE number = ?", number)
        if not rows:
            return None
        _, *row, signs, gap = rows[0]
        with self.sound(f"rollout {number}"):
            return self._rollout(number, row, gap, signs_of(number, signs, gap, far))

    @contextmanager
    def sound(self, what: str) -> Iterator[None]:
        """Turn errors from unpacking stored bytes into a StoreError that names `what`, to which the bytes belong."""
        try:
            yield
        except StoreError:
            raise
        except DAMAGE as error:
            raise damaged(self.path, ValueError(f"{what}: {error}")) from error

    def phases(self) -> list[str]:
        """Return the names of the phases that have rollouts, in alphabetical order."""
        return [phase for (phase,) in self.query("SELECT DISTINCT phase FROM rollouts ORDER BY phase")]

    def _rollout(self, number: int, row: Sequence[Any], gap: float | None, signs: tuple[str, ...]) -> StoredRollout:
        sql = f"SELECT rollout, {SEGMENT_VALUES}, trained, advantages FROM segments WHERE rollout = ? ORDER BY place"
        rows, unpacker = self.query(sql, number), Unpacker()
        segments = [segment_of(r[1:-2], unpacker) for r in rows]
        return StoredRollout(
            number=number,
            phase=row[0],
            step=row[1],
            rollout=rollout_of(row, segments, unpacker),
            trainer_logprobs=tuple(map(trained_of, segments, (r[-2] for r in rows))),
            advantages=tuple(map(advantages_of, segments, (r[-1] for r in rows))),
            logprob_gap=gap,
            suspicious=signs,
        )

    def query(self, sql: str, *values: object) -> list[Any]:
        """Return the rows of a query on the store's own tables.

        Raises:
            StoreError: If the file is damaged, if a value's type differs from its column's, or if the read takes too
                long or returns too much for the size of the store.
        """
        database = self._opened()
        try:
            with database.one_read(self._all):
                names, rows = database.rows(sql, values)
        except (sqlite3.Error, UnicodeDecodeError, OverflowError, MemoryError) as error:
            raise damaged(self.path, error) from error
        except UnreadableFileError as error:
            raise StoreError(str(error)) from error
        if wrong := misplaced(names, rows):
            raise damaged(self.path, ValueError(wrong))
        return rows

    def _opened(self) -> ForeignDatabase:
        if self._database is None:
            raise ValueError("the store is not open: use `with RolloutStore(folder) as store`")
        return self._database


def _conditions(
    order: Order,
    failed: bool,
    suspicious: bool,
    step: int | None,
    phase: str | None,
    ids: Sequence[str],
    far: set[int],
) -> tuple[str, list[object]]:
    """Return the conditions of `RolloutStore.find` as an SQL expression and its values.

    The database has an index for each condition. `far` contains the numbers of the rollouts whose reward is far from
    all others, which count as suspicious.
    """
    where, values = ["1"], list[object]()
    if failed:
        where.append("reward IS NULL")
    elif order in ("worst", "best"):
        where.append("reward IS NOT NULL")
    if suspicious:
        where.append(_any("suspicious IS NOT NULL", "logprob_gap > ?", "number IN (SELECT value FROM json_each(?))"))
        values += [LARGE_GAP, json.dumps([*far])]
    within = None if step is None else max(-LARGEST, min(step, LARGEST))
    for name, value in (("step", within), ("phase", None if phase is None else stored_text(phase))):
        if value is not None:
            where.append(f"{name} = ?")
            values.append(value)
    if ids:
        numbers = [int(name) for name in ids if name.isascii() and name.isdigit() and len(name) < 19]
        where.append(_any(_among("rollout_id", ids), _among("group_id", ids), _among("number", numbers)))
        names = [stored_text(name) for name in ids]
        values += [*names, *names, *numbers]
    return " AND ".join(where), values


def _any(*conditions: str) -> str:
    """Join conditions with "or", in a form for which SQLite uses the index of each condition."""
    return f"number IN ({' UNION '.join(f'SELECT number FROM rollouts WHERE {one}' for one in conditions)})"


def _among(column: str, values: Collection[object]) -> str:
    return f"{column} IN ({', '.join('?' * len(values))})"


def _all(limit: int | None) -> int:
    """Return the limit for SQLite, which uses -1 for no limit."""
    return -1 if limit is None else min(limit, LARGEST)
