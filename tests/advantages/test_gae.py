"""Generalized advantage estimation: its formula, its estimand, and the turns between which it is defined."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

from agentgym.advantages.gae import GAEConfig, discounted_returns, gae, turn_order, turn_rewards
from agentgym.errors import EnvError, Failure
from agentgym.samples import build_samples, value_samples
from agentgym.types.arrays import Floats
from agentgym.types.completion import Version
from agentgym.types.rollout import Group, Rollout, RolloutBranch, Segment, SegmentKind, Turn
from agentgym.types.sample import Sample, SampleKey

HOWS = [GAEConfig(gamma=gamma, lam=lam) for gamma, lam in product((1.0, 0.9, 0.0), (1.0, 0.95, 0.5, 0.0))]


def by_sums(rewards: Sequence[float], values: Sequence[float], how: GAEConfig) -> list[float]:
    """Compute the weighted sum over all later turns of their TD errors, as in the paper."""
    after = [*values[1:], 0.0][: len(values)]
    surprises = [r + how.gamma * later - v for r, later, v in zip(rewards, after, values, strict=True)]
    weight = how.gamma * how.lam
    return [sum(weight**k * d for k, d in enumerate(surprises[t:])) for t in range(len(rewards))]


@pytest.mark.parametrize("how", HOWS, ids=str)
def test_gae_is_the_discounted_sum_of_td_errors(how: GAEConfig) -> None:
    rng = np.random.default_rng(0)
    for turns in (0, 1, 2, 20):
        rewards, values = rng.normal(size=turns).tolist(), rng.normal(size=turns).tolist()
        np.testing.assert_allclose(gae(rewards, values, how), by_sums(rewards, values, how), atol=1e-12)


@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_lambda_1_is_return_minus_value_and_lambda_0_is_one_step(gamma: float) -> None:
    rng = np.random.default_rng(1)
    rewards, values = rng.normal(size=7), rng.normal(size=7)
    returns = [sum(gamma**k * r for k, r in enumerate(rewards[t:])) for t in range(7)]
    np.testing.assert_allclose(discounted_returns(rewards.tolist(), gamma), returns)
    whole = gae(rewards.tolist(), values.tolist(), GAEConfig(gamma=gamma, lam=1.0))
    np.testing.assert_allclose(whole, np.array(returns) - values)
    one = gae(rewards.tolist(), values.tolist(), GAEConfig(gamma=gamma, lam=0.0))
    np.testing.assert_allclose(one, rewards + gamma * np.append(values[1:], 0) - values)


# A small Markov decision process: three turns of two actions; a state consists of the earlier choices.
TURNS = 3
RIGHT = {"": 0.6, "a": 0.3, "b": 0.8, "aa": 0.5, "ab": 0.2, "ba": 0.9, "bb": 0.4}
"""The probability of action a."""
REWARDS = {
    state + action: len(state) - 1.5 * i + 0.3 * len(set(state)) for state in RIGHT for i, action in enumerate("ab")
}


def chance(state: str, action: str) -> float:
    return RIGHT[state] if action == "a" else 1 - RIGHT[state]


def quality(state: str, action: str, gamma: float) -> float:
    return REWARDS[state + action] + gamma * value(state + action, gamma)


def value(state: str, gamma: float) -> float:
    return 0.0 if len(state) == TURNS else sum(chance(state, x) * quality(state, x, gamma) for x in "ab")


def ways() -> Iterator[tuple[float, str]]:
    for actions in product("ab", repeat=TURNS):
        way = "".join(actions)
        yield float(np.prod([chance(way[:t], way[t]) for t in range(TURNS)])), way


def estimates(way: str, how: GAEConfig, wrong: float = 0.0) -> Any:
    """Return a path's advantages under the true values, or under values wrong by a number per letter b."""
    before = [way[:t] for t in range(TURNS)]
    values = [value(state, how.gamma) + wrong * (1 + state.count("b")) for state in before]
    return gae([REWARDS[way[: t + 1]] for t in range(TURNS)], values, how)


def expected(how: GAEConfig, wrong: float = 0.0) -> dict[str, float]:
    """Return the exact mean advantage of each action in each state, over all possible outcomes."""
    sums: dict[str, float] = {}
    weights: dict[str, float] = {}
    for likely, way in ways():
        for t, advantage in enumerate(estimates(way, how, wrong)):
            name = way[: t + 1]
            sums[name] = sums.get(name, 0.0) + likely * advantage
            weights[name] = weights.get(name, 0.0) + likely
    return {name: total / weights[name] for name, total in sums.items()}


@pytest.mark.parametrize("how", HOWS, ids=str)
def test_with_the_true_values_every_lambda_is_unbiased(how: GAEConfig) -> None:
    for name, found in expected(how).items():
        exact = quality(name[:-1], name[-1], how.gamma) - value(name[:-1], how.gamma)
        assert found == pytest.approx(exact, abs=1e-12), name


def test_with_wrong_values_lambda_1_is_off_by_a_baseline_and_lambda_0_is_biased() -> None:
    def ranks(lam: float) -> dict[str, float]:
        """Return how much better a is than b in each state, which a baseline doesn't change."""
        found = expected(GAEConfig(lam=lam), wrong=0.7)
        return {state: found[state + "a"] - found[state + "b"] for state in RIGHT}

    true = {state: quality(state, "a", 1.0) - quality(state, "b", 1.0) for state in RIGHT}
    assert ranks(1.0) == pytest.approx(true)
    assert max(abs(ranks(0.0)[state] - true[state]) for state in RIGHT) == pytest.approx(0.7)


@pytest.mark.parametrize("lam", [1.0, 0.95, 0.0])
def test_the_mean_of_sampled_advantages_is_within_three_standard_errors(lam: float) -> None:
    rng, how, found = np.random.default_rng(4), GAEConfig(lam=lam), dict[str, list[float]]()
    likely, all_ways = zip(*ways(), strict=True)
    for way in rng.choice(all_ways, size=4000, p=likely):
        for t, advantage in enumerate(estimates(str(way), how)):
            found.setdefault(way[: t + 1], []).append(advantage)
    assert len(found) == len(REWARDS)
    for name, seen in found.items():
        exact = quality(name[:-1], name[-1], 1.0) - value(name[:-1], 1.0)
        assert abs(np.mean(seen) - exact) <= 3 * np.std(seen) / len(seen) ** 0.5 + 1e-9, name


@pytest.mark.parametrize("wrong", [{"gamma": 1.1}, {"lam": -0.1}, {"lam": "1"}])
def test_settings_out_of_bounds_are_refused_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"^{next(iter(wrong))}"):
        GAEConfig(**wrong)


def segment(
    index: int,
    turns: Sequence[tuple[int, float]],
    kind: SegmentKind = "root",
    branch: int | None = None,
    **changed: Any,
) -> Segment:
    """Return a segment whose two-token turns have these numbers and rewards, and are requested at their numbers."""
    made = [
        Turn(
            start=2 + 3 * i,
            stop=4 + 3 * i,
            finish_reason="stop",
            versions=(Version(0, 0),),
            message={"role": "assistant", "content": ""},
            reward=reward,
            number=number,
            asked_at=float(number),
            seconds=1.0,
        )
        for i, (number, reward) in enumerate(turns)
    ]
    sampled = np.zeros(1 + 3 * len(turns), np.bool_)
    for turn in made:
        sampled[turn.start : turn.stop] = True
    first = Segment(
        index=index,
        parent=None if index == 0 else 0,
        kind=kind,
        token_ids=np.arange(len(sampled)),
        sampled=sampled,
        logprobs=np.where(sampled, -1.0, 0.0),
        turns=tuple(made),
        branch=branch,
    )
    return replace(first, **changed)


def rollout(*segments: Segment, name: str = "r", reward: float | None = 1.0, **changed: Any) -> Rollout:
    failure = Failure.of(EnvError("gone")) if reward is None else None
    return Rollout(
        rollout_id=name,
        group_id="g",
        segments=segments,
        reward=reward,
        stop_reason="done",
        failure=failure,
        **changed,
    )


@pytest.mark.parametrize("reward", [0.0, 1.0, -0.5])
def test_turn_rewards_add_up_to_the_rollouts_reward(reward: float) -> None:
    played = rollout(segment(0, [(0, 0.25), (1, 0.0), (2, 0.5)]), reward=reward)
    assert turn_rewards(played, turn_order(played)) == pytest.approx([0.25, 0.0, reward - 0.25])


def numbers(played: Rollout) -> list[int]:
    return [turn.number for _, turn in turn_order(played)]


def test_turns_are_ordered_as_they_were_sampled() -> None:
    compacted = rollout(segment(0, [(0, 0), (1, 0)]), segment(1, [(2, 0)], "compaction"))
    assert numbers(compacted) == [0, 1, 2]
    waited = rollout(segment(0, [(0, 0), (3, 0)]), segment(1, [(1, 0), (2, 0)], "subagent"))
    assert numbers(waited) == [0, 1, 2, 3]
    assert [s.index for s, _ in turn_order(waited)] == [0, 1, 1, 0]
    other = rollout(segment(0, [(0, 0), (2, 0)]), segment(1, [(1, 0)], "subagent", trained=False))
    assert numbers(other) == [0, 2]


def overlapping() -> Rollout:
    beside = segment(1, [(1, 0)], "fork")
    return rollout(segment(0, [(0, 0)]), beside, _asked(segment(2, [(2, 0)], "fork"), 1.5))


def _asked(segment: Segment, at: float | None) -> Segment:
    return replace(segment, turns=tuple(turn._replace(asked_at=at) for turn in segment.turns))


@pytest.mark.parametrize(
    ("played", "said"),
    [
        (overlapping(), "turns 1 and 2 were sampled at the same time"),
        (
            rollout(
                segment(0, [(0, 0)]),
                _asked(segment(1, [(1, 0)], "fork"), None),
            ),
            "its turns have no times",
        ),
        (rollout(segment(0, [(0, 0), (0, 0)])), "two turns have the same number"),
        (rollout(segment(0, [(0, 0)], role="spy"), role_rewards={"spy": 1.0}), "role 'spy' has a separate reward"),
        (
            rollout(
                segment(0, [(0, 0)]),
                segment(1, [(1, 0)], "branch", branch=0),
                branches=(RolloutBranch(turn=1, reward=1.0, stop_reason="done"),),
            ),
            "it has branches",
        ),
    ],
)
def test_rollouts_without_a_linear_order_of_turns_are_refused(played: Rollout, said: str) -> None:
    with pytest.raises(ValueError, match=rf'^credit: "value" \(GAE\) does not work for rollout .r.: .*{said}'):
        value_samples([Group(group_id="g", rollouts=(played,))], lambda samples: {})


def constant(samples: Sequence[Sample]) -> dict[SampleKey, Floats]:
    return {(s.rollout_id, s.segment, s.step): np.full(int(s.loss_mask.sum()), 0.5, np.float32) for s in samples}


def test_each_token_of_a_turn_has_its_advantage_and_is_trained_once() -> None:
    played = rollout(segment(0, [(0, 0.25), (1, 0.0)]), segment(1, [(2, 0.5)], "compaction"), reward=2.0)
    lost = rollout(segment(0, [(0, 0)]), name="lost", reward=None)
    asked = list[Sample]()

    def values_of(samples: Sequence[Sample]) -> dict[SampleKey, Floats]:
        asked.extend(samples)
        return constant(samples)

    batch = value_samples([Group(group_id="g", rollouts=(played, lost))], values_of, GAEConfig(lam=0.0))
    assert [sample.loss_mask.tolist() for sample in asked] == [[True, False, False, True, False], [True, False]]
    assert [sample.loss_mask.tolist() for sample in batch] == [[True, True, False, True, True], [True, True]]
    # The turns gave 0.75 of the reward 2, so the last one gets the rest. The value is 0.5 everywhere.
    assert [sample.advantages.tolist() for sample in batch] == [[0.25, 0.25, 0.0, 0.0, 0.0], [1.25, 1.25]]
    assert {key: found.tolist() for key, found in batch.returns.items()} == {
        ("r", 0, 0): [2, 1.75],
        ("r", 1, 0): [1.75],
    }
    assert sum(sample.weight for sample in batch) == pytest.approx(1)
    assert (batch.rollouts_failed, batch.rollouts_trained, batch.trained_tokens) == (1, 1, played.sampled_tokens)


def test_a_group_with_equal_rewards_has_a_signal() -> None:
    group = Group(group_id="g", rollouts=tuple(rollout(segment(0, [(0, 0)]), name=name, reward=0.0) for name in "ab"))
    assert len(build_samples([group])) == 0
    batch = value_samples([group], lambda samples: {key: 0 * found for key, found in constant(samples).items()})
    assert (len(batch), len(batch.returns), batch.groups_without_signal) == (2, 2, 0)


def test_missing_or_too_few_values_are_refused() -> None:
    groups = [Group(group_id="g", rollouts=(rollout(segment(0, [(0, 0), (1, 0)])),))]
    with pytest.raises(ValueError, match=r"^values: rollout 'r' has 2 turns in segment 0, but no values"):
        value_samples(groups, lambda samples: {})
    with pytest.raises(ValueError, match=r"^values: rollout 'r' has 2 turns in segment 0, but 1 values"):
        value_samples(groups, lambda samples: {("r", 0, 0): np.zeros(1, np.float32)})


def test_samples_without_a_critic_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^credit: value needs a critic; use value_samples"):
        build_samples([], credit="value")
