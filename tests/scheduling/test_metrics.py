"""Metrics of a batch: each mean covers the rollouts that have the metric, and time is running time."""

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

import agentgym as ag
from agentgym.engines.scripted import Scripted, call, say
from agentgym.run.tasks.envs import env_metrics
from agentgym.scheduling import Schedule, Scheduler, run_groups
from agentgym.scheduling.accounting import Groups, is_counter
from agentgym.scheduling.gate import RolloutUsage, current_usage, gate_of
from agentgym.types.completion import Completion
from agentgym.types.rollout import Group, Rollout
from agentgym.types.task import StepResult
from agentgym.view.timeline import timeline
from tests.scheduling.scheduled import Held, Say, cut, tasks
from tests.support.virtual_time import run_in_virtual_time

ROOT = Path(__file__).parents[2]


class Plain(ag.ToolEnv[ag.Task]):
    """An env with reward 0.8 and a tool."""

    @classmethod
    def tasks(cls, split: str) -> list[ag.Task]:
        return [ag.Task(id=str(number), prompt="x") for number in range(9)]

    @ag.tool
    def look(self) -> str:
        """Look."""
        return "seen"

    @ag.reward
    def alpha(self) -> float:
        return 0.8


class Deep(ag.Env[ag.Task]):
    """An env with reward 0.5 under a separate name; it has a measure but no tools and no tool metric."""

    @classmethod
    def tasks(cls, split: str) -> list[ag.Task]:
        return Plain.tasks(split)

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[list[ag.Message], dict[str, Any]]:
        self.metrics["depth"] = 10.0
        return [ag.Message(role="user", content="x")], {}

    async def step(self, message: ag.Message) -> StepResult:
        return StepResult([], 0.0, True, False, {})

    async def score(self) -> dict[str, float]:
        return {"beta": 0.5}


def rollout(name: str, **given: object) -> Rollout:
    group, _, _ = name.partition("/")
    known = {"segments": (), "reward": 1.0, "stop_reason": "answer", **given}
    return Rollout(rollout_id=name, group_id=group, **known)  # type: ignore[arg-type]


def metrics(*rollouts: Rollout) -> dict[str, float]:
    return Groups([Group(group_id=one.group_id, rollouts=(one,)) for one in rollouts]).metrics()


async def test_a_metric_of_a_mixture_covers_only_rollouts_that_have_it() -> None:
    mixed = ag.mix({"plain": ag.Member(Plain, 3), "deep": ag.Member(Deep, 1)})
    groups = await run_groups(mixed, mixed.tasks("train")[:8], Scripted([say("x")]), n=2)
    found = groups.metrics()
    assert (found["reward/alpha"], found["reward/beta"], found["rollout/depth"]) == pytest.approx((0.8, 0.5, 10.0))
    by_env = env_metrics(mixed, groups)
    assert by_env["env/plain/reward/alpha"] == by_env["env/plain/reward"] == pytest.approx(0.8)
    assert by_env["env/deep/reward/beta"] == by_env["env/deep/reward"] == pytest.approx(0.5)
    assert "env/plain/reward/beta" not in by_env


def test_optional_measures_are_averaged_and_missing_counts_are_0() -> None:
    found = metrics(
        rollout("a/0", metrics={"depth": 4.0, "retries": 1.0, "tool_errors/look": 2.0}),
        rollout("b/0", metrics={"usage/cost": 1.0, "model_calls/judge": 3.0}),
        rollout("c/0", metrics={"model_size": 7.0}),
        rollout("d/0"),
    )
    assert (found["rollout/depth"], found["rollout/model_size"]) == (4.0, 7.0)
    assert (found["rollout/retries"], found["rollout/tool_errors/look"]) == (0.25, 0.5)
    assert (found["rollout/usage/cost"], found["rollout/model_calls/judge"]) == (0.25, 0.75)


def test_every_count_of_a_rollout_is_recognized_as_one() -> None:
    written = "".join(path.read_text() for path in (ROOT / "agentgym/rollouts").rglob("*.py"))
    counted = set(re.findall(r'state\.count\("(\w+)"\)', written)) | {"forks", "subagents", "sandbox_killed"}
    assert len(counted) > 6
    assert [name for name in counted if not is_counter(name)] == []


async def test_the_share_of_cut_rollouts_in_a_group_is_reported() -> None:
    engine = Held(lambda name, turn: name.endswith(("/0", "/3")))
    async with Scheduler(Say, tasks(), engine, Schedule(group_size=3, oversample=cut(extra_rollouts=2))) as scheduler:
        assert (await scheduler.collect(2)).metrics()["oversample/cut_share"] == pytest.approx(2 / 5)
    async with Scheduler(Say, tasks(), Scripted([say("1")]), Schedule(group_size=3)) as scheduler:
        assert (await scheduler.collect(2)).metrics()["oversample/cut_share"] == 0


def test_concurrent_waits_at_the_gate_count_once_and_not_as_running_time() -> None:
    async def play() -> None:
        gate = gate_of(Scripted([say("x")]))
        current_usage.set(usage := RolloutUsage())
        usage.began = asyncio.get_running_loop().time()
        given = {"session": "a/0/0", "max_tokens": 4, "sampling": ag.Sampling(), "seed": 0}
        waiting = [asyncio.create_task(gate.generate([1], **given)) for _ in range(3)]  # type: ignore[arg-type]
        await asyncio.sleep(50)
        assert (usage.held.seconds, usage.seconds) == (50, 0)
        usage.stopped = asyncio.get_running_loop().time()  # it is dropped while it waits
        await asyncio.sleep(50)
        assert usage.seconds == 0
        for one in waiting:
            one.cancel()
        await asyncio.wait(waiting)
        assert usage.seconds == 0

    run_in_virtual_time(play())


class Slow(Say):
    @ag.tool
    async def look(self) -> str:
        """Look for two seconds."""
        await asyncio.sleep(2)
        return "seen"


class SlowEngine(Scripted):
    """An engine whose turns take one second."""

    async def generate(self, *args: Any, **given: Any) -> Completion:
        await asyncio.sleep(1)
        return await super().generate(*args, **given)


def test_a_rollouts_seconds_exclude_waiting_at_the_gate() -> None:
    async def play() -> tuple[Rollout, Rollout]:
        engine = SlowEngine([call("look"), say("1")])
        gate = gate_of(engine)
        current_usage.set(RolloutUsage())
        playing = asyncio.create_task(ag.rollout(Slow, ag.Task(id="a", prompt="x"), gate))
        await asyncio.sleep(5)  # the gate is shut at first
        gate.open()
        return await playing, await ag.rollout(Slow, ag.Task(id="a", prompt="x"), engine)

    played, without_gate = run_in_virtual_time(play())
    assert (played.metrics["held_seconds"], played.metrics["seconds"]) == (5, 4)
    pieces, _ = timeline(played)
    waits = [piece["to_s"] - piece["from_s"] for piece in pieces if piece["what"] == "wait"]
    assert waits == [5]
    assert max(piece["to_s"] for piece in pieces) == 9
    assert "held_seconds" not in without_gate.metrics
    assert without_gate.metrics["seconds"] == 4
