"""Advantages of turns with a critic: GAE over a rollout's turns, and the returns that the critic learns. NumPy only.

GAE's steps are turns here. The env responds to whole turns and rewards whole turns. Lambda and gamma are therefore
per turn, and all tokens of a turn have the same advantage. V(t) is the value of the state before turn t. The rollout
has T turns with the rewards r, of which the last one also includes the rollout's final reward::

    d(t) = r(t) + gamma V(t+1) - V(t)                      V(T) = 0: every end is terminal, even at a limit
    A(t) = d(t) + gamma lambda A(t+1)                      arXiv 1506.02438, equation 16
    R(t) = r(t) + gamma R(t+1)                             the target of V(t), equation 28 there

With lambda 1 the advantage is R(t) - V(t). If gamma is 1, this is unbiased for any V that depends only on the state.
With lambda 0 the advantage is d(t), which is unbiased if V is the true value.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Annotated, TypeAlias

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from agentgym.advantages.levels import Advantages
from agentgym.config_fields import config
from agentgym.types.arrays import Floats
from agentgym.types.rollout import Rollout, Segment, Turn
from agentgym.types.sample import Sample, SampleKey

UpTo1: TypeAlias = Annotated[float, Field(ge=0, le=1)]
Place: TypeAlias = tuple[int, int]
"""Identifies a turn of a rollout: its segment's index, and its number."""
OVERLAP_S = 1e-3
"""Seconds by which a turn may seem to start before the previous turn ends, because the clocks that time them differ."""


@config(frozen=True, kw_only=True)
class GAEConfig:
    """Settings of generalized advantage estimation (GAE), per turn."""

    gamma: UpTo1 = 1.0
    """Discount factor per turn, in 0..1. Below 1, training maximizes the discounted reward instead of the reward
    itself.
    """
    lam: UpTo1 = 0.95
    """Lambda of GAE, in 0..1, which weighs observed rewards against the critic's values. 1 uses only the rewards
    observed from a turn on. 0 uses only the turn's own reward and the critic's value of the state before the next
    turn.
    """


def gae(rewards: Sequence[float], values: Sequence[float], how: GAEConfig) -> NDArray[np.float64]:
    """Return the advantage of each turn, given the turns' rewards and the values of the states before them."""
    found, after, value = np.zeros(len(rewards)), 0.0, 0.0
    for t in range(len(rewards) - 1, -1, -1):
        after = rewards[t] + how.gamma * value - values[t] + how.gamma * how.lam * after
        found[t], value = after, values[t]
    return found


def discounted_returns(rewards: Sequence[float], gamma: float) -> NDArray[np.float64]:
    """Return the discounted sum of the rewards from each turn on."""
    found, after = np.zeros(len(rewards)), 0.0
    for t in range(len(rewards) - 1, -1, -1):
        found[t] = after = rewards[t] + gamma * after
    return found


def turn_order(rollout: Rollout) -> list[tuple[Segment, Turn]]:
    """Return the trained turns of a scored rollout in the order in which they were sampled, each with its segment.

    A context that continues another one (a compaction) comes after it. The turns of forks and sub-agents come at the
    point at which these ran, provided that they were awaited.

    Raises:
        ValueError: If the turns don't form one sequence, which is the case for branches, roles with separate rewards,
            parallel conversations, and turns with the same number. The message names the rollout.
    """
    segments = [segment for segment in rollout.segments if segment.trained]
    if rollout.branches:
        raise _refused(
            rollout,
            "it has branches, whose turns are not one sequence; run it without branches, or use credit='branches'",
        )
    if roles := sorted({segment.role for segment in segments if segment.role}):
        raise _refused(
            rollout,
            f"role {roles[0]!r} has a separate reward, but a critic learns only one reward; use credit='outcome'",
        )
    placed = [(segment, turn) for segment in segments for turn in segment.turns]
    if len({turn.number for _, turn in placed}) < len(placed):
        raise _refused(rollout, "two turns have the same number, so their order is unknown; number the turns")
    placed.sort(key=lambda place: place[1].number)
    if any(segment.kind in ("fork", "subagent") for segment in segments):
        _refuse_beside(rollout, [turn for _, turn in placed])
    return placed


def _refuse_beside(rollout: Rollout, turns: Sequence[Turn]) -> None:
    """Raise ValueError if a turn was requested before the previous one had finished, or if the times are unknown."""
    for first, second in pairwise(turns):
        if first.asked_at is None or second.asked_at is None:
            raise _refused(rollout, "it has forks or sub-agents, but its turns have no times; use credit='outcome'")
        if second.asked_at < first.asked_at + first.seconds - OVERLAP_S:
            raise _refused(
                rollout,
                f"turns {first.number} and {second.number} were sampled at the same time, so neither follows the "
                "other; await each fork and sub-agent, or use credit='outcome'",
            )


def turn_rewards(rollout: Rollout, placed: Sequence[tuple[Segment, Turn]]) -> list[float]:
    """Return the reward of each turn in `placed`, the result of `turn_order`.

    The last one also includes the part of the rollout's reward that no turn got.
    """
    rewards = [turn.reward for _, turn in placed]
    if rewards:
        rewards[-1] += (rollout.reward or 0.0) - sum(rewards)
    return rewards


def at_starts(sample: Sample, rollout: Rollout) -> Sample:
    """Return the sample with a loss mask that covers only the first token of each turn.

    The critic then gives it one value for each turn. The sample must be merged: one whole segment of `rollout`.
    """
    turns, mask = rollout.segments[sample.segment].turns, np.zeros_like(sample.loss_mask)
    mask[[turn.start - turns[0].start for turn in turns]] = True
    return replace(sample, loss_mask=mask)


def gae_of(
    rollout: Rollout, order: Sequence[tuple[Segment, Turn]], values: Mapping[SampleKey, Floats], how: GAEConfig
) -> tuple[Advantages, dict[SampleKey, Floats]]:
    """Return the advantage of each turn of a rollout, and the returns of each segment's turns.

    Args:
        rollout: A scored rollout.
        order: Its turns, as `turn_order` returns them.
        values: For each segment, the values of the states before its turns, by the key of the segment's merged
            sample.
        how: The settings of GAE.

    Returns:
        The advantages by segment index and turn number, and the returns by the same keys as `values`.

    Raises:
        ValueError: If a segment doesn't have one value per turn.
    """
    rewards, places = turn_rewards(rollout, order), [(segment.index, turn.number) for segment, turn in order]
    before, segments = dict[Place, float](), {segment.index: segment for segment, _ in order}
    for index, segment in segments.items():
        given = values.get((rollout.rollout_id, index, 0))
        if given is None or len(given) != len(segment.turns):
            raise ValueError(
                f"values: rollout {rollout.rollout_id!r} has {len(segment.turns)} turns in segment {index}, but "
                f"{'no' if given is None else len(given)} values; pass one for each turn"
            )
        before |= {(index, turn.number): float(value) for turn, value in zip(segment.turns, given, strict=True)}
    found = gae(rewards, [before[place] for place in places], how)
    to_come = dict(zip(places, discounted_returns(rewards, how.gamma).tolist(), strict=True))
    returns = {
        (rollout.rollout_id, index, 0): np.array([to_come[index, turn.number] for turn in segment.turns], np.float32)
        for index, segment in segments.items()
    }
    return {place: float(advantage) for place, advantage in zip(places, found, strict=True)}, returns


def _refused(rollout: Rollout, why: str) -> ValueError:
    return ValueError(f'credit: "value" (GAE) does not work for rollout {rollout.rollout_id!r}: {why}')
