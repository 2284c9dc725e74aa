"""What a reward is worth: baselines over groups of rollouts, each rollout once. Numpy only.

Every estimator is the distance to the group's mean in a unit of its own::

    advantage = (reward - mean) / unit         n rollouts are scored in the group, mean is over their rewards

    dr_grpo      1                                            Dr. GRPO, arXiv 2503.20783
    grpo         s + 1e-6                                     arXiv 2402.03300
    rloo         (n - 1) / n: the mean is of the others       arXiv 2402.14740
    reinforce++  S + 1e-6                                     REINFORCE++ with a baseline, arXiv 2501.03262
    maxrl        mean; the advantage is 0 where that is 0     MaxRL, arXiv 2602.02710

s is the group's standard deviation, S that of reward - mean over the rollouts of all groups with a signal; both are
unbiased. REINFORCE++ has it over tokens: here each rollout counts once, however long it is. MaxRL climbs
log(mean reward), which is the likelihood of success where rewards are 0 and 1; a negative reward has no logarithm and
is refused, and a group in which nothing succeeded has no gradient.

A group has a signal where its largest and its smallest score differ by LEAST_DIFFERENCE or more. All advantages of a
group without one, and of a group of one, are exactly 0.
"""

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from agentgym.returns import LEAST_DIFFERENCE, differ, returns_by_turn, turn_rewards
from agentgym.types import Floats, Ints, Rollout

Estimator: TypeAlias = Literal["grpo", "dr_grpo", "rloo", "reinforce++", "maxrl"]
Ids: TypeAlias = Sequence[str] | Sequence[int] | NDArray[Any]

EPSILON = 1e-6
"""Added to a standard deviation, in units of reward."""


def advantages(
    rewards: Sequence[float | None] | NDArray[Any],
    rollouts: Ids,
    groups: Ids,
    *,
    estimator: Estimator = "dr_grpo",
) -> NDArray[np.float64]:
    """One advantage per row; a rollout counts once in its group's baseline, however many rows it has.

    Rows are samples in any order: their rollout's reward, rollout id and group id, ids being str or int. The
    estimators are this module's. A reward of None (or NaN) is no score: outside the baseline, and NaN is its answer.
    Raises ValueError, naming the rollout and its rows, for siblings with unequal rewards or groups.
    """
    reward = np.asarray(rewards, np.float64)
    rollout, n_rollouts = _codes("rollout", rollouts)
    group, n_groups = _codes("group", groups)
    if not len(reward) == len(rollout) == len(group):
        raise ValueError(f"rows: {len(reward)} rewards, {len(rollout)} rollout ids, {len(group)} group ids")
    if np.isinf(reward).any():
        raise ValueError(f"reward: not finite in row {int(np.isinf(reward).argmax())}")
    reward_of = _once("rewards", reward, rollout, n_rollouts, rollouts)
    group_of = _once("groups", group, rollout, n_rollouts, rollouts)
    present = np.zeros(n_rollouts, np.bool_)
    present[rollout] = True
    scored = np.flatnonzero(present & ~np.isnan(reward_of))
    out = np.full(n_rollouts, np.nan)
    centred, unit = _baseline(reward_of[scored], group_of[scored], n_groups, estimator)
    out[scored] = centred / unit[group_of[scored]]
    return out[rollout]


def turn_advantages(rollouts: Sequence[Rollout], *, estimator: Estimator = "dr_grpo") -> list[Floats]:
    """One advantage per turn of each of these scored rollouts: what came after it, less what that is on average.

    With O the outcome of rollout j, r its turns' rewards in the order of their numbers, and n rollouts in its group::

        G_j(t) = O_j + r_j(t) + r_j(t+1) + ...          G_j(t) = O_j behind its last turn
        A_i(t) = (G_i(t) - (G_1(t) + ... + G_n(t)) / n) / unit

    Every rollout counts in the mean of every turn, those that had ended by then with their outcome: a mean over the
    rollouts that reached turn t would depend on who chose to go on, and pay for going on. What rollout i itself adds
    to the mean only scales its advantage by (n-1)/n, at every turn alike, so the gradient keeps its direction. A group
    has a signal where its returns differ at any turn, its totals may be equal.

    The unit is the estimator's. Where it is a deviation (grpo, reinforce++), it is that of the returns, the mean over
    the turns of their variance at each: totals that are almost equal say nothing about how far the turns differ.
    Without turn rewards these are the usual advantages.
    """
    if any(rollout.reward is None for rollout in rollouts):
        raise ValueError("rollouts: one without a reward has no return")
    group, n_groups = _codes("group", [rollout.group_id for rollout in rollouts])
    members = _members(group, n_groups)
    returns = [returns_by_turn([rollouts[i] for i in rows]) for rows in members]
    centred = [G - G.mean(0) if differ(G) else np.zeros_like(G) for G in returns]
    unit = _turn_units(np.array([r.reward for r in rollouts], np.float64), group, centred, estimator)
    out: list[Floats] = [np.zeros(0, np.float32)] * len(rollouts)
    for code, rows in enumerate(members):
        for i, row in zip(rows, centred[code], strict=True):
            out[i] = np.asarray(row[: len(turn_rewards(rollouts[i]))] / unit[code], np.float32)
    return out


def _members(group: Ints, n_groups: int) -> list[list[int]]:
    members: list[list[int]] = [[] for _ in range(n_groups)]
    for i, code in enumerate(group.tolist()):
        members[code].append(i)
    return members


def _turn_units(
    reward: NDArray[np.float64], group: Ints, centred: Sequence[NDArray[np.float64]], estimator: Estimator
) -> NDArray[np.float64]:
    """The estimator's unit of each group, from the distances of its returns to their means."""
    squares = np.array([float((part * part).sum() / max(part.shape[1], 1)) for part in centred])
    count = np.array([len(part) for part in centred])
    if estimator == "grpo":
        return np.asarray(np.sqrt(squares / np.maximum(count - 1, 1)) + EPSILON)
    if estimator == "reinforce++":
        kept = int(count[squares > 0].sum())
        return np.full(len(centred), np.sqrt(squares.sum() / max(kept - 1, 1)) + EPSILON)
    return _baseline(reward, group, len(centred), estimator)[1]


def _baseline(
    reward: NDArray[np.float64], group: Ints, n_groups: int, estimator: Estimator
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Distance to the group's mean of each of these rollouts, exactly 0 without a signal; and each group's unit."""
    count = np.bincount(group, minlength=n_groups)
    mean = np.bincount(group, reward, n_groups) / np.maximum(count, 1)
    signal = _signals(reward, group, n_groups)
    centred = np.where(signal[group], reward - mean[group], 0.0)
    others = np.maximum(count - 1, 1)
    if estimator == "dr_grpo":
        unit = np.ones(n_groups)
    elif estimator == "rloo":
        unit = others / np.maximum(count, 1)
    elif estimator == "grpo":
        unit = np.sqrt(np.bincount(group, centred * centred, n_groups) / others) + EPSILON
    elif estimator == "reinforce++":
        kept = int(count[signal].sum())
        unit = np.full(n_groups, np.sqrt((centred * centred).sum() / max(kept - 1, 1)) + EPSILON)
    elif estimator == "maxrl":
        unit = _likelihood(mean, reward)
    else:
        known = ", ".join(get_args(Estimator))
        raise ValueError(
            f"estimator: {estimator!r} is none of {known}; there is no value model and no credit by token: "
            'where turns differ in worth use build_samples(advantage_level="turn")'
        )
    return centred, unit


def _signals(reward: NDArray[np.float64], group: Ints, n_groups: int) -> NDArray[np.bool_]:
    """Of each group, whether its scores differ enough to learn from; `differ` of all groups at once."""
    high, low = np.full(n_groups, -np.inf), np.full(n_groups, np.inf)
    np.maximum.at(high, group, reward)
    np.minimum.at(low, group, reward)
    return np.asarray(high - low >= LEAST_DIFFERENCE)


def _likelihood(mean: NDArray[np.float64], reward: NDArray[np.float64]) -> NDArray[np.float64]:
    """The mean, and without end where nothing succeeded."""
    if (reward < 0).any():
        raise ValueError(
            f"reward: {reward.min():g} is negative, and maxrl climbs the logarithm of the mean reward; "
            "use dr_grpo, or rewards of 0 and 1"
        )
    return np.where(mean > 0, mean, np.inf)


def _codes(what: str, ids: Ids) -> tuple[Ints, int]:
    """Small whole numbers standing for the ids, and how many such numbers there may be."""
    if isinstance(ids, np.ndarray) and ids.dtype.kind in "iu":
        if not len(ids):
            return np.zeros(0, np.int64), 0
        low, high = int(ids.min()), int(ids.max())
        if high - low <= 4 * len(ids) + 1024:  # dense enough to count in a table: no sort
            return np.subtract(ids, low, dtype=np.int64), high - low + 1
        names, codes = np.unique(ids, return_inverse=True)
        return codes, len(names)
    table: dict[Any, int] = {}
    codes = np.fromiter((table.setdefault(i, len(table)) for i in ids), np.int64, len(ids))
    for name in table:
        if isinstance(name, bool) or not isinstance(name, str | int | np.integer):
            row = int((codes == table[name]).argmax())
            raise ValueError(f"{what} id: {name!r} in row {row}; every row needs a str or an int")
    return codes, len(table)


def _once(what: str, values: NDArray[Any], rollout: Ints, size: int, ids: Ids) -> NDArray[Any]:
    """The one value of each rollout; ValueError where its rows disagree."""
    table = np.zeros(size, values.dtype)
    table[rollout] = values
    differ = table[rollout] != values
    if differ.any():
        differ &= ~(np.isnan(table[rollout]) & np.isnan(values))
    if differ.any():
        rows = np.flatnonzero(rollout == rollout[differ.argmax()])
        raise ValueError(
            f"rollout {ids[rows[0]]!r}: unequal {what} {values[rows].tolist()} in its rows {rows.tolist()}; "
            "a rollout has one reward and one group"
        )
    return table
