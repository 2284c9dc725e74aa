"""The reader of a run's rollout store: rollouts chosen by what became of them, rebuilt whole."""

import json
import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, TypeAlias

import numpy as np

from agentgym.store.rows import ROLLOUT_COLUMNS, SEGMENT_COLUMNS, rollout_of, segment_of, unpacked
from agentgym.store.schema import FILE, open_store
from agentgym.types import Floats, Rollout

Order: TypeAlias = Literal["written", "worst", "best"]
_ORDERS = {"written": "number", "worst": "reward, number", "best": "reward DESC, number"}


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRollout:
    """A rollout as it was played, and what the step that trained on it computed."""

    number: int
    """In the order of writing, from 1."""
    phase: str
    """"train", or the name of an evaluation."""
    step: int
    rollout: Rollout
    trainer_logprobs: tuple[Floats | None, ...]
    """Of each segment's sampled tokens, before the step; None for a segment that was not trained on."""
    advantages: tuple[tuple[float, ...] | None, ...]
    """One number for each turn of each segment; None for a segment that was not trained on."""

    @property
    def logprob_gap(self) -> float | None:
        """The largest difference between the engine's and the trainer's log-probabilities, in nats."""
        gaps = [
            float(np.abs(segment.logprobs[segment.sampled] - trained).max())
            for segment, trained in zip(self.rollout.segments, self.trainer_logprobs, strict=True)
            if trained is not None and len(trained)
        ]
        return max(gaps, default=None)


class RolloutStore:
    """The rollouts of a run, read while it runs or later: `with RolloutStore("runs/mine") as store`."""

    def __init__(self, folder: str | Path) -> None:
        self.path = Path(folder) / FILE
        self._connection: sqlite3.Connection | None = None

    def __enter__(self) -> Self:
        self._connection = open_store(self.path, write=False)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def __len__(self) -> int:
        return int(self._rows("SELECT count(*) FROM rollouts")[0][0])

    def find(
        self,
        *,
        order: Order = "written",
        failed: bool = False,
        step: int | None = None,
        phase: str | None = None,
        ids: Sequence[str] = (),
        limit: int | None = None,
    ) -> Iterator[StoredRollout]:
        """The rollouts that meet every condition, in `order`; `worst` and `best` leave failed ones out.

        An id is a rollout's (`task/0`), its task's (`task`), or its number in the store.
        """
        where, values = ["1"], list[object]()
        if failed:
            where.append("reward IS NULL")
        elif order != "written":
            where.append("reward IS NOT NULL")
        for name, value in (("step", step), ("phase", phase)):
            if value is not None:
                where.append(f"{name} = ?")
                values.append(value)
        if ids:
            marks = ", ".join("?" * len(ids))
            where.append(f"(rollout_id IN ({marks}) OR group_id IN ({marks}) OR CAST(number AS TEXT) IN ({marks}))")
            values += [*ids, *ids, *ids]
        sql = f"SELECT number, {ROLLOUT_COLUMNS} FROM rollouts WHERE {' AND '.join(where)} ORDER BY {_ORDERS[order]}"
        for number, *row in self._rows(
            sql + (" LIMIT ?" if limit is not None else ""), *values, *([limit] if limit is not None else [])
        ):
            yield self._rollout(number, row)

    def task(self, group_id: str) -> dict[str, Any] | None:
        """The fields of a group's task; None where the run did not keep it."""
        rows = self._rows("SELECT task FROM tasks WHERE group_id = ?", group_id)
        return unpacked(rows[0][0]) if rows else None

    def _rollout(self, number: int, row: Sequence[Any]) -> StoredRollout:
        sql = f"SELECT {SEGMENT_COLUMNS}, trained, advantages FROM segments WHERE rollout = ? ORDER BY place"
        rows = self._rows(sql, number)
        rollout = rollout_of(row, [segment_of(r[:-2]) for r in rows])
        return StoredRollout(
            number=number,
            phase=row[0],
            step=row[1],
            rollout=rollout,
            trainer_logprobs=tuple(None if r[-2] is None else np.frombuffer(r[-2], "<f4") for r in rows),
            advantages=tuple(None if r[-1] is None else tuple(json.loads(r[-1])) for r in rows),
        )

    def _rows(self, sql: str, *values: object) -> list[Any]:
        if self._connection is None:
            raise ValueError("the store is not open: use `with RolloutStore(folder) as store`")
        return self._connection.execute(sql, values).fetchall()
