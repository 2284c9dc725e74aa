"""Batches that are cut at their target or deadline, and the effects of a cut."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import agentgym as ag
from agentgym.engines.scripted import Scripted, call, say
from agentgym.engines.transformers.engine import TransformersConfig, TransformersEngine
from agentgym.sandboxes.fake.sandbox import FakeSandboxPool
from agentgym.scheduling.accounting import Groups, LifecycleCounts
from agentgym.scheduling.oversampling import OversampleConfig
from agentgym.scheduling.schedule import Schedule
from agentgym.scheduling.scheduler import Scheduler
from agentgym.types.completion import Completion
from tests.scheduling.scheduled import Held, Say, batch_stats, cut, ids, settle, task, tasks
from tests.support.virtual_time import run_in_virtual_time

MODEL = Path(__file__).parents[2] / "recipes" / "checkpoints" / "chase"


@pytest.mark.parametrize(("wanted", "extra"), [(8, 2), (102, 26)])
async def test_a_batch_stops_at_its_target_and_drops_the_rest(wanted: int, extra: int) -> None:
    stuck = {f"t{i}/0" for i in range(extra)}
    engine = Held(lambda name, turn: name in stuck)
    async with Scheduler(
        Say, tasks(), engine, Schedule(group_size=1, concurrency=200, oversample=cut(extra_groups=extra))
    ) as scheduler:
        groups = await scheduler.collect(wanted)
        assert ids(groups) == [f"t{i}" for i in range(extra, extra + wanted)]
        counts = LifecycleCounts(started=wanted + extra, finished=wanted, dropped=extra)
        assert (batch_stats(groups).rollouts, batch_stats(groups).groups, batch_stats(groups).requests) == (counts,) * 3
        await settle()
        assert engine.cancelled == stuck


async def test_a_group_is_complete_with_its_first_scored_rollouts_and_cancels_the_others() -> None:
    engine = Held(lambda name, turn: name.endswith(("/0", "/3")))
    async with Scheduler(Say, tasks(), engine, Schedule(group_size=3, oversample=cut(extra_rollouts=2))) as scheduler:
        groups = await scheduler.collect(2)
        await settle()
        assert engine.cancelled == {"t0/0", "t0/3", "t1/0", "t1/3"}
    assert [[r.rollout_id[-1] for r in group.rollouts] for group in groups] == [["1", "2", "4"]] * 2
    assert batch_stats(groups).rollouts == LifecycleCounts(started=10, finished=6, dropped=4)


async def test_a_dropped_rollout_that_never_started_does_not_count_as_cut() -> None:
    engine = Held(lambda name, turn: name != "t0/0")
    schedule = Schedule(group_size=1, concurrency=1, oversample=cut(extra_groups=3))
    async with Scheduler(Say, tasks(), engine, schedule) as scheduler:
        stats = batch_stats(await scheduler.collect(1))
    assert stats.rollouts.dropped == 3
    assert stats.cut <= 1  # the one that got the slot after the first


async def test_a_cut_reaches_the_engine_the_tool_and_the_sandbox(sandboxes: FakeSandboxPool) -> None:
    in_tool, cancelled, closed = asyncio.Event(), list[str](), list[str]()

    class Boxed(Say):
        sandbox_spec = ag.AnySandbox()

        @ag.tool
        async def look(self) -> str:
            """Look for ever."""
            in_tool.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled.append(self.task.id)
                raise
            raise AssertionError

        async def close(self) -> None:
            closed.append(self.task.id)

    class Mixed(Held):
        def _next(self, token_ids: Sequence[int], session: str) -> Any:
            return call("look") if session.startswith("t0") else say("1")

    engine = Mixed(lambda name, turn: name.startswith("t1"))
    async with Scheduler(
        Boxed, tasks(), engine, Schedule(group_size=1, oversample=cut(extra_groups=2)), sandboxes=sandboxes
    ) as scheduler:
        groups = await scheduler.collect(1)
        await settle()
        assert (ids(groups), cancelled, engine.cancelled) == (["t2"], ["t0"], {"t1/0"})
        assert (sandboxes.leased, sorted(closed)) == ([], ["t0", "t1", "t2"])
        assert batch_stats(groups).requests == LifecycleCounts(started=3, finished=2, dropped=1)


async def test_a_cut_frees_the_slots_of_the_local_engine() -> None:
    class Chatty(Say):
        limits = ag.Limits(turns=1, context_tokens=512, turn_tokens=300)  # one request per rollout

        async def score(self) -> dict[str, float]:
            return {"said": 1.0}

    settings, sampling = cut(extra_groups=3), ag.Sampling(temperature=2.0, max_tokens=300)
    async with (
        TransformersEngine(MODEL, TransformersConfig(slots=4)) as engine,
        Scheduler(Chatty, tasks(), engine, Schedule(group_size=1, sampling=sampling, oversample=settings)) as scheduler,
    ):
        for _ in range(3):
            groups = await scheduler.collect(1)
            counts = batch_stats(groups)
            assert counts.rollouts.dropped == 3
            # Requests may have ended in the same tick as the one that completed the batch.
            assert counts.requests.finished + counts.requests.dropped == 4
            assert counts.requests.finished >= 1
            await settle()
            await engine.score([1, 2], sampling=sampling)  # answered after all earlier requests
            assert not engine._opened().busy


def test_a_deadline_is_one_and_a_half_times_the_time_that_most_rollouts_took() -> None:
    class Slow(Scripted):
        async def generate(self, token_ids: Sequence[int], *, session: str, **given: Any) -> Completion:
            await asyncio.sleep(int(session.split("/")[0][1:]))
            return await super().generate(token_ids, session=session, **given)

    async def play() -> tuple[float, Groups]:
        async with Scheduler(
            Say,
            map(task, (1, 2, 3, 4, 5, 6, 7, 8, 11, 13)),
            Slow([say("1")]),
            Schedule(group_size=1, oversample=OversampleConfig(stop="deadline")),
        ) as scheduler:
            groups = await scheduler.collect(10)
            return asyncio.get_running_loop().time(), groups

    seconds, groups = run_in_virtual_time(play())
    assert seconds == pytest.approx(12.0)  # 8 of 10 are done after 8 seconds
    assert batch_stats(groups).rollouts == LifecycleCounts(started=10, finished=9, dropped=1)


def test_the_length_bias_of_kept_rollouts_is_measured() -> None:
    class Uneven(Scripted):
        """An engine that answers two rollouts after 0.4 and 1.2 seconds; the third calls a tool every half second."""

        def _next(self, token_ids: Sequence[int], session: str) -> Any:
            return call("look") if session.startswith("t2/") else say("1")

        async def generate(self, token_ids: Sequence[int], *, session: str, **given: Any) -> Completion:
            await asyncio.sleep({"t0": 0.4, "t1": 1.2, "t2": 0.5}[session.split("/")[0]])
            return await super().generate(token_ids, session=session, **given)

    async def play() -> Groups:
        async with Scheduler(
            Say, tasks(), Uneven([]), Schedule(group_size=1, oversample=cut(extra_groups=1))
        ) as scheduler:
            return await scheduler.collect(2)

    numbers = run_in_virtual_time(play()).metrics()
    look = len('<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>') + 1
    assert (numbers["tokens/sampled"], numbers["oversample/dropped_tokens"]) == (2, 2 * look)
    assert numbers["oversample/length_bias"] == pytest.approx(((0.4 + 1.2) / 2) / ((0.4 + 1.2 + 1.2) / 3))
