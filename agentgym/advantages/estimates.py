r"""Advantages inside a rollout, estimated without a critic from branches that are played from its states.

From a state s_k of a rollout, which t_k turns had led to, m branches were played to their ends under the same policy.
Their returns c_1 .. c_m, and the return R that the rollout itself came to, are independent samples of the return from
s_k, given s_k. So are the rewards of a group's rollouts of the return from the first state s_0::

    states          s_0 ........... s_1 ........... s_2 ........... end
    rollout         turns 0..t_1-1  turns t_1..     turns t_2..     R
    returns here    rewards of      c_1 .. c_m, R   c'_1 .. c'_m, R
                    the others

    V(s_0) = mean of the other rollouts' rewards                  Q(s_k) = (c_1 + .. + c_m + R) / (m + 1)
    V(s_k) = (c_1 + .. + c_m) / m

    A of the rollout's turns from s_k to s_k+1   Q(s_k+1) - V(s_k), and R - V(s_k) behind the last state
    A of branch i from s_k                       c_i - (R + the other branches' returns) / m

These are the Monte-Carlo values of VinePPO, arXiv 2410.01679, with one difference: what the rollout itself came to
counts among the samples behind a turn. It is one of them, and costs nothing. It is never in the value that is taken
off: V(s_k) knows nothing of what was sampled from s_k on. So the expectation of grad log p(turn) V(s_k) is 0, and that
of grad log p(turn) A is the turn's part of the gradient of the expected reward.

This holds where a state was chosen by what was sampled before it, in earlier batches too, or by a draw. To choose the
state before a turn by how that turn came out, such as by its entropy, would make V(s_k) depend on the turn, and the
estimate biased. A branch that failed is no sample; where failing depends on what a branch was worth, the values are
biased by that, as a group's mean is by failed rollouts.

The turns of the rollout itself, alone, have the gradient of the expected reward as their expectation. So has each set
of branches, for the turns behind its state: late turns are sampled more often than early ones. `share` makes up for
that where the branches are trained, too. A turn counts as one over the number of ways that its place was sampled for,
which is 1 for the rollout and 1 for each branch of a state before it::

    turn        0    1    2    3    4        two branches behind turn 1
    rollout     1    1   1/3  1/3  1/3
    branches             1/3  1/3  1/3       each

The expectation of the whole is then the gradient of the expected reward again: exactly, where a rollout has one state
with branches, or where its states do not depend on it, as with a fixed number of turns. Elsewhere a branch may go on
behind the rollout's own end, and the turns there count for a little more.
"""

from collections.abc import Sequence
from typing import NamedTuple


class State(NamedTuple):
    """A state that branches were played from."""

    turn: int
    """The number of turns of the rollout that were sampled before it."""
    returns: Sequence[float]
    """What the branches came to, one return each."""


class Estimates(NamedTuple):
    """The advantages of a rollout's turns and of its branches."""

    starts: list[int]
    """The number of the first turn of each stretch of the rollout: 0, then the `turn` of each state."""
    stretches: list[float]
    """The advantage of the turns of each stretch."""
    branches: list[list[float]]
    """The advantages of the branches of each state."""


def estimate(reward: float, others: Sequence[float], states: Sequence[State]) -> Estimates:
    """Return the advantages of a rollout with this reward, whose group has these other rewards.

    The states are in the order of their turns, each with a return at least. Without other rewards the turns before the
    first state have no baseline, and the advantage 0.
    """
    values = [_mean(state.returns) for state in states]
    behind = [*(_mean([*state.returns, reward]) for state in states), reward]
    first = behind[0] - _mean(others) if others else 0.0
    later = [after - value for after, value in zip(behind[1:], values, strict=True)]
    return Estimates(
        starts=[0, *(state.turn for state in states)],
        stretches=[first, *later],
        branches=[_against_the_others(state.returns, reward) for state in states],
    )


def share(turn: int, branches: Sequence[int]) -> float:
    """Return what a turn with this number counts for, where trained branches begin behind these numbers of turns."""
    return 1 / (1 + sum(begins <= turn for begins in branches))


def _against_the_others(returns: Sequence[float], reward: float) -> list[float]:
    """Return each branch's return less the mean of what else came of its state."""
    whole = sum(returns) + reward
    return [value - (whole - value) / len(returns) for value in returns]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
