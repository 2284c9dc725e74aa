"""Many sandboxes and many leases: the limits hold, and the event loop is never blocked."""

import asyncio
import gc
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

import pytest

from agentgym.sandboxes.protocol import Sandbox, SandboxSpec
from tests.sandboxes.conftest import ISOLATED, make

STALL_S = 0.05
HELD = [
    ("bubblewrap", 30),
    pytest.param("bubblewrap", 150, marks=pytest.mark.slow),
    pytest.param("docker", 150, marks=[pytest.mark.docker, pytest.mark.slow]),
]


@dataclass
class Watchdog:
    """Processor time of the event loop's slowest callback, which does not depend on the machine's load."""

    longest_s: float = 0.0
    callback: str = ""
    seen: int = field(default=0)

    def note(self, seconds: float, handle: object) -> None:
        self.seen += 1
        if seconds > self.longest_s:
            self.longest_s, self.callback = seconds, repr(handle)


@pytest.fixture
def many(request: pytest.FixtureRequest) -> SandboxSpec:
    """Return a kind of sandbox; checked before the watchdog starts."""
    return make(str(request.param))


@pytest.fixture
def watchdog(many: SandboxSpec, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watchdog]:
    """Time every callback that the event loop runs."""
    assert many is not None
    dog = Watchdog()
    run = asyncio.Handle._run

    def timed(handle: Any) -> None:
        began = time.thread_time()
        run(handle)
        dog.note(time.thread_time() - began, handle)

    monkeypatch.setattr(asyncio.Handle, "_run", timed)
    gc.collect()
    gc.freeze()  # Keep the garbage collector from walking the test run's own heap.
    yield dog
    gc.unfreeze()
    assert dog.seen > 0
    assert dog.longest_s < STALL_S, f"{dog.longest_s:.3f} s in {dog.callback}"


@pytest.mark.usefixtures("watchdog")
@pytest.mark.parametrize(("many", "size"), HELD, indirect=["many"])
async def test_many_sandboxes_can_be_leased_at_once(many: SandboxSpec, size: int) -> None:
    async with many.open(size) as sandboxes, AsyncExitStack() as held:
        async with asyncio.TaskGroup() as tasks:
            leasing = [tasks.create_task(held.enter_async_context(sandboxes.lease())) for _ in range(size)]
        leased: list[Sandbox] = [lease.result() for lease in leasing]
        async with asyncio.TaskGroup() as tasks:
            for number, sandbox in enumerate(leased):
                tasks.create_task(sandbox.python(f"x = {number}"))
        async with asyncio.TaskGroup() as tasks:
            answers = [tasks.create_task(sandbox.python("x")) for sandbox in leased]
        assert [answer.result().stdout for answer in answers] == [f"{number}\n" for number in range(size)]


@pytest.mark.usefixtures("watchdog")
@pytest.mark.parametrize("leases", [100, pytest.param(1000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("many", ["unsafe", *ISOLATED], indirect=True)
async def test_many_leases_at_once_never_exceed_the_pool(many: SandboxSpec, leases: int) -> None:
    size = 8
    inside = most = 0
    answers: set[str] = set()

    async def rollout(number: int) -> None:
        nonlocal inside, most
        async with sandboxes.lease() as sandbox:
            inside += 1
            most = max(most, inside)
            result = await sandbox.python(f"'x' in globals(), {number}")
            await sandbox.python("x = 1")
            answers.add(result.stdout)
            inside -= 1

    async with many.open(size) as sandboxes, asyncio.TaskGroup() as tasks:
        for number in range(leases):
            tasks.create_task(rollout(number))
    assert 1 < most <= size  # How many are leased at once depends on how long a reset takes relative to two calls.
    assert answers == {f"(False, {number})\n" for number in range(leases)}
