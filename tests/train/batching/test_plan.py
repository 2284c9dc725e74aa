"""Optimizer steps count rollouts; ranks run in step; no sample is lost."""

from collections.abc import Sequence
from itertools import chain
from typing import Literal

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from agentgym.train.batching.bins import Cost
from agentgym.train.batching.plan import (
    Balance,
    Plan,
    cost_of,
    mini_batches,
    over_budget,
    plan_lengths,
    plan_step,
)
from agentgym.train.batching.prefix_tree import unique_tokens
from agentgym.types.sample import Sample

Layout = Literal["padded", "packed", "tree"]
Ids = tuple[list[int], list[int]]
"""Prompt and response ids."""

SQUARE = cost_of("square", 1)


def rows_of(counts: list[list[int]]) -> list[Sample]:
    """Return one sample per step; counts[g][r] steps of rollout r of group g."""
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
        )
        for g, rollouts in enumerate(counts)
        for r, steps in enumerate(rollouts)
        for step in range(steps)
    ]


def samples_of(ids: Sequence[Ids]) -> list[Sample]:
    """Return one rollout for each prompt and response."""
    return [
        Sample(
            group_id="g",
            rollout_id=f"r{i}",
            segment=0,
            step=0,
            prompt_ids=np.array(prompt),
            response_ids=np.array(response),
            loss_mask=np.ones(len(response), np.bool_),
            logprobs=np.zeros(len(response), np.float32),
            advantages=np.ones(len(response), np.float32),
            weight=1.0,
        )
        for i, (prompt, response) in enumerate(ids)
    ]


def bins_of(plans: Plan) -> list[list[set[int]]]:
    """Return the rows of each micro-batch of each rank, without padding."""
    return [[set(micro) for micro in plan if micro] for plan in plans]


STEPS = rows_of([[3, 2], [1, 4], [2, 1], [1, 1]])


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


def test_planning_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        mini_batches(STEPS, rollouts=0)
    with pytest.raises(ValueError, match="nothing to distribute"):
        plan_lengths([], ranks=1)


def test_five_rows_on_four_ranks_become_eight_with_three_masked() -> None:
    plans = plan_lengths([1] * 5, ranks=4, micro_samples=1)
    assert [len(plan) for plan in plans] == [2, 2, 2, 2]
    assert sum(not micro for plan in plans for micro in plan) == 3
    assert all(len(micro) <= 1 for plan in plans for micro in plan)


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_longest_first_balances_the_sum_of_squares(layout: Literal["padded", "packed"]) -> None:
    plans = plan_lengths([4, 3, 2, 1], ranks=2, layout=layout, cost=SQUARE)
    assert sorted(map(sorted, bins_of(plans)[0] + bins_of(plans)[1])) == [[0], [1, 2, 3]]  # 16 and 14


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_no_rank_is_empty_and_each_sample_occurs_once(layout: Literal["padded", "packed"]) -> None:
    plans = plan_lengths([5, 1, 1, 1, 1], ranks=2, layout=layout)
    assert bins_of(plans) == [[{0}], [{1, 2, 3, 4}]]


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_a_token_budget_holds_as_many_rows_as_fit(layout: Literal["padded", "packed"]) -> None:
    assert bins_of(plan_lengths([5, 5], ranks=2, max_tokens_per_microbatch=8, layout=layout)) == [[{0}], [{1}]]
    (plan, other) = plan_lengths([2] * 8, ranks=2, max_tokens_per_microbatch=8, layout=layout)
    assert [len(micro) for micro in plan + other] == [4, 4]


def test_a_budget_counts_padding_only_in_the_padded_layout() -> None:
    lengths = [5, 2, 1]
    assert len(plan_lengths(lengths, ranks=1, max_tokens_per_microbatch=8, layout="packed")[0]) == 1  # 5 + 2 + 1
    assert len(plan_lengths(lengths, ranks=1, max_tokens_per_microbatch=8, layout="padded")[0]) == 2  # 5, and 2 x 2


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_a_row_over_the_budget_is_alone_and_is_counted(layout: Literal["padded", "packed"]) -> None:
    lengths = [2, 12, 2]
    assert bins_of(plan_lengths(lengths, ranks=1, max_tokens_per_microbatch=8, layout=layout)) == [[{1}, {0, 2}]]
    assert over_budget(lengths, 8) == 1
    assert over_budget(lengths, None) == 0


def test_a_sample_over_the_budget_is_alone_in_a_tree_too() -> None:
    rows = samples_of([([1, 2, 3], [4]), ([1, 2, 3], list(range(9))), ([1, 2, 3], [5])])
    assert bins_of(plan_step(rows, ranks=1, layout="tree", max_tokens_per_microbatch=8, cost=Cost())) == [[{1}, {0, 2}]]


def test_bins_are_split_before_a_rank_gets_padding() -> None:
    plans = plan_lengths([4, 4, 3, 2, 2, 1], ranks=2, max_tokens_per_microbatch=8)
    assert sorted(map(sorted, chain.from_iterable(bins_of(plans)))) == [[0], [1], [2, 3], [4, 5]]
    assert not any(not micro for plan in plans for micro in plan)


def test_padded_rows_are_batched_with_rows_of_similar_length() -> None:
    plans = plan_lengths([9, 1, 8, 2, 9, 1], ranks=1, micro_samples=2, layout="padded")
    assert bins_of(plans) == [[{0, 4}, {2, 3}, {1, 5}]]


def test_rows_of_similar_cost_share_a_micro_batch_and_the_costliest_come_first() -> None:
    plans = plan_lengths([9, 1, 5, 1, 9, 5], ranks=2, micro_samples=1)
    assert bins_of(plans) == [[{0}, {5}, {1}], [{4}, {2}, {3}]]


def test_ranks_alternate_in_getting_the_costlier_row() -> None:
    plans = plan_lengths([8, 7, 6, 5], ranks=2, micro_samples=1)
    assert bins_of(plans) == [[{0}, {3}], [{1}, {2}]]  # 13 and 13 tokens


@pytest.mark.parametrize("budget", [None, 7])
def test_rows_are_swapped_until_the_ranks_are_balanced(budget: int | None) -> None:
    lengths = [3, 3, 2, 2, 2]  # longest first: 3 2 2 and 3 2
    plans = plan_lengths(lengths, ranks=2, max_tokens_per_microbatch=budget, layout="packed")
    assert [[sum(lengths[i] for i in part) for part in plan] for plan in bins_of(plans)] == [[6], [6]]


def test_no_swap_breaks_the_budget() -> None:
    """Sums of squares are 82 and 61; swapping the 1 would bring them closer, but 12 tokens exceed the budget of 11."""
    plans = plan_lengths([9, 6, 5, 1], ranks=2, max_tokens_per_microbatch=11, layout="packed", cost=SQUARE)
    assert bins_of(plans) == [[{0, 3}], [{1, 2}]]


def test_a_tight_budget_is_filled_exactly() -> None:
    """Filling the emptiest bin longest first would give 9 + 5 + 5 and need one more bin."""
    lengths = [9, 7, 6, 5, 5]
    plans = plan_lengths(lengths, ranks=2, max_tokens_per_microbatch=16, layout="packed")
    assert sorted(sum(lengths[i] for i in part) for plan in bins_of(plans) for part in plan) == [16, 16]


@pytest.mark.parametrize(
    ("balance", "expected"), [("length", [100, 200]), ("square", [1e4, 4e4]), ("flops", [101.25, 205.0])]
)
def test_the_cost_of_a_row_follows_the_balance_setting(balance: Balance, expected: list[float]) -> None:
    """100 + 100^2 / (6 x 1333.3) = 101.25."""
    lengths = np.array([100, 200])
    assert cost_of(balance, 8000 // 6 + 1).of(lengths, lengths**2).tolist() == pytest.approx(expected, rel=1e-3)


def test_invalid_limits_and_costs_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="max_tokens_per_microbatch, micro_samples: set one"):
        plan_lengths([1], ranks=1, max_tokens_per_microbatch=1, micro_samples=1)
    with pytest.raises(ValueError, match="micro_samples: a micro-batch needs at least 1"):
        plan_lengths([1], ranks=1, micro_samples=0)
    with pytest.raises(ValueError, match="sample 1 has no token"):
        plan_lengths([1, 0], ranks=1)
    with pytest.raises(ValueError, match="balance: expected length, square or flops, got 'tokens'"):
        cost_of("tokens", 8)  # type: ignore[arg-type]


# Shared prefixes


def test_samples_that_share_a_prompt_are_grouped_and_the_budget_counts_it_once() -> None:
    first, second = list(range(6)), list(range(10, 16))
    rows = samples_of([(prompt, [20 + i, 30]) for i in range(3) for prompt in (first, second)])
    plans = plan_step(rows, ranks=2, layout="tree", max_tokens_per_microbatch=12, cost=Cost())
    assert bins_of(plans) == [[{0, 2, 4}], [{1, 3, 5}]]  # 6 + 3 x 2 tokens each, 24 without sharing


def test_a_group_over_the_budget_is_split_between_rollouts_that_share_little() -> None:
    """Three turns of one rollout and three of another: the cut separates the rollouts, which share 2 tokens of 8."""
    one, other = [1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 13, 14, 15, 16, 17, 18]
    rows = samples_of([(ids[:n], [9 + n]) for n in (4, 6, 8) for ids in (one, other)])
    plans = plan_step(rows, ranks=1, layout="tree", max_tokens_per_microbatch=14, cost=Cost())
    assert sorted(map(sorted, bins_of(plans)[0])) == [[0, 2, 4], [1, 3, 5]]


@pytest.mark.parametrize(("prompt", "forwards"), [(5, 3), (2, 2)])
def test_a_prompt_is_computed_twice_only_to_save_a_sixteenth_of_a_forward(prompt: int, forwards: int) -> None:
    """Five groups of 20 unique tokens: two whole ones fit into 53, or two and a half with one prompt repeated."""
    rows = samples_of([([group] * prompt, [10 + i]) for group in range(1, 6) for i in range(20 - prompt)])
    plans = plan_step(rows, ranks=1, layout="tree", max_tokens_per_microbatch=53, cost=Cost())
    assert len(plans[0]) == forwards


def test_without_a_budget_there_is_one_tree_per_rank() -> None:
    rows = samples_of([([1, 2, 3], [4 + i] * 5) for i in range(8)])
    for ranks in (1, 2, 4):
        plans = plan_step(rows, ranks=ranks, layout="tree", max_tokens_per_microbatch=None, cost=Cost())
        assert [[len(part) for part in plan] for plan in bins_of(plans)] == [[8 // ranks]] * ranks


ids = st.tuples(
    st.lists(st.integers(1, 2), min_size=1, max_size=8), st.lists(st.integers(1, 2), min_size=1, max_size=8)
)


def check_plan(plans: Plan, rows: int, ranks: int) -> list[list[int]]:
    """Check the invariants of a plan for any layout and limit, and return the real micro-batches."""
    assert len(plans) == ranks
    assert len({len(plan) for plan in plans}) == 1
    real = [micro for plan in plans for micro in plan if micro]
    assert sorted(i for micro in real for i in micro) == list(range(rows))
    assert len(real) == min(rows, sum(map(len, plans)))  # padding only if there are too few rows
    return real


@given(st.lists(ids, min_size=1, max_size=30), st.integers(1, 5), st.sampled_from([None, 1, 8, 16, 40]))
@settings(max_examples=150, deadline=None)
@pytest.mark.parametrize("layout", ["padded", "packed", "tree"])
def test_ranks_run_equally_many_forwards_within_the_budget_and_lose_no_sample(
    layout: Layout, drawn: list[Ids], ranks: int, budget: int | None
) -> None:
    rows = samples_of(drawn)
    plans = plan_step(rows, ranks=ranks, layout=layout, max_tokens_per_microbatch=budget, cost=cost_of("flops", 4))
    for micro in check_plan(plans, len(rows), ranks):
        chosen = [rows[i] for i in micro]
        size = {
            "padded": len(chosen) * max(map(len, chosen)),
            "packed": sum(map(len, chosen)),
            "tree": unique_tokens(chosen),
        }
        assert budget is None or len(chosen) == 1 or size[layout] <= budget


@given(st.lists(st.integers(1, 60), min_size=1, max_size=40), st.integers(1, 6), st.sampled_from([1, 3, 8]))
@settings(max_examples=150, deadline=None)
@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_a_fixed_micro_batch_size_gives_the_minimum_number_of_forwards(
    layout: Literal["padded", "packed"], lengths: list[int], ranks: int, size: int
) -> None:
    plans = plan_lengths(lengths, ranks=ranks, micro_samples=size, layout=layout, cost=SQUARE)
    assert all(len(micro) <= size for micro in check_plan(plans, len(lengths), ranks))
    assert len(plans[0]) == -(-len(lengths) // (ranks * size))


@given(st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=4), min_size=1, max_size=6), st.integers(1, 5))
@settings(max_examples=50, deadline=None)
def test_all_samples_of_a_rollout_are_in_one_optimizer_step(counts: list[list[int]], rollouts: int) -> None:
    rows = rows_of(counts)
    steps = mini_batches(rows, rollouts=rollouts)
    assert sorted(i for step in steps for i in step) == list(range(len(rows)))
    names = [{rows[i].rollout_id for i in step} for step in steps]
    assert all(0 < len(step) <= rollouts for step in names)
    assert sum(map(len, names)) == len({row.rollout_id for row in rows})


def test_a_plan_is_nearly_balanced_for_long_tailed_lengths() -> None:
    """With log-normal lengths and a tenth of them at the limit, no rank waits for more than one percent."""
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(6.5, 0.9, 512), 24, 4096).astype(int)
    lengths[rng.random(512) < 0.1] = 4096
    cost = cost_of("flops", 2560)
    plans = plan_lengths(lengths.tolist(), ranks=8, micro_samples=8, layout="packed", cost=cost)
    load = np.array([[cost.of(lengths[m], lengths[m] ** 2).sum() for m in p] for p in plans])
    assert load.max(0).sum() / load.sum() * 8 < 1.002
