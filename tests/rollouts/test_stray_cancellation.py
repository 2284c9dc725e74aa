"""A CancelledError that nobody sent to a rollout is an error of the code that raised it; no rollout ends silently."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

import agentgym as ag
from agentgym.engines.scripted import Scripted, call, say
from agentgym.sandboxes.fake.sandbox import FakeSandboxPool
from agentgym.scheduling import run_groups
from agentgym.scheduling.schedule import Schedule
from agentgym.scheduling.scheduler import Scheduler
from agentgym.types.completion import Completion
from agentgym.types.rollout import Rollout
from tests.support.virtual_time import run_in_virtual_time

SCRIPT = [call("look"), say("done")]


def tasks(*names: str) -> list[ag.Task]:
    return [ag.Task(id=name, prompt=(ag.Message(role="user", content="Go."),)) for name in names]


async def cancelled_elsewhere() -> str:
    """Await something that rollouts share and that another task has cancelled."""
    shared: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    shared.cancel()
    return await shared


class Desk(ag.ToolEnv[ag.Task]):
    @ag.tool
    async def look(self) -> str:
        """Look around."""
        return await self.see()

    async def see(self) -> str:
        return "nothing"

    @ag.reward
    async def graded(self) -> float:
        return 1.0


def broken(name: str) -> type[Desk]:
    """Return a Desk one of whose methods raises a stray CancelledError for the task "bad"."""
    sound = getattr(Desk, name)

    async def method(self: Desk, *args: Any, **given: Any) -> Any:
        return await (cancelled_elsewhere() if self.task.id == "bad" else sound(self, *args, **given))

    return type("Broken", (Desk,), {name: method})


@pytest.mark.parametrize("where", ["setup", "step", "score", "close"])
async def test_a_stray_cancelled_error_fails_only_its_rollout(where: str) -> None:
    groups = await run_groups(broken(where), tasks("bad", "good"), Scripted(SCRIPT), n=1)
    bad, good = groups.rollouts
    assert (bad.reward, good.reward) == (None, 1.0)
    assert (bad.error or "").startswith(f"EnvError: Broken.{where}: CancelledError: nobody cancelled the rollout")


async def test_a_stray_cancelled_error_in_a_tool_is_an_answer_the_model_reads() -> None:
    groups = await run_groups(broken("see"), tasks("bad"), Scripted(SCRIPT), n=1)
    (rollout,) = groups.rollouts
    assert (rollout.reward, rollout.stop_reason, rollout.metrics["tool_errors"]) == (1.0, "answer", 1)


async def test_a_stray_cancelled_error_of_the_engine_is_an_engine_error() -> None:
    class Shared(Scripted):
        async def generate(self, token_ids: Sequence[int], *, session: str, **given: Any) -> Completion:
            if session.startswith("bad"):
                await cancelled_elsewhere()
            return await super().generate(token_ids, session=session, **given)

    bad, good = (await run_groups(Desk, tasks("bad", "good"), Shared(SCRIPT), n=1)).rollouts
    assert (bad.reward, good.reward) == (None, 1.0)
    assert (bad.error or "").startswith("EngineError: generate: CancelledError")


async def test_a_stray_cancelled_error_in_the_lease_of_a_sandbox_is_a_sandbox_error() -> None:
    class Boxed(Desk):
        sandbox_spec = ag.AnySandbox()

    class Busy(FakeSandboxPool):
        def lease(self) -> Any:
            return Never()

    class Never:
        async def __aenter__(self) -> Any:
            await cancelled_elsewhere()

        async def __aexit__(self, *error: object) -> None:
            raise AssertionError

    rollout = await ag.rollout(Boxed, tasks("t")[0], Scripted(SCRIPT), sandboxes=Busy())
    assert (rollout.error or "").startswith("SandboxError: lease: CancelledError")


async def test_a_sandbox_that_cannot_be_returned_fails_only_its_rollout() -> None:
    class Boxed(Desk):
        sandbox_spec = ag.AnySandbox()

    class Stuck:
        async def __aenter__(self) -> Any:
            return FakeSandboxPool().make()

        async def __aexit__(self, *error: object) -> None:
            raise OSError("the wire broke")

    class Pool(FakeSandboxPool):
        def lease(self) -> Any:
            return Stuck()

    rollout = await ag.rollout(Boxed, tasks("t")[0], Scripted(SCRIPT), sandboxes=Pool())
    assert rollout.error == "SandboxError: the return of the sandbox: OSError: the wire broke"


async def test_a_rollout_whose_task_is_cancelled_from_outside_fails_and_the_batch_ends() -> None:
    class Selfish(Desk):
        async def see(self) -> str:
            task = asyncio.current_task()
            if self.task.id == "bad" and task is not None:
                task.cancel()
            await asyncio.sleep(0)
            return "nothing"

    seen: list[Rollout] = []
    async with Scheduler(
        Selfish, tasks("bad", "good"), Scripted(SCRIPT), Schedule(group_size=1), on_rollout=seen.append
    ) as scheduler:
        groups = await scheduler.collect(2)
    assert [r.error for r in groups.rollouts] == ["AgentGymError: its task was cancelled from outside", None]
    assert groups.batch_stats is not None
    assert (groups.batch_stats.rollouts.failed, groups.batch_stats.rollouts.finished, len(seen)) == (1, 1, 2)


class Guarded(Desk):
    """An env whose tool swallows every exception, as a bare `except` does."""

    limits = ag.Limits(turns=50, seconds=10)

    async def see(self) -> str:
        try:
            await asyncio.Event().wait()
        except BaseException:
            return "something went wrong"
        raise AssertionError


def test_a_tool_that_swallows_the_time_limit_does_not_disable_it() -> None:
    rollout = run_in_virtual_time(ag.rollout(Guarded, tasks("t")[0], Scripted(lambda text: call("look"))))
    assert (rollout.stop_reason, rollout.reward, rollout.metrics["turns"]) == ("seconds", 1.0, 1)


async def test_a_tool_that_swallows_a_cancellation_does_not_keep_the_rollout_alive() -> None:
    reached = asyncio.Event()

    class Patient(Guarded):
        limits = ag.Limits(turns=50)

        async def see(self) -> str:
            reached.set()
            return await super().see()

    playing = asyncio.create_task(ag.rollout(Patient, tasks("t")[0], Scripted(lambda text: call("look"))))
    await reached.wait()
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await playing


@pytest.mark.parametrize("where", ["setup", "step", "score", "close"])
async def test_a_cancellation_that_the_env_swallows_ends_the_rollout_wherever_it_arrived(where: str) -> None:
    reached, sound = asyncio.Event(), getattr(Desk, where)

    async def method(self: Desk, *args: Any, **given: Any) -> Any:
        reached.set()
        try:
            await asyncio.Event().wait()
        except BaseException:
            return await sound(self, *args, **given)

    env = type("Deaf", (Desk,), {where: method})
    playing = asyncio.create_task(ag.rollout(env, tasks("t")[0], Scripted(SCRIPT)))
    await reached.wait()
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await playing


def test_a_close_that_hangs_ends_at_the_limit() -> None:
    class Hangs(Desk):
        limits = ag.Limits(seconds=10)

        async def close(self) -> None:
            await asyncio.Event().wait()

    rollout = run_in_virtual_time(ag.rollout(Hangs, tasks("t")[0], Scripted([say("done")])))
    said = "EnvError: Hangs.close: TimeoutError: not finished after 10 s (limits.seconds), at test_stray"
    assert (rollout.error or "").startswith(said)


class Releasing(Scripted):
    """An engine whose first release waits until it is cancelled, or fails."""

    def __init__(self, replies: Any, first: Any) -> None:
        super().__init__(replies)
        self.first, self.reached, self.released = first, asyncio.Event(), list[str]()

    async def release(self, session: str) -> None:
        first, self.first = self.first, None
        if first is not None:
            self.reached.set()
            await first()
        self.released.append(session)


class Forking(Desk):
    context = ag.Compact(at=None, turns=1)


async def test_a_cancellation_during_a_release_leaves_no_other_session_open() -> None:
    engine = Releasing([call("look"), say("so far"), say("done")], asyncio.Event().wait)
    playing = asyncio.create_task(ag.rollout(Forking, tasks("t")[0], engine))
    await engine.reached.wait()
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await playing
    assert engine.released == ["t/0/1"]


async def test_a_release_that_fails_leaves_no_other_session_open() -> None:
    engine = Releasing([call("look"), say("so far"), say("done")], cancelled_elsewhere)
    rollout = await ag.rollout(Forking, tasks("t")[0], engine)
    assert (rollout.error or "").startswith("EngineError: release: CancelledError")
    assert engine.released == ["t/0/1"]


async def test_later_failures_are_added_to_the_first() -> None:
    class Twice(Desk):
        async def setup(self) -> None:
            raise ValueError("first")

        async def close(self) -> None:
            raise ValueError("second")

    rollout = await ag.rollout(Twice, tasks("t")[0], Scripted(SCRIPT))
    first, _, second = (rollout.error or "").partition("; ")
    assert first.startswith("EnvError: Twice.setup: ValueError: first, at test_stray_cancellation.py:")
    assert second.startswith("Twice.close: ValueError: second, at test_stray_cancellation.py:")
