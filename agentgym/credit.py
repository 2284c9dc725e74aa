"""What a reward is worth: baselines over groups of rollouts, each rollout once. Numpy only.

Every estimator is the distance to the group's mean in a unit of its own::

    advantage = (reward - mean) / unit         n rollouts are scored in the group, mean is over their rewards

    dr_grpo      1                                            Dr. GRPO, arXiv 2503.20783
    grpo         s + 1e-6                                     arXiv 2402.03300
    rloo         (n - 1) / n: the mean is of the others       arXiv 2402.14740
    reinforce++  S + 1e-6                                     REINFORCE++ with a baseline, arXiv 2501.03262
    maxrl        mean; the advantage is 0 where that is 0     MaxRL, arXiv 2602.02710

s is the group's standard deviation, S that of reward - mean over the rollouts of all groups in which two scores
differ; both are unbiased. REINFORCE++ has it over tokens: here each rollout counts once, however long it is.
MaxRL climbs log(mean reward), which is the likelihood of success where rewards are 0 and 1; a negative reward has no
logarithm and is refused. A group in which nothing succeeded has no gradient, and a group of one gets 0 from all.
"""

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

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
    estimator: Estimator = "grpo",
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
    out[scored] = centred / unit
    return out[rollout]


def turn_advantages(rollouts: Sequence[Rollout], *, estimator: Estimator = "dr_grpo") -> list[Floats]:
    """One advantage per turn of each of these scored rollouts: what came after it, less what that is on average.

    With O the outcome of rollout j, r its turns' rewards in the order of their numbers, and n rollouts in its group::

        G_j(t) = O_j + r_j(t) + r_j(t+1) + ...          G_j(t) = O_j behind its last turn
        A_i(t) = (G_i(t) - (G_1(t) + ... + G_n(t)) / n) / unit

    Every rollout counts in the mean of every turn, those that had ended by then with their outcome: a mean over the
    rollouts that reached turn t would depend on who chose to go on, and pay for going on. What rollout i itself adds
    to the mean only scales its advantage by (n-1)/n, at every turn alike, so the gradient keeps its direction. The
    unit is the estimator's, of the rollouts' whole rewards. Without turn rewards these are the usual advantages.
    """
    if any(rollout.reward is None for rollout in rollouts):
        raise ValueError("rollouts: one without a reward has no return")
    group, n_groups = _codes("group", [rollout.group_id for rollout in rollouts])
    _, unit = _baseline(np.array([r.reward for r in rollouts], np.float64), group, n_groups, estimator)
    played = [_turn_rewards(rollout) for rollout in rollouts]
    out: list[Floats] = [np.zeros(0, np.float32)] * len(rollouts)
    for members in _members(group, n_groups):
        returns = _returns([rollouts[i] for i in members], [played[i] for i in members])
        for i, row in zip(members, returns - returns.mean(0), strict=True):
            out[i] = np.asarray(row[: len(played[i])] / unit[i], np.float32)
    return out


def _turn_rewards(rollout: Rollout) -> NDArray[np.float64]:
    """What the env's steps gave, in the order of the turns' numbers."""
    turns = sorted((turn for s in rollout.segments for turn in s.turns), key=lambda turn: turn.number)
    return np.array([turn.reward for turn in turns], np.float64)


def _members(group: Ints, n_groups: int) -> list[list[int]]:
    members: list[list[int]] = [[] for _ in range(n_groups)]
    for i, code in enumerate(group.tolist()):
        members[code].append(i)
    return members


def _returns(rollouts: Sequence[Rollout], played: Sequence[NDArray[np.float64]]) -> NDArray[np.float64]:
    """What each rollout of a group got from each turn on; its outcome behind its last turn."""
    returns = np.zeros((len(rollouts), max(map(len, played)) + 1))
    for row, rollout, given in zip(returns, rollouts, played, strict=True):
        row[: len(given)] = given[::-1].cumsum()[::-1]
        row += (rollout.reward or 0.0) - given.sum()
    return returns


def _baseline(
    reward: NDArray[np.float64], group: Ints, n_groups: int, estimator: Estimator
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Distance to the group's mean and the estimator's unit, of each of these rollouts."""
    count = np.bincount(group, minlength=n_groups)
    mean = np.bincount(group, reward, n_groups) / np.maximum(count, 1)
    centred = reward - mean[group]
    others = np.maximum(count - 1, 1)
    if estimator == "dr_grpo":
        unit = np.ones(n_groups)
    elif estimator == "rloo":
        unit = others / np.maximum(count, 1)
    elif estimator == "grpo":
        unit = np.sqrt(np.bincount(group, centred * centred, n_groups) / others) + EPSILON
    elif estimator == "reinforce++":
        unit = np.full(n_groups, _spread(reward, centred, group, n_groups) + EPSILON)
    elif estimator == "maxrl":
        unit = _likelihood(mean, reward)
    else:
        known = ", ".join(get_args(Estimator))
        raise ValueError(
            f"estimator: {estimator!r} is none of {known}; there is no value model and no credit by token: "
            'where turns differ in worth use samples(credit="turns")'
        )
    return centred, unit[group]


def _spread(reward: NDArray[np.float64], centred: NDArray[np.float64], group: Ints, n_groups: int) -> float:
    """Standard deviation of the distances to the means, over the rollouts of groups in which two scores differ.

    A group without a signal is not trained on, and counts in no denominator.
    """
    one = np.zeros(n_groups)
    one[group] = reward
    signal = np.bincount(group[reward != one[group]], minlength=n_groups) > 0
    kept = centred[signal[group]]
    return float(np.sqrt((kept * kept).sum() / max(len(kept) - 1, 1)))


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
