"""Group rewards: an env compares the rollouts of a task before advantages are computed."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from pydantic import BaseModel

import agentgym as ag
from agentgym.engines.scripted import Scripted, call, say
from agentgym.samples import build_samples
from agentgym.scheduling import Schedule, Scheduler, run_groups
from agentgym.scheduling.group_rewards import GroupRewards
from agentgym.scheduling.group_state import GroupState

TASK = ag.Task(id="t", prompt="Write a line.")


class Order(BaseModel):
    best_first: list[int]


class Ranked(ag.ToolEnv[ag.Task]):
    """An env in which a listwise judge ranks the answers to a task."""

    @ag.reward
    def short(self) -> float:
        return 0.1 * (len(self.answer or "") < 5)

    @classmethod
    async def group_reward(cls, task: Any, rollouts: Sequence[ag.Rollout], model: Any) -> list[float]:
        answers = "\n".join(f"{n}: {rollout.messages[-1]['content']}" for n, rollout in enumerate(rollouts))
        order = await model("judge").ask(f"{task.id}:\n{answers}", Order)
        places = {number: place for place, number in enumerate(order.best_first)}
        return [1 - places[number] / len(rollouts) for number in range(len(rollouts))]


class InTurn(Scripted):
    """An engine that says the next text to each rollout, by the number in its name."""

    def __init__(self, *texts: str) -> None:
        super().__init__([])
        self.texts = texts

    def _next(self, token_ids: Sequence[int], session: str) -> ag.Message:
        return say(self.texts[int(session.split("/")[1])])


def longest(text: str) -> ag.Message:
    lines = [line.split(": ") for line in text.split("t:\n")[1].split("\n\n")[0].split("\n")]
    order = sorted(lines, key=lambda line: -len(line[1]))
    return say(f'{{"best_first": {[int(number) for number, _ in order]}}}')


async def test_a_group_reward_is_added_to_each_rollouts_own_before_advantages() -> None:
    groups = await run_groups(
        Ranked, [TASK], InTurn("aa", "bbbbbbbb", "cccccc"), n=3, models={"judge": Scripted(longest)}
    )
    rewards = [rollout.reward or 0.0 for rollout in groups.rollouts]
    assert rewards == pytest.approx([0.1 + 1 / 3, 1.0, 2 / 3])
    assert groups.rollouts[0].rewards == {"short": 0.1, "group_reward": pytest.approx(1 / 3)}
    batch = build_samples(groups)
    mean = sum(rewards) / 3
    assert [float(sample.advantages[0]) for sample in batch] == pytest.approx([r - mean for r in rewards])


async def test_the_cost_of_a_group_reward_is_divided_among_the_rollouts() -> None:
    groups = await run_groups(Ranked, [TASK], InTurn("a", "b"), n=2, models={"judge": Scripted(longest)})
    assert [rollout.metrics["model_calls/judge"] for rollout in groups.rollouts] == [0.5, 0.5]


async def test_failed_rollouts_are_not_compared_and_remain_without_a_reward() -> None:
    class Breaks(Ranked):
        @ag.reward
        def whole(self) -> float:
            if self.answer == "b":
                raise RuntimeError("broken")
            return 0.0

    groups = await run_groups(Breaks, [TASK], InTurn("a", "b", "cc"), n=3, models={"judge": Scripted(longest)})
    assert [rollout.reward for rollout in groups.rollouts] == pytest.approx([0.6, None, 1.1])
    assert groups.batch_stats is not None
    counts = groups.batch_stats.rollouts
    assert (counts.started, counts.finished, counts.failed) == (3, 2, 1)


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        ([1.0], "must return a number for each of its 2 rollouts"),
        ([1.0, float("nan")], "must return finite numbers"),
        (["1", "2"], "must return numbers"),
        ([None, None], "must return numbers"),
        (None, "must return a number for each"),
        (RuntimeError("no judge"), "RuntimeError: no judge"),
    ],
)
async def test_a_group_reward_that_fails_leaves_only_its_own_group_without_rewards(returned: Any, said: str) -> None:
    class Odd(ag.ToolEnv[ag.Task]):
        @ag.reward
        def one(self) -> float:
            return 1.0

        @classmethod
        async def group_reward(cls, task: Any, rollouts: Any, model: Any) -> Any:
            if task.id == "good":
                return [0.0] * len(rollouts)
            if isinstance(returned, Exception):
                raise returned
            return returned

    tasks = [TASK, ag.Task(id="good", prompt="?")]
    groups = await run_groups(Odd, tasks, Scripted([say("x")]), n=2)
    assert [rollout.reward for rollout in groups.rollouts] == [None, None, 1.0, 1.0]
    assert said in str(groups.rollouts[0].error)
    assert "Odd.group_reward" in str(groups.rollouts[0].error)
    assert groups.batch_stats is not None
    assert groups.batch_stats.rollouts.failed == 2


def test_a_group_is_compared_in_rollout_order_whichever_ends_first() -> None:
    group = GroupState(TASK, n=3, seed=0, number=0)
    for index in (2, 0, 1):
        group.end(index, replace(group.failed_rollout(index, "none yet"), reward=1.0, failure=None))
    assert [rollout.rollout_id for rollout in group.scored] == ["t/0", "t/1", "t/2"]


async def test_oversampled_groups_are_compared_once_complete_and_the_rest_is_cut() -> None:
    seen: list[int] = []

    class Compared(ag.ToolEnv[ag.Task]):
        @ag.tool
        async def wait(self) -> str:
            """Wait for ever."""
            await asyncio.Event().wait()
            return ""

        @ag.reward
        def one(self) -> float:
            return 1.0

        @classmethod
        async def group_reward(cls, task: Any, rollouts: Any, model: Any) -> list[float]:
            seen.append(len(rollouts))
            return [float(number) for number in range(len(rollouts))]

    class Third(InTurn):
        def _next(self, token_ids: Sequence[int], session: str) -> ag.Message:
            return call("wait") if session.split("/")[1] == "2" else say("x")

    ended: list[float | None] = []
    async with Scheduler(
        Compared,
        [TASK],
        Third(),
        Schedule(group_size=2, oversample=ag.OversampleConfig(extra_rollouts=1, stop="target")),
        on_rollout=lambda rollout: ended.append(rollout.reward),
    ) as scheduler:
        groups = await scheduler.collect(1)
    assert seen == [2]
    assert [rollout.reward for rollout in groups.rollouts] == [1.0, 2.0]
    assert ended == [1.0, 2.0]
    assert groups.batch_stats is not None
    assert groups.batch_stats.rollouts.dropped == 1


async def test_leaving_the_scheduler_cancels_a_waiting_group_reward(no_leaks: None) -> None:
    began = asyncio.Event()

    class Waits(ag.ToolEnv[ag.Task]):
        @ag.reward
        def one(self) -> float:
            return 1.0

        @classmethod
        async def group_reward(cls, task: Any, rollouts: Any, model: Any) -> list[float]:
            began.set()
            await asyncio.Event().wait()
            return []

    async with Scheduler(Waits, [TASK], Scripted([say("x")]), Schedule(group_size=1)) as scheduler:
        collecting = asyncio.create_task(scheduler.collect(1))
        await began.wait()
        collecting.cancel()
        await asyncio.gather(collecting, return_exceptions=True)


async def test_the_policy_may_judge_its_own_rollouts() -> None:
    def both(text: str) -> ag.Message:
        return longest(text) if "t:\n" in text else say("a")

    policy = Scripted(both)
    groups = await run_groups(Ranked, [TASK], policy, n=2, models={"judge": policy})
    assert [rollout.reward for rollout in groups.rollouts] == pytest.approx([1.1, 0.6])


def test_an_invalid_group_reward_is_refused_when_the_class_is_created() -> None:
    with pytest.raises(ValueError, match="group_reward: put @classmethod on it"):

        class Instance(ag.ToolEnv[ag.Task]):
            async def group_reward(self, task: Any, rollouts: Any, model: Any) -> Any: ...  # type: ignore[override]

    with pytest.raises(ValueError, match="group_reward is a plain `def`"):

        class Plain(ag.ToolEnv[ag.Task]):
            @classmethod
            def group_reward(cls, task: Any, rollouts: Any, model: Any) -> Any: ...


async def test_an_env_with_only_a_group_reward_causes_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    class Alone(ag.ToolEnv[ag.Task]):
        @classmethod
        async def group_reward(cls, task: Any, rollouts: Any, model: Any) -> list[float]:
            return [1.0] * len(rollouts)

    groups = await run_groups(Alone, [TASK], Scripted([say("x")]), n=2)
    assert [rollout.reward for rollout in groups.rollouts] == [1.0, 1.0]
    assert caplog.text == ""


async def test_a_group_reward_is_bound_by_the_envs_time_limit() -> None:
    class Hangs(ag.ToolEnv[ag.Task]):
        limits = ag.Limits(seconds=0.05)

        @classmethod
        async def group_reward(cls, task: Any, rollouts: Any, model: Any) -> list[float]:
            await asyncio.Event().wait()
            return []

    rollout = ag.Rollout(rollout_id="t/0", group_id="t", segments=(), reward=1.0, stop_reason="answer")
    (failed,) = await GroupRewards(Hangs, {}).added(TASK, [rollout], seed=0)
    assert failed.reward is None
    assert "Hangs.group_reward: TimeoutError: not finished after 0.05 s (limits.seconds)" in str(failed.error)
