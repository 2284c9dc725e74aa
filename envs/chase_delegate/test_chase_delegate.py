"""Tests of chase_delegate without a model or a container."""

import re

import agentgym as ag
from agentgym.engines.scripted import ByteTokenizer, Reply, Scripted, call, say
from agentgym.sandboxes.fake.sandbox import FakeSandboxPool
from agentgym.testing import check_env
from envs.chase_delegate.env import ChaseDelegate, DelegateTask

TASK = DelegateTask(
    id="t",
    prompt=(ag.Message(role="user", content="Start at key 31. What is the value?"),),
    store={"31": "see 52", "52": "see 60", "60": "see 61", "61": "value 17"},
    owned=("52", "60"),
    value=17,
)
FOUND = re.compile(r"key (\d+)|see (\d+)|value (\d+)")


def follow(text: str) -> Reply:
    """Reply based on the last message."""
    start, see, value = FOUND.findall(text)[-1]
    return say(f"Answer: {value}") if value else call("python", code=f"get({see or start})")


async def test_chase_delegate_keeps_the_contract_of_an_env(sandboxes: FakeSandboxPool) -> None:
    await check_env(ChaseDelegate, TASK, oracle=follow, sandboxes=sandboxes)


async def test_sub_agents_can_delegate_to_sub_agents_and_report_back(sandboxes: FakeSandboxPool) -> None:
    rollout = await ag.rollout(ChaseDelegate, TASK, Scripted(follow), sandboxes=sandboxes)
    assert rollout.reward == 1.0
    assert [(s.kind, s.parent) for s in rollout.segments] == [("root", None), ("subagent", 0), ("subagent", 1)]
    assert rollout.metrics["tool_calls"] == 4


async def test_a_sub_agent_that_guesses_gives_a_wrong_answer(sandboxes: FakeSandboxPool) -> None:
    def hasty(text: str) -> Reply:
        return say("Answer: 99") if text.rstrip().endswith("assistant") and "key 61" in text else follow(text)

    assert (await ag.rollout(ChaseDelegate, TASK, Scripted(hasty), sandboxes=sandboxes)).reward == 0.0


async def test_an_unusable_report_of_a_sub_agent_is_reported_as_no_value(sandboxes: FakeSandboxPool) -> None:
    script = [call("python", code="get(31)"), call("python", code="get(52)"), say("who knows"), say("Answer: 17")]
    rollout = await ag.rollout(ChaseDelegate, TASK, Scripted(script), sandboxes=sandboxes)
    assert "no value" in ByteTokenizer().decode(rollout.segments[0].token_ids.tolist())


def test_delegated_keys_are_neither_first_nor_last() -> None:
    for task in ChaseDelegate.tasks("train")[:200]:
        keys = list(task.store)
        assert set(task.owned) <= set(keys[1:-1])
        assert task.owned
