"""Optimizer steps count rollouts; ranks stay in step; nothing is lost."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentgym.train.plan import mini_batches, over_budget, shares
from agentgym.types import Sample


def rows_of(counts: list[list[int]]) -> list[Sample]:
    """One sample per step; counts[g][r] steps of rollout r of group g."""
    return [
        Sample(
            group_id=f"p{g}",
            rollout_id=f"p{g}/{r}",
            segment=0,
            step=step,
            prompt_ids=np.array([1]),
            response_ids=np.array([2]),
            loss_mask=np.array([True]),
            logprobs=np.zeros(1, np.float32),
            advantages=np.ones(1, np.float32),
            weight=1 / steps,
            policy_version=0,
            is_last=step == steps - 1,
        )
        for g, rollouts in enumerate(counts)
        for r, steps in enumerate(rollouts)
        for step in range(steps)
    ]


STEPS = rows_of([[3, 2], [1, 4], [2, 1], [1, 1]])


def test_mini_batches_count_prompts_and_not_rows() -> None:
    assert mini_batches(STEPS, groups=2) == [list(range(10)), list(range(10, 15))]


def test_mini_batches_count_rollouts_and_not_rows() -> None:
    assert mini_batches(STEPS, rollouts=4) == [list(range(10)), list(range(10, 15))]


def test_a_rollout_keeps_all_its_samples_in_one_optimizer_step_in_any_row_order() -> None:
    mixed = [STEPS[i] for i in np.random.default_rng(0).permutation(len(STEPS))]
    steps = mini_batches(mixed, rollouts=3)
    homes: dict[str, set[int]] = {}
    for n, rows in enumerate(steps):
        for i in rows:
            homes.setdefault(mixed[i].rollout_id, set()).add(n)
    assert all(len(home) == 1 for home in homes.values())
    assert sorted(i for rows in steps for i in rows) == list(range(15))


def test_steps_are_even_and_the_tail_is_flushed() -> None:
    nine = rows_of([[1] * 9])
    assert [len(rows) for rows in mini_batches(nine, rollouts=8)] == [5, 4]
    assert [len(rows) for rows in mini_batches(nine)] == [9]
    assert mini_batches([], rollouts=8) == []


def test_a_mini_batch_is_counted_in_one_thing() -> None:
    with pytest.raises(ValueError, match="not in both"):
        mini_batches(STEPS, rollouts=1, groups=1)
    with pytest.raises(ValueError, match="at least 1"):
        mini_batches(STEPS, rollouts=0)
    with pytest.raises(ValueError, match="not both"):
        shares([1], ranks=1, micro_tokens=1, micro_rows=1)
    with pytest.raises(ValueError, match="nothing to share"):
        shares([], ranks=1)


def test_five_rows_on_four_ranks_become_eight_with_three_masked() -> None:
    plans = shares([1] * 5, ranks=4, micro_rows=1)
    assert [len(micros) for micros in plans] == [2, 2, 2, 2]
    assert sum(micro.masked for micros in plans for micro in micros) == 3
    assert all(len(micro.rows) == 1 for micros in plans for micro in micros)


def test_longest_first_balances_the_sum_of_squares() -> None:
    plans = shares([4, 3, 2, 1], ranks=2)
    assert [[micro.rows for micro in micros] for micros in plans] == [[(0,)], [(1, 2, 3)]]  # 16 and 14


def test_no_rank_is_empty_and_each_sample_is_there_once() -> None:
    plans = shares([5, 1, 1, 1, 1], ranks=2)
    assert [[micro.rows for micro in micros] for micros in plans] == [[(0,)], [(1, 2, 3, 4)]]


def test_a_token_budget_holds_as_many_rows_as_fit_padded() -> None:
    assert [[m.rows for m in micros] for micros in shares([5, 5], ranks=2, micro_tokens=8)] == [[(0,)], [(1,)]]
    (plan, other) = shares([2] * 8, ranks=2, micro_tokens=8)
    assert [len(micro.rows) for micro in plan + other] == [4, 4]


def test_a_row_over_the_budget_stands_alone_and_is_counted() -> None:
    lengths = [12, 2, 2]
    ((alone, rest),) = shares(lengths, ranks=1, micro_tokens=8)
    assert (alone.rows, rest.rows) == ((0,), (1, 2))
    assert over_budget(lengths, 8) == 1
    assert over_budget(lengths, None) == 0


def test_a_rank_with_fewer_micro_batches_halves_its_own_before_it_pads() -> None:
    plans = shares([4, 4, 3, 2, 2, 1], ranks=2, micro_tokens=8)
    assert [[micro.rows for micro in micros] for micros in plans] == [[(0,), (2,)], [(1, 3), (4, 5)]]
    assert not any(micro.masked for micros in plans for micro in micros)


@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=40),
    st.integers(1, 6),
    st.sampled_from([("micro_tokens", 1), ("micro_tokens", 64), ("micro_rows", 1), ("micro_rows", 3), None]),
)
@settings(max_examples=200, deadline=None)
def test_every_rank_makes_as_many_forwards_none_empty_none_lost(
    lengths: list[int], ranks: int, limit: tuple[str, int] | None
) -> None:
    plans = shares(lengths, ranks=ranks, **dict([limit] if limit else []))
    assert len(plans) == ranks
    assert len({len(micros) for micros in plans}) == 1
    everything = [micro for micros in plans for micro in micros]
    assert all(micro.rows for micro in everything)
    assert sorted(i for micro in everything if not micro.masked for i in micro.rows) == list(range(len(lengths)))
    for micro in everything:
        if limit and limit[0] == "micro_rows":
            assert len(micro.rows) <= limit[1]
        if limit and limit[0] == "micro_tokens" and len(micro.rows) > 1:
            assert len(micro.rows) * max(lengths[i] for i in micro.rows) <= limit[1]
