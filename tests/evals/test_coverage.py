"""The intervals and p-values of evaluations, checked on simulated ones whose true values are known."""

from collections.abc import Callable, Mapping, Sequence
from math import comb

import numpy as np
import pytest

from agentgym.evals import statistics
from agentgym.evals.statistics import Array, beta_quantile, intervals, pass_at_k, pass_hat_k, sign_flip_p

Rng = np.random.Generator
Played = Callable[[Rng, float, tuple[int, int, int]], Array]
"""A function that draws rewards with this mean, of shape [evaluations, tasks, attempts]."""
MEANS = (0.02, 0.1, 0.5, 0.98)
TASKS = (8, 32, 128)
ATTEMPTS = (1, 4)
LEAST, MOST = 0.93, 0.97
LITTLE = 0.1
"""Cases are only held to MOST if the share of evaluations with an exact bound is below this."""


def beta(rng: Rng, mean: float, strength: float, shape: Sequence[int]) -> Array:
    return rng.beta(mean * strength, (1 - mean) * strength, tuple(shape))


def alike(rng: Rng, mean: float, shape: tuple[int, int, int]) -> Array:
    """Draw 0 or 1; all tasks are equally hard."""
    return (rng.random(shape) < mean).astype(float)


def unlike(strength: float) -> Played:
    """Return a function that draws 0 or 1; the smaller the strength, the more the tasks' chances differ."""

    def play(rng: Rng, mean: float, shape: tuple[int, int, int]) -> Array:
        return (rng.random(shape) < beta(rng, mean, strength, (*shape[:2], 1))).astype(float)

    return play


def fractions(strength: float) -> Played:
    """Return a function that draws values from 0 to 1; the smaller the strength, the more they spread."""
    return lambda rng, mean, shape: beta(rng, mean, strength, shape)


def quarters(rng: Rng, mean: float, shape: tuple[int, int, int]) -> Array:
    """Draw scores of four parts, each right or wrong; the tasks are not equally hard."""
    return rng.binomial(4, beta(rng, mean, 3.0, (*shape[:2], 1)), shape) / 4


def rare(rng: Rng, mean: float, shape: tuple[int, int, int]) -> Array:
    """Draw a little for the form, and 1 for the few tasks that are solved; mirrored for a mean above 0.5."""
    form = min(mean, 1 - mean) / 2
    solved = rng.random((*shape[:2], 1)) < form / (1 - form)
    rewards = np.where(solved, 1.0, 2 * form * rng.random(shape))
    return rewards if mean <= 0.5 else 1 - rewards


KINDS: Mapping[str, Played] = {
    "alike": alike,
    "unlike": unlike(1.0),
    "somewhat unlike": unlike(4.0),
    "far apart": fractions(1.0),
    "apart": fractions(5.0),
    "close": fractions(20.0),
    "quarters": quarters,
    "rare": rare,
}


def covered(values: Array, true: float, *, least: float = 0.0, most: float = 1.0) -> tuple[float, float]:
    """Return how often the interval contains the true value, and how often its bound is exact.

    Both are shares of the evaluations. Exact bounds are Clopper and Pearson's, for values of 0 and 1, and the bound
    for
    unseen tasks.
    """
    low, high = intervals(values, least=least, most=most)
    unseen = 1 - 0.025 ** (1 / values.shape[1])
    mean = values.mean(1)
    exact = (np.isin(values, (least, most)).all(1)) | (high <= mean + unseen * (most - mean) + 1e-9)
    exact |= low >= mean - unseen * (mean - least) - 1e-9
    return float(((low <= true + 1e-9) & (high >= true - 1e-9)).mean()), float(exact.mean())


def check(share: float, exact: float, *, of: int, at_most: bool, case: object) -> None:
    """Assert that a coverage is as promised, within three standard errors of the simulation."""
    assert share >= LEAST - 3 * (LEAST * (1 - LEAST) / of) ** 0.5, (case, share)
    if at_most and exact < LITTLE:
        assert share <= MOST + 3 * (MOST * (1 - MOST) / of) ** 0.5, (case, share)


def check_intervals(tasks: int, attempts: int, runs: int) -> int:
    """Check the intervals of mean rewards; return how many cases were held to the upper limit."""
    rng, limited = np.random.default_rng(tasks + attempts), 0
    for mean in MEANS:
        for kind, play in KINDS.items():
            share, exact = covered(play(rng, mean, (runs, tasks, attempts)).mean(2), mean)
            at_most = mean in (0.1, 0.5) and tasks >= 32
            check(share, exact, of=runs, at_most=at_most, case=(tasks, attempts, mean, kind))
            limited += at_most and exact < LITTLE
    return limited


@pytest.mark.parametrize(("tasks", "attempts", "limited"), [(8, 4, 0), (32, 1, 3), (128, 4, 10)])
def test_an_interval_contains_the_true_mean_as_often_as_promised(tasks: int, attempts: int, limited: int) -> None:
    assert check_intervals(tasks, attempts, 100) >= limited


@pytest.mark.slow
@pytest.mark.parametrize("attempts", ATTEMPTS)
@pytest.mark.parametrize("tasks", TASKS)
def test_an_interval_contains_the_true_mean_in_every_case(tasks: int, attempts: int) -> None:
    check_intervals(tasks, attempts, 2000)


def check_passes(tasks: int, attempts: int, runs: int) -> None:
    """Check the intervals of pass@k and pass^k, whose true values are known if all tasks are equally hard."""
    rng = np.random.default_rng(3)
    for mean in MEANS:
        solved = alike(rng, mean, (runs, tasks, attempts)).sum(2).astype(int)
        for k in {1, 2, attempts} - {2 if attempts == 1 else 0}:
            for estimate, true in ((pass_at_k, 1 - (1 - mean) ** k), (pass_hat_k, mean**k)):
                table = np.array([estimate(attempts, count, k) for count in range(attempts + 1)])
                share, exact = covered(table[solved], true)
                check(share, exact, of=runs, at_most=False, case=(tasks, attempts, mean, k, estimate.__name__))


def test_intervals_of_pass_at_k_and_pass_hat_k_contain_the_true_value() -> None:
    check_passes(32, 4, 100)


@pytest.mark.slow
@pytest.mark.parametrize("attempts", ATTEMPTS)
@pytest.mark.parametrize("tasks", TASKS)
def test_intervals_of_pass_at_k_and_pass_hat_k_contain_the_true_value_in_every_case(tasks: int, attempts: int) -> None:
    check_passes(tasks, attempts, 2000)


PAIRS = ((0.02, 0.02), (0.02, 0.1), (0.1, 0.1), (0.1, 0.5), (0.5, 0.5), (0.5, 0.98), (0.98, 0.98))


def check_differences(tasks: int, attempts: int, runs: int) -> None:
    """Check the interval of the difference of two models on the same tasks."""
    rng = np.random.default_rng(4)
    for pair in PAIRS:
        for kind, play in KINDS.items():
            one, other = (play(rng, mean, (runs, tasks, attempts)).mean(2) for mean in pair)
            share, exact = covered(other - one, pair[1] - pair[0], least=-1.0)
            at_most = pair in ((0.1, 0.1), (0.5, 0.5)) and tasks >= 32
            check(share, exact, of=runs, at_most=at_most, case=(tasks, attempts, pair, kind))


def test_the_interval_of_a_difference_contains_the_true_difference() -> None:
    check_differences(32, 4, 50)


@pytest.mark.slow
@pytest.mark.parametrize("attempts", ATTEMPTS)
@pytest.mark.parametrize("tasks", TASKS)
def test_the_interval_of_a_difference_contains_the_true_difference_in_every_case(tasks: int, attempts: int) -> None:
    check_differences(tasks, attempts, 2000)


def check_p(monkeypatch: pytest.MonkeyPatch, tasks: int, attempts: int, mean: float, kind: str, runs: int) -> None:
    """Check that small p-values are no more frequent than they claim if both models are the same; tasks may differ."""
    monkeypatch.setattr(statistics, "RESAMPLES", 199)
    rng = np.random.default_rng(5)
    chances = beta(rng, mean, 2.0, (runs, tasks, 1))

    def side() -> Array:
        shape = runs, tasks, attempts
        rewards = rng.random(shape) < chances if kind == "0 or 1" else beta(rng, mean, 3.0, shape)
        return np.asarray(rewards.mean(2))

    p = np.array([sign_flip_p(list(differences)) for differences in side() - side()])
    for level in (0.01, 0.05, 0.1, 0.5):
        assert (p <= level).mean() <= level + 3.5 * (level * (1 - level) / runs) ** 0.5, (tasks, mean, kind, level)


@pytest.mark.parametrize(("tasks", "mean", "kind"), [(8, 0.1, "0 or 1"), (32, 0.5, "fractions")])
def test_small_p_values_are_not_too_frequent_by_chance(
    monkeypatch: pytest.MonkeyPatch, tasks: int, mean: float, kind: str
) -> None:
    check_p(monkeypatch, tasks, 1, mean, kind, 150)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["0 or 1", "fractions"])
@pytest.mark.parametrize("attempts", ATTEMPTS)
@pytest.mark.parametrize("tasks", TASKS)
def test_small_p_values_are_not_too_frequent_by_chance_in_every_case(
    monkeypatch: pytest.MonkeyPatch, tasks: int, attempts: int, kind: str
) -> None:
    for mean in MEANS:
        check_p(monkeypatch, tasks, attempts, mean, kind, 600)


@pytest.mark.parametrize(("solved", "tasks"), [(0, 8), (1, 8), (16, 32), (2, 128), (127, 128)])
def test_bounds_for_values_of_0_and_1_are_those_of_the_binomial_distribution(solved: int, tasks: int) -> None:
    values = np.array([[1.0] * solved + [0.0] * (tasks - solved)])
    [low], [high] = intervals(values, least=0.0, most=1.0)

    def at_most(count: int, chance: float) -> float:
        return sum(comb(tasks, i) * chance**i * (1 - chance) ** (tasks - i) for i in range(count + 1))

    assert at_most(solved, high) == pytest.approx(0.025, rel=1e-6) if solved < tasks else high == 1
    assert 1 - at_most(solved - 1, low) == pytest.approx(0.025, rel=1e-6) if solved else low == 0


@pytest.mark.parametrize(
    ("a", "b", "found"),
    [
        (1.0, 8.0, 1 - 0.025**0.125),  # in closed form
        (5.0, 1.0, 0.975**0.2),
        (0.5, 0.5, np.sin(np.pi * 0.975 / 2) ** 2),
        (1.0, 1.0, 0.975),
        (2.0, 2.0, 0.9057007),  # the root of 3x^2 - 2x^3 = 0.975
    ],
)
def test_beta_quantiles_agree_with_their_closed_form(a: float, b: float, found: float) -> None:
    assert beta_quantile(0.975, np.array([a]), np.array([b]))[0] == pytest.approx(found, abs=1e-6)
