"""Advantages: rewards against baselines over groups of rollouts, each rollout counted once. Numpy only.

Every estimator is the distance to the group's mean, divided by a unit of its own::

    advantage = (reward - mean) / unit         n is the number of scored rollouts in the group, mean is of their rewards

    dr_grpo      1                                            Dr. GRPO, arXiv 2503.20783
    grpo         s + 1e-6                                     arXiv 2402.03300
    rloo         (n - 1) / n: the mean is of the others       arXiv 2402.14740
    reinforce++  S + 1e-6                                     REINFORCE++ with a baseline, arXiv 2501.03262
    maxrl        mean; the advantage is 0 where that is 0     MaxRL, arXiv 2602.02710

s is the standard deviation of the group's rewards, and S is that of reward - mean over the rollouts of all groups with
a signal; both are unbiased. The REINFORCE++ paper takes S over tokens; here each rollout counts once, however long it
is. MaxRL climbs log(mean reward), which is the log-likelihood of success where rewards are 0 and 1. A negative reward
has no logarithm and is refused, and a group in which nothing succeeded has no gradient.

A group has a signal if its largest and its smallest reward differ by at least LEAST_DIFFERENCE. In a group without a
signal, and in a group of one rollout, every advantage is exactly 0.
"""

import itertools
import operator
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from agentgym.advantages.estimates import State
from agentgym.types.arrays import Floats, Ints
from agentgym.types.rollout import Rollout, Turn

Estimator: TypeAlias = Literal["grpo", "dr_grpo", "rloo", "reinforce++", "maxrl"]
Ids: TypeAlias = Sequence[str] | Sequence[int] | NDArray[Any]

EPSILON = 1e-6
"""Number that is added to a standard deviation before dividing by it, in units of reward."""

LEAST_DIFFERENCE = 1e-6
"""Least difference of two rewards that are not equal: the last digits of a sum depend on its order."""

PROBED = 256
"""Number of rows that are looked at before it is decided how to look names up."""


def advantages(
    rewards: Sequence[float | None] | NDArray[Any],
    rollouts: Ids,
    groups: Ids,
    *,
    estimator: Estimator = "dr_grpo",
) -> NDArray[np.float64]:
    """Return one advantage for each row; a rollout counts once in its group's baseline, however many rows it has.

    The three columns are one table, in any order: a row has the reward, the id and the group's id of one rollout.
    Ids are str or int. A reward of None (or NaN) is no score: it is not in the baseline, and its advantage is NaN.
    Raises ValueError for rows of one rollout with unequal rewards or groups, naming the rollout and the rows.
    """
    reward = np.asarray(rewards, np.float64)
    rollout, n_rollouts = _codes("rollout", rollouts)
    group, n_groups = _codes("group", groups)
    if not len(reward) == len(rollout) == len(group):
        raise ValueError(f"rows: {len(reward)} rewards, {len(rollout)} rollout ids, {len(group)} group ids")
    if np.isinf(reward).any():
        raise ValueError(f"reward: not finite in row {int(np.isinf(reward).argmax())}")
    if n_rollouts == len(rollout) and (rollout[1:] > rollout[:-1]).all():
        reward_of, group_of = reward, group  # each rollout has one row, in their order
    else:
        reward_of = _once("rewards", reward, rollout, np.full(n_rollouts, np.nan), rollouts)
        group_of = _once("groups", group, rollout, np.zeros(n_rollouts, np.int64), rollouts)
    scored = ~np.isnan(reward_of)
    if scored.all():
        return _of_scored(reward_of, group_of, n_groups, estimator)[rollout]
    out = np.full(n_rollouts, np.nan)
    out[scored] = _of_scored(reward_of[scored], group_of[scored], n_groups, estimator)
    return out[rollout]


def turn_advantages(rollouts: Sequence[Rollout], *, estimator: Estimator = "dr_grpo", role: str = "") -> list[Floats]:
    """Return one advantage for each turn of each rollout: the turn's return less the group's mean return at that turn.

    The turns are the trained ones of one role, in the order of their numbers, and the rewards are those of that role,
    "" for the rollout's own. All rollouts must have such a reward. The return of a turn is the rewards from that turn
    on: r are those that the environment's steps gave, O is the rest of the reward, and n rollouts are in the group::

        G_j(t) = O_j + r_j(t) + r_j(t+1) + ...          after the last turn of rollout j: G_j(t) = O_j
        A_i(t) = (G_i(t) - (G_1(t) + ... + G_n(t)) / n) / unit

    Every rollout counts in the mean of every turn; one that has ended counts with its O. A mean over only those
    rollouts that reached turn t would reward going on for its own sake. The share of rollout i itself in the mean
    scales its advantages by (n-1)/n at every turn alike, so the gradient keeps its direction. A group has a signal if
    its returns differ at any turn, even if the rollouts' rewards are equal.

    The unit is the estimator's. For grpo and reinforce++ it is a deviation of the returns: the variance at each turn,
    averaged over the turns, under a root. Without rewards of turns, these are the advantages of the rollouts.
    """
    rewards = [rollout.reward_of(role) for rollout in rollouts]
    if any(reward is None for reward in rewards):
        raise ValueError("rollouts: one without a reward has no return; leave failed rollouts out")
    group, n_groups = _codes("group", [rollout.group_id for rollout in rollouts])
    members = _members(group, n_groups)
    returns = [_returns([rollouts[i] for i in rows], role) for rows in members]
    centered = [G - G.mean(0) if _differ(G) else np.zeros_like(G) for G in returns]
    unit = _turn_units(np.array(rewards, np.float64), group, centered, estimator)
    found: dict[int, Floats] = {}
    for code, rows in enumerate(members):
        for i, row in zip(rows, centered[code], strict=True):
            found[i] = np.asarray(row[: len(_turn_rewards(rollouts[i], role))] / unit[code], np.float32)
    return [found[i] for i in range(len(rollouts))]


def has_signal(rollouts: Sequence[Rollout], *, by_turn: bool = False) -> bool:
    """Tell whether the scored rollouts of one group differ enough to learn from.

    Their rewards are compared, or with `by_turn` their returns at each turn; and so are those of each role. What
    branches of one state came to is compared, too.
    """
    for role in ("", *roles_of(rollouts)):
        having = [rollout for rollout in rollouts if rollout.reward_of(role) is not None]
        rewards = np.array([[rollout.reward_of(role)] for rollout in having], np.float64)
        if _differ(_returns(having, role) if by_turn else rewards) or branches_differ(having, role):
            return True
    return False


def states_of(rollout: Rollout, role: str) -> list[State]:
    """Return the states that the rollout has branches from, with the rewards of a role in them, in order."""
    returns: dict[int, list[float]] = {}
    for branch in sorted(rollout.branches, key=lambda branch: branch.turn):
        if (reward := branch.reward_of(role)) is not None:
            returns.setdefault(branch.turn, []).append(reward)
    return [State(turn, values) for turn, values in returns.items()]


def branches_differ(rollouts: Sequence[Rollout], role: str) -> bool:
    """Tell whether what came of any one state with branches differs, in these rollouts with a reward of the role."""
    came = ([*state.returns, r.reward_of(role) or 0.0] for r in rollouts for state in states_of(r, role))
    return any(max(returns) - min(returns) >= LEAST_DIFFERENCE for returns in came)


def roles_of(rollouts: Sequence[Rollout]) -> list[str]:
    """Return the roles that have rewards of their own, in the order in which the rollouts name them."""
    return list(dict.fromkeys(role for rollout in rollouts for role in rollout.role_rewards))


def _differ(values: NDArray[np.float64]) -> bool:
    """Tell whether the largest and the smallest value of any column differ enough to learn from."""
    return bool(values.size and np.ptp(values, axis=0).max() >= LEAST_DIFFERENCE)


def _returns(rollouts: Sequence[Rollout], role: str) -> NDArray[np.float64]:
    """Return the returns of a role in the scored rollouts of one group, one row a rollout and one column a turn.

    With r the rewards of a rollout's turns and O the rest of its reward, which stands where it has ended::

        turn        0            1        2            as many columns as the longest rollout has turns
        3 turns     r0+r1+r2+O   r1+r2+O  r2+O
        1 turn      r0+O         O        O
    """
    rewards = [_turn_rewards(rollout, role) for rollout in rollouts]
    returns = np.zeros((len(rollouts), max(map(len, rewards), default=0)))
    for row, rollout, given in zip(returns, rollouts, rewards, strict=True):
        row[: len(given)] = given[::-1].cumsum()[::-1]
        row += (rollout.reward_of(role) or 0.0) - given.sum()
    return returns


def _turn_rewards(rollout: Rollout, role: str) -> NDArray[np.float64]:
    """Return what the environment's steps gave for the trained turns of a role, in the order of their numbers."""
    return np.array([turn.reward for turn in turns_of(rollout, role)], np.float64)


def turns_of(rollout: Rollout, role: str) -> list[Turn]:
    """Return the trained turns of a role in the rollout itself, without branches, in the order of their numbers."""
    segments = [s for s in rollout.segments if s.trained and s.role == role and s.branch is None]
    return sorted((turn for segment in segments for turn in segment.turns), key=lambda turn: turn.number)


def _members(group: Ints, n_groups: int) -> list[list[int]]:
    """Return the positions of each group's rollouts."""
    members: list[list[int]] = [[] for _ in range(n_groups)]
    for i, code in enumerate(group.tolist()):
        members[code].append(i)
    return members


def _turn_units(
    reward: NDArray[np.float64], group: Ints, centered: Sequence[NDArray[np.float64]], estimator: Estimator
) -> NDArray[np.float64]:
    """Return the estimator's unit of each group, from the distances of its returns to their means."""
    squares = np.array([float((part * part).sum() / max(part.shape[1], 1)) for part in centered])
    count = np.array([len(part) for part in centered])
    if estimator == "grpo":
        return np.asarray(np.sqrt(squares / np.maximum(count - 1, 1)) + EPSILON)
    if estimator == "reinforce++":
        kept = int(count[squares > 0].sum())
        return np.full(len(centered), np.sqrt(squares.sum() / max(kept - 1, 1)) + EPSILON)
    return _baseline(reward, group, len(centered), estimator)[1]


def _of_scored(reward: NDArray[np.float64], group: Ints, n_groups: int, estimator: Estimator) -> NDArray[np.float64]:
    """Return one advantage for each scored rollout."""
    centered, unit = _baseline(reward, group, n_groups, estimator)
    centered /= unit[group]
    return centered


def _baseline(
    reward: NDArray[np.float64], group: Ints, n_groups: int, estimator: Estimator
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return each rollout's distance to its group's mean, exactly 0 without a signal, and each group's unit."""
    count = np.bincount(group, minlength=n_groups)
    mean = np.bincount(group, reward, n_groups) / np.maximum(count, 1)
    signal = _signals(reward, group, n_groups)
    centered = reward - mean[group]
    if not signal.all():
        centered[~signal[group]] = 0.0
    others = np.maximum(count - 1, 1)
    if estimator == "dr_grpo":
        unit = np.ones(n_groups)
    elif estimator == "rloo":
        unit = others / np.maximum(count, 1)
    elif estimator == "grpo":
        unit = np.sqrt(np.bincount(group, centered * centered, n_groups) / others) + EPSILON
    elif estimator == "reinforce++":
        kept = int(count[signal].sum())
        unit = np.full(n_groups, np.sqrt((centered * centered).sum() / max(kept - 1, 1)) + EPSILON)
    elif estimator == "maxrl":
        unit = _likelihood(mean, reward)
    else:
        known = ", ".join(get_args(Estimator))
        raise ValueError(
            f"estimator: {estimator!r} is none of {known}; advantages of a critic come from value_samples, and "
            'to tell turns apart use build_samples(credit="turn")'
        )
    return centered, unit


def _signals(reward: NDArray[np.float64], group: Ints, n_groups: int) -> NDArray[np.bool_]:
    """Tell of each group whether its rewards differ enough to learn from: `_differ` for all groups at once."""
    high, low = np.full(n_groups, -np.inf), np.full(n_groups, np.inf)
    np.maximum.at(high, group, reward)
    np.minimum.at(low, group, reward)
    return np.asarray(high - low >= LEAST_DIFFERENCE)


def _likelihood(mean: NDArray[np.float64], reward: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return maxrl's unit: the mean, or infinity where nothing succeeded, which makes the advantages 0."""
    if (reward < 0).any():
        raise ValueError(
            f"reward: {reward.min():g} is negative, and maxrl climbs the logarithm of the mean reward; "
            "use dr_grpo, or rewards of 0 and 1"
        )
    return np.where(mean > 0, mean, np.inf)


def _codes(what: str, ids: Ids) -> tuple[Ints, int]:
    """Return the ids as small whole numbers, and a bound that all of them are below."""
    if isinstance(ids, np.ndarray) and ids.dtype.kind in "iu" and len(ids):
        low, high = int(ids.min()), int(ids.max())
        if high - low <= 4 * len(ids) + 1024:  # dense enough to count in a table: no sort
            return np.subtract(ids, low, dtype=np.int64), high - low + 1
        values, codes = np.unique(ids, return_inverse=True)
        return codes, len(values)
    if all(map(operator.ne, ids[:PROBED], ids[1:PROBED])):
        return _numbered(what, ids, range(len(ids)))
    # Rows of one rollout or group mostly stand side by side: the first of them is looked up for all.
    column = np.fromiter(ids, object, len(ids))
    starts = np.flatnonzero(np.append(True, column[1:] != column[:-1]))
    codes, bound = _numbered(what, column[starts].tolist(), starts)
    return codes.repeat(np.diff(starts, append=len(ids))), bound


def _numbered(what: str, names: Ids, rows: Iterable[int]) -> tuple[Ints, int]:
    """Number the names in the order in which they first come; returns the number of each, and how many there are."""
    probed = names[:PROBED]
    if len(set(probed)) == len(probed) and len(set(names)) == len(names):  # one row a rollout, not cut into samples
        known: Any = names
        codes = np.arange(len(names))
    else:
        # A name that is looked up for the first time gets the next number.
        known = defaultdict[Any, int](itertools.count().__next__)
        codes = np.fromiter(map(known.__getitem__, names), np.int64, len(names))
    if not set(map(type, known)) <= {str, int}:
        for row, name in zip(rows, names, strict=True):
            if isinstance(name, bool) or not isinstance(name, str | int | np.integer):
                raise ValueError(f"{what} id: {name!r} in row {row}; every row needs a str or an int")
    return codes, len(known)


def _once(what: str, values: NDArray[Any], rollout: Ints, table: NDArray[Any], ids: Ids) -> NDArray[Any]:
    """Fill the table with the one value of each rollout, and return it; raise ValueError where its rows disagree."""
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
