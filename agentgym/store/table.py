"""Pages of a table of a run's rollouts. SQLite filters, sorts and counts them without unpacking any rollout."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentgym.store.reader import LARGEST, RolloutStore, RolloutSummary
from agentgym.store.rows import SUMMARY_COLUMNS, stored_text
from agentgym.store.suspicious import LARGE_GAP, signs_of

SORTS: Mapping[str, str] = {
    "number": "number",
    "step": "step",
    "reward": "reward",
    "turns": "turns",
    "tokens": "tokens",
    "seconds": "seconds",
    "tool_errors": "tool_errors",
    "task": "group_id",
    "stop": "stop_reason",
}
"""The columns that the table can be sorted by, keyed by their names in requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Filters:
    """Conditions on rollouts, all of which must hold; None and False set no condition."""

    phase: str | None = None
    env: str | None = None
    """The member of a mixture that the rollout was run in."""
    task: str | None = None
    """The task's full id, which is also the group's id."""
    stop: str | None = None
    step_from: int | None = None
    step_to: int | None = None
    reward_from: float | None = None
    reward_to: float | None = None
    failed: bool = False
    suspicious: bool = False
    tool_errors: bool = False
    among: Sequence[int] | None = None
    """Rollout numbers that a search found."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TableRow:
    """One row of the table: a rollout's summary and its counts of tool calls."""

    summary: RolloutSummary
    tool_calls: int | None
    """Number of the rollout's tool calls; None if the store was written before calls were counted."""
    tool_errors: int | None


def page(
    store: RolloutStore,
    filters: Filters,
    *,
    sort: str = "number",
    descending: bool = False,
    offset: int = 0,
    limit: int = 200,
) -> tuple[int, list[TableRow]]:
    """Return how many rollouts match the filters, and up to `limit` of them from `offset` on.

    Rollouts without a value in the sorted column come last.
    """
    with store.one_moment():
        far = store.far_rewards(filters.phase)
        where, values = conditions(filters, far)
        total = int(store.query(f"SELECT count(*) FROM rollouts WHERE {where}", *values)[0][0])
        columns = f"number, {SUMMARY_COLUMNS}, suspicious, logprob_gap, tool_calls, tool_errors"
        sql = f"SELECT {columns} FROM rollouts WHERE {where}"
        ordered = _order(sort, descending)
        rows = store.query(f"{sql} ORDER BY {ordered} LIMIT ? OFFSET ?", *values, limit, min(offset, LARGEST))
    return total, [_row(row, far) for row in rows]


def rows_of(store: RolloutStore, filters: Filters) -> list[TableRow]:
    """Return all rollouts that match the filters, in the order of writing."""
    return page(store, filters, limit=LARGEST)[1]


def conditions(filters: Filters, far: set[int]) -> tuple[str, list[object]]:
    """Return the filters as an SQL condition and its values.

    Args:
        filters: The filters.
        far: The numbers of the rollouts whose reward is far from all others, which count as suspicious.
    """
    where, values = ["1"], list[object]()

    def add(condition: str, *given: object) -> None:
        where.append(condition)
        values.extend(given)

    for column, text in (("phase", filters.phase), ("group_id", filters.task), ("stop_reason", filters.stop)):
        if text is not None:
            add(f"{column} = ?", stored_text(text))
    if filters.env is not None:
        name = stored_text(filters.env)
        add("group_id >= ? AND group_id < ?", f"{name}/", f"{name}0")  # "0" is the character after "/"
    bounds = (
        ("step >= ?", filters.step_from),
        ("step <= ?", filters.step_to),
        ("reward >= ?", filters.reward_from),
        ("reward <= ?", filters.reward_to),
    )
    for condition, bound in bounds:
        if bound is not None:
            add(condition, max(-LARGEST, min(bound, LARGEST)) if isinstance(bound, int) else bound)
    if filters.failed:
        add("reward IS NULL")
    if filters.suspicious:
        add(
            "(suspicious IS NOT NULL OR logprob_gap > ? OR number IN (SELECT value FROM json_each(?)))",
            LARGE_GAP,
            json.dumps(sorted(far)),
        )
    if filters.tool_errors:
        add("tool_errors > 0")
    if filters.among is not None:
        add("number IN (SELECT value FROM json_each(?))", json.dumps(list(filters.among)))
    return " AND ".join(where), values


def _order(sort: str, descending: bool) -> str:
    column, way = SORTS[sort], " DESC" if descending else ""
    if column == "number":
        return f"number{way}"
    missing = f"{column} IS NULL, " if column in ("reward", "tool_errors") else ""
    return f"{missing}{column}{way}, number{way}"


def _row(row: Sequence[Any], far: set[int]) -> TableRow:
    number, *values, signs, gap, calls, errors = row
    names = [name.strip() for name in SUMMARY_COLUMNS.split(",")]
    summary = RolloutSummary(
        number=number, **dict(zip(names, values, strict=True)), suspicious=signs_of(number, signs, gap, far)
    )
    return TableRow(summary=summary, tool_calls=calls, tool_errors=errors)
