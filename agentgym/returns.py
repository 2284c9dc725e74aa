"""What rollouts got from each of their turns on, and whether a group's differ enough to learn from. Numpy only."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from agentgym.types import Rollout

LEAST_DIFFERENCE = 1e-6
"""Scores of a group that lie closer together than this are equal: a sum's last digits depend on its order."""


def differ(scores: NDArray[np.float64]) -> bool:
    """Whether a group's largest and smallest score differ enough to learn from, in any of the columns."""
    return bool(scores.size and np.ptp(scores, axis=0).max() >= LEAST_DIFFERENCE)


def returns_by_turn(rollouts: Sequence[Rollout]) -> NDArray[np.float64]:
    """What each of a group's scored rollouts got from each turn on: one row a rollout, one column a turn.

    A rollout that has ended has its outcome there. With O the outcome of a rollout and r its turns' rewards::

        turn        0            1        2            as many columns as the longest rollout has turns
        3 turns     r0+r1+r2+O   r1+r2+O  r2+O
        1 turn      r0+O         O        O
    """
    played = [turn_rewards(rollout) for rollout in rollouts]
    returns = np.zeros((len(rollouts), max(map(len, played), default=0)))
    for row, rollout, given in zip(returns, rollouts, played, strict=True):
        row[: len(given)] = given[::-1].cumsum()[::-1]
        row += (rollout.reward or 0.0) - given.sum()
    return returns


def turn_rewards(rollout: Rollout) -> NDArray[np.float64]:
    """What the env's steps gave, in the order of the turns' numbers."""
    turns = sorted((turn for s in rollout.segments for turn in s.turns), key=lambda turn: turn.number)
    return np.array([turn.reward for turn in turns], np.float64)
