"""Each rollout counts once in its group's baseline."""

from inspect import signature
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from agentgym.advantages.group import PROBED, Estimator, advantages, turn_advantages
from agentgym.samples import build_samples


def test_a_rollout_counts_once_in_its_baseline() -> None:
    got = advantages([1, 3, 3, 5, 11], [0, 1, 1, 2, 3], [0, 0, 0, 1, 1], estimator="dr_grpo")
    np.testing.assert_array_equal(got, [-1, 1, 1, -3, 3])
    got = advantages([1, 3, 3, 5, 11], [0, 1, 1, 2, 3], [0, 0, 0, 1, 1], estimator="grpo")
    np.testing.assert_allclose(got, np.array([-1, 1, 1, -1, 1]) / np.sqrt(2), atol=1e-6)


def test_string_ids_group_like_int_ids() -> None:
    rewards, rollouts, groups = [1, 3, 3, 5, 11], [0, 1, 1, 2, 3], [0, 0, 0, 1, 1]
    named = advantages(rewards, [f"r{i}" for i in rollouts], [f"g{i}" for i in groups])
    far_apart = advantages(rewards, np.array(rollouts) * 10**9, -np.array(groups) * 10**9)
    negative = advantages(rewards, np.array(rollouts) - 7, np.array(groups) - 7)
    plain = advantages(rewards, np.array(rollouts), np.array(groups))
    np.testing.assert_array_equal(named, plain)
    np.testing.assert_array_equal(far_apart, plain)
    np.testing.assert_array_equal(negative, plain)


@pytest.mark.parametrize("ids", [[0, 1, 1], ["a", "b", "b"], np.array([0, 1, 1])])
def test_unequal_sibling_rewards_name_the_rollout_and_its_rows(ids: Any) -> None:
    with pytest.raises(ValueError, match=r"rollout .*[1b].*: unequal rewards \[2.0, 6.0\] in its rows \[1, 2\]"):
        advantages([0, 2, 6], ids, [0, 0, 0])


def test_a_sibling_without_a_reward_is_unequal_too() -> None:
    with pytest.raises(ValueError, match="unequal rewards"):
        advantages([2, None], ["a", "a"], [0, 0])


def test_a_rollout_in_two_groups_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"rollout 5: unequal groups .* in its rows \[0, 2\]"):
        advantages([1, 2, 1], [5, 6, 5], [0, 0, 1])


@pytest.mark.parametrize("which", ["rollout", "group"])
def test_a_missing_id_is_an_error_and_is_not_treated_as_one_rollout(which: str) -> None:
    ids = (
        {"rollout": [1, None, None], "group": [0, 0, 0]}
        if which == "rollout"
        else {
            "rollout": [1, 2, 3],
            "group": [0, None, None],
        }
    )
    with pytest.raises(ValueError, match=f"{which} id: .*got None in row 1"):
        advantages([1, 2, 2], ids["rollout"], ids["group"])  # type: ignore[arg-type]


def test_float_ids_are_refused() -> None:
    with pytest.raises(ValueError, match="group id"):
        advantages([1.0, 2.0], [1, 2], np.array([0.0, 0.0]))


def test_rollout_numbers_may_have_gaps() -> None:
    assert advantages([1.0, 0.0], np.array([0, 2]), ["g"] * 2).tolist() == [0.5, -0.5]
    assert advantages([1.0, 1.0, 0.0], np.array([0, 0, 2]), ["g"] * 3).tolist() == [0.5, 0.5, -0.5]


def test_interleaved_groups_keep_their_own_baselines() -> None:
    got = advantages([0, 10, 2, 14], [0, 1, 2, 3], [0, 1, 0, 1], estimator="dr_grpo")
    np.testing.assert_array_equal(got, [-1, -2, 1, 2])


def test_uneven_groups_never_share_one_global_mean() -> None:
    got = advantages([5, 5, 5, 0, 1], [0, 1, 2, 3, 4], [0, 0, 0, 1, 1], estimator="dr_grpo")
    np.testing.assert_array_equal(got, [0, 0, 0, -0.5, 0.5])


ESTIMATORS: tuple[Estimator, ...] = get_args(Estimator)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_a_group_of_one_gets_zero_and_never_nan(estimator: Estimator) -> None:
    np.testing.assert_array_equal(advantages([7.5], ["a"], ["g"], estimator=estimator), [0])


def test_a_failed_rollout_is_excluded_from_the_baseline_and_has_no_advantage() -> None:
    got = advantages([100, None, 50], [0, 1, 2], [0, 0, 0], estimator="dr_grpo")
    np.testing.assert_array_equal(got, [25, np.nan, -25])


def test_a_failed_rollout_may_have_several_rows() -> None:
    got = advantages([100, None, None, 50], [0, 1, 1, 2], [0, 0, 0, 0])
    np.testing.assert_array_equal(got, [25, np.nan, np.nan, -25])


def test_leave_one_out_uses_the_mean_of_the_others() -> None:
    got = advantages([6, 3, 9, 12, 1], [0, 1, 2, 3, 4], [0, 0, 1, 1, 2], estimator="rloo")
    np.testing.assert_allclose(got, [3, -3, -3, 3, 0])


def test_without_std_the_advantage_is_the_distance_to_the_mean() -> None:
    got = advantages([6, 3, 9, 12], [0, 1, 2, 3], [0, 0, 1, 1], estimator="dr_grpo")
    np.testing.assert_array_equal(got, [1.5, -1.5, -1.5, 1.5])


def test_the_batch_deviation_counts_each_rollout_with_a_signal_once() -> None:
    # Distances -1 1 | -2 2; the third group has no signal; rollout 1 fans out into three rows.
    rewards, rollouts, groups = [1, 3, 3, 3, 0, 4, 5, 5], [0, 1, 1, 1, 2, 3, 4, 5], [0, 0, 0, 0, 1, 1, 2, 2]
    got = advantages(rewards, rollouts, groups, estimator="reinforce++")
    np.testing.assert_allclose(got, np.array([-1, 1, 1, 1, -2, 2, 0, 0]) / np.sqrt(10 / 3), atol=1e-5)
    np.testing.assert_array_equal(got[:6], advantages(rewards[:6], rollouts[:6], groups[:6], estimator="reinforce++"))


def test_maxrl_weights_a_success_by_its_rarity() -> None:
    got = advantages([1, 0, 0, 0, 1, 1, 1, 0, 0, 0], range(10), [0] * 4 + [1] * 4 + [2] * 2, estimator="maxrl")
    np.testing.assert_allclose(got, [3, -1, -1, -1, 1 / 3, 1 / 3, 1 / 3, -1, 0, 0])


def test_maxrl_refuses_a_negative_reward() -> None:
    with pytest.raises(ValueError, match=r"^reward: -0.1 is negative, .*use dr_grpo"):
        advantages([1, -0.1], [0, 1], [0, 0], estimator="maxrl")


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_no_estimator_counts_rows_as_rollouts_or_includes_failed_ones(estimator: Estimator) -> None:
    rewards, rollouts, groups = [1.0, 0.0, 0.5, 0.0, 1.0], [0, 1, 2, 3, 4], [0, 0, 0, 1, 1]
    once = advantages(rewards, rollouts, groups, estimator=estimator)
    rows = [4, 0, 2, 0, 3, 0, 1]
    again = advantages(
        [*(rewards[i] for i in rows), None],
        [*(rollouts[i] for i in rows), 9],
        [*(groups[i] for i in rows), 1],
        estimator=estimator,
    )
    np.testing.assert_allclose(again[:-1], once[rows], rtol=1e-12)
    assert np.isnan(again[-1])


def test_one_row_per_rollout_equals_the_plain_reshape() -> None:
    rewards = np.random.default_rng(0).normal(size=(32, 8))
    plain = (rewards - rewards.mean(1, keepdims=True)) / (rewards.std(1, ddof=1, keepdims=True) + 1e-6)
    got = advantages(rewards.ravel(), np.arange(256), np.arange(32).repeat(8), estimator="grpo")
    np.testing.assert_allclose(got, plain.ravel(), rtol=1e-12, atol=1e-12)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=12), st.randoms(use_true_random=False))
@settings(max_examples=50, deadline=None)
def test_the_order_of_rows_does_not_matter(fan_out: list[int], random: Any) -> None:
    rows = [(float(r % 3), r, r // 3) for r, k in enumerate(fan_out) for _ in range(k)]
    mixed = random.sample(rows, len(rows))
    first = dict(zip((r[1] for r in rows), advantages(*zip(*rows, strict=True)).tolist(), strict=True))
    again = dict(zip((r[1] for r in mixed), advantages(*zip(*mixed, strict=True)).tolist(), strict=True))
    assert first == pytest.approx(again, abs=1e-12)


@pytest.mark.parametrize("before", [0, 2, PROBED + 1])
@given(st.lists(st.integers(0, 6), min_size=1, max_size=20))
@settings(max_examples=30, deadline=None)
def test_ids_may_be_dense_or_far_apart(before: int, drawn: list[int]) -> None:
    rollouts = [*range(100, 100 + before), *drawn]
    groups = [number % 3 for number in rollouts]
    rewards = [float(number % 5) for number in rollouts]
    named = advantages(rewards, [f"r{number}" for number in rollouts], [f"g{number}" for number in groups])
    np.testing.assert_allclose(named, advantages(rewards, np.array(rollouts), np.array(groups)), atol=1e-12)


@pytest.mark.parametrize("ids", [["a", "a", None, "b", None], ["a", "b", None, "a"], ["a", "b", None], ["a", "a", 1.5]])
def test_an_invalid_id_is_named_with_its_first_row(ids: list[Any]) -> None:
    with pytest.raises(ValueError, match=f"^rollout id: expected a str or an int in every row, got {ids[2]} in row 2$"):
        advantages([1.0] * len(ids), ids, [0] * len(ids))


def test_the_given_rewards_are_not_changed() -> None:
    rewards = np.array([6.0, 3, 9, 12])
    advantages(rewards, np.arange(4), np.array([0, 0, 1, 1]), estimator="grpo")
    assert rewards.tolist() == [6, 3, 9, 12]


def test_unequal_columns_an_infinite_reward_and_an_unknown_estimator_are_refused() -> None:
    with pytest.raises(ValueError, match="2 rewards, 1 rollout ids, 1 group ids"):
        advantages([1, 2], [0], [0])
    with pytest.raises(ValueError, match="row 1 is infinite"):
        advantages([0, np.inf], [0, 1], [0, 0])
    with pytest.raises(ValueError, match=r"estimator: expected one of .*, got 'gae'; .*credit=\"turn\""):
        advantages([0, 1], [0, 1], [0, 0], estimator="gae")  # type: ignore[arg-type]


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_scores_that_differ_by_less_than_a_millionth_give_no_signal(estimator: Estimator) -> None:
    noise = [0.1 + 0.2 + 0.3, 0.3 + 0.2 + 0.1]
    assert noise[0] != noise[1]
    alone = advantages([1, 0], [2, 3], [1, 1], estimator=estimator)
    got = advantages([*noise, 1, 0], [0, 1, 2, 3], [0, 0, 1, 1], estimator=estimator)
    np.testing.assert_array_equal(got, [0, 0, *alone])
    assert advantages([1, 1 + 9e-7], [0, 1], [0, 0], estimator=estimator).tolist() == [0, 0]
    assert all(advantages([1, 1 + 2e-6], [0, 1], [0, 0], estimator=estimator) != 0)


def test_all_functions_that_compute_advantages_share_one_default_estimator() -> None:
    defaults = {
        signature(advantages).parameters["estimator"].default,
        signature(turn_advantages).parameters["estimator"].default,
        signature(build_samples).parameters["advantage_estimator"].default,
    }
    assert defaults == {"dr_grpo"}


def test_no_rows_give_no_advantages() -> None:
    assert len(advantages([], [], [])) == len(advantages([], np.zeros(0, int), np.zeros(0, int))) == 0
