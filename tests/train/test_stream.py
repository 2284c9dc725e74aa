"""Micro-batches of a stream: nothing is lost, nobody is empty, and what leaves is full."""

from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentgym.train.plan import Micro, shares
from agentgym.train.stream import StreamPlanner


def test_nothing_leaves_before_a_micro_batch_can_be_chosen_and_the_fullest_rows_leave_first() -> None:
    planner = StreamPlanner(ranks=2, micro_tokens=10, layout="packed")
    assert [planner.put(length) for length in [6, 3, 5, 5, 4, 6, 3, 2]] == [[]] * 8  # 34 of 2 x 2 x 10 tokens
    ((one, other),) = planner.put(6)
    sums = [sum([6, 3, 5, 5, 4, 6, 3, 2, 6][row] for row in micro.rows) for micro in (one, other)]
    assert sums == [10, 10]
    assert planner.waiting == 9 - len(one.rows) - len(other.rows)
    assert planner.put(19) == []  # 39 tokens wait


def test_a_flush_sends_what_is_left_and_the_next_one_nothing() -> None:
    planner = StreamPlanner(ranks=2, micro_tokens=10)
    planner.put(3)
    ((one, other),) = planner.flush()
    assert (one, other) == (Micro(rows=(0,)), Micro(rows=(0,), masked=True))
    assert planner.waiting == 0
    assert planner.flush() == []
    planner.put(4)
    assert planner.flush()[0][0].rows == (1,)  # arrivals are counted on


def test_a_fixed_count_leaves_when_depth_micro_batches_are_there() -> None:
    planner = StreamPlanner(ranks=2, micro_rows=2, depth=3)
    assert [planner.put(length) for length in range(1, 12)] == [[]] * 11
    sent = planner.put(12)
    assert len(sent) == 3
    assert all(len(micro.rows) == 2 for micros in sent for micro in micros)
    assert planner.waiting == 0


def test_a_depth_of_everything_plans_as_if_all_had_been_there() -> None:
    lengths = [7, 1, 5, 5, 2, 6, 3, 3]
    planner = StreamPlanner(ranks=2, micro_tokens=10, layout="packed", depth=100)
    for length in lengths:
        assert planner.put(length) == []
    plans = shares(lengths, ranks=2, micro_tokens=10, layout="packed")
    assert planner.flush() == [list(micros) for micros in zip(*plans, strict=True)]


def test_bad_arguments_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="micro_tokens, micro_rows: a stream needs one"):
        StreamPlanner(ranks=1)
    with pytest.raises(ValueError, match="ranks, depth: must be at least 1"):
        StreamPlanner(ranks=1, micro_rows=1, depth=0)
    with pytest.raises(ValueError, match="length: sample 0 has no token"):
        StreamPlanner(ranks=1, micro_rows=1).put(0)


@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=80),
    st.integers(1, 4),
    st.integers(1, 3),
    st.sampled_from(["padded", "packed"]),
    st.sampled_from([("micro_tokens", 40), ("micro_rows", 3)]),
)
@settings(max_examples=150, deadline=None)
def test_every_arrival_is_in_one_micro_batch_and_no_budget_is_broken(
    lengths: list[int], ranks: int, depth: int, layout: Literal["padded", "packed"], limit: tuple[str, int]
) -> None:
    tokens, rows = (limit[1] if limit[0] == name else None for name in ("micro_tokens", "micro_rows"))
    planner = StreamPlanner(ranks=ranks, micro_tokens=tokens, micro_rows=rows, layout=layout, depth=depth)
    sent = [micros for length in lengths for micros in planner.put(length)]
    early = [micro for micros in sent for micro in micros]
    assert not any(micro.masked for micro in early)
    sent += planner.flush()
    assert all(len(micros) == ranks and all(micro.rows for micro in micros) for micros in sent)
    real = [micro for micros in sent for micro in micros if not micro.masked]
    assert sorted(row for micro in real for row in micro.rows) == list(range(len(lengths)))
    for micro in real:
        held = [lengths[row] for row in micro.rows]
        if rows is not None:
            assert len(held) <= rows
        elif len(held) > 1:
            assert (len(held) * max(held) if layout == "padded" else sum(held)) <= 40
