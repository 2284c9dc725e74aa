"""Advantages: rewards compared with baselines over groups of rollouts, in which each rollout counts once. Numpy only.

Every estimator is the distance to the group's mean, divided by the estimator's unit::

    advantage = (reward - mean) / unit         n is the number of scored rollouts in the group, mean their mean reward

    dr_grpo      1                                            Dr. GRPO, arXiv 2503.20783
    grpo         s + 1e-6                                     arXiv 2402.03300
    rloo         (n - 1) / n: subtracts the others' mean      arXiv 2402.14740
    reinforce++  S + 1e-6                                     REINFORCE++ with a baseline, arXiv 2501.03262
    maxrl        mean; the advantage is 0 if the mean is 0    MaxRL, arXiv 2602.02710

s is the standard deviation of the group's rewards, and S that of reward - mean over the rollouts of all groups with a
signal. Both are unbiased. The REINFORCE++ paper computes S over tokens. Here, each rollout counts once, regardless of
its length. MaxRL maximizes log(mean reward), which is the log-likelihood of success if rewards are 0 and 1. A
negative reward has no logarithm and raises ValueError, and a group without any success has no gradient.

A group has a signal if its largest and smallest reward differ by at least LEAST_DIFFERENCE. In a group without a
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
"""Number added to a standard deviation before dividing by it, in units of reward."""

LEAST_DIFFERENCE = 1e-6
"""Smallest difference between rewards that counts. Rewards that differ by less are treated as equal, because the last
digits of a sum depend on the order of its terms.
"""

PROBED = 256
"""Number of ids at the start of a column that are inspected to choose the fastest way to turn all of its ids into
numbers.
"""


def advantages(
    rewards: Sequence[float | None] | NDArray[Any],
    rollouts: Ids,
    groups: Ids,
    *,
    estimator: Estimator = "dr_grpo",
) -> NDArray[np.float64]:
    """Return one advantage for each row. Rows belong to rollouts, and a rollout may have several rows.

    The three sequences are parallel columns: row i has a rollout's reward, its id and its group's id. Rows may be in
    any order. A rollout counts once in its group's baseline, no matter how many rows it has.

    Args:
        rewards: Reward of each row's rollout. None (or NaN) means unscored: the rollout is not in the baseline, and
            its advantage is NaN.
        rollouts: Rollout id of each row, str or int.
        groups: Group id of each row, str or int.
        estimator: The estimator.

    Raises:
        ValueError: If rows of one rollout have unequal rewards or groups (the message names the rollout and the
            rows), if the columns differ in length, or if a reward or an id is invalid.
    """
    reward = np.asarray(rewards, np.float64)
    rollout, n_rollouts = _codes("rollout", rollouts)
    group, n_groups = _codes("group", groups)
    if not len(reward) == len(rollout) == len(group):
        raise ValueError(
            f"rows: expected three columns of the same length, got {len(reward)} rewards, {len(rollout)} rollout ids, "
            f"{len(group)} group ids"
        )
    if np.isinf(reward).any():
        raise ValueError(
            f"reward: row {int(np.isinf(reward).argmax())} is infinite; pass a number, or None if there is no reward"
        )
    if n_rollouts == len(rollout) and (rollout[1:] > rollout[:-1]).all():
        reward_of, group_of = reward, group  # each rollout has one row, in order
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
    """Return one advantage per turn of each rollout: the turn's return minus the group's mean return at that turn.

    Only trained turns of one role are used, in the order of their numbers. The return of a turn is the sum of the
    rewards from that turn on. With r the rewards of the environment's steps, O the rest of the reward, and n rollouts
    in the group::

        G_j(t) = O_j + r_j(t) + r_j(t+1) + ...          after the last turn of rollout j: G_j(t) = O_j
        A_i(t) = (G_i(t) - (G_1(t) + ... + G_n(t)) / n) / unit

    Every rollout counts in the mean of every turn. A rollout that has ended counts with its O. A mean over only the
    rollouts that reached turn t would reward continuing for its own sake. Because rollout i is itself in the mean,
    its advantages are scaled by (n-1)/n at every turn alike, so the direction of the gradient doesn't change. A group
    has a signal if its returns differ at any turn, even if the rollouts' rewards are equal.

    The unit is the estimator's. For grpo and reinforce++ it is a deviation of the returns: the square root of the
    mean over turns of the variance at each turn. If no turn has a reward, the result is the rollouts' advantages.

    Args:
        rollouts: Scored rollouts of any number of groups.
        estimator: The estimator.
        role: Role whose turns and rewards are used, "" for the rollout's own. All rollouts must have this reward.

    Raises:
        ValueError: If a rollout doesn't have the reward.
    """
    rewards = [rollout.reward_of(role) for rollout in rollouts]
    if any(reward is None for reward in rewards):
        raise ValueError("rollouts: a rollout without a reward has no return; leave out failed rollouts")
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
    """Return whether the scored rollouts of one group differ enough to learn from.

    The rollouts' rewards are compared, or with `by_turn` their returns at each turn, both for the whole rollout and
    for each role. The returns of branches of the same state are compared too.
    """
    for role in ("", *roles_of(rollouts)):
        having = [rollout for rollout in rollouts if rollout.reward_of(role) is not None]
        rewards = np.array([[rollout.reward_of(role)] for rollout in having], np.float64)
        if _differ(_returns(having, role) if by_turn else rewards) or branches_differ(having, role):
            return True
    return False


def states_of(rollout: Rollout, role: str) -> list[State]:
    """Return the rollout's states with branches, in order, each with the rewards that its branches have for a role."""
    returns: dict[int, list[float]] = {}
    for branch in sorted(rollout.branches, key=lambda branch: branch.turn):
        if (reward := branch.reward_of(role)) is not None:
            returns.setdefault(branch.turn, []).append(reward)
    return [State(turn, values) for turn, values in returns.items()]


def branches_differ(rollouts: Sequence[Rollout], role: str) -> bool:
    """Return whether the returns from any one state differ: those of its branches, and that of the rollout itself.

    All rollouts must have a reward of the role.
    """
    came = ([*state.returns, r.reward_of(role) or 0.0] for r in rollouts for state in states_of(r, role))
    return any(max(returns) - min(returns) >= LEAST_DIFFERENCE for returns in came)


def roles_of(rollouts: Sequence[Rollout]) -> list[str]:
    """Return the roles that have separate rewards, in the order in which the rollouts name them."""
    return list(dict.fromkeys(role for rollout in rollouts for role in rollout.role_rewards))


def _differ(values: NDArray[np.float64]) -> bool:
    """Return whether the largest and smallest value of any column differ enough to learn from."""
    return bool(values.size and np.ptp(values, axis=0).max() >= LEAST_DIFFERENCE)


def _returns(rollouts: Sequence[Rollout], role: str) -> NDArray[np.float64]:
    """Return a role's returns in one group's scored rollouts, one row per rollout and one column per turn.

    With r the rewards of a rollout's turns, and O the rest of its reward, which fills the columns after the rollout's
    last turn::

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
    """Return the rewards that the environment gave for a role's trained turns, in the order of the turns' numbers."""
    return np.array([turn.reward for turn in turns_of(rollout, role)], np.float64)


def turns_of(rollout: Rollout, role: str) -> list[Turn]:
    """Return a role's trained turns in the order of their numbers. Turns of branches are left out."""
    segments = [s for s in rollout.segments if s.trained and s.role == role and s.branch is None]
    return sorted((turn for segment in segments for turn in segment.turns), key=lambda turn: turn.number)


def _members(group: Ints, n_groups: int) -> list[list[int]]:
    """Return, for each group, the positions of its rollouts."""
    members: list[list[int]] = [[] for _ in range(n_groups)]
    for i, code in enumerate(group.tolist()):
        members[code].append(i)
    return members


def _turn_units(
    reward: NDArray[np.float64], group: Ints, centered: Sequence[NDArray[np.float64]], estimator: Estimator
) -> NDArray[np.float64]:
    """Return each group's unit (the estimator's divisor), computed from the distances of its returns to their means.

    Args:
        reward: Reward of each rollout.
        group: Index of each rollout's group.
        centered: For each group, the distances of its returns to their mean at each turn, with one row per rollout.
        estimator: The estimator.
    """
    squares = np.array([float((part * part).sum() / max(part.shape[1], 1)) for part in centered])
    count = np.array([len(part) for part in centered])
    if estimator == "grpo":
        return np.asarray(np.sqrt(squares / np.maximum(count - 1, 1)) + EPSILON)
    if estimator == "reinforce++":
        kept = int(count[squares > 0].sum())
        return np.full(len(centered), np.sqrt(squares.sum() / max(kept - 1, 1)) + EPSILON)
    return _baseline(reward, group, len(centered), estimator)[1]


def _of_scored(reward: NDArray[np.float64], group: Ints, n_groups: int, estimator: Estimator) -> NDArray[np.float64]:
    """Return one advantage for each scored rollout, given its reward and the index of its group."""
    centered, unit = _baseline(reward, group, n_groups, estimator)
    centered /= unit[group]
    return centered


def _baseline(
    reward: NDArray[np.float64], group: Ints, n_groups: int, estimator: Estimator
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return each rollout's distance to its group's mean, and each group's unit.

    In a group without a signal, every distance is exactly 0. `group` contains the index of each rollout's group.
    """
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
            f"estimator: expected one of {known}, got {estimator!r}; for the advantages of a critic use value_samples, "
            'and for a separate advantage of each turn build_samples(credit="turn")'
        )
    return centered, unit


def _signals(reward: NDArray[np.float64], group: Ints, n_groups: int) -> NDArray[np.bool_]:
    """Return for each group whether its rewards differ enough to learn from: `_differ` for all groups at once."""
    high, low = np.full(n_groups, -np.inf), np.full(n_groups, np.inf)
    np.maximum.at(high, group, reward)
    np.minimum.at(low, group, reward)
    return np.asarray(high - low >= LEAST_DIFFERENCE)


def _likelihood(mean: NDArray[np.float64], reward: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return maxrl's unit for each group: its mean reward, or infinity if nothing succeeded.

    With infinity as the unit, the advantages are 0.

    Raises:
        ValueError: If a reward is negative.
    """
    if (reward < 0).any():
        raise ValueError(
            f"reward: {reward.min():g} is negative, but maxrl maximizes the logarithm of the mean reward; "
            "use dr_grpo, or rewards of 0 and 1"
        )
    return np.where(mean > 0, mean, np.inf)


def _codes(what: str, ids: Ids) -> tuple[Ints, int]:
    """Map ids to small integers. Return the integers, and a bound that is greater than all of them.

    `what` says for the error message whose ids they are: rollout or group.
    """
    if isinstance(ids, np.ndarray) and ids.dtype.kind in "iu" and len(ids):
        low, high = int(ids.min()), int(ids.max())
        if high - low <= 4 * len(ids) + 1024:  # dense enough for a table, without sorting
            return np.subtract(ids, low, dtype=np.int64), high - low + 1
        values, codes = np.unique(ids, return_inverse=True)
        return codes, len(values)
    if all(map(operator.ne, ids[:PROBED], ids[1:PROBED])):
        return _numbered(what, ids, range(len(ids)))
    # Rows of one rollout or group are usually adjacent, so an id is looked up only where it differs from the row
    # before.
    column = np.fromiter(ids, object, len(ids))
    starts = np.flatnonzero(np.append(True, column[1:] != column[:-1]))
    codes, bound = _numbered(what, column[starts].tolist(), starts)
    return codes.repeat(np.diff(starts, append=len(ids))), bound


def _numbered(what: str, names: Ids, rows: Iterable[int]) -> tuple[Ints, int]:
    """Give each distinct name a number, in order of first appearance.

    Return each name's number, and the count of numbers. For the error message, `what` says whose ids the names are,
    and `rows` contains the row of each name.
    """
    probed = names[:PROBED]
    if len(set(probed)) == len(probed) and len(set(names)) == len(names):  # one row per rollout, not cut into samples
        known: Any = names
        codes = np.arange(len(names))
    else:
        # Looking up a new name gives it the next number.
        known = defaultdict[Any, int](itertools.count().__next__)
        codes = np.fromiter(map(known.__getitem__, names), np.int64, len(names))
    if not set(map(type, known)) <= {str, int}:
        for row, name in zip(rows, names, strict=True):
            if isinstance(name, bool) or not isinstance(name, str | int | np.integer):
                raise ValueError(f"{what} id: expected a str or an int in every row, got {name!r} in row {row}")
    return codes, len(known)


def _once(what: str, values: NDArray[Any], rollout: Ints, table: NDArray[Any], ids: Ids) -> NDArray[Any]:
    """Write one value per rollout to `table`, and return it. A rollout's value must be the same in all of its rows.

    Args:
        what: Name of the values, for the error message.
        values: Value of each row.
        rollout: Index of each row's rollout in `table`.
        table: The array to fill, with one entry per rollout.
        ids: Rollout id of each row, for the error message.

    Raises:
        ValueError: If a rollout's rows have different values.
    """
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
