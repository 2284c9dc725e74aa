"""A turn's advantage is its return minus a mean that does not depend on which rollouts continued."""

from dataclasses import replace
from itertools import product
from typing import Any, get_args

import numpy as np
import pytest

from agentgym.advantages.estimates import State
from agentgym.advantages.group import (
    LEAST_DIFFERENCE,
    Estimator,
    advantages,
    has_signal,
    states_of,
    turn_advantages,
    turns_of,
)
from agentgym.errors import Failure
from agentgym.samples import CreditLevel, build_samples
from agentgym.scheduling.group_state import GroupState
from agentgym.types.completion import Version
from agentgym.types.rollout import Group, Rollout, RolloutBranch, Segment, Turn
from agentgym.types.task import Task


def played(name: str, outcome: float, *rewards: float) -> Rollout:
    """Return a rollout with one token per turn."""
    n = len(rewards)
    turns = tuple(
        Turn(
            start=1 + 2 * i,
            stop=2 + 2 * i,
            finish_reason="stop",
            versions=(Version(0, 0),),
            message={"role": "assistant", "content": ""},
            reward=reward,
            number=i,
        )
        for i, reward in enumerate(rewards)
    )
    mask = np.array([0, 1] * n, np.bool_)
    segment = Segment(
        index=0,
        parent=None,
        kind="root",
        token_ids=np.arange(2 * n),
        sampled=mask,
        logprobs=np.where(mask, -1.0, 0.0),
        turns=turns,
    )
    total = outcome + sum(rewards)
    return Rollout(rollout_id=name, group_id="g", segments=(segment,), reward=total, stop_reason="done")


def branched(name: str, reward: float, **branches: float | None) -> Rollout:
    """Return a rollout with branches named by the number of their turn and a letter."""
    boom = Failure(type="EnvError", message="boom")
    ends = [
        RolloutBranch(turn=int(key[1]), reward=came, stop_reason="done", failure=boom if came is None else None)
        for key, came in branches.items()
    ]
    return replace(played(name, reward, 0, 0, 0), branches=tuple(ends))


def worth(*rollouts: Rollout, estimator: Estimator = "dr_grpo") -> list[list[float]]:
    return [row.tolist() for row in turn_advantages(rollouts, estimator=estimator)]


def test_a_turns_advantage_is_its_return_minus_the_mean_over_all_rollouts() -> None:
    # returns of a: 1+2+4, 2+4; of b: 3, and after its end its outcome 1
    assert worth(played("a", 4, 1, 2), played("b", 1, 2)) == [[7 - 5, 6 - 3.5], [3 - 5]]


@pytest.mark.parametrize("estimator", get_args(Estimator))
def test_without_turn_rewards_it_is_the_groups_usual_advantage(estimator: Estimator) -> None:
    group = [played("a", 1, 0, 0, 0), played("b", 0, 0), played("c", 3, 0, 0)]
    usual = advantages([1, 0, 3], ["a", "b", "c"], ["g"] * 3, estimator=estimator)
    for row, value in zip(worth(*group, estimator=estimator), usual, strict=True):
        assert row == pytest.approx([value] * len(row), rel=1e-6)


def test_turns_use_the_estimators_unit_and_the_deviation_of_returns() -> None:
    # Returns 7 6 and 3 1, distances 2 2.5 and -2 -2.5; another group's, of 2 and 0, are 1 and -1.
    others = [replace(played(name, outcome, 0), group_id="h") for name, outcome in (("c", 2), ("d", 0))]
    group = [played("a", 4, 1, 2), played("b", 1, 2)]
    of_both_turns = (2 * 2**2 + 2 * 2.5**2) / 2
    units: dict[Estimator, float] = {
        "grpo": np.sqrt(of_both_turns),
        "rloo": 1 / 2,
        "reinforce++": np.sqrt((of_both_turns + 1 + 1) / 3),
        "maxrl": 5.0,
    }
    for estimator, unit in units.items():
        got = worth(*group, *others, estimator=estimator)
        assert got[:2] == [pytest.approx([2 / unit, 2.5 / unit], rel=1e-5), pytest.approx([-2 / unit], rel=1e-5)]


@pytest.mark.parametrize("estimator", get_args(Estimator))
def test_a_group_without_a_signal_does_not_change_other_advantages(estimator: Estimator) -> None:
    group = [played("a", 4, 1, 2), played("b", 1, 2)]
    equal = [replace(played(name, 1, 1, 1), group_id="h") for name in ("c", "d", "e")]
    assert worth(*group, *equal, estimator=estimator) == [*worth(*group, estimator=estimator), *[[0, 0]] * 3]
    rewards, names = [3, 1, 2, 2, 2], ["a", "b", "c", "d", "e"]
    both = advantages(rewards, names, [*"gghhh"], estimator=estimator)
    alone = advantages(rewards[:2], names[:2], [*"gg"], estimator=estimator)
    assert both.tolist() == [*alone.tolist(), 0, 0, 0]


@pytest.mark.parametrize("rewards", [[0.0, 0.2], [0.1, 0.0, 0.3]])
def test_the_deviation_of_a_single_group_equals_the_batchs(rewards: list[float]) -> None:
    names = [str(n) for n in range(len(rewards))]
    group = [played(name, reward, 0, 0) for name, reward in zip(names, rewards, strict=True)]
    usual = advantages(rewards, names, ["g"] * len(rewards), estimator="grpo")
    np.testing.assert_allclose(advantages(rewards, names, ["g"] * len(rewards), estimator="reinforce++"), usual)
    for estimator in ("grpo", "reinforce++"):
        np.testing.assert_allclose(worth(*group, estimator=estimator), np.repeat(usual[:, None], 2, 1), rtol=1e-6)


@pytest.mark.parametrize("estimator", ["grpo", "reinforce++"])
def test_tied_totals_do_not_inflate_the_advantages_of_turns(estimator: Estimator) -> None:
    for gap in (0.0, 1e-5):
        got = worth(played("a", 0, 1, 0), played("b", 0, 0, 1 + gap), estimator=estimator)
        assert np.abs(np.concatenate(got)).max() < 2


def test_a_group_with_tied_totals_is_trained_if_its_turns_differ() -> None:
    group = Group(group_id="g", rollouts=(played("a", 0, 1, 0), played("b", 0, 0, 1)))
    by_turn = build_samples([group], credit="turn", merge=False)
    assert [row.advantages.tolist() for row in by_turn] == [[0], [-0.5], [0], [0.5]]
    assert by_turn.groups_without_signal == 0
    by_outcome = build_samples([group], credit="outcome")
    assert (len(by_outcome), by_outcome.groups_without_signal) == (0, 1)


def test_a_group_with_identical_turns_is_dropped_at_every_credit_level() -> None:
    same = (played("a", 0, 1, 0), played("b", 1e-8, 1, 0))
    group = Group(group_id="g", rollouts=tuple(replace(each, metrics={"branches": 0.0}) for each in same))
    for credit in set(get_args(CreditLevel)) - {"value"}:  # that one needs a critic
        rows = build_samples([group], credit=credit)
        assert (len(rows), rows.groups_without_signal) == (0, 1)


def test_a_signal_is_determined_by_rewards_unless_turns_are_requested() -> None:
    tied = [played("a", 0, 1, 0), played("b", 0, 0, 1)]
    assert not has_signal(tied)
    assert has_signal(tied, by_turn=True)
    assert not has_signal([])
    assert not has_signal([], by_turn=True)


def test_the_least_difference_of_two_rewards_gives_a_signal() -> None:
    rewards = [0.0, LEAST_DIFFERENCE]
    least = [played(name, reward, 0) for name, reward in zip("ab", rewards, strict=True)]
    assert has_signal(least)
    assert has_signal(least, by_turn=True)
    assert all(advantages(rewards, ["a", "b"], ["g", "g"]) != 0)
    assert all(value != 0 for row in worth(*least) for value in row)


def test_the_turns_of_a_role_are_its_trained_ones_in_the_rollout_itself() -> None:
    (own,) = played("a", 1, 0, 0).segments
    turns = own.turns

    def beside(index: int, **given: Any) -> Segment:
        numbered = tuple(turn._replace(number=turn.number + 2 * index) for turn in turns)
        return replace(own, **{"index": index, "parent": 0, "kind": "subagent", "turns": numbered, **given})

    aide, silent = beside(1, role="aide"), beside(2, trained=False)
    branch = beside(3, kind="branch", branch=0)
    rollout = replace(
        branched("a", 1, t1a=0), segments=(own, aide, silent, branch), role_rewards={"aide": 1.0, "other": 0.0}
    )
    assert turns_of(rollout, "") == [*turns]
    assert turns_of(rollout, "aide") == [*aide.turns]
    assert turns_of(rollout, "other") == []


def test_a_state_has_the_rewards_of_its_successful_branches() -> None:
    rollout = branched("a", 1, t2a=0.5, t1a=0.25, t2b=None, t2c=0.75)
    assert states_of(rollout, "") == [State(1, [0.25]), State(2, [0.5, 0.75])]
    assert states_of(rollout, "aide") == []


def test_branch_rewards_of_one_state_give_a_signal_from_the_least_difference() -> None:
    assert has_signal([branched("a", 0, t1a=LEAST_DIFFERENCE), branched("b", 0)])
    assert not has_signal([branched("a", 0, t1a=0), branched("b", 0)])
    assert has_signal([branched("a", 1, t1a=1, t2a=0.5, t2b=0.75), branched("b", 1)])
    assert not has_signal([branched("a", 1, t1a=1, t2a=1 + 1e-9), branched("b", 1, t1a=1)])


@pytest.mark.parametrize("by_turn", [False, True])
def test_a_running_group_determines_its_signal_like_the_samples(by_turn: bool) -> None:
    pairs = [
        (played("a", 0, 1, 0), played("b", 0, 0, 1)),
        (played("a", 0, 0.1, 0.2, 0.3), played("b", 0.1 + 0.2 + 0.3)),
        (played("a", 1), played("b", 0)),
        (played("a", 1, 0), played("b", 0, 0)),
        (played("a", 0.6, 0), played("b", 0.6 + 1e-9, 0)),
        (played("a", 1, 0),),
    ]
    task = Task(id="g", prompt=({"role": "user", "content": "?"},))
    for pair in pairs:
        group: GroupState[Task] = GroupState(task, n=2, seed=0, number=0, by_turn=by_turn)
        group.ended.update(enumerate(pair))
        rows = build_samples([Group(group_id="g", rollouts=pair)], credit="turn" if by_turn else "outcome")
        assert group.signal == (rows.groups_without_signal == 0)


P = 0.7
"""The probability of continuing after a turn; the third turn is the last."""
TURN_REWARDS, OUTCOMES = (1.0, -0.4, 0.9), (0.5, 2.0, -1.0)


def chance(turns: int) -> float:
    return float(P ** (turns - 1) * (1 - P if turns < 3 else 1.0))


def ended_after(turns: int, name: str) -> Rollout:
    return played(name, OUTCOMES[turns - 1], *TURN_REWARDS[:turns])


def score(turn: int, turns: int) -> float:
    """Return d log(probability of the choice at this turn) / d logit(P)."""
    if turn == 2:
        return 0.0
    return (1 - P) if turn < turns - 1 else -P


def gradient() -> float:
    """Return the gradient of the expected reward by logit(P), by definition."""
    return sum(
        chance(n) * sum(score(t, n) for t in range(n)) * (OUTCOMES[n - 1] + sum(TURN_REWARDS[:n])) for n in (1, 2, 3)
    )


def estimate(baseline: str) -> float:
    """Return the estimator's mean over every pair of rollouts, weighted by probability."""
    total = 0.0
    for n, m in product((1, 2, 3), repeat=2):
        pair = (ended_after(n, "a"), ended_after(m, "b"))
        if baseline == "ours":
            mine = worth(*pair)[0]
        elif baseline == "samples":
            rows = build_samples([Group(group_id="g", rollouts=pair)], credit="turn", merge=False)
            trained = {row.step: float(row.advantages[0]) for row in rows if row.rollout_id == "a"}
            mine = [trained.get(t, 0.0) for t in range(n)]
        else:  # the mean over those that reached the turn
            reach = [[OUTCOMES[k - 1] + sum(TURN_REWARDS[t:k]) for t in range(k)] for k in (n, m)]
            mine = [reach[0][t] - float(np.mean([r[t] for r in reach if len(r) > t])) for t in range(n)]
        total += chance(n) * chance(m) * sum(score(t, n) * mine[t] for t in range(n))
    return total


def test_the_gradient_is_unbiased_although_the_policy_chooses_its_number_of_turns() -> None:
    assert estimate("ours") == pytest.approx(gradient() / 2, rel=1e-5)  # (n - 1) / n, the same at every turn


def test_trained_samples_are_unbiased_although_totals_tie(monkeypatch: pytest.MonkeyPatch) -> None:
    for rewards, outcomes in (((1.0, -0.4, 0.9), (0.5, 2.0, -1.0)), ((1.0, 0.0, -1.0), (0.0, 0.0, 1.0))):
        monkeypatch.setitem(globals(), "TURN_REWARDS", rewards)
        monkeypatch.setitem(globals(), "OUTCOMES", outcomes)
        assert estimate("samples") == pytest.approx(gradient() / 2, rel=1e-5, abs=1e-8)


def test_a_mean_over_rollouts_that_reached_the_turn_would_be_biased() -> None:
    assert abs(estimate("reached") - gradient() / 2) > 0.01


def test_each_turn_of_a_sample_has_its_own_advantage() -> None:
    group = Group(group_id="g", rollouts=(played("a", 4, 1, 2), played("b", 1, 2)))
    apart = build_samples([group], credit="turn", merge=False)
    assert [row.advantages.tolist() for row in apart] == [[2.0], [2.5], [-2.0]]
    merged = build_samples([group], credit="turn")
    assert merged[0].advantages.tolist() == [2.0, 0.0, 2.5]
    assert build_samples([group], credit="outcome")[0].advantages.tolist() == [2.0, 0.0, 2.0]


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"credit": "step"}, "credit: expected one of .*, got 'step'"),
        ({"credit": "turn"}, "rollout 'a': two turns have the same number"),
    ],
)
def test_an_invalid_credit_level_is_refused(change: dict[str, str], error: str) -> None:
    a, b = played("a", 1, 0, 0), played("b", 0, 0)
    (segment,) = a.segments
    same = replace(segment, turns=tuple(turn._replace(number=0) for turn in segment.turns))
    group = Group(group_id="g", rollouts=(replace(a, segments=(same,)), b))
    with pytest.raises(ValueError, match=f"^{error}"):
        build_samples([group], **change)  # type: ignore[arg-type]
