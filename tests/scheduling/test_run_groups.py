"""Many rollouts: bounded, in order, counted, and cancelled together."""

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import agentgym as ag
from agentgym.engines.scripted import Scripted, call, say
from agentgym.errors import AgentGymError, SandboxError
from agentgym.sandboxes.fake.sandbox import FakeSandboxPool
from agentgym.scheduling import Schedule, Scheduler, run_groups
from agentgym.scheduling.run_groups import Groups
from agentgym.types.completion import Completion
from agentgym.types.rollout import Group, Rollout


def tasks(count: int) -> list[ag.Task]:
    return [ag.Task(id=f"t{i}", prompt=(ag.Message(role="user", content=f"Say {i}."),)) for i in range(count)]


class Say(ag.ToolEnv[ag.Task]):
    """An env with reward 1 for the number in the prompt."""

    async def setup(self) -> None:
        if self.task.id.startswith("bad"):
            raise ValueError(f"{self.task.id} is broken")

    @ag.tool
    async def look(self) -> str:
        """Look."""
        return "seen"

    @ag.reward
    async def said(self) -> float:
        return float(self.answer == self.task.id.removeprefix("t"))


ZERO = Scripted(lambda text: say("0"))


async def test_groups_and_rollouts_are_returned_in_order() -> None:
    class Reversed(Scripted):
        """An engine that answers the last request first."""

        waiting: list[asyncio.Event]

        async def generate(self, token_ids: Sequence[int], **given: Any) -> Completion:
            mine = asyncio.Event()
            self.waiting.append(mine)
            if len(self.waiting) == 6:
                mine.set()
            await mine.wait()
            self.waiting.remove(mine)
            if self.waiting:
                self.waiting[-1].set()
            return await super().generate(token_ids, **given)

    engine = Reversed(lambda text: say("1"))
    engine.waiting = []
    done: list[str] = []
    groups = await run_groups(Say, tasks(3), engine, n=2, on_rollout=lambda r: done.append(r.rollout_id))
    assert [group.group_id for group in groups] == ["t0", "t1", "t2"]
    assert [r.rollout_id for r in groups.rollouts] == ["t0/0", "t0/1", "t1/0", "t1/1", "t2/0", "t2/1"]
    assert [[r.reward for r in group.scored] for group in groups] == [[0, 0], [1, 1], [0, 0]]
    assert done == [r.rollout_id for r in groups.rollouts][::-1]


@pytest.mark.parametrize("bound", [1, 3])
async def test_at_most_concurrency_rollouts_run_at_once(bound: int) -> None:
    running, most = 0, 0
    full = asyncio.Event()

    class Counted(Say):
        async def setup(self) -> None:
            nonlocal running, most
            running += 1
            most = max(most, running)
            if running == bound:
                full.set()
            await full.wait()
            for _ in range(20):  # any others that are admitted start now
                await asyncio.sleep(0)

        async def close(self) -> None:
            nonlocal running
            running -= 1

    groups = await run_groups(Counted, tasks(4), ZERO, n=3, concurrency=bound)
    assert (most, running, len(groups.rollouts)) == (bound, 0, 12)


async def test_every_rollout_that_was_started_finished_or_failed() -> None:
    bad = ag.Task(id="bad", prompt=tasks(1)[0].prompt)
    groups = await run_groups(Say, [*tasks(2), bad], ZERO, n=2)
    numbers = groups.metrics()
    assert (numbers["rollouts/started"], numbers["rollouts/finished"], numbers["rollouts/failed"]) == (6, 4, 2)
    assert groups[2].scored == ()
    error = "EnvError: Say.setup: ValueError: bad is broken, at test_run_groups.py:"
    assert [(r.error or "").startswith(error) for r in groups[2].rollouts] == [True] * 2


async def test_means_are_taken_over_the_finished_rollouts_only() -> None:
    bad = ag.Task(id="bad", prompt=tasks(1)[0].prompt)
    numbers = (await run_groups(Say, [*tasks(2), bad], ZERO, n=1)).metrics()
    assert numbers["reward"] == numbers["reward/said"] == 0.5
    assert numbers["stop/answer"] == 1.0
    assert numbers["tokens/sampled"] == len("0<") == 2
    assert "stop/error" not in numbers


async def test_two_tasks_with_one_id_are_refused_before_anything_runs() -> None:
    rollouts: list[Rollout] = []
    with pytest.raises(ValueError, match=r"\['t0'\] appear twice"):
        await run_groups(Say, [*tasks(2), *tasks(1)], ZERO, n=1, on_rollout=rollouts.append)
    assert rollouts == []


@pytest.mark.parametrize(("name", "field"), [("n", "group_size"), ("concurrency", "concurrency")])
async def test_zero_of_anything_is_refused_by_name(name: str, field: str) -> None:
    counts: dict[str, Any] = {"n": 1, name: 0}
    with pytest.raises(ValueError, match=f"^{field}: must be at least 1"):
        await run_groups(Say, tasks(1), ZERO, **counts)


async def test_if_all_rollouts_failed_the_first_error_is_raised() -> None:
    bad = [ag.Task(id=f"bad{i}", prompt=tasks(1)[0].prompt) for i in range(2)]
    with pytest.raises(AgentGymError, match=r"all 4 rollouts failed; the first one: EnvError: .*bad0 is broken"):
        await run_groups(Say, bad, ZERO, n=2)


async def test_no_tasks_give_no_groups() -> None:
    groups = await run_groups(Say, [], ZERO, n=2)
    assert (len(groups), groups.metrics()["rollouts/started"]) == (0, 0)


async def test_cancelling_cancels_all_rollouts_and_returns_every_sandbox(sandboxes: FakeSandboxPool) -> None:
    closed: list[str] = []
    asked = asyncio.Event()

    class Boxed(Say):
        sandbox_spec = ag.AnySandbox()

        async def close(self) -> None:
            closed.append(self.task.id)

    class Waiting(Scripted):
        async def generate(self, *args: Any, **kwargs: Any) -> Completion:
            if len(sandboxes.leased) == 4:
                asked.set()
            await asyncio.Event().wait()
            raise AssertionError

    playing = asyncio.create_task(run_groups(Boxed, tasks(3), Waiting([]), n=2, sandboxes=sandboxes, concurrency=4))
    await asked.wait()
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await playing
    assert sandboxes.leased == []
    assert sorted(closed) == ["t0", "t0", "t1", "t1"]


async def test_rollout_ids_are_unique_and_on_rollout_sees_each_rollout_failed_or_not() -> None:
    seen: list[Rollout] = []
    bad = ag.Task(id="bad", prompt=tasks(1)[0].prompt)
    groups = await run_groups(Say, [*tasks(3), bad], ZERO, n=4, on_rollout=seen.append)
    assert len({r.rollout_id for r in seen}) == 16
    assert {r.rollout_id for r in seen} == {r.rollout_id for r in groups.rollouts}
    assert sum(r.reward is None for r in seen) == 4


def test_groups_can_be_sliced_and_contain_each_id_once() -> None:
    made = [Group(group_id=name, rollouts=()) for name in "abc"]
    groups = Groups(made)
    assert [g.group_id for g in groups[1:]] == ["b", "c"]
    assert isinstance(groups[1:], Groups)
    with pytest.raises(ValueError, match=r"groups: \['a'\] appear twice"):
        Groups([*made, made[0]])


class Chaos(Scripted):
    """An engine that at times aborts, fails, loses log-probabilities or exceeds the requested length."""

    def __init__(self, seed: int) -> None:
        super().__init__(self.speak)
        self.dice = random.Random(seed)
        self.sessions: set[str] = set()

    def speak(self, text: str) -> Any:
        return self.dice.choice(
            [call("look"), call("lok"), "<tool_call>\n{", say("0"), call("unplug"), say("long " * 99)]
        )

    async def generate(self, token_ids: Sequence[int], *, session: str, **given: Any) -> Completion:
        self.sessions.add(session)
        await asyncio.sleep(0)
        whole = await super().generate(token_ids, session=session, **given)
        fault = self.dice.random()
        if fault < 0.05:
            raise ConnectionError("gone")
        if fault < 0.10:
            return Completion(token_ids=whole.token_ids[:1], logprobs=whole.logprobs[:1], finish_reason="abort")
        if fault < 0.15:
            return Completion(token_ids=whole.token_ids, logprobs=np.zeros(0, np.float32), finish_reason="stop")
        return whole

    async def release(self, session: str) -> None:
        self.sessions.discard(session)


class Rough(Say):
    """An env whose tools overflow the context and whose sandboxes die."""

    sandbox_spec = ag.AnySandbox()
    limits = ag.Limits(turns=6, context_tokens=900, turn_tokens=300)
    context = ag.Compact(at=0.5)

    @ag.tool
    async def look(self) -> str:
        """Look; now and then there is more than the context takes."""
        return "seen " * (7 if len(self.task.id) % 2 else 300)

    @ag.tool
    async def unplug(self) -> str:
        """Lose the sandbox."""
        raise SandboxError("the sandbox died")


async def test_over_a_thousand_rollouts_with_faults_lengths_match_and_counts_add_up(
    sandboxes: FakeSandboxPool,
) -> None:
    engine = Chaos(0)
    groups = await run_groups(Rough, tasks(125), engine, n=8, sandboxes=sandboxes)
    numbers = groups.metrics()
    assert numbers["rollouts/started"] == numbers["rollouts/finished"] + numbers["rollouts/failed"] == 1000
    for rollout in groups.rollouts:
        assert (rollout.stop_reason == "error") == (rollout.reward is None)
        for segment in rollout.segments:
            assert len(segment.token_ids) == len(segment.sampled) == len(segment.logprobs) <= 900
    stops = Counter(rollout.stop_reason for rollout in groups.rollouts)
    assert {"answer", "context", "length", "error"} <= set(stops)
    assert (engine.sessions, sandboxes.leased, len(sandboxes.made)) == (set(), [], 1000)


async def test_a_batch_has_as_many_groups_as_the_schedule_has_prompts() -> None:
    async with Scheduler(Say, tasks(9), ZERO, Schedule(prompts_per_step=3, group_size=1)) as scheduler:
        assert [group.group_id for group in await scheduler.collect()] == ["t0", "t1", "t2"]
        assert [group.group_id for group in await scheduler.collect(2)] == ["t3", "t4"]


@pytest.mark.parametrize("field", ["group_size", "prompts_per_step", "concurrency"])
def test_an_empty_schedule_is_refused(field: str) -> None:
    with pytest.raises(ValueError, match=f"^{field}: must be at least 1, got 0"):
        replace(Schedule(group_size=1), **{field: 0})  # type: ignore[arg-type]


def test_a_task_belongs_to_one_process_only_if_batches_overlap_or_tasks_rest() -> None:
    plain = Schedule(group_size=1)
    assert not plain.by_id
    assert all(replace(plain, **{field: 1}).by_id for field in ("max_staleness", "rest_epochs"))  # type: ignore[arg-type]
