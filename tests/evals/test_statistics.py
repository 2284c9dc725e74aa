"""An evaluation's estimates, compared with sums over all subsets and all sign flips, and with normal theory."""

import math
from collections.abc import Sequence
from itertools import combinations, product

import numpy as np
import pytest

from agentgym.evals.statistics import interval_over_tasks, pass_at_k, pass_hat_k, sign_flip_p


@pytest.mark.parametrize(("scored", "solved", "k"), [(4, 1, 2), (5, 0, 3), (6, 4, 3), (3, 3, 3), (8, 5, 1)])
def test_pass_at_k_and_pass_hat_k_are_shares_of_all_subsets(scored: int, solved: int, k: int) -> None:
    rewards = [1] * solved + [0] * (scored - solved)
    drawn = list(combinations(rewards, k))
    assert pass_at_k(scored, solved, k) == pytest.approx(sum(map(any, drawn)) / len(drawn))
    assert pass_hat_k(scored, solved, k) == pytest.approx(sum(map(all, drawn)) / len(drawn))


def test_too_few_attempts_have_no_estimate() -> None:
    assert math.isnan(pass_at_k(1, 1, 2))
    assert math.isnan(pass_hat_k(1, 1, 2))


def test_the_interval_is_the_normal_approximation_for_many_tasks() -> None:
    values = np.random.default_rng(1).normal(0.5, 0.2, 400)
    low, high = interval_over_tasks(list(values))
    error = 1.96 * values.std() / 20
    assert low == pytest.approx(values.mean() - error, abs=0.1 * error)
    assert high == pytest.approx(values.mean() + error, abs=0.1 * error)


def test_a_task_with_more_scored_rollouts_weighs_more() -> None:
    values = [0.0, 1.0] * 50
    low, high = interval_over_tasks(values, [1, 3] * 50)
    assert low < 0.75 < high
    assert low > interval_over_tasks(values).low


def test_without_tasks_there_is_no_interval_and_no_p() -> None:
    assert all(map(math.isnan, interval_over_tasks([])))
    assert math.isnan(sign_flip_p([]))


@pytest.mark.parametrize("differences", [[0.5, 0.25, -0.25], [1.0] * 5, [0.0, 0.0], [0.1, 0.2, 0.3, -0.6]])
def test_p_is_the_share_of_sign_flips_with_as_large_a_mean(differences: Sequence[float]) -> None:
    sums = [
        sum(s * d for s, d in zip(signs, differences, strict=True))
        for signs in product((1, -1), repeat=len(differences))
    ]
    as_large = [abs(one) >= abs(sum(differences)) - 1e-12 for one in sums]
    assert sign_flip_p(differences) == pytest.approx(sum(as_large) / len(as_large))


def test_sampled_flips_agree_with_the_normal_approximation() -> None:
    differences = np.random.default_rng(2).normal(0.03, 0.2, 200)
    z = abs(differences.sum()) / math.sqrt((differences**2).sum())
    assert sign_flip_p(list(differences)) == pytest.approx(math.erfc(z / math.sqrt(2)), abs=0.02)
