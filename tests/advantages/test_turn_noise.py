"""What is seen of turns in rollouts, and the number of turns behind which branches pay."""

import numpy as np
import pytest

from agentgym.advantages.turn_noise import LEAST_NOISE, Part, Rows, added, measured, planned, signals
from agentgym.types.branching import Branching

NOTHING = np.zeros((0, 6))


def branching(**given: object) -> Branching:
    return Branching(**{"after": "learned_turn", "tokens": 1000, **given})  # type: ignore[arg-type]


def rollout(*, advantage: float = 1.0, turns: int = 4, **variances: float) -> Rows:
    """Turns of ten tokens with a weight of 1, and what came of the states behind so many of them."""
    given = {int(name[1:]): value for name, value in variances.items()}
    return measured(np.full(turns, 10.0), np.ones(turns, bool), [Part(np.ones(turns), advantage, given)])


def summed(*rows: Rows) -> Rows:
    whole = NOTHING
    for each in rows:
        whole = added(whole, each)
    return whole


def test_a_rollout_says_what_lies_behind_each_number_of_turns_and_around_its_branches() -> None:
    found = measured(
        np.array([3.0, 2.0, 5.0]),
        np.array([True, False, True]),
        [Part(np.array([0.5, 0.0, 0.25]), 2.0, {2: 0.1}), Part(np.array([0.0, 1.0, 0.0]), -1.0, {})],
    )
    # reached, tokens behind, noise behind, measured, variance times the weight before it and behind it
    assert found.tolist() == [
        [1, 10, 4 * 0.75 + 1, 0, 0, 0],
        [0, 0, 0, 0, 0, 0],
        [1, 5, 4 * 0.25, 1, pytest.approx(0.1 * 0.5), pytest.approx(0.1 * 0.25)],
    ]


def test_rollouts_of_any_length_add_up_in_any_order() -> None:
    long, short = rollout(), rollout(turns=2)
    assert added(long, short).tolist() == added(short, long).tolist()
    assert added(long, short)[:, 0].tolist() == [2, 2, 1, 1]


@pytest.mark.parametrize(("m", "train", "more"), [(1, True, 1.0), (2, True, 0.5), (2, False, 1.5)])
def test_the_signal_is_that_of_less_noise_for_more_tokens(m: int, train: bool, more: float) -> None:
    rows = summed(*[rollout(t2=0.6)] * 16)
    # Of a noise of 4, 2 stand behind the state: they go, and 2 v `more` come; before it 2 v m / (m + 1) go.
    left = (4 - 2 + 2 * 0.6 * more - 2 * 0.6 * m / (m + 1)) / 4
    found = signals(branching(per_state=m, train=train), rows)
    assert found[2] == pytest.approx(1 / (left * (1 + m * 20 / 40)))


def test_the_unit_of_the_rewards_changes_no_signal() -> None:
    usual, small = summed(*[rollout(t2=0.6)] * 16), summed(*[rollout(advantage=0.01, t2=0.6e-4)] * 16)
    assert signals(branching(), small).tolist() == pytest.approx(signals(branching(), usual).tolist())


def test_a_number_that_few_rollouts_reach_counts_for_these() -> None:
    rows = summed(*[rollout(t2=0.6)] * 16, *[rollout(turns=2)] * 16)
    noise = (16 * 4 + 16 * 2) / 32
    left = (noise - (2 - 2 * 0.6 + 2 * 0.6 / 2) / 2) / noise
    assert signals(branching(per_state=1), rows)[2] == pytest.approx(1 / (left * (1 + (20 / 2) / 30)))


def test_the_number_with_the_highest_signal_is_chosen_and_none_where_branches_cost_more_than_they_tell() -> None:
    pays = summed(*[rollout(t1=0.9, t2=0.9, t3=0.0)] * 16)
    found = signals(branching(per_state=1), pays)
    plan = planned(branching(per_state=1), pays)
    assert plan.turn == found.argmax()
    assert plan.signal == pytest.approx(found.max())
    assert plan.signal > 1
    costs = summed(*[rollout(t1=0.1, t2=0.1, t3=0.1)] * 16)
    assert planned(branching(per_state=8), costs).turn == 0


def test_branches_that_tell_just_what_they_cost_are_not_planned() -> None:
    halved_noise_for_twice_the_tokens = summed(*[rollout(turns=2, t1=0.0)] * 16)
    assert signals(branching(per_state=2), halved_noise_for_twice_the_tokens).max() == 1
    assert planned(branching(per_state=2), halved_noise_for_twice_the_tokens).turn == 0


def test_a_number_whose_branches_are_dearer_than_the_budget_is_not_chosen() -> None:
    rows = summed(*[rollout(t1=0.1, t2=0.1, t3=0.1)] * 16)
    usual = planned(branching(per_state=1), rows)
    assert usual.turn == 1
    assert planned(branching(per_state=1, tokens=30), rows).turn == 1
    assert planned(branching(per_state=1, tokens=29), rows).turn == 2
    assert planned(branching(per_state=1, tokens=9), rows).turn == 0


def test_where_a_number_has_too_few_branches_those_next_to_it_tell_and_few_in_all_tell_nothing() -> None:
    few = summed(*[rollout(t2=0.6)] * 15)
    assert planned(branching(), few).turn == 0
    assert not signals(branching(), few).any()
    shared = signals(branching(), summed(*[rollout(t1=0.6)] * 8, *[rollout(t3=0.6)] * 8))
    assert (shared[1:] > 0).all()


def test_a_number_without_branches_takes_the_mean_of_those_as_near_on_either_side() -> None:
    rows = summed(*[rollout(turns=6, t2=0.6)] * 16, *[rollout(turns=6, t4=0.3)] * 16)
    before, behind = (2 * 0.6 + 4 * 0.3) / 2, (4 * 0.6 + 2 * 0.3) / 2
    left = (6 - 3 + behind - before / 2) / 6
    assert signals(branching(per_state=1), rows)[3] == pytest.approx(1 / (left * (1 + 30 / 60)))


def test_states_are_drawn_for_a_sixteenth_of_the_tokens_and_at_first_one_in_eight() -> None:
    plan = planned(branching(per_state=2), summed(*[rollout()] * 4))
    assert plan.explored * 2 * (30 + 20 + 10) == pytest.approx(40 / 16)
    assert planned(branching(), NOTHING).explored == 1 / 8
    assert planned(branching(), summed(rollout(turns=1))).explored <= 1


def test_noise_that_is_none_and_noise_that_branches_seem_to_take_away_are_no_signal_without_end() -> None:
    assert not signals(branching(), summed(*[rollout(advantage=0.0, t1=0.5)] * 16)).any()
    assert signals(branching(per_state=1), summed(*[rollout(t3=9.0)] * 16)).max() <= 1 / LEAST_NOISE
