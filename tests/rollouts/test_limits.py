"""Limits cover a rollout and everything it starts, concurrently or in sequence, and are paused while it is held up."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import pytest

import agentgym as ag
from agentgym.engines.scripted import ByteTokenizer, Scripted, call, say
from agentgym.machine.time_limits import TimeLimit, all_clocks_stopped, off_the_clock
from agentgym.scheduling.accounting import Groups
from agentgym.scheduling.oversampling import OversampleConfig
from agentgym.scheduling.schedule import Schedule
from agentgym.scheduling.scheduler import Scheduler
from agentgym.types.completion import Completion
from agentgym.types.messages import Message
from tests.support.virtual_time import run_in_virtual_time

TASK = ag.Task(id="t", prompt=(ag.Message(role="user", content="Go."),))
DECODE = ByteTokenizer().decode
HELPERS = 8


class Boss(ag.ToolEnv[ag.Task]):
    """An env that queries eight sub-agents at once."""

    @ag.tool
    async def ask(self) -> str:
        """Ask all of them."""
        async with asyncio.TaskGroup() as group:
            jobs = [group.create_task(self.one(number)) for number in range(HELPERS)]
        return " ".join(job.result() for job in jobs)

    async def one(self, number: int) -> str:
        async with self.fork("subagent", [Message(role="user", content=f"SUB {number}")]) as agent:
            text = await agent.run()
        return f"{agent.stop_reason}:{len(text)}"

    @ag.reward
    async def one_point(self) -> float:
        return 1.0


class Waiting(Scripted):
    """An engine that answers one loop turn later, as any engine does.

    It tracks how many tokens are requested at once.
    """

    def __init__(self, reply: str) -> None:
        super().__init__(lambda text: say(reply) if "SUB" in text else call("ask"))
        self.running = self.most = self.asked = 0

    async def generate(self, token_ids: Sequence[int], *, max_tokens: int, **given: Any) -> Completion:
        self.running += 1
        self.asked += max_tokens
        self.most = max(self.most, self.asked)
        try:
            for _ in range(5):
                await asyncio.sleep(0)
            return await super().generate(token_ids, max_tokens=max_tokens, **given)
        finally:
            self.running -= 1
            self.asked -= max_tokens


def limited(base: type[Any] = Boss, **limits: Any) -> type[Any]:
    return type("Limited", (base,), {"limits": ag.Limits(**limits)})


@pytest.mark.parametrize("turns", [1, 2, 3, 9, 10])
async def test_the_turn_limit_holds_for_concurrent_sub_agents(turns: int) -> None:
    rollout = await ag.rollout(limited(turns=turns), TASK, Waiting("ok"))
    assert (rollout.stop_reason, rollout.metrics["turns"], len(rollout.messages)) == ("turns", turns, turns)


async def test_the_token_limit_holds_for_concurrent_sub_agents() -> None:
    engine = Waiting("y" * 200)
    rollout = await ag.rollout(limited(tokens=400), TASK, engine)
    assert (rollout.stop_reason, rollout.sampled_tokens, rollout.reward) == ("tokens", 400, 1.0)
    assert engine.most <= 400
    (answer,) = rollout.segments[0].turns[0].env_messages
    assert {each.partition(":")[0] for each in answer["content"].split()} == {"answer", "tokens"}


async def test_tokens_that_one_sub_agent_leaves_can_be_used_by_another() -> None:
    rollout = await ag.rollout(limited(tokens=400), TASK, Waiting("ok"))
    answers = DECODE(rollout.segments[0].token_ids.tolist())
    assert " ".join(["answer:2"] * HELPERS) in answers


async def test_concurrent_turns_wait_only_if_tokens_do_not_suffice() -> None:
    engine = Waiting("ok")
    rollout = await ag.rollout(limited(tokens=10_000, turns=9, turn_tokens=100), TASK, engine)
    assert engine.most == HELPERS * 100
    first = rollout.segments[0].turns[0]
    exact, short = Waiting("ok"), Waiting("ok")
    suffice = first.stop - first.start + HELPERS * 100
    await ag.rollout(limited(tokens=suffice, turns=9, turn_tokens=100), TASK, exact)
    await ag.rollout(limited(tokens=suffice - 1, turns=9, turn_tokens=100), TASK, short)
    assert (exact.most, short.most) == (HELPERS * 100, (HELPERS - 1) * 100)


async def test_a_cancelled_turn_counts_toward_neither_turns_nor_tokens() -> None:
    class Impatient(Boss):
        @ag.tool(timeout_s=0.01)
        async def ask(self) -> str:
            """Ask one that never answers."""
            return await self.one(0)

    class Silent(Scripted):
        async def generate(self, token_ids: Sequence[int], **given: Any) -> Completion:
            if "SUB" in DECODE(token_ids):
                await asyncio.Event().wait()
            return await super().generate(token_ids, **given)

    needed = 1000
    for _ in range(2):  # first with more tokens than needed, then with exactly those
        env = limited(Impatient, turns=2, tokens=needed)
        rollout = await ag.rollout(env, TASK, Silent([call("ask"), say("done")]))
        assert (rollout.stop_reason, rollout.metrics["turns"]) == ("answer", 2)
        needed = rollout.sampled_tokens
    assert needed < 1000


async def test_a_summary_does_not_count_as_a_turn_of_a_sub_agent() -> None:
    class Asks(Boss):
        context = ag.Compact(at=None, turns=1)

        @ag.tool
        async def look(self) -> str:
            """Look."""
            return "seen"

        @ag.tool
        async def ask(self) -> str:
            """Ask a sub-agent that has two turns."""
            ask = [Message(role="user", content="SUB")]
            async with self.fork("subagent", ask, tools=[self.look], turns=2) as agent:
                return await agent.run()

    rollout = await ag.rollout(
        Asks, TASK, Scripted([call("ask"), call("look"), say("summary"), say("sub"), say("summary"), say("done")])
    )
    assert (rollout.stop_reason, rollout.metrics["turns"]) == ("answer", 4)
    assert DECODE(rollout.segments[0].token_ids.tolist()).count("sub<|im_end|>") == 1


async def test_two_replies_before_a_turn_are_read_in_order() -> None:
    class Replies(Boss):
        @ag.tool
        async def ask(self) -> str:
            """Reply twice to a sub-agent."""
            async with self.fork("subagent", [Message(role="user", content="SUB")]) as agent:
                await agent.turn()
                agent.reply([Message(role="user", content="first word")])
                agent.reply([Message(role="user", content="second word")])
                await agent.turn()
                return DECODE(agent.conversation.segment.token_ids)  # type: ignore[attr-defined]

    rollout = await ag.rollout(Replies, TASK, Scripted([call("ask"), say("yes"), say("ok"), say("done")]))
    agent = DECODE(rollout.segments[1].token_ids.tolist())
    assert agent.index("yes") < agent.index("first word") < agent.index("second word") < agent.index("ok")


async def test_a_sub_agent_that_a_tool_stopped_samples_no_more() -> None:
    seen: list[Any] = []

    class Stops(Boss):
        @ag.tool
        async def halt(self) -> ag.Stop:
            """Stop."""
            return ag.Stop("halted", "bye")

        @ag.tool
        async def ask(self) -> str:
            """Ask a sub-agent that stops itself."""
            ask = [Message(role="user", content="SUB")]
            async with self.fork("subagent", ask, tools=[self.halt]) as agent:
                seen.extend([await agent.run(), agent.stop_reason, await agent.turn()])
            return ""

    rollout = await ag.rollout(Stops, TASK, Scripted([call("ask"), call("halt"), say("done")]))
    assert seen == ["bye", "halted", None]
    assert [message["content"] for message in rollout.segments[1].turns[0].env_messages] == ["bye"]


# Time


class Judged(ag.ToolEnv[ag.Task]):
    limits = ag.Limits(seconds=10.0)
    needs = 7.0
    begun = 0

    @ag.reward
    async def judged(self) -> float:
        type(self).begun += 1
        await asyncio.sleep(self.needs)
        return 1.0


class Pondering(Scripted):
    async def generate(self, token_ids: Sequence[int], **given: Any) -> Completion:
        await asyncio.sleep(5.0)
        return await super().generate(token_ids, **given)


def test_an_env_that_ended_in_time_is_graded_once_with_the_full_time_limit() -> None:
    env: Any = type("Judged", (Judged,), {"begun": 0})
    rollout = run_in_virtual_time(ag.rollout(env, TASK, Pondering([say("done")])))
    assert (rollout.stop_reason, rollout.reward, env.begun) == ("answer", 1.0, 1)


def test_a_grader_over_the_time_limit_fails_the_rollout_by_its_name() -> None:
    env: Any = type("Judged", (Judged,), {"begun": 0, "needs": 11.0})
    rollout = run_in_virtual_time(ag.rollout(env, TASK, Pondering([say("done")])))
    said = "EnvError: Judged.score: TimeoutError: not finished after 10 s (limits.seconds), at test_limits.py:"
    assert (rollout.error or "").startswith(said)
    assert (env.begun, rollout.reward) == (1, None)


class Research(Boss):
    """An env whose tool has less time than the trainer needs."""

    limits = ag.Limits(seconds=20.0)

    @ag.tool(timeout_s=10.0)
    async def ask(self) -> str:
        """Ask a sub-agent twice."""
        async with asyncio.TaskGroup() as group:
            job = group.create_task(self.twice())
        return job.result()

    async def twice(self) -> str:
        async with self.fork("subagent", [Message(role="user", content="SUB")]) as agent:
            await agent.turn()
            agent.reply([Message(role="user", content="go on")])
            return await agent.run()


def held_at_the_door(seconds: float) -> Groups:
    """Run a carried rollout whose tool's sub-agent waits at the gate while the trainer works.

    Each turn takes `seconds`.
    """

    class Slow(Scripted):
        async def generate(self, token_ids: Sequence[int], *, session: str, **given: Any) -> Completion:
            await asyncio.sleep(seconds if session.startswith("slow") else 1.0)
            return await super().generate(token_ids, session=session, **given)

    def reply(text: str) -> Message:
        if "SUB" in text:
            return say("found")
        return say("done") if "quick" in text or "found" in text or "error" in text else call("ask")

    names = ["slow", *(f"quick{number}" for number in range(9))]
    tasks = [ag.Task(id=name, prompt=(Message(role="user", content=name),)) for name in names]

    async def play() -> Groups:
        engine, cut = Slow(reply), OversampleConfig(stop="target", extra_groups=1, carry=2)
        async with Scheduler(Research, tasks, engine, Schedule(group_size=1, oversample=cut)) as scheduler:
            await scheduler.collect(1)
            await asyncio.sleep(1000.0)
            await engine.load_adapter(None, version=1)
            await asyncio.wait_for(scheduler.collect(1), 100.0)
            await asyncio.sleep(1000.0)
            await engine.load_adapter(None, version=2)
            return await scheduler.collect(1)

    return run_in_virtual_time(play())


def test_a_tools_own_limit_is_paused_while_the_gate_is_shut() -> None:
    (rollout,) = held_at_the_door(4.0).rollouts
    assert (rollout.group_id, rollout.stop_reason, rollout.metrics["tool_errors"]) == ("slow", "answer", 0)


def test_a_limit_continues_after_the_gate_with_its_remaining_time() -> None:
    async def work() -> None:
        await asyncio.sleep(4.0)
        with off_the_clock():
            await asyncio.sleep(100.0)
        await asyncio.sleep(1000.0)

    async def play() -> float:
        with suppress(TimeoutError):
            await TimeLimit(10.0).bound(work())
        return asyncio.get_running_loop().time()

    assert run_in_virtual_time(play()) == pytest.approx(110.0)


def test_a_paused_limit_reports_its_remaining_time() -> None:
    limit, left = TimeLimit(10.0), list[float]()

    async def work() -> None:
        await asyncio.sleep(4.0)
        with off_the_clock():
            await asyncio.sleep(100.0)
            left.append(limit.left)

    run_in_virtual_time(limit.bound(work()))
    assert left == [6.0]


def test_a_limit_that_starts_while_clocks_are_stopped_runs_afterwards() -> None:
    async def play() -> float:
        with all_clocks_stopped():
            waiting = asyncio.create_task(TimeLimit(10.0).bound(asyncio.sleep(1000.0)))
            await asyncio.sleep(100.0)
        with suppress(TimeoutError):
            await waiting
        return asyncio.get_running_loop().time()

    assert run_in_virtual_time(play()) == pytest.approx(110.0)


def test_a_limit_is_paused_until_everything_that_paused_it_continues() -> None:
    async def hold(seconds: float) -> None:
        with off_the_clock():
            await asyncio.sleep(seconds)

    async def work() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(hold(50.0))
            group.create_task(hold(100.0))
            await asyncio.sleep(1000.0)

    async def play() -> float:
        with suppress(TimeoutError):
            await TimeLimit(10.0).bound(work())
        return asyncio.get_running_loop().time()

    assert run_in_virtual_time(play()) == pytest.approx(110.0)


def test_a_limit_that_is_paused_before_it_runs_starts_from_the_pause() -> None:
    async def play() -> float:
        with TimeLimit(10.0) as limit:
            limit.pause()
            with suppress(TimeoutError):
                async with limit.running():
                    await asyncio.sleep(100.0)
                    limit.resume()
                    await asyncio.sleep(1000.0)
        assert limit.expired()
        return asyncio.get_running_loop().time()

    assert run_in_virtual_time(play()) == pytest.approx(110.0)


def test_a_limit_counts_the_time_before_its_work_first_awaits() -> None:
    async def work() -> None:
        asyncio.get_running_loop().advance(4.0)  # type: ignore[attr-defined]
        await asyncio.sleep(1000.0)

    async def play() -> float:
        with suppress(TimeoutError):
            await TimeLimit(10.0).bound(work())
        return asyncio.get_running_loop().time()

    assert run_in_virtual_time(play()) == pytest.approx(10.0)


def test_a_limit_gives_later_work_only_the_remaining_time() -> None:
    async def compute() -> None:
        asyncio.get_running_loop().advance(3.0)  # type: ignore[attr-defined]

    async def play() -> float:
        limit = TimeLimit(10.0)
        await limit.bound(compute())
        await limit.bound(asyncio.sleep(4.0))
        with suppress(TimeoutError):
            await limit.bound(asyncio.sleep(1000.0))
        assert limit.expired()
        return asyncio.get_running_loop().time()

    assert run_in_virtual_time(play()) == pytest.approx(10.0)


def test_a_leftover_task_of_finished_work_does_not_pause_the_limits_next_work() -> None:
    async def hold() -> None:
        with off_the_clock():
            await asyncio.sleep(100.0)

    async def play() -> float:
        limit = TimeLimit(10.0)
        await limit.bound(asyncio.sleep(1.0))
        async with asyncio.TaskGroup() as group:
            group.create_task(hold())
            with suppress(TimeoutError):
                await limit.bound(asyncio.sleep(1000.0))
            return asyncio.get_running_loop().time()

    assert run_in_virtual_time(play()) == pytest.approx(10.0)


def test_a_task_that_outlives_a_limit_cannot_restart_it() -> None:
    async def hold() -> None:
        with off_the_clock():
            await asyncio.sleep(100.0)

    async def work() -> "asyncio.Task[None]":
        held = asyncio.create_task(hold())
        await asyncio.sleep(1.0)
        return held

    async def play() -> None:
        await (await TimeLimit(10.0).bound(work()))

    run_in_virtual_time(play())
