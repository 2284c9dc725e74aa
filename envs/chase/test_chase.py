"""Tests of chase without a model or a container."""

import agentgym as ag
from agentgym.engines.scripted import Reply, Scripted, call, raw, say
from agentgym.sandboxes.fake.sandbox import FakeSandboxPool
from agentgym.testing import check_env
from envs.chase.env import Chase, ChaseCompaction, ChaseTask

TASK = ChaseTask(
    id="t",
    prompt=(ag.Message(role="user", content="Start at key 31. What is the value?"),),
    store={"31": "see 52", "52": "value 17"},
    value=17,
)
SOLUTION: list[Reply] = [call("python", code="get(31)"), call("python", code="get(52)"), say("Answer: 17")]


async def test_chase_keeps_the_contract_of_an_env(sandboxes: FakeSandboxPool) -> None:
    await check_env(Chase, TASK, oracle=SOLUTION, sandboxes=sandboxes)


async def test_following_the_pointers_solves_the_task(sandboxes: FakeSandboxPool) -> None:
    rollout = await ag.rollout(Chase, TASK, Scripted(SOLUTION), sandboxes=sandboxes)
    assert rollout.reward == 1.0
    assert rollout.stop_reason == "answer"
    assert rollout.metrics["tool_calls"] == 2


async def test_a_malformed_call_costs_a_tenth(sandboxes: FakeSandboxPool) -> None:
    script = [raw("<tool_call>\nget(31)\n</tool_call>"), *SOLUTION]
    rollout = await ag.rollout(Chase, TASK, Scripted(script), sandboxes=sandboxes)
    assert rollout.rewards == {"solved": 1.0, "malformed": 1.0}


async def test_the_value_is_not_in_the_sandbox(sandboxes: FakeSandboxPool) -> None:
    snoop = call("python", code="sorted(n for n in globals() if not n.startswith('__'))")
    rollout = await ag.rollout(Chase, TASK, Scripted([snoop, say("?")]), sandboxes=sandboxes)
    sandbox = sandboxes.made[0]
    assert "17" not in "".join(str(v) for k, v in vars(sandbox).items() if k not in ("namespace", "log"))
    assert rollout.reward == 0.0


async def test_compaction_carries_the_summary_into_the_next_segment(sandboxes: FakeSandboxPool) -> None:
    script = [*SOLUTION[:2], say("The value is 17."), say("Answer: 17")]
    rollout = await ag.rollout(ChaseCompaction, TASK, Scripted(script), sandboxes=sandboxes)
    assert rollout.reward == 1.0
    assert [s.kind for s in rollout.segments] == ["root", "compaction"]
    assert [len(s.turns) for s in rollout.segments] == [3, 1]


def test_train_and_test_tasks_never_overlap() -> None:
    train, test = Chase.tasks("train"), Chase.tasks("test")
    assert train[len(train) - 1].id != test[0].id
    assert train.indices.stop <= test.indices.start


def test_the_same_index_gives_the_same_task() -> None:
    assert Chase.tasks("train")[7] == Chase.tasks("train")[7]
