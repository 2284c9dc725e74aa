"""Tests of chase_long without a model or a container."""

import re

import pytest

import agentgym as ag
from agentgym.engines.scripted import Reply, ReplyPolicy, Scripted, call, say
from agentgym.sandboxes.fake.sandbox import FakeSandboxPool
from agentgym.testing import check_env
from envs.chase.env import ChaseTask
from envs.chase_long.env import ChaseLong, ChaseLongTurns

KEYS = [str(key) for key in range(20, 32)]
TASK = ChaseTask(
    id="t",
    prompt=(ag.Message(role="user", content=f"Start at key {KEYS[0]}. What is the value?"),),
    store=dict(zip(KEYS, [*(f"see {key}" for key in KEYS[1:]), "value 17"], strict=True)),
    value=17,
)
FOUND = re.compile(r"key:? (\d+)|see (\d+)|alue (?:is )?(\d+)")


class RoomyTurns(ChaseLongTurns):
    """Like `Roomy`, but with turn rewards."""

    limits = ag.Limits(turns=18, seconds=120, context_tokens=1200)


class Roomy(ChaseLong):
    """Chase_long with a context that has as many bytes as the real one has tokens of the tiny model."""

    limits = ag.Limits(turns=18, seconds=120, context_tokens=1200)


def follow(lies: int = 0) -> ReplyPolicy:
    """Reply based on the last message; the first `lies` summaries are wrong."""
    told = 0

    def reply(text: str) -> Reply:
        nonlocal told
        start, see, value = FOUND.findall(text)[-1]
        if "Summarise." in text.rpartition("user\n")[2]:
            told += 1
            if value:
                return say(f"The value is {value}.")
            return say(f"Next key: {99 if told <= lies else see or start}.")
        return say(f"Answer: {value}") if value else call("python", code=f"get({see or start})")

    return reply


async def test_chase_long_keeps_the_contract_of_an_env(sandboxes: FakeSandboxPool) -> None:
    await check_env(Roomy, TASK, oracle=follow(), sandboxes=sandboxes)


async def test_a_long_chain_takes_several_contexts_and_one_reward(sandboxes: FakeSandboxPool) -> None:
    rollout = await ag.rollout(Roomy, TASK, Scripted(follow()), sandboxes=sandboxes)
    assert rollout.reward == 1.0
    assert len(rollout.segments) >= 4
    assert {s.kind for s in rollout.segments[1:]} == {"compaction"}
    assert max(len(s.token_ids) for s in rollout.segments) <= 1200
    assert sum(len(s.token_ids) for s in rollout.segments) > 2 * 1200


async def test_a_wrong_summary_costs_the_rest_of_the_reward(sandboxes: FakeSandboxPool) -> None:
    rollout = await ag.rollout(Roomy, TASK, Scripted(follow(lies=1)), sandboxes=sandboxes)
    assert 0 < (rollout.reward or 0.0) < 0.5
    assert rollout.rewards["solved"] == 0.0


@pytest.mark.parametrize("lies", [0, 1])
async def test_paid_per_turn_the_total_reward_is_the_same(sandboxes: FakeSandboxPool, lies: int) -> None:
    plain = await ag.rollout(Roomy, TASK, Scripted(follow(lies)), sandboxes=sandboxes)
    rollout = await ag.rollout(RoomyTurns, TASK, Scripted(follow(lies)), sandboxes=sandboxes)
    rewards = [turn.reward for segment in rollout.segments for turn in segment.turns]
    assert rollout.reward == pytest.approx(plain.reward)
    assert sorted({round(reward, 6) for reward in rewards}) == [0, round(0.5 / 12, 6)]  # a key is paid for once
    assert sum(rewards) == pytest.approx(0.5 * plain.rewards["way"])


def test_train_and_test_tasks_never_overlap() -> None:
    assert ChaseLong.tasks("train").indices.stop <= ChaseLong.tasks("test").indices.start
