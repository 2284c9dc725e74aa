"""The noise of the policy gradient by the number of turns, and behind how many of them branches take most of it away.

The gradient is a sum over turns of grad log p(turn) A. Let the weight of a turn be the sum of (1 - p)^2 over its
tokens, which goes with the square of grad log p: in a softmax, what was likely moves the logits little. The noise of a
rollout is then the sum of its turns' weights times A^2. With m branches of the state behind t turns, whose returns and
the reward R of the rollout have the sample variance v, that noise changes::

    turns before the state   Q(state) in the place of R           less by m / (m + 1) v w_before
    turns behind it          V(state) in the place of the others' mean b, and m more ways that share each place
                                                                  less by (R - b)^2 w_behind, more by 1 / m v w_behind
                             and where branches only estimate                         more by (1 + 1 / m) v w_behind

All of it is measured in rollouts, and its mean is over all of them, also those that have ended before t turns. Then

    signal(t) = 1 / ((noise with branches / noise without) x (tokens with branches / tokens without))

is what branches there are worth: how many times the signal of the gradient rises at equal tokens. Where it is at most 1
for every t, they cost more than they tell.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from agentgym.types.branching import Branching, PlannedBranching

COLUMNS = 6
REACHED, TOKENS, NOISE, MEASURED, BEFORE, BEHIND = range(COLUMNS)
"""What was seen of the state behind each number of turns, summed over rollouts: how many had it, the tokens and the
noise behind it, how many had branches there, and in these v times the weights before it and behind it."""
DECAY = 0.9
"""What a batch counts for behind each later one: the policy has changed since."""
EXPLORED = 1 / 16
"""Tokens of branches of states that are drawn, as a share of the rollouts' own."""
ENOUGH = 16
"""States with branches that an estimate is a mean of; where one number has fewer, those next to it are taken, too."""
LEAST_NOISE = 0.1
"""The least share of the noise that is believed to be left."""
Rows = NDArray[np.float64]
"""One row for each number of turns from 0 on, with the columns above."""


class Part(NamedTuple):
    """What the turns of one role add to the noise of a rollout."""

    weights: Rows
    """The weight of each turn, by number."""
    advantage: float
    """The rollout's reward less the mean of the others'."""
    variances: Mapping[int, float]
    """The sample variance of what came of each state with branches, by its number of turns."""


def measured(tokens: Rows, is_state: NDArray[np.bool_], parts: Sequence[Part]) -> Rows:
    """Return what one rollout says, from the tokens of each turn and whether branches may begin before it."""
    rows = np.zeros((len(tokens), COLUMNS))
    rows[:, REACHED], rows[:, TOKENS] = is_state, _behind(tokens) * is_state
    for part in parts:
        behind = _behind(part.weights)
        rows[:, NOISE] += behind * is_state * np.square(part.advantage)
        for turn, variance in part.variances.items():
            rows[turn, MEASURED] = 1
            rows[turn, BEFORE] += variance * (behind[0] - behind[turn])
            rows[turn, BEHIND] += variance * behind[turn]
    return rows


def added(one: Rows, other: Rows) -> Rows:
    """Return the sum of two, of which one may have more numbers."""
    longer, shorter = (one, other) if len(one) >= len(other) else (other, one)
    whole = longer.copy()
    whole[: len(shorter)] += shorter
    return whole


def planned(branching: Branching, rows: Rows) -> PlannedBranching:
    """Return the plan that follows from what was seen; without rollouts, that of a first batch."""
    if not len(rows) or not rows[0, TOKENS]:
        return PlannedBranching.of(branching)
    costs = branching.per_state * rows[:, TOKENS]
    explored = min(1.0, EXPLORED * float(rows[0, TOKENS]) / max(float(costs[1:].sum()), 1e-9))
    signal = signals(branching, rows)
    turn = int(signal.argmax())
    if signal[turn] <= 1:
        return PlannedBranching.of(branching, explored=explored)
    return PlannedBranching.of(branching, turn=turn, explored=explored, signal=float(signal[turn]))


def signals(branching: Branching, rows: Rows) -> Rows:
    """Return what branches behind each number of turns are worth; 0 where it is unknown, or above `tokens`."""
    m, mean, nearest = branching.per_state, rows / rows[0, REACHED], _nearest(rows)
    own, noise, costs = mean[0, TOKENS], mean[0, NOISE], m * mean[:, TOKENS]
    more = 1 / m if branching.train else 1 + 1 / m
    change = mean[:, REACHED] * (more * nearest[:, 1] - m / (m + 1) * nearest[:, 0]) - mean[:, NOISE]
    found = np.zeros(len(rows))
    is_known = np.isfinite(change) & (costs <= (branching.tokens or np.inf)) & (noise > 0)
    is_known[0] = False
    left = 1 + change[is_known] / max(noise, 1e-300)
    found[is_known] = 1 / (np.maximum(left, LEAST_NOISE) * (1 + costs[is_known] / own))
    return found


def _nearest(rows: Rows) -> Rows:
    """Return v times the weights before and behind each state, in the mean of the nearest ones that are enough."""
    found = np.full((len(rows), 2), np.nan)
    sums = np.concatenate([np.zeros((1, 3)), rows[:, [MEASURED, BEFORE, BEHIND]].cumsum(0)])
    turns = np.arange(len(rows))
    for reach in range(len(rows) if sums[-1, 0] >= ENOUGH else 0):
        high, low = np.minimum(turns + reach + 1, len(rows)), np.maximum(turns - reach, 0)
        window = sums[high] - sums[low]
        fresh = np.isnan(found[:, 0]) & (window[:, 0] >= ENOUGH)
        found[fresh] = window[fresh, 1:] / window[fresh, :1]
    return found


def _behind(values: Rows) -> Rows:
    """Return the sums of the values from each number on."""
    return np.asarray(values[::-1].cumsum()[::-1])
