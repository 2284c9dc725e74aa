"""Pages of rollouts, and summaries of tasks and failures, compared with a look at each rollout by itself."""

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from agentgym.errors import Failure
from agentgym.store.overview import TASK_SORTS, failure_kinds, group_advantages, reward_histogram, task_rows, visits
from agentgym.store.reader import RolloutStore
from agentgym.store.table import SORTS, Filters, TableRow, page, rows_of
from agentgym.store.writer import RolloutWriter, Trained
from agentgym.types.messages import Function, Message, ToolCall
from agentgym.types.rollout import Group, Rollout
from tests.store.test_store import rollout


def played(number: int) -> Rollout:
    """Return one of many rollouts that differ in everything that filters can select."""
    reward = None if number % 7 == 3 else (number * 37 % 11) / 4 - 1
    made = rollout(f"{('nim', 'chase', 'nim-2')[number % 3]}/{number % 5}/{number // 5}", reward)
    name = made.rollout_id.rpartition("/")[0]
    failure = made.failure
    if failure is not None:
        trace = f'Traceback ..\n  File "env.py", line {number % 2}, in step\n    boom({number})\nKeyError: {number}\n'
        failure = Failure(type="EnvError", message=f"KeyError: {number}", where="Env.step", traceback=trace)
    metrics = {"seconds": float(number * 13 % 17), "tool_errors": float(number % 3)}
    stop = "error" if reward is None else ["answer", "turns"][number % 4 == 1]
    return replace(made, group_id=name, metrics=metrics, failure=failure, stop_reason=stop)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a run with four steps of ten groups each, and an evaluation."""
    made = tmp_path_factory.mktemp("run")
    with RolloutWriter(made) as writer:
        for step in range(5):
            groups: dict[str, list[Rollout]] = defaultdict(list)
            for number in range(25):
                groups[(one := played(number + 25 * step)).group_id].append(one)
            found = [Group(group_id=name, rollouts=tuple(of)) for name, of in groups.items()]
            writer.add(found, phase="train" if step < 4 else "eval_after", step=step)
        made_of = [
            Trained(rollout_id=played(number).rollout_id, segment=0, logprobs=None, advantages=[number / 4, 0.0])
            for number in range(0, 25, 2)
        ]
        writer.add_step(made_of, step=0)
    return made


@pytest.fixture
def store(folder: Path) -> Iterator[RolloutStore]:
    with RolloutStore(folder) as opened:
        yield opened


def meets(row: TableRow, asked: Filters) -> bool:
    """Return whether a row, looked at by itself, meets the filters."""
    one = row.summary
    return all(
        [
            asked.phase in (None, one.phase),
            asked.env is None or one.group_id.startswith(f"{asked.env}/"),
            asked.task in (None, one.group_id),
            asked.stop in (None, one.stop_reason),
            asked.step_from is None or one.step >= asked.step_from,
            asked.step_to is None or one.step <= asked.step_to,
            asked.reward_from is None or (one.reward is not None and one.reward >= asked.reward_from),
            asked.reward_to is None or (one.reward is not None and one.reward <= asked.reward_to),
            not asked.failed or one.reward is None,
            not asked.suspicious or bool(one.suspicious),
            not asked.tool_errors or bool(row.tool_errors),
            asked.among is None or one.number in asked.among,
        ]
    )


ASKED: dict[str, st.SearchStrategy[Any]] = {
    "phase": st.sampled_from(["train", "eval_after", "nix"]),
    "env": st.sampled_from(["nim", "chase", "chas", "nim-2", "ch\ud800"]),
    "task": st.sampled_from(["nim/1", "chase/0", "%", "'"]),
    "stop": st.sampled_from(["answer", "turns", "error"]),
    "step_from": st.integers(-1, 5) | st.integers(),
    "step_to": st.integers(-1, 5) | st.integers(),
    "reward_from": st.floats(-2, 2),
    "reward_to": st.floats(-2, 2),
    "failed": st.booleans(),
    "suspicious": st.booleans(),
    "tool_errors": st.booleans(),
    "among": st.lists(st.integers(0, 130), max_size=40),
}
FILTERS = st.lists(st.sampled_from([*ASKED]), unique=True, max_size=2).flatmap(
    lambda names: st.fixed_dictionaries({name: ASKED[name] for name in names}).map(lambda given: Filters(**given))
)


def key(row: TableRow, sort: str) -> tuple[bool, Any]:
    """Return a row's sort key; rows without a value come last."""
    names = {"task": "group_id", "stop": "stop_reason"}
    value = row.tool_errors if sort == "tool_errors" else getattr(row.summary, names.get(sort, sort))
    return value is None, value or 0 if value is None or isinstance(value, int | float) else value


@settings(max_examples=200, deadline=None)
@given(
    asked=FILTERS,
    sort=st.sampled_from([*SORTS]),
    descending=st.booleans(),
    offset=st.integers(0, 40),
    limit=st.integers(1, 60),
)
def test_a_page_has_the_rollouts_that_match_all_filters_in_order(
    folder: Path, asked: Filters, sort: str, descending: bool, offset: int, limit: int
) -> None:
    with RolloutStore(folder) as store:
        every = [row for row in rows_of(store, Filters()) if meets(row, asked)]
        total, rows = page(store, asked, sort=sort, descending=descending, offset=offset, limit=limit)
    assert total == len(every)
    with_value = [row for row in every if not key(row, sort)[0]]
    ordered = sorted(with_value, key=lambda row: (key(row, sort)[1], row.summary.number), reverse=descending)
    without = [row for row in every if key(row, sort)[0]]
    without.sort(key=lambda row: row.summary.number, reverse=descending)
    assert rows == [*ordered, *without][offset : offset + limit]


def test_a_page_and_its_total_are_from_the_same_moment(tmp_path: Path) -> None:
    with RolloutWriter(tmp_path) as writer:
        writer.add([Group(group_id="a", rollouts=(rollout("a/0"),))], step=0)
        writer.flush()
        with RolloutStore(tmp_path) as store:
            read = store.query

            def read_while_others_are_written(sql: str, *values: object) -> list[Any]:
                found = read(sql, *values)
                if "count(*)" in sql:
                    writer.add([Group(group_id="b", rollouts=(rollout("b/0"),))], step=0)
                    writer.flush()
                return found

            store.query = read_while_others_are_written  # type: ignore[method-assign]
            total, rows = page(store, Filters())
    assert total == len(rows)


def test_a_row_counts_the_calls_and_the_failed_calls(tmp_path: Path, store: RolloutStore) -> None:
    by_id = {played(number).rollout_id: played(number).metrics["tool_errors"] for number in range(125)}
    rows = rows_of(store, Filters())
    assert {row.summary.rollout_id: row.tool_errors for row in rows} == by_id
    assert {row.tool_calls for row in rows} == {0}
    call = ToolCall(function=Function(name="look", arguments={}))
    said = Message(role="assistant", content="", tool_calls=[call, call])
    one = rollout("a/0")
    (spoken,) = one.segments
    turns = (spoken.turns[0]._replace(message=said), spoken.turns[1])
    with RolloutWriter(tmp_path) as writer:
        changed = replace(one, segments=(replace(spoken, turns=turns),), metrics={"tool_errors/look": 1.0})
        writer.add([Group(group_id="a", rollouts=(changed,))], step=0)
    with RolloutStore(tmp_path) as other:
        assert [(row.tool_calls, row.tool_errors) for row in rows_of(other, Filters())] == [(2, 1)]


@pytest.mark.parametrize("sort", TASK_SORTS)
@pytest.mark.parametrize("phase", [None, "train"])
def test_tasks_have_mean_rewards_of_their_first_and_last_visits(
    store: RolloutStore, sort: str, phase: str | None
) -> None:
    total, rows = task_rows(store, phase=phase, sort=sort, descending=True, offset=0, limit=100)
    assert total == len(rows) == len({row["task"] for row in rows})
    for row in rows:
        attempts = rows_of(store, Filters(task=row["task"], phase=phase))
        by_step: dict[int, list[float]] = defaultdict(list)
        for one in attempts:
            by_step[one.summary.step] += [] if one.summary.reward is None else [one.summary.reward]
        first, last = by_step[min(by_step)], by_step[max(by_step)]
        assert row["attempts"] == len(attempts)
        assert row["failed"] == sum(one.summary.reward is None for one in attempts)
        assert (row["first_step"], row["last_step"]) == (min(by_step), max(by_step))
        for name, rewards in (
            ("reward_first", first),
            ("reward_last", last),
            ("reward_mean", [*chain(*by_step.values())]),
        ):
            assert row[name] == (pytest.approx(sum(rewards) / len(rewards)) if rewards else None)
    if sort != "gain":
        values = [row[sort] for row in rows if row[sort] is not None]
        assert values == sorted(values, reverse=True)
    assert task_rows(store, phase=phase, sort=sort, descending=True, offset=3, limit=2)[1] == rows[3:5]


def test_the_visits_of_a_task_have_each_attempt_at_its_step(store: RolloutStore) -> None:
    found = visits(store, "nim/1")
    rows = rows_of(store, Filters(task="nim/1"))
    assert [number for visit in found for number in visit["numbers"]] == [row.summary.number for row in rows]
    assert [reward for visit in found for reward in visit["rewards"]] == [row.summary.reward for row in rows]
    assert [(visit["step"], visit["phase"]) for visit in found] == sorted(
        {(r.summary.step, r.summary.phase) for r in rows}
    )
    assert visits(store, "nix") == []


def test_failures_at_the_same_line_are_one_kind_whatever_their_text(store: RolloutStore) -> None:
    kinds = failure_kinds(store)
    failed = rows_of(store, Filters(failed=True))
    assert len(kinds) == 2
    assert sum(kind.count for kind in kinds) == len(failed)
    assert sorted(number for kind in kinds for number in kind.numbers) == [row.summary.number for row in failed]
    assert all(kind.first_step <= kind.last_step for kind in kinds)
    assert kinds[0].count >= kinds[1].count


def test_only_the_latest_of_very_many_failures_are_grouped(
    store: RolloutStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentgym.store.overview.MOST_FAILURES", 3)
    failed = [row.summary.number for row in rows_of(store, Filters(failed=True))]
    assert sorted(number for kind in failure_kinds(store) for number in kind.numbers) == failed[-3:]


@pytest.mark.parametrize("bins", [1, 2, 7])
def test_a_histogram_counts_every_reward_once(store: RolloutStore, bins: int) -> None:
    rewards = [row.summary.reward for row in rows_of(store, Filters()) if row.summary.reward is not None]
    edges, counts = reward_histogram(store, Filters(), bins)
    assert (len(edges), len(counts), sum(counts)) == (bins + 1, bins, len(rewards))
    assert [edges[0], edges[-1]] == pytest.approx([min(rewards), max(rewards)])
    assert counts[0] == sum(reward < edges[1] or bins == 1 for reward in rewards)
    assert reward_histogram(store, Filters(failed=True), bins) == ([], [])
    (low, high), (count,) = reward_histogram(store, Filters(reward_from=1.5, reward_to=1.5), 1)
    assert low <= 1.5 <= high
    assert count == rewards.count(1.5)
    assert not math.isnan(low)


def test_a_groups_advantages_are_those_of_its_trained_rollouts(store: RolloutStore) -> None:
    found = group_advantages(store, list(range(1, 26)))
    rows = {row.summary.number: row.summary.rollout_id for row in rows_of(store, Filters())}
    trained = {played(number).rollout_id: number / 4 for number in range(0, 25, 2)}
    assert {rows[number]: gained for number, gained in found.items()} == trained
