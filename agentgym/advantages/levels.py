"""Advantages at each level of credit: first those of each rollout, then those of a segment's tokens."""

from collections.abc import Sequence
from typing import Literal, TypeAlias

import numpy as np

from agentgym.advantages.branches import branch_advantages
from agentgym.advantages.group import Estimator, advantages, roles_of, turn_advantages, turns_of
from agentgym.types.arrays import Floats
from agentgym.types.rollout import Rollout, Segment

CreditLevel: TypeAlias = Literal["outcome", "turn", "branches", "value"]
Advantages: TypeAlias = dict[str | int | tuple[int, int], float]
"""The advantages of one rollout. Depending on the level of credit, the keys are roles ("" for the rollout's own
reward), turn numbers, or pairs of segment and turn number.
"""


def outcome_levels(rollouts: Sequence[Rollout], estimator: Estimator) -> dict[str, Advantages]:
    """Return each scored rollout's advantages by role, keyed by rollout id. Each role has a separate baseline."""
    by_id: dict[str, Advantages] = {}
    for role in ("", *roles_of(rollouts)):
        values = advantages(
            [rollout.reward_of(role) for rollout in rollouts],
            [rollout.rollout_id for rollout in rollouts],
            [rollout.group_id for rollout in rollouts],
            estimator=estimator,
        )
        for rollout, value in zip(rollouts, values.tolist(), strict=True):
            if rollout.reward_of(role) is not None:
                by_id.setdefault(rollout.rollout_id, {})[role] = value
    return by_id


def turn_levels(rollouts: Sequence[Rollout], estimator: Estimator) -> dict[str, Advantages]:
    """Return each scored rollout's advantages by turn, keyed by rollout id. Each role has a separate baseline.

    Raises:
        ValueError: If two turns of a rollout have the same number.
    """
    by_id: dict[str, Advantages] = {}
    for rollout in rollouts:
        numbers = [turn.number for s in rollout.segments if s.branch is None for turn in s.turns]
        if len(set(numbers)) < len(numbers):
            raise ValueError(
                f'rollout {rollout.rollout_id!r}: two turns have the same number, but credit="turn" tells turns '
                'apart by their numbers; number the turns, or use credit="outcome"'
            )
        if rollout.reward is not None:
            by_id[rollout.rollout_id] = {}
    for role in ("", *roles_of(rollouts)):
        having = [rollout for rollout in rollouts if rollout.reward_of(role) is not None]
        for rollout, values in zip(having, turn_advantages(having, estimator=estimator, role=role), strict=True):
            numbers = [turn.number for turn in turns_of(rollout, role)]
            by_id[rollout.rollout_id].update(zip(numbers, values.tolist(), strict=True))
    return by_id


def branch_levels(rollouts: Sequence[Rollout], estimator: Estimator) -> dict[str, Advantages]:
    """Return the advantages of the turns of each scored rollout and its branches, keyed by rollout id.

    Each role has a separate baseline.

    Raises:
        ValueError: If there are scored rollouts, but none was run with branching. A rollout's metrics tell whether it
            was run with branching, even if it has no branches.
    """
    scored = [rollout for rollout in rollouts if rollout.reward is not None]
    if scored and not any(rollout.branches or "branches" in rollout.metrics for rollout in scored):
        raise ValueError(
            "credit: none of these rollouts was run with branches; run them with "
            '`branching=ag.BranchingConfig(...)`, or use credit="outcome"'
        )
    by_id: dict[str, Advantages] = {rollout.rollout_id: {} for rollout in scored}
    for role in ("", *roles_of(rollouts)):
        having = [rollout for rollout in rollouts if rollout.reward_of(role) is not None]
        for rollout, given in zip(having, branch_advantages(having, estimator=estimator, role=role), strict=True):
            by_id[rollout.rollout_id].update(given)
    return by_id


def _turn_tokens(given: Advantages, segment: Segment) -> Floats:
    """Return one advantage for each token of a segment: that of its turn, or 0 if the token wasn't sampled.

    `given` contains the advantages by turn number.
    """
    return _spread(segment, [given[turn.number] for turn in segment.turns])


def placed_tokens(given: Advantages, segment: Segment) -> Floats:
    """Return one advantage for each token of a segment: that of its turn, or 0 if the token wasn't sampled.

    `given` contains the advantages by segment and turn number.
    """
    return _spread(segment, [given[segment.index, turn.number] for turn in segment.turns])


def _spread(segment: Segment, advantages: Sequence[float]) -> Floats:
    """Return one advantage for each token of a segment, given one for each turn. Tokens outside the turns get 0."""
    values = np.zeros(len(segment.token_ids), np.float32)
    for turn, advantage in zip(segment.turns, advantages, strict=True):
        values[turn.start : turn.stop] = advantage
    values.setflags(write=False)
    return values


def _role_tokens(given: Advantages, segment: Segment) -> Floats:
    """Return one advantage for each token of a segment, sampled or not: that of the segment's role."""
    # All entries share one float, however long the segment is. This takes a fifth of the time of `np.broadcast_to`.
    return np.ndarray(len(segment.token_ids), np.float32, np.float32(given[segment.role]).tobytes(), strides=(0,))


LEVELS = {
    "outcome": (outcome_levels, _role_tokens),
    "turn": (turn_levels, _turn_tokens),
    "branches": (branch_levels, placed_tokens),
}
"""For each level without a critic, two functions: the first returns the advantages of rollouts, and the second spreads
them over the tokens of a segment.
"""
