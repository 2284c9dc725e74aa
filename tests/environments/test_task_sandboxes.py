"""A sandbox per task: several kinds of pools that share one limit."""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest

import agentgym as ag
from agentgym.environments.task_sandboxes import TaskSandboxPools, open_sandboxes
from agentgym.errors import EnvError, SandboxError
from agentgym.sandboxes.local.local import Process
from agentgym.sandboxes.protocol import Sandbox, SandboxPool, SandboxSpec
from agentgym.scheduling import run_groups
from agentgym.testing import FakeSandboxPool, Scripted, say

KINDS = [Process(unsafe=True, memory_mb=memory) for memory in (900, 1000, 1100)]


class Counted:
    """The number of sandboxes of all kinds at the moment, and the maximum so far."""

    def __init__(self) -> None:
        self.now = self.most = 0
        self.opened: Counter[str] = Counter()


@dataclass(frozen=True)
class Foreign:
    """Another library's sandbox: its pool creates sandboxes on demand and ends them all when it closes."""

    name: str
    counted: Counted = field(compare=False)

    @asynccontextmanager
    async def open(self, size: int) -> AsyncIterator[SandboxPool]:
        self.counted.opened[self.name] += 1
        pool = ForeignPool(self.counted)
        yield pool
        self.counted.now -= pool.made


class ForeignPool:
    def __init__(self, counted: Counted) -> None:
        self.counted, self.made, self.leased, self.fakes = counted, 0, 0, FakeSandboxPool()

    @asynccontextmanager
    async def lease(self) -> AsyncIterator[Sandbox]:
        self.leased += 1
        if self.leased > self.made:
            self.made += 1
            self.counted.now += 1
            self.counted.most = max(self.counted.most, self.counted.now)
        try:
            async with self.fakes.lease() as sandbox:
                yield sandbox
        finally:
            self.leased -= 1


async def thirty_rollouts(kinds: list[Any], sandboxes: TaskSandboxPools) -> list[str]:
    """Start thirty rollouts at once and return the order in which they got a sandbox."""
    order: list[str] = []

    async def play(number: int) -> None:
        async with sandboxes.lease(kinds[number % len(kinds)]) as sandbox:
            order.append(f"{number}")
            await sandbox.write({"f": "x"})
            await asyncio.sleep(0)
            assert await sandbox.list() == ["f"]

    async with asyncio.TaskGroup() as tasks:
        for number in range(30):
            tasks.create_task(play(number))
    return order


async def test_leases_start_in_the_order_of_requests_for_all_kinds() -> None:
    sandboxes, counted = TaskSandboxPools(1), Counted()
    try:
        order = await thirty_rollouts([Foreign(name, counted) for name in "abc"], sandboxes)
    finally:
        await sandboxes.close()
    assert order == [str(number) for number in range(30)]
    assert counted.most == 1


async def test_there_are_never_more_real_sandboxes_than_the_size(monkeypatch: pytest.MonkeyPatch) -> None:
    now = most = 0
    start = Process._start

    async def counting(self: Process) -> Any:
        nonlocal now, most
        now += 1
        most = max(most, now)
        sandbox = await start(self)
        end, over = sandbox._end, False

        async def ended() -> None:
            nonlocal now, over
            await end()
            now, over = now - (not over), True

        sandbox._end = ended
        return sandbox

    monkeypatch.setattr(Process, "_start", counting)
    sandboxes = TaskSandboxPools(2)
    try:
        await thirty_rollouts(KINDS, sandboxes)
    finally:
        await sandboxes.close()
    assert (now, most) == (0, 2)


async def test_pools_that_cannot_end_a_single_sandbox_are_closed_as_a_whole() -> None:
    counted = Counted()
    sandboxes = TaskSandboxPools(2)
    try:
        await thirty_rollouts([Foreign(name, counted) for name in "abc"], sandboxes)
    finally:
        await sandboxes.close()
    assert counted.now == 0
    assert counted.most == 2
    assert set(counted.opened) == set("abc")


async def test_equal_sandboxes_share_a_pool() -> None:
    counted = Counted()
    sandboxes = TaskSandboxPools(2)
    try:
        for _ in range(3):
            async with sandboxes.lease(Foreign("a", counted)):
                pass
    finally:
        await sandboxes.close()
    assert counted.opened == {"a": 1}
    assert counted.most == 1


@dataclass(frozen=True)
class Broken:
    """A sandbox that cannot be opened."""

    def open(self, size: int) -> AbstractAsyncContextManager[SandboxPool]:
        raise SandboxError("no such image")


async def test_a_sandbox_that_fails_to_open_takes_no_slot_from_the_others() -> None:
    sandboxes = TaskSandboxPools(1)
    try:
        for _ in range(2):
            with pytest.raises(SandboxError, match="no such image"):
                async with sandboxes.lease(Broken()):
                    pass
            async with sandboxes.lease(KINDS[0]) as sandbox:
                assert (await sandbox.python("1")).ok
    finally:
        await sandboxes.close()


async def test_cancelled_leases_free_their_slots() -> None:
    rng = random.Random(0)
    sandboxes = TaskSandboxPools(2)

    async def lease(kind: SandboxSpec) -> None:
        async with sandboxes.lease(kind) as sandbox:
            await sandbox.python("1")

    try:
        tasks = [asyncio.create_task(lease(rng.choice(KINDS))) for _ in range(12)]
        for task in tasks:
            for _ in range(rng.randrange(6)):
                await asyncio.sleep(0)
            if rng.random() < 0.6:
                task.cancel()
        await asyncio.wait(tasks)
        for kind in KINDS:
            await lease(kind)
    finally:
        await sandboxes.close()


class MemoryTask(ag.Task):
    memory_mb: int | None


class AsTheTaskSays(ag.ToolEnv[MemoryTask]):
    @classmethod
    def sandbox_for(cls, task: MemoryTask) -> SandboxSpec | None:
        return None if task.memory_mb is None else Process(unsafe=True, memory_mb=task.memory_mb)

    @ag.reward
    async def right(self) -> float:
        if self.task.memory_mb is None:
            with pytest.raises(EnvError, match="sandbox_for"):
                _ = self.sandbox
            return 1.0
        limit = "import resource\nresource.getrlimit(resource.RLIMIT_AS)[0] >> 20"
        return float((await self.sandbox.python(limit)).stdout == f"{self.task.memory_mb}\n")


TASKS = [MemoryTask(id=f"{memory}", prompt="?", memory_mb=memory) for memory in (700, 800, None, 900)]


async def test_each_task_runs_in_the_sandbox_that_the_env_chose_for_it() -> None:
    groups = await run_groups(AsTheTaskSays, TASKS, Scripted([say("done")]), n=2, concurrency=2)
    assert [rollout.reward for rollout in groups.rollouts] == [1.0] * 8
    assert (await ag.rollout(AsTheTaskSays, TASKS[1], Scripted([say("done")]))).reward == 1.0
    evaluation = await ag.evaluate(AsTheTaskSays, Scripted([say("done")]), tasks=TASKS)
    assert [rollout.reward for rollout in evaluation.groups.rollouts] == [1.0] * 4


async def test_a_sandbox_choice_that_raises_fails_only_its_rollout() -> None:
    class Choosy(AsTheTaskSays):
        @classmethod
        def sandbox_for(cls, task: MemoryTask) -> SandboxSpec | None:
            raise KeyError(task.id)

    played = await ag.rollout(Choosy, TASKS[0], Scripted([say("done")]))
    assert played.reward is None
    assert "sandbox_for" in str(played.failure)


def test_a_sandbox_choice_must_be_a_classmethod() -> None:
    with pytest.raises(ValueError, match=r"Wrong\.sandbox_for: put @classmethod on it"):

        class Wrong(ag.ToolEnv[MemoryTask]):
            def sandbox_for(self, task: MemoryTask) -> None:  # type: ignore[override]
                return None


async def test_an_explicit_sandbox_is_used_for_all_tasks() -> None:
    async with open_sandboxes(AsTheTaskSays, 1, KINDS[0]) as sandboxes:
        assert sandboxes is not None
        async with sandboxes.lease() as sandbox:
            assert (await sandbox.python("1")).ok


class Undecided(ag.ToolEnv[MemoryTask]):
    answer_of: ClassVar[Any] = None

    @classmethod
    def sandbox_for(cls, task: MemoryTask) -> SandboxSpec | None:
        return cls.answer_of()  # type: ignore[no-any-return]

    @ag.reward
    def right(self) -> float:
        return 1.0


async def later() -> SandboxSpec:
    return Process(unsafe=True)


def fails() -> SandboxSpec:
    raise KeyError("no such image")


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (lambda: 3, "must return a sandbox, such as `ag.AnySandbox()`, or None for no sandbox, got 3"),
        (lambda: "docker", "must return a sandbox, such as `ag.AnySandbox()`, or None for no sandbox, got 'docker'"),
        (
            lambda: ag.AnySandbox,
            "must return a sandbox, such as `ag.AnySandbox()`, or None for no sandbox, got <class",
        ),
        (
            later,
            "must return a sandbox, such as `ag.AnySandbox()`, or None for no sandbox, got <coroutine object later",
        ),
        (fails, "KeyError: 'no such image'"),
    ],
)
async def test_a_choice_that_is_not_a_sandbox_is_an_env_error_that_names_the_method(
    monkeypatch: pytest.MonkeyPatch, answer: Any, said: str
) -> None:
    monkeypatch.setattr(Undecided, "answer_of", staticmethod(answer))
    played = await ag.rollout(Undecided, MemoryTask(id="x", prompt="x", memory_mb=1), Scripted([say("done")]))
    assert played.reward is None
    assert played.failure is not None
    assert (played.failure.type, played.failure.where) == ("EnvError", "Undecided.sandbox_for")
    assert said in played.failure.message


def test_an_async_sandbox_choice_is_refused_when_the_class_is_created() -> None:
    with pytest.raises(ValueError, match=r"Wrong\.sandbox_for is called without `await`; make it a plain `def`"):

        class Wrong(ag.ToolEnv[MemoryTask]):
            @classmethod
            async def sandbox_for(cls, task: MemoryTask) -> SandboxSpec | None:  # type: ignore[override]
                return None
