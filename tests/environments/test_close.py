"""A rollout's env is closed after the threads of its plain tools and rewards have ended, or after a grace period."""

import asyncio
import sqlite3
import threading
from collections.abc import Callable
from typing import Any

import pytest

import agentgym as ag
from agentgym.engines.scripted import Reply, Scripted, call, say
from agentgym.environments.env import close
from agentgym.tools import tool_threads as threads

TASK = ag.Task.model_validate({"id": "t", "prompt": "Go."})


class Ward(ag.ToolEnv[ag.Task]):
    """An env whose tool waits in a C call until the test releases it, and which records what ended in which order."""

    made: "list[Ward]"

    entered: "asyncio.Future[Ward]"
    """Resolves to the first instance that is inside its tool."""

    begun = False
    """Whether a call of its tool has started working."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.made = []
        cls.entered = asyncio.get_running_loop().create_future()

    def __init__(self, task: ag.Task) -> None:
        super().__init__(task)
        self.made.append(self)
        self.diary: list[str] = []
        self.free, self.answered = threading.Event(), asyncio.Event()
        self.loop = asyncio.get_running_loop()

    def work(self) -> str:
        try:
            self.begun = True
            self.loop.call_soon_threadsafe(self.enter)
            self.free.wait()
        except threads.Interrupted:  # The interrupt came before the C call started.
            self.loop.call_soon_threadsafe(self.enter)
            self.free.wait()
        finally:
            self.diary.append("work ended")
        return "done"

    def enter(self) -> None:
        if not self.entered.done():
            self.entered.set_result(self)

    @ag.tool
    def operate(self) -> str:
        """Work until it is released."""
        return self.work()

    @ag.tool(timeout_s=0.01)
    def operate_late(self) -> str:
        """Work past the time limit."""
        return self.work()

    @ag.tool
    async def release(self) -> str:
        """Release the work."""
        self.free.set()
        return "released"

    @ag.reward
    async def healed(self) -> float:
        self.answered.set()
        return 1.0

    async def close(self) -> None:
        self.diary.append("closed")


def ward() -> type[Ward]:
    return type("Ward", (Ward,), {})


def late(env: type[Ward]) -> Callable[[str], Reply]:
    """Return a script that calls the tool past its limit, and calls it again if the thread had not started in time."""
    return lambda text: say("done") if env.made[0].begun else call("operate_late")


async def begin(env: type[Ward], script: Any) -> tuple["asyncio.Task[ag.Rollout]", Ward]:
    """Start a rollout, and return its task and its env once the plain tool is running."""
    current_usage = asyncio.create_task(ag.rollout(env, TASK, Scripted(script)))
    return current_usage, await env.entered


async def turns_of_the_loop(count: int = 50) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


@pytest.mark.parametrize("cancellations", [1, 3])
async def test_a_cancelled_rollout_is_closed_after_its_tools_thread_has_ended(
    cancellations: int, no_leaks: None
) -> None:
    current_usage, env = await begin(ward(), [call("operate"), say("done")])
    for _ in range(cancellations):
        current_usage.cancel()
        await turns_of_the_loop()
    assert env.diary == []
    env.free.set()
    with pytest.raises(asyncio.CancelledError):
        await current_usage
    assert env.diary == ["work ended", "closed"]


async def test_a_finished_rollout_is_closed_after_its_timed_out_tool_has_ended(no_leaks: None) -> None:
    kind = ward()
    current_usage, env = await begin(kind, late(kind))
    await env.answered.wait()
    await turns_of_the_loop()
    assert env.diary == []
    env.free.set()
    assert (await current_usage).reward == 1.0
    assert env.diary == ["work ended", "closed"]


async def test_a_tool_that_ends_in_time_delays_nothing(caplog: pytest.LogCaptureFixture) -> None:
    env = ward()
    rollout = await ag.rollout(env, TASK, Scripted([call("release"), call("operate"), say("done")]))
    assert (rollout.error, env.made[0].diary, caplog.records) == (None, ["work ended", "closed"], [])


async def test_a_thread_that_outlives_the_grace_period_is_named_and_the_env_is_closed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(threads, "GRACE_S", 0.02)
    kind = ward()
    current_usage, env = await begin(kind, late(kind))
    assert (await current_usage).reward == 1.0
    assert env.diary == ["closed"]
    said = [record.getMessage() for record in caplog.records if "was closed while" in record.getMessage()]
    assert len(said) == 1
    assert said[0].startswith(
        "Ward was closed while its thread 'agentgym-tool operate_late' was still running, at test_close."
    )
    assert said[0].endswith(" in work")
    env.free.set()


async def test_a_sub_agents_threads_belong_to_its_rollout() -> None:
    class Delegating(Ward):
        @ag.tool
        async def delegate(self) -> str:
            """Let a sub-agent operate."""
            ask = [ag.Message(role="user", content="Operate.")]
            async with self.fork("subagent", ask, tools=[self.operate]) as agent:
                return await agent.run()

    current_usage, env = await begin(Delegating, [call("delegate"), call("operate"), say("done"), say("done")])
    current_usage.cancel()
    await turns_of_the_loop()
    assert env.diary == []
    env.free.set()
    with pytest.raises(asyncio.CancelledError):
        await current_usage
    assert env.diary == ["work ended", "closed"]


async def test_a_database_is_not_closed_while_a_thread_reads_it() -> None:
    class Library(ag.ToolEnv[ag.Task]):
        begun: asyncio.Event

        async def setup(self) -> None:
            self.db = sqlite3.connect(":memory:", check_same_thread=False)
            self.db.execute("create table t (x)")
            self.db.executemany("insert into t values (?)", [(i,) for i in range(2000)])
            self.loop = asyncio.get_running_loop()

        async def close(self) -> None:
            self.db.close()

        @ag.tool
        def query(self) -> int:
            """Read for a long time."""
            self.loop.call_soon_threadsafe(self.begun.set)
            return sum(len(list(self.db.execute("select a.x from t a, t b where a.x = 7"))) for _ in range(50))

        @ag.reward
        def right(self) -> float:
            return 1.0

    for _ in range(40):
        Library.begun = asyncio.Event()
        current_usage = asyncio.create_task(ag.rollout(Library, TASK, Scripted([call("query"), say("done")])))
        await Library.begun.wait()
        current_usage.cancel()
        await asyncio.wait([current_usage])
        assert current_usage.cancelled()


async def test_an_env_that_skips_its_bases_constructor_is_also_closed() -> None:
    class Bare(ag.Env[ag.Task]):
        closed = False

        def __init__(self, task: ag.Task) -> None:
            self.task = task

        async def close(self) -> None:
            self.closed = True

    env = Bare(TASK)
    await close(env)
    assert env.closed
