"""The times of turns: when the engine was queried, and how long a turn waited before that."""

import asyncio
from typing import Any

import pytest

import agentgym as ag
from agentgym.machine.time_limits import Standstill, count_held_time, off_the_clock
from agentgym.scheduling.gate import RolloutUsage, current_usage, gate_of
from agentgym.testing import Scripted, call, say
from agentgym.types.completion import Completion
from tests.support.virtual_time import run_in_virtual_time


class Look(ag.ToolEnv[ag.Task]):
    """An env with one tool."""

    @ag.tool
    def look(self) -> str:
        """Look."""
        return "seen"

    @ag.reward
    def right(self) -> float:
        """Return 1."""
        return 1.0


TASK = ag.Task(id="t", prompt="go")


async def test_a_turn_reports_how_long_it_waited_at_the_shut_gate() -> None:
    gate = gate_of(Scripted([call("look"), say("done")]))
    current_usage.set(usage := RolloutUsage())
    playing = asyncio.create_task(ag.rollout(Look, TASK, gate))
    for _ in range(100):  # it reaches the gate, which is shut at first
        await asyncio.sleep(0)
    gate.open()
    first, second = (await playing).segments[0].turns
    assert 0 < first.waited <= first.seconds
    assert first.waited == pytest.approx(usage.held.seconds, abs=0.01)
    assert second.waited == 0


async def test_turns_report_when_they_were_requested_within_the_rollouts_time() -> None:
    rollout = await ag.rollout(Look, TASK, Scripted([call("look"), call("look"), say("done")]))
    turns = rollout.segments[0].turns
    asked = [turn.asked_at for turn in turns if turn.asked_at is not None]
    assert len(asked) == 3
    assert asked[0] >= 0
    answered = [at + turn.seconds for at, turn in zip(asked, turns, strict=True)]
    assert all(before <= at for before, at in zip(answered, asked[1:], strict=False))
    assert answered[-1] <= rollout.metrics["seconds"]


async def test_paused_time_counts_for_a_task_and_its_children_unless_counted_separately() -> None:
    async def wait() -> None:
        with off_the_clock():
            await asyncio.sleep(0)

    first = count_held_time()
    await wait()
    before = first.seconds
    second = count_held_time()
    await asyncio.create_task(wait())
    assert before > 0
    assert second.seconds > 0
    assert first.seconds == before


class SlowScripted(Scripted):
    """An engine that takes ten seconds for each answer."""

    async def generate(self, *given: Any, **how: Any) -> Completion:
        await asyncio.sleep(10.0)
        return await super().generate(*given, **how)


class SlowLook(Look):
    """An env whose tool takes 20 seconds and whose reward queries a judge."""

    @ag.tool
    async def look(self) -> str:  # type: ignore[override]  # a tool may be either
        """Look."""
        await asyncio.sleep(20.0)
        return "seen"

    @ag.reward
    async def right(self) -> float:  # type: ignore[override]
        await self.model("judge").ask("Well?")
        return 1.0


def test_seconds_of_rollouts_turns_tools_and_models_use_the_loops_clock() -> None:
    """These times include no standstill because the loop's clock has none; here it jumps and no real time passes."""

    async def play() -> ag.Rollout:
        gate = gate_of(SlowScripted([call("look"), say("done")]))
        current_usage.set(RolloutUsage())
        judge = SlowScripted([say("yes")])
        playing = asyncio.create_task(ag.rollout(SlowLook, TASK, gate, models={"judge": judge}))
        await asyncio.sleep(100.0)
        gate.open()
        return await playing

    rollout = run_in_virtual_time(play())
    assert rollout.failure is None
    assert [(turn.asked_at, turn.waited, turn.seconds, turn.env_seconds) for turn in rollout.segments[0].turns] == [
        (0.0, 100.0, 110.0, 20.0),
        (130.0, 0.0, 10.0, 0.0),
    ]
    assert (rollout.metrics["seconds"], rollout.metrics["held_seconds"]) == (50.0, 100.0)
    assert rollout.metrics["model_seconds/judge"] == 10.0


async def test_a_wait_at_the_gate_uses_a_clock_that_its_loop_got_later(monkeypatch: pytest.MonkeyPatch) -> None:
    held = Standstill()
    with monkeypatch.context() as other:
        other.setattr(asyncio.get_running_loop(), "time", iter([100.0, 105.0]).__next__)
        with held.block():
            pass
    assert held.seconds == 5.0
