"""Estimates for evaluations: pass@k, pass^k, intervals over tasks, and a paired test of two evaluations."""

from collections.abc import Sequence
from itertools import product
from math import comb, lgamma
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 10_000
"""Number of random sign flips in a permutation test that isn't exact."""
EXACT_TASKS = 13
"""Maximum number of tasks for which all sign flips are tried."""
Array: TypeAlias = NDArray[np.float64]
Z = 1.959963984540054
"""The 97.5 % quantile of the standard normal distribution."""
MOST_TRIALS = 1e6
"""Upper limit of the effective number of trials, which has no bound if the values hardly differ."""
_TAIL = 0.025
"""The probability that a bound is on the wrong side of the true value."""
_CHUNK = 1 << 22
"""Maximum number of draws in memory at once."""


def pass_at_k(scored: int, solved: int, k: int) -> float:
    """Estimate without bias the probability that at least one of `k` attempts solves a task.

    With c of n attempts solved, the estimate is 1 - C(n - c, k) / C(n, k) (Chen et al., 2021,
    https://arxiv.org/abs/2107.03374). It is nan if fewer than k attempts are scored.
    """
    return 1 - comb(scored - solved, k) / comb(scored, k) if scored >= k else float("nan")


def pass_hat_k(scored: int, solved: int, k: int) -> float:
    """Estimate without bias the probability that all of `k` attempts solve a task.

    With c of n attempts solved, the estimate is C(c, k) / C(n, k), which tau-bench calls pass^k (Yao et al., 2024,
    https://arxiv.org/abs/2406.12045). It is nan if fewer than k attempts are scored.
    """
    return comb(solved, k) / comb(scored, k) if scored >= k else float("nan")


class Interval(NamedTuple):
    """The bounds of a 95 % interval, which contains the estimated value in at least 93 % of all evaluations."""

    low: float
    high: float

    def __str__(self) -> str:
        return f"[{self.low:.3f}, {self.high:.3f}]"


def interval_over_tasks(
    values: Sequence[float], weights: Sequence[float] | None = None, *, least: float = 0.0, most: float = 1.0
) -> Interval:
    """Return the 95 % interval of the mean over all possible tasks; the evaluated tasks are a sample of them.

    Args:
        values: One value per task.
        weights: The number of rollouts that each value averages; None weights all values equally.
        least: The smallest possible value. If one of `values` is smaller, that one is used.
        most: The largest possible value. If one of `values` is larger, that one is used.

    Returns:
        The bounds; nan if there are no values.
    """
    value = np.asarray(values, np.float64)
    if not len(value):
        return Interval(float("nan"), float("nan"))
    weight = None if weights is None else np.asarray(weights, np.float64)[None]
    low, high = intervals(value[None], weight, least=min(least, value.min()), most=max(most, value.max()))
    return Interval(float(low[0]), float(high[0]))


def intervals(values: Array, weights: Array | None = None, *, least: float, most: float) -> tuple[Array, Array]:
    """Return the lower and upper bounds for each row of task values; see `interval_over_tasks`.

    The bounds are those of Clopper and Pearson (1934). Their number of trials is the one at which a share has the
    variance of the mean, which Korn and Graubard (1998) call the effective sample size. For values of 0 and 1, that is
    the number of tasks, and the interval is exact.

    The sample may miss a rare kind of task: one that makes up so small a share of all tasks that 2.5 % of all samples
    of this size have none of it. Each bound is at least as far from the mean as such a kind could move the mean.
    """
    unit = (values - least) / (most - least)
    weight = np.ones_like(unit) if weights is None else weights / weights.mean(1, keepdims=True)
    tasks = weight.sum(1) ** 2 / (weight**2).sum(1)
    mean = (weight * unit).mean(1)
    of_mean = (weight**2 * (unit - mean[:, None]) ** 2).sum(1) / unit.shape[1] ** 2
    with np.errstate(divide="ignore", invalid="ignore"):
        trials = mean * (1 - mean) / of_mean
    exact = ((unit == 0) | (unit == 1)).all(1) & (weight == weight[:, :1]).all(1)
    trials = np.where(of_mean > 0, np.minimum(trials * _fewer(tasks), MOST_TRIALS), MOST_TRIALS)
    trials = np.where(exact, tasks, trials)
    unseen = 1 - _TAIL ** (1 / tasks)
    high = np.maximum(_upper(mean, trials), mean + (1 - mean) * unseen)
    low = np.minimum(1 - _upper(1 - mean, trials), mean - mean * unseen)
    return least + low * (most - least), least + high * (most - least)


def _fewer(tasks: Array) -> Array:
    """Return the factor that reduces the effective sample size because the variance is only estimated (Student's t)."""
    free = np.maximum(tasks - 1, 1.0)
    more = [  # Abramowitz and Stegun, 26.7.5
        (Z**3 + Z) / 4,
        (5 * Z**5 + 16 * Z**3 + 3 * Z) / 96,
        (3 * Z**7 + 19 * Z**5 + 17 * Z**3 - 15 * Z) / 384,
    ]
    t = Z + np.sum([term / free**power for power, term in enumerate(more, start=1)], axis=0)
    return np.asarray((Z / t) ** 2 * free / (free + 1))


def _upper(mean: Array, trials: Array) -> Array:
    """Return Clopper and Pearson's upper bounds of shares, for numbers of trials that needn't be integers."""
    solved = mean * trials
    beyond = solved >= trials - 1e-9
    rest = np.where(beyond, 1.0, trials - solved)
    return np.where(beyond, 1.0, beta_quantile(1 - _TAIL, solved + 1, rest))


def beta_quantile(share: float, a: Array, b: Array) -> Array:
    """Return the quantiles of the Beta(a, b) distributions at `share`, by Newton's method and bisection."""
    low, high = np.zeros_like(a), np.ones_like(a)
    log_beta = np.array([lgamma(x) + lgamma(y) - lgamma(x + y) for x, y in zip(a, b, strict=True)])
    spread = np.sqrt(a * b / (a + b + 1)) / (a + b)
    found = np.clip(a / (a + b) + Z * spread * (1 if share > 0.5 else -1), 1e-12, 1 - 1e-12)
    left = np.arange(len(a))
    for _ in range(100):
        x, of_a, of_b = found[left], a[left], b[left]
        over = beta_share(x, of_a, of_b, log_beta[left]) - share
        low[left], high[left] = np.where(over < 0, x, low[left]), np.where(over < 0, high[left], x)
        density = np.exp((of_a - 1) * np.log(x) + (of_b - 1) * np.log1p(-x) - log_beta[left])
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            step = x - over / density
        inside = (step > low[left]) & (step < high[left])
        found[left] = np.where(inside, step, (low[left] + high[left]) / 2)
        left = left[np.abs(found[left] - x) > 1e-9]
        if not len(left):
            break
    return found


def beta_share(x: Array, a: Array, b: Array, log_beta: Array) -> Array:
    """Return the shares of the Beta(a, b) distributions below x, for 0 < x < 1.

    This is the regularized incomplete beta function, by the continued fraction of Lentz's method (Press et al.,
    Numerical Recipes, 6.4). `log_beta` is the logarithm of B(a, b).
    """
    turned = x > (a + 1) / (a + b + 2)
    p, q, y = np.where(turned, b, a), np.where(turned, a, b), np.where(turned, 1 - x, x)
    front = np.exp(p * np.log(y) + q * np.log1p(-y) - log_beta) / p
    c, d = np.ones_like(y), 1 / (1 - (p + q) * y / (p + 1))
    fraction = d.copy()
    for m in range(1, 1000):
        for term in (
            m * (q - m) * y / ((p + 2 * m - 1) * (p + 2 * m)),
            -(p + m) * (p + q + m) * y / ((p + 2 * m) * (p + 2 * m + 1)),
        ):
            d, c = 1 / (1 + term * d), 1 + term / c
            fraction *= c * d
        if (np.abs(c * d - 1) < 1e-11).all():
            break
    return np.asarray(np.where(turned, 1 - front * fraction, front * fraction))


def sign_flip_p(differences: Sequence[float]) -> float:
    """Return the two-sided p-value of a paired permutation test: how often random signs give a mean at least as large.

    If both sides are equal, each task's difference could just as well have had the other sign (Fisher, 1935). With up
    to EXACT_TASKS tasks, all combinations of signs are tried. With more, RESAMPLES random combinations and the observed
    one are. Returns nan if there are no tasks.
    """
    difference = np.asarray(differences, np.float64)
    if not len(difference):
        return float("nan")
    seen = abs(difference.sum()) - 1e-9 * np.abs(difference).sum()
    if len(difference) <= EXACT_TASKS:
        signs = np.array(list(product((-1.0, 1.0), repeat=len(difference))))
        return float((np.abs(signs @ difference) >= seen).mean())
    rng = np.random.default_rng(0)
    as_large = 0
    rows = max(1, _CHUNK // len(difference))
    for start in range(0, RESAMPLES, rows):
        drawn = rng.integers(2, size=(min(rows, RESAMPLES - start), len(difference))) * 2.0 - 1.0
        as_large += int((np.abs(drawn @ difference) >= seen).sum())
    return (as_large + 1) / (RESAMPLES + 1)


def least_p(differences: Sequence[float]) -> float:
    """Return the smallest p-value that differences of these sizes could have: the one if all had the same sign."""
    differing = sum(difference != 0 for difference in differences)
    return float(min(1.0, 2.0 ** (1 - differing))) if differences else float("nan")
