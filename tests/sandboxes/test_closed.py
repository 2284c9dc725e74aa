"""Use of a pool, lease, branch, program or shell after its end: one error says which, since when and why."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path

import pytest
import pytest_asyncio

from agentgym.environments.task_sandboxes import TaskSandboxPools
from agentgym.errors import ClosedError
from agentgym.sandboxes.fake.sandbox import FakeSandbox, FakeSandboxPool
from agentgym.sandboxes.local.local import Process
from agentgym.sandboxes.pool import Pool
from agentgym.sandboxes.protocol import Sandbox, SandboxPool, SandboxSpec

pytestmark = pytest.mark.asyncio(loop_scope="module")
LEASE_ENDED = r"the sandbox was closed \d+\.\d s ago, when its lease ended: use it before that"


async def enter(block: object) -> None:
    async with block:  # type: ignore[attr-defined]
        pass


async def plain(call: Callable[[], object]) -> None:
    call()


CALLS: Mapping[str, Callable[[Sandbox, Path], Awaitable[object]]] = {
    "exec": lambda sandbox, _: sandbox.exec("true"),
    "python": lambda sandbox, _: sandbox.python("1"),
    "verify": lambda sandbox, _: sandbox.verify(command="true"),
    "start": lambda sandbox, _: enter(sandbox.start("true")),
    "shell": lambda sandbox, _: enter(sandbox.shell()),
    "write": lambda sandbox, _: sandbox.write({}),
    "read": lambda sandbox, _: sandbox.read("f"),
    "read_text": lambda sandbox, _: sandbox.read_text("f"),
    "list": lambda sandbox, _: sandbox.list(),
    "put": lambda sandbox, folder: sandbox.put(folder),
    "get": lambda sandbox, folder: sandbox.get("f", folder / "f"),
    "archive": lambda sandbox, _: sandbox.archive(),
    "unpack": lambda sandbox, _: sandbox.unpack(bytes(1024)),
    "fork": lambda sandbox, _: sandbox.fork(),
    "requests": lambda sandbox, _: plain(sandbox.requests),
    "port": lambda sandbox, _: enter(sandbox.port(80)),
    "service": lambda sandbox, _: plain(lambda: sandbox.service("db")),
    "snapshot": lambda sandbox, folder: sandbox.snapshot(folder / "it.tar"),
    "restore": lambda sandbox, folder: sandbox.restore(folder / "it.tar"),
    "reset": lambda sandbox, _: sandbox.reset(),
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool() -> AsyncIterator[SandboxPool]:
    async with Process(unsafe=True).open(1) as opened:
        yield opened


@pytest.mark.parametrize("name", CALLS)
async def test_every_call_of_a_sandbox_raises_when_its_lease_has_ended(
    pool: SandboxPool, tmp_path: Path, name: str
) -> None:
    fake = FakeSandboxPool(lambda: FakeSandbox(shell=lambda _: ""))
    for sandboxes in (pool, fake):
        async with sandboxes.lease() as sandbox:
            pass
        async with sandboxes.lease() as next_one:
            with pytest.raises(ClosedError, match=LEASE_ENDED):
                await CALLS[name](sandbox, tmp_path)
            assert await next_one.list() == []


@pytest.mark.parametrize("name", sorted(CALLS.keys() - {"reset"}))
async def test_every_call_of_a_closed_branch_raises(pool: SandboxPool, tmp_path: Path, name: str) -> None:
    async with pool.lease() as sandbox:
        async with await sandbox.fork() as branch:
            pass
        with pytest.raises(ClosedError, match=r"the branch was closed .* when its close\(\) was called"):
            await CALLS[name](branch, tmp_path)


async def test_the_tested_calls_are_those_of_the_protocol() -> None:
    assert set(CALLS) == {name for name in vars(Sandbox) if not name.startswith("_")} - {"digest"}


async def test_a_call_that_runs_when_the_lease_ends_is_ended(spec: SandboxSpec) -> None:
    begun = asyncio.Event()
    async with spec.open(1) as sandboxes:
        async with sandboxes.lease() as sandbox:
            running = asyncio.create_task(
                sandbox.python("go()\nwhile True: pass", functions={"go": begun.set}, timeout_s=600)
            )
            await begun.wait()
        with pytest.raises(ClosedError, match=LEASE_ENDED):
            await running
        assert running.cancelling() == 0
        async with sandboxes.lease() as sandbox:
            assert (await sandbox.python("1")).stdout == "1\n"


async def test_a_call_that_was_cancelled_stays_cancelled_when_the_lease_ends_too(pool: SandboxPool) -> None:
    begun = asyncio.Event()
    async with pool.lease() as sandbox:
        running = asyncio.create_task(
            sandbox.python("go()\nwhile True: pass", functions={"go": begun.set}, timeout_s=600)
        )
        await begun.wait()
        running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


async def test_a_program_and_a_shell_raise_after_their_block(pool: SandboxPool) -> None:
    async with pool.lease() as sandbox:
        async with sandbox.start("cat") as program, sandbox.shell() as shell:
            pass
        for use in (
            lambda: program.write("x"),
            program.close_stdin,
            program.wait,
            program.kill,
            program.stdout.read,
            program.stderr.read,
        ):
            with pytest.raises(ClosedError, match=r"the program was closed .* when its `async with` block ended"):
                await use()
        with pytest.raises(ClosedError, match=r"the shell was closed .* when its `async with` block ended"):
            await shell.run("true")


async def test_programs_shells_and_branches_end_when_the_sandbox_is_reset(pool: SandboxPool) -> None:
    async with pool.lease() as sandbox:
        async with await sandbox.fork() as branch, sandbox.start("sleep 60") as program, sandbox.shell() as shell:
            await sandbox.reset()
            for use in (lambda: branch.exec("true"), program.wait, lambda: shell.run("true")):
                with pytest.raises(ClosedError, match=r"was closed .* when the sandbox was reset"):
                    await use()
        assert (await sandbox.exec("echo x")).stdout == "x\n"


async def test_a_closed_pool_raises_for_waiting_and_new_leases() -> None:
    async with Process(unsafe=True).open(1) as sandboxes, sandboxes.lease() as sandbox:
        waiting = asyncio.create_task(enter(sandboxes.lease()))
        await sandbox.python("1")
        assert isinstance(sandboxes, Pool)
        await sandboxes.close()
        with pytest.raises(ClosedError, match="the pool was closed"):
            await waiting
        with pytest.raises(
            ClosedError, match=r"the sandbox was closed .* when the `async with` block of the pool ended"
        ):
            await sandbox.python("1")
    with pytest.raises(ClosedError, match="the pool was closed"):
        await enter(sandboxes.lease())
    with pytest.raises(ClosedError, match="the pool was closed"):
        await sandboxes.resize(2)


async def test_closed_pools_of_several_sandboxes_lease_nothing() -> None:
    sandboxes = TaskSandboxPools(1, Process(unsafe=True))
    async with sandboxes.lease():
        waiting = asyncio.create_task(enter(sandboxes.lease()))
        await asyncio.sleep(0)
        closing = asyncio.create_task(sandboxes.close())
        with pytest.raises(ClosedError, match="the pool was closed"):
            await waiting
    await closing
    with pytest.raises(ClosedError, match="the pool was closed"):
        await enter(sandboxes.lease())
