r"""Advantages within a rollout, estimated without a critic from branches that start at its states.

From a state s_k of a rollout, reached after t_k turns, m branches were run to their ends under the same policy. Their
returns c_1 .. c_m, and the return R of the rollout itself, are independent samples of the return from s_k, given s_k.
In the same way, the rewards of a group's rollouts are samples of the return from the first state s_0::

    states          s_0 ........... s_1 ........... s_2 ........... end
    rollout         turns 0..t_1-1  turns t_1..     turns t_2..     R
    returns here    rewards of      c_1 .. c_m, R   c'_1 .. c'_m, R
                    the others

    V(s_0) = mean of the other rollouts' rewards                  Q(s_k) = (c_1 + .. + c_m + R) / (m + 1)
    V(s_k) = (c_1 + .. + c_m) / m

    A of the rollout's turns from s_k to s_k+1   Q(s_k+1) - V(s_k), and R - V(s_k) after the last state
    A of branch i from s_k                       c_i - (R + the other branches' returns) / m

These are the Monte-Carlo values of VinePPO, arXiv 2410.01679, with one difference: the return of the rollout itself
is one of the samples of Q, the value after a turn, at no extra cost. It is never part of the value that is
subtracted: V(s_k) doesn't depend on anything sampled from s_k on. So the expectation of grad log p(turn) V(s_k) is 0,
and the expectation of grad log p(turn) A is the turn's part of the gradient of the expected reward.

This is true if a state was chosen at random, or by tokens sampled before it, including those of earlier batches. If
the state before a turn were chosen by the outcome of that turn, such as its entropy, V(s_k) would depend on the turn
and the estimate would be biased. A failed branch is not a sample. If failures depend on the return that a branch
would have had, the values are biased, just as a group's mean is biased by failed rollouts.

Summed over the rollout's own turns alone, grad log p(turn) A has the gradient of the expected reward as its
expectation. The same is true of each set of branches, for the turns after its state. If the branches are trained too,
late turns are therefore sampled more often than early ones, and `share` corrects for that. A turn's weight is 1
divided by the number of samples of its position, which are the rollout and each branch of a state before that turn::

    turn        0    1    2    3    4        two branches after turn 1
    rollout     1    1   1/3  1/3  1/3
    branches             1/3  1/3  1/3       each

The expectation of the weighted sum is then the gradient of the expected reward again. This is exact if a rollout has
one state with branches, or if its states don't depend on the rollout, as with a fixed number of turns. Otherwise, a
branch may have more turns than the rollout, and its additional turns have slightly too much weight.
"""

from collections.abc import Sequence
from typing import NamedTuple


class State(NamedTuple):
    """A state from which branches were run."""

    turn: int
    """Number of the rollout's turns that were sampled before the state."""
    returns: Sequence[float]
    """The return of each branch."""


class Estimates(NamedTuple):
    """The advantages of a rollout's turns and of its branches."""

    starts: list[int]
    """Number of the first turn of each stretch of the rollout. A stretch begins at turn 0 and at each state's
    `turn`.
    """
    stretches: list[float]
    """Advantage of the turns in each stretch."""
    branches: list[list[float]]
    """Advantages of the branches, as one list for each state."""


def estimate(reward: float, others: Sequence[float], states: Sequence[State]) -> Estimates:
    """Estimate the advantages of a rollout's turns and of its branches.

    If there are no other rewards, the turns before the first state have no baseline, and their advantage is 0.

    Args:
        reward: Return of the rollout itself.
        others: Rewards of the group's other rollouts.
        states: States with branches in the order of their turns, each with at least one return.
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
    """Return the weight of turn number `turn`, if branches are trained too.

    `branches` has an entry for each trained branch: the number of the rollout's turns after which it begins.
    """
    return 1 / (1 + sum(begins <= turn for begins in branches))


def _against_the_others(returns: Sequence[float], reward: float) -> list[float]:
    """Return each branch's return minus the mean of the other returns from its state.

    `reward`, the return of the rollout itself, is one of the other returns.
    """
    whole = sum(returns) + reward
    return [value - (whole - value) / len(returns) for value in returns]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
