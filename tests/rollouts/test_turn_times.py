"""The times of turns: when the engine was asked, and how long a turn waited in front of it."""

import asyncio

import pytest

import agentgym as ag
from agentgym.scheduling.gate import RolloutUsage, current_usage, gate_of
from agentgym.testing import Scripted, call, say
from agentgym.time_limits import count_held_time, off_the_clock


class Look(ag.ToolEnv[ag.Task]):
    """One tool."""

    @ag.tool
    def look(self) -> str:
        """Look."""
        return "seen"

    @ag.reward
    def right(self) -> float:
        """Always."""
        return 1.0


TASK = ag.Task(id="t", prompt="go")


async def test_a_turn_says_how_long_it_waited_at_the_shut_gate() -> None:
    gate = gate_of(Scripted([call("look"), say("done")]))
    current_usage.set(usage := RolloutUsage())
    playing = asyncio.create_task(ag.rollout(Look, TASK, gate))
    for _ in range(100):  # it comes to the gate, which is shut at first
        await asyncio.sleep(0)
    gate.open()
    first, second = (await playing).segments[0].turns
    assert 0 < first.waited <= first.seconds
    assert first.waited == pytest.approx(usage.held.seconds, abs=0.01)
    assert second.waited == 0


async def test_turns_say_when_they_were_asked_for_within_the_time_of_the_rollout() -> None:
    played = await ag.rollout(Look, TASK, Scripted([call("look"), call("look"), say("done")]))
    turns = played.segments[0].turns
    asked = [turn.asked_at for turn in turns if turn.asked_at is not None]
    assert len(asked) == 3
    assert asked[0] >= 0
    answered = [at + turn.seconds for at, turn in zip(asked, turns, strict=True)]
    assert all(before <= at for before, at in zip(answered, asked[1:], strict=False))
    assert answered[-1] <= played.metrics["seconds"]


async def test_time_off_the_clock_is_counted_for_the_task_and_those_it_starts_until_it_counts_apart() -> None:
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
