"""Advantages from branches are unbiased: averaged over all possible samples, they give the gradient of the reward."""

from collections.abc import Iterator
from itertools import product

import numpy as np
import pytest

from agentgym.advantages.estimates import State, estimate, share

REWARDS = {"": 0.0, "a": 0.0, "b": 0.0, "aa": 0.2, "ab": 1.0, "ba": -0.5, "bb": 0.7}
"""The reward of each pair of turns, in an env of two turns with two actions each."""
LOGITS = {"": 0.3, "a": -0.4, "b": 0.8}
"""The logit of action a in each state; the logit of b is 0."""


def chance(state: str, action: str) -> float:
    likely = float(1 / (1 + np.exp(-LOGITS[state])))
    return likely if action == "a" else 1 - likely


def gradient(state: str, action: str) -> dict[str, float]:
    """Return the derivative of log p(action | state) by the logits."""
    return {name: (float(action == "a") - chance(state, "a")) * (name == state) for name in LOGITS}


def value(state: str) -> float:
    return REWARDS[state] if len(state) == 2 else sum(chance(state, x) * value(state + x) for x in "ab")


def reached(state: str) -> float:
    return float(np.prod([chance(state[:i], state[i]) for i in range(len(state))]))


def exact(states: tuple[str, ...]) -> dict[str, float]:
    """Return the part of the policy gradient of the expected reward that belongs to turns in these states."""
    return {
        state: reached(state) * sum(chance(state, x) * gradient(state, x)[state] * value(state + x) for x in "ab")
        if state in states
        else 0.0
        for state in LOGITS
    }


def ways(branches: int) -> Iterator[tuple[float, str, list[str], str]]:
    """Yield every combination of a rollout, its branches after the first turn, and the group's other rollout.

    Yields:
        The combination's probability, the rollout's path, its branches' paths, and the other rollout's path.
    """
    pairs = [first + second for first, second in product("ab", "ab")]
    for way, other in product(pairs, pairs):
        for seconds in product("ab", repeat=branches):
            rollouts = [way[0] + second for second in seconds]
            likely = reached(way) * reached(other) * np.prod([chance(way[0], second) for second in seconds])
            yield float(likely), way, rollouts, other


@pytest.mark.parametrize("branches", [1, 2, 3])
def test_a_rollouts_turns_give_the_gradient_of_the_expected_reward(branches: int) -> None:
    found = dict.fromkeys(LOGITS, 0.0)
    of_branches = dict.fromkeys(LOGITS, 0.0)
    for likely, way, rollout, other in ways(branches):
        given = estimate(REWARDS[way], [REWARDS[other]], [State(1, [REWARDS[end] for end in rollout])])
        for place, advantage in enumerate(given.stretches):
            for name, slope in gradient(way[:place], way[place]).items():
                found[name] += likely * slope * advantage
        for end, advantage in zip(rollout, given.branches[0], strict=True):
            for name, slope in gradient(end[:1], end[1]).items():
                of_branches[name] += likely * slope * advantage
    assert found == pytest.approx(exact(("", "a", "b")))
    # Each branch adds the same gradient once more, for the turns after its state.
    assert of_branches == pytest.approx({name: branches * part for name, part in exact(("a", "b")).items()})


def test_with_its_weight_every_position_of_a_turn_counts_once() -> None:
    found = dict.fromkeys(LOGITS, 0.0)
    for likely, way, rollout, other in ways(2):
        given = estimate(REWARDS[way], [REWARDS[other]], [State(1, [REWARDS[end] for end in rollout])])
        turns = [(way[:place], way[place], value) for place, value in enumerate(given.stretches)]
        turns += [(end[:1], end[1], value) for end, value in zip(rollout, given.branches[0], strict=True)]
        for state, letter, advantage in turns:
            for name, slope in gradient(state, letter).items():
                found[name] += likely * slope * advantage * share(len(state), [1, 1])
    assert found == pytest.approx(exact(("", "a", "b")))
    assert [share(turn, [2, 2, 4]) for turn in range(5)] == [1, 1, 1 / 3, 1 / 3, 1 / 4]


def test_a_parts_advantage_is_the_mean_after_it_minus_the_mean_before_it() -> None:
    found = estimate(1.0, [0.0, 0.5], [State(2, [0.0, 1.0]), State(5, [1.0, 1.0, 0.0])])
    assert found.starts == [0, 2, 5]
    # after: (0 + 1 + 1) / 3, (1 + 1 + 0 + 1) / 4, 1; before: (0 + .5) / 2, (0 + 1) / 2, (1 + 1 + 0) / 3
    assert found.stretches == pytest.approx([2 / 3 - 1 / 4, 3 / 4 - 1 / 2, 1 - 2 / 3])
    assert found.branches[0] == pytest.approx([0 - (1 + 1) / 2, 1 - (0 + 1) / 2])
    assert found.branches[1] == pytest.approx([1 - 2 / 3, 1 - 2 / 3, 0 - 1])


def test_a_rollouts_own_outcome_is_not_in_the_value_of_earlier_states() -> None:
    low, high = (estimate(reward, [0.0], [State(1, [0.3])]) for reward in (0.0, 1.0))
    assert high.stretches[1] - low.stretches[1] == pytest.approx(1.0)


def test_without_other_rollouts_the_first_turns_have_no_baseline_and_no_advantage() -> None:
    assert estimate(3.0, [], [State(1, [1.0])]).stretches == [0.0, 2.0]


def test_a_state_may_be_chosen_by_an_earlier_batch_and_at_random() -> None:
    found = dict.fromkeys(LOGITS, 0.0)
    for past, drawn in product(("aa", "ab", "ba", "bb"), (True, False)):
        for likely, way, rollout, other in ways(1):
            likely *= reached(past) * (0.2 if drawn else 0.8)
            states = [State(1, [REWARDS[rollout[0]]])] if drawn or REWARDS[past] > 0.3 else []
            given = estimate(REWARDS[way], [REWARDS[other]], states)
            for place in range(2):
                for name, slope in gradient(way[:place], way[place]).items():
                    found[name] += likely * slope * given.stretches[place if states else 0]
    assert found == pytest.approx(exact(("", "a", "b")))


@pytest.mark.parametrize(("turn", "is_unbiased"), [(0, True), (1, False)])
def test_a_state_may_be_chosen_by_the_turn_before_it_but_not_by_the_one_after_it(turn: int, is_unbiased: bool) -> None:
    found = dict.fromkeys(LOGITS, 0.0)
    for likely, way, rollout, other in ways(1):
        states = [State(1, [REWARDS[rollout[0]]])] if way[turn] == "b" else []
        given = estimate(REWARDS[way], [REWARDS[other]], states)
        for place in range(2):
            for name, slope in gradient(way[:place], way[place]).items():
                found[name] += likely * slope * given.stretches[place if states else 0]
    assert (found == pytest.approx(exact(("", "a", "b")), abs=1e-3)) == is_unbiased
