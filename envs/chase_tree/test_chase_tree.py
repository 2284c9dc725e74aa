"""Tests of chase_tree without a model or a container."""

import re

import agentgym as ag
from agentgym.engines.scripted import Reply, Scripted, call, say
from agentgym.sandboxes.fake.sandbox import FakeSandboxPool
from agentgym.testing import check_env
from envs.chase_tree.env import ChaseTree, TreeTask

TASK = TreeTask(
    id="t",
    prompt=(ag.Message(role="user", content="Start at key 31. What is the value?"),),
    store={"31": ("see 52", "see 60"), "52": ("value 17",), "60": ("see 61",), "61": ("value 40",)},
    value=40,
)
FOUND = re.compile(r"key (\d+)|see (\d+)|value (\d+)")


def follow(text: str) -> Reply:
    """Reply based on the last message."""
    start, see, value = FOUND.findall(text)[-1]
    return say(f"Answer: {value}") if value else call("python", code=f"get({see or start})")


async def test_chase_tree_keeps_the_contract_of_an_env(sandboxes: FakeSandboxPool) -> None:
    await check_env(ChaseTree, TASK, oracle=follow, sandboxes=sandboxes)


async def test_both_branches_are_followed_and_the_larger_value_is_the_answer(sandboxes: FakeSandboxPool) -> None:
    rollout = await ag.rollout(ChaseTree, TASK, Scripted(follow), sandboxes=sandboxes)
    assert rollout.reward == 1.0
    assert sorted((s.kind, len(s.turns)) for s in rollout.segments) == [("fork", 2), ("fork", 3), ("root", 2)]
    assert rollout.metrics["forks"] == 2


async def test_a_branch_that_guesses_gives_a_wrong_answer(sandboxes: FakeSandboxPool) -> None:
    def hasty(text: str) -> Reply:
        return say("Answer: 99") if text.rstrip().endswith("assistant") and "see 60" in text else follow(text)

    rollout = await ag.rollout(ChaseTree, TASK, Scripted(hasty), sandboxes=sandboxes)
    assert rollout.reward == 0.0


async def test_a_branch_has_a_separate_session(sandboxes: FakeSandboxPool) -> None:
    def noting(text: str) -> Reply:
        start, see, value = FOUND.findall(text)[-1]
        key = see or start
        return say(f"Answer: {value}") if value else call("python", code=f"mine = get({key})\nmine")

    rollout = await ag.rollout(ChaseTree, TASK, Scripted(noting), sandboxes=sandboxes)
    assert rollout.reward == 1.0
    assert sandboxes.made[0].namespace["mine"] == "see 52"  # type: ignore[attr-defined]


def test_every_task_has_its_largest_value_at_a_leaf() -> None:
    for task in ChaseTree.tasks("train")[:200]:
        values = [int(f.removeprefix("value ")) for found in task.store.values() for f in found if "value" in f]
        assert max(values) == task.value
        assert len(values) == 2
