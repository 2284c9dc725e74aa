"""The outcomes of a run's rollouts by task, failure and reward, counted by SQLite."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from agentgym.errors import Failure
from agentgym.files.foreign.content import Unpacker, parsed
from agentgym.files.foreign.values import number as checked
from agentgym.store.reader import RolloutStore
from agentgym.store.rows import failure_of, stored_text
from agentgym.store.table import Filters, conditions

TASK_SORTS: Mapping[str, str] = {
    "task": "group_id",
    "attempts": "attempts",
    "failed": "failed",
    "first_step": "first_step",
    "last_step": "last_step",
    "reward_first": "reward_first",
    "reward_last": "reward_last",
    "reward_mean": "reward_mean",
    "gain": "reward_last - reward_first",
}
"""The columns that tasks can be sorted by. "gain" is the last reward minus the first."""
MOST_FAILURES = 20_000
"""Maximum number of failures to read, starting with the latest."""
MOST_UNPACKED = 256 << 20
"""Maximum total bytes of the JSON of a run's failures. Each failure is freed before the next is unpacked."""
SHOWN = 50
"""Maximum number of rollout numbers to list per kind of failure."""


@dataclass(slots=True)
class FailureKind:
    """Count of the rollouts that failed with the same kind of error: one type, at one place in the user's code."""

    first: Failure
    """Failure of the first such rollout."""
    count: int = 0
    first_step: int = 0
    last_step: int = 0
    numbers: list[int] = field(default_factory=list)
    """Numbers of the first SHOWN such rollouts."""


def task_rows(
    store: RolloutStore, *, phase: str | None, sort: str, descending: bool, offset: int, limit: int
) -> tuple[int, list[dict[str, Any]]]:
    """Return the number of tasks, and one row per task from `offset` on.

    A row contains the mean rewards of the first and of the last step in which the task was run.
    """
    where, values = ("1", []) if phase is None else ("phase = ?", [stored_text(phase)])
    column = TASK_SORTS[sort]
    missing = f"{column} IS NULL, " if sort in ("reward_first", "reward_last", "reward_mean", "gain") else ""
    sql = f"""
        WITH visits AS (
            SELECT group_id, step, count(*) AS attempts, sum(reward IS NULL) AS failed,
                   avg(reward) AS mean, sum(reward) AS total
            FROM rollouts WHERE {where} GROUP BY group_id, step
        ), ends AS (
            SELECT group_id, sum(attempts) AS attempts, sum(failed) AS failed, min(step) AS first_step,
                   max(step) AS last_step, sum(total) / (sum(attempts) - sum(failed)) AS reward_mean
            FROM visits GROUP BY group_id
        )
        SELECT ends.group_id AS group_id, ends.attempts AS attempts, ends.failed AS failed, first_step, last_step,
               one.mean AS reward_first, two.mean AS reward_last, reward_mean
        FROM ends JOIN visits AS one ON one.group_id = ends.group_id AND one.step = first_step
                  JOIN visits AS two ON two.group_id = ends.group_id AND two.step = last_step
    """
    order = f"{missing}{column} {'DESC' if descending else ''}, group_id"
    names = ("task", "attempts", "failed", "first_step", "last_step", "reward_first", "reward_last", "reward_mean")
    with store.one_moment():
        total = int(store.query(f"SELECT count(DISTINCT group_id) FROM rollouts WHERE {where}", *values)[0][0])
        rows = store.query(f"SELECT * FROM ({sql}) ORDER BY {order} LIMIT ? OFFSET ?", *values, limit, offset)
    return total, [dict(zip(names, row, strict=True)) for row in rows]


def visits(store: RolloutStore, task: str) -> list[dict[str, Any]]:
    """Return each step and phase in which a task was run, with the numbers and rewards of its rollouts there."""
    rows = store.query(
        "SELECT step, phase, reward, number FROM rollouts WHERE group_id = ? ORDER BY step, phase, number",
        stored_text(task),
    )
    found: dict[tuple[int, str], dict[str, Any]] = {}
    for step, phase, reward, number in rows:
        visit = found.setdefault((step, phase), {"step": step, "phase": phase, "rewards": [], "numbers": []})
        visit["rewards"].append(reward)
        visit["numbers"].append(number)
    return list(found.values())


def failure_kinds(store: RolloutStore) -> list[FailureKind]:
    """Return the latest failures grouped by type, place and last traceback lines, the most frequent kind first."""
    found: dict[tuple[str, str, str], FailureKind] = {}
    with store.one_read():
        for number, step, failure in _failures(store):
            kind = found.setdefault(_key(failure), FailureKind(failure, first_step=step))
            kind.count += 1
            kind.first_step, kind.last_step = min(kind.first_step, step), max(kind.last_step, step)
            if len(kind.numbers) < SHOWN:
                kind.numbers.append(number)
    return sorted(found.values(), key=lambda kind: -kind.count)


def reward_histogram(store: RolloutStore, filters: Filters, bins: int) -> tuple[list[float], list[int]]:
    """Return the edges and counts of equally wide bins over the rewards, both empty if no rollout has a reward."""
    where, values = conditions(filters, store.far_rewards(filters.phase) if filters.suspicious else set())
    with store.one_moment(), store.sound("rewards"):
        sql = f"FROM rollouts WHERE {where} AND reward IS NOT NULL"
        low, high, number = store.query(f"SELECT min(reward), max(reward), count(*) {sql}", *values)[0]
        if not number:
            return [], []
        half = (high / 2 - low / 2) / bins or 0.5  # halved, since the difference of two floats may overflow
        place = f"min(CAST((reward / 2 - ?) / ? AS INTEGER), {bins - 1})"
        rows = store.query(f"SELECT {place} AS bin, count(*) {sql} GROUP BY bin", low / 2, half, *values)
    counts = [0] * bins
    for place, count in rows:
        counts[place] = count
    return [(low / 2 + half * edge) * 2 for edge in range(bins + 1)], counts


def group_advantages(store: RolloutStore, numbers: list[int]) -> dict[int, float]:
    """Return the advantage of the first trained turn of each of these rollouts, by rollout number.

    Rollouts without a trained turn are left out.
    """
    rows = store.query(
        "SELECT rollout, advantages FROM segments WHERE rollout IN (SELECT value FROM json_each(?)) "
        "AND advantages IS NOT NULL ORDER BY rollout, place DESC",
        json.dumps(numbers),
    )
    with store.sound("advantages"):
        return {number: checked(values[0], "advantages") for number, text in rows if (values := parsed(text.encode()))}


def _failures(store: RolloutStore) -> Iterator[tuple[int, int, Failure]]:
    """Yield the number, step and failure of each of the latest failed rollouts, oldest first, read in parts."""
    latest = "SELECT number FROM rollouts WHERE reward IS NULL ORDER BY number DESC LIMIT 1 OFFSET ?"
    skipped, unpacker = store.query(latest, MOST_FAILURES), Unpacker(MOST_UNPACKED, MOST_UNPACKED)
    last = skipped[0][0] if skipped else 0
    while rows := store.query(
        "SELECT number, step, detail FROM rollouts WHERE reward IS NULL AND number > ? ORDER BY number LIMIT 1000", last
    ):
        for number, step, detail in rows:
            with store.sound(f"rollout {number}"):
                failure = failure_of(unpacker.unpacked(detail)["failure"])
            yield number, step, failure
        last = rows[-1][0]


def _key(failure: Failure) -> tuple[str, str, str]:
    """Return the key that groups failures: type, place, and the traceback's last frame with the error's class."""
    lines = failure.traceback.rstrip().splitlines()
    frames = [line.strip() for line in lines if line.lstrip().startswith("File ")]
    error = lines[-1].partition(":")[0] if lines else failure.message.partition(":")[0]
    return failure.type, failure.where, f"{frames[-1] if frames else ''} {error}"
