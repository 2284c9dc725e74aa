"""Resources that an env opens once for all of its rollouts: they are shared, and closed at the end whatever happens."""

import asyncio
import sqlite3
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import agentgym as ag
from agentgym.engines.scripted import Scripted, call, say
from agentgym.environments.mixture import Member, mix
from agentgym.errors import EnvError
from agentgym.machine.time_limits import all_clocks_stopped
from agentgym.scheduling import run_groups
from agentgym.testing import check_env
from agentgym.testing.env_checks.plays import Waiting

events: list[str] = []
"""What the envs in these tests opened, used and closed."""


class Index:
    def __init__(self, name: str) -> None:
        self.name = name


class Searching(ag.ToolEnv[ag.Task]):
    """An env whose rollouts share an index that is opened in a task group."""

    resources: Index

    @classmethod
    @asynccontextmanager
    async def open_resources(cls) -> AsyncIterator[Index]:
        async with asyncio.TaskGroup() as group:  # A task group must be exited by the task that entered it.
            waiting = group.create_task(asyncio.Event().wait())
            events.append(f"open {cls.__name__}")
            try:
                yield Index(cls.__name__)
            finally:
                waiting.cancel()
                events.append(f"close {cls.__name__}")

    async def setup(self) -> None:
        assert self.resources.name == type(self).__name__
        events.append("use")

    @ag.reward
    def zero(self) -> float:
        return 0.0


class Other(Searching):
    """Another env with a separate index."""


@pytest.fixture(autouse=True)
def fresh() -> None:
    events.clear()
    counting.clear()


def tasks(count: int) -> list[ag.Task]:
    return [ag.Task(id=i, prompt="?") for i in range(count)]


def answers() -> Scripted:
    return Scripted(lambda text: say("x"))


async def test_a_rollout_opens_its_own_resources_and_closes_them(no_leaks: None) -> None:
    assert (await ag.rollout(Searching, tasks(1)[0], answers())).reward == 0.0
    assert events == ["open Searching", "use", "close Searching"]


async def test_the_rollouts_of_many_tasks_share_resources_that_are_opened_once(no_leaks: None) -> None:
    await run_groups(Searching, tasks(4), answers(), n=2)
    assert events == ["open Searching", *["use"] * 8, "close Searching"]


async def test_open_resources_are_shared_and_closed_by_the_last_user() -> None:
    async with ag.open_resources(Searching) as index:
        await ag.evaluate(Searching, answers(), tasks=tasks(2))
        await asyncio.gather(*(ag.rollout(Searching, task, answers()) for task in tasks(2)))
        assert events == ["open Searching", *["use"] * 4]
        assert isinstance(index, Index)
    assert events[-1] == "close Searching"


async def test_instances_share_the_same_object_and_it_can_be_set_without_a_rollout() -> None:
    seen: list[Any] = []

    class Looking(Searching):
        async def setup(self) -> None:
            seen.append(self.resources)

    async with ag.open_resources(Looking) as index:
        await run_groups(Looking, tasks(2), answers(), n=1)
    assert [each is index for each in seen] == [True, True]
    env = Searching(tasks(1)[0])
    with pytest.raises(EnvError, match="Searching has no resources: override `open_resources`"):
        env.resources  # noqa: B018
    env.resources = Index("Searching")
    await env.reset()


async def test_each_member_of_a_mixture_opens_its_own_resources() -> None:
    both = mix({"one": Member(Searching, 1), "two": Member(Other, 1)})
    async with ag.open_resources(both) as opened:
        assert {name: index.name for name, index in opened.items()} == {"one": "Searching", "two": "Other"}
        await run_groups(both, [ag.Task(id="one/a", prompt="?"), ag.Task(id="two/a", prompt="?")], answers(), n=1)
    assert sorted(events) == ["close Other", "close Searching", "open Other", "open Searching", "use", "use"]


async def test_check_env_opens_resources_once_for_all_of_its_rollouts() -> None:
    await check_env(
        Searching, tasks(1)[0], oracle=[say("x")], reward_range=(0.0, 1.0), threshold=0.0, idle_is_right=True
    )
    assert (events.count("open Searching"), events.count("close Searching")) == (1, 1)
    assert events.count("use") > 2


async def test_a_cancelled_run_closes_its_resources(no_leaks: None) -> None:
    engine = Waiting()
    running = asyncio.create_task(run_groups(Searching, tasks(3), engine, n=1))
    await engine.asked.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert events[-1] == "close Searching"


async def test_a_failed_run_closes_its_resources(no_leaks: None) -> None:
    with pytest.raises(RuntimeError, match="in the block"):
        async with ag.open_resources(Searching):
            raise RuntimeError("in the block")
    assert events == ["open Searching", "close Searching"]


async def test_a_failure_to_open_resources_is_an_env_error_for_each_waiting_rollout(no_leaks: None) -> None:
    class Broken(Searching):
        @classmethod
        @asynccontextmanager
        async def open_resources(cls) -> AsyncIterator[Index]:
            await asyncio.sleep(0)
            raise ConnectionError("refused")
            yield

    playing = [ag.rollout(Broken, task, answers()) for task in tasks(2)]
    for error in await asyncio.gather(*playing, return_exceptions=True):
        assert isinstance(error, EnvError)
        assert "Broken.open_resources: ConnectionError: refused" in str(error)


async def test_a_failure_to_close_resources_is_an_env_error() -> None:
    class Stuck(Searching):
        @classmethod
        @asynccontextmanager
        async def open_resources(cls) -> AsyncIterator[Index]:
            yield Index("Stuck")
            raise OSError("still in use")

    with pytest.raises(EnvError, match=r"Stuck\.open_resources: OSError: still in use"):
        await run_groups(Stuck, tasks(1), answers(), n=1)


async def test_cancellation_interrupts_the_opening_and_closing_of_resources(no_leaks: None) -> None:
    reached = asyncio.Event()

    class Slow(Searching):
        closing = ag.Parameter(False)

        @classmethod
        @asynccontextmanager
        async def open_resources(cls) -> AsyncIterator[Index]:
            if cls.closing:
                yield Index("Slow")
            reached.set()
            await asyncio.Event().wait()
            yield Index("Slow")

    for closing in (False, True):
        reached.clear()
        running = asyncio.create_task(ag.rollout(Slow.configured(closing=closing), tasks(1)[0], answers()))
        await reached.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running


async def test_a_rollout_that_starts_after_resources_have_ended_fails_with_a_reason() -> None:
    fail = asyncio.Event()

    class Dying(Searching):
        @classmethod
        @asynccontextmanager
        async def open_resources(cls) -> AsyncIterator[Index]:
            async def background() -> None:
                await fail.wait()
                raise ConnectionError("the server went away")

            async with asyncio.TaskGroup() as group:
                group.create_task(background())
                yield Index("Dying")

    async def play() -> None:
        async with ag.open_resources(Dying):
            assert (await ag.rollout(Dying, tasks(1)[0], answers())).reward == 0.0
            fail.set()
            for _ in range(5):
                await asyncio.sleep(0)
            failed = await ag.rollout(Dying, tasks(1)[0], answers())
            assert "Dying.open_resources: the resources ended while rollouts were using them" in str(failed.error)

    with pytest.raises(EnvError, match=r"Dying\.open_resources"):
        await play()


@pytest.fixture
async def index() -> AsyncIterator[Index]:
    async with ag.open_resources(Searching) as opened:
        yield opened


async def test_a_fixture_can_keep_resources_open_for_a_test(index: Index) -> None:
    await ag.rollout(Searching, tasks(1)[0], answers())
    await ag.rollout(Searching, tasks(1)[0], answers())
    assert events == ["open Searching", "use", "use"]


@pytest.mark.parametrize("bare", [True, False])
def test_an_invalid_open_resources_is_refused_when_the_class_is_created(bare: bool) -> None:
    async def generator(cls: Any) -> AsyncIterator[int]:
        yield 1

    made: Any = classmethod(generator) if bare else asynccontextmanager(generator)
    with pytest.raises(ValueError, match=r"^Made\.open_resources is .*; write `@classmethod`, below it"):
        type("Made", (Searching,), {"open_resources": made})


counting = threading.Event()
"""Set by a query of `Counting` once it runs."""


class Counting(ag.ToolEnv[ag.Task]):
    """A tool that hangs in a C call until its connection is interrupted."""

    db: sqlite3.Connection

    async def setup(self) -> None:
        self.db = sqlite3.connect(":memory:", check_same_thread=False)
        self.db.create_function("began", 0, counting.set)

    @ag.tool(timeout_s=0.05)
    def count(self) -> str:
        """Count forever."""
        query = "WITH RECURSIVE n(i) AS (SELECT began() UNION ALL SELECT 1 FROM n) SELECT count(*) FROM n"
        return str(self.db.execute(query).fetchone())

    def interrupt(self) -> None:
        events.append("interrupt")
        self.db.interrupt()

    async def close(self) -> None:
        self.db.close()

    @ag.reward
    def zero(self) -> float:
        return 0.0


async def count_forever(env: type[Counting]) -> ag.Rollout:
    """Play a rollout whose tool hangs in a C call; its time limit starts once the call has begun."""
    with all_clocks_stopped():
        playing = asyncio.create_task(ag.rollout(env, tasks(1)[0], Scripted([call("count"), say("x")])))
        await asyncio.to_thread(counting.wait)
    return await playing


async def test_the_env_can_interrupt_a_timed_out_c_call_so_that_it_can_close(no_leaks: None) -> None:
    rollout = await count_forever(Counting)
    assert rollout.transcript()[0].messages[2]["content"] == "error: tool 'count' timed out after 0.05 s"
    assert rollout.reward == 0.0
    assert events == ["interrupt"]


async def test_an_interrupt_that_raises_is_logged_and_has_no_effect(caplog: pytest.LogCaptureFixture) -> None:
    class Raising(Counting):
        def interrupt(self) -> None:
            super().interrupt()
            raise RuntimeError("not now")

    rollout = await count_forever(Raising)
    assert rollout.reward == 0.0
    assert "Raising.interrupt raised RuntimeError: not now" in caplog.text


def test_an_async_interrupt_is_refused_when_the_class_is_created() -> None:
    async def interrupt(self: Any) -> None: ...

    with pytest.raises(ValueError, match=r"^Made\.interrupt is called without `await`; make it a plain `def`"):
        type("Made", (Counting,), {"interrupt": interrupt})


async def test_a_run_opens_resources_once_including_its_evaluations(tmp_path: Path) -> None:
    class Trained(Searching):
        @classmethod
        def tasks(cls, split: ag.Split) -> list[ag.Task]:
            return [ag.Task(id=f"{split}-{i}", prompt=f"{split} {i}?") for i in range(4)]

        @ag.reward
        def zero(self) -> float:
            return float(self.answer is not None and len(self.answer) % 2)

    ag.register("resources-of-a-run")(Trained)
    run = ag.RunConfig(
        recipe="shared", env="resources-of-a-run", model="tiny", max_steps=1, prompts_per_step=2, group_size=2
    )
    await ag.train_policy(replace(run, eval_tasks=2, max_turn_tokens=4, output_dir=tmp_path))
    assert (events.count("open Trained"), events.count("close Trained")) == (1, 1)
    assert events.count("use") == 2 + 2 * 2 + 2
    assert events[-1] == "close Trained"
