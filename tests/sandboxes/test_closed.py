"""Use after the end: of a pool, a lease, a branch, a program or a shell; one error says which, since when and why."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path

import pytest
import pytest_asyncio

import agentgym as ag
from agentgym.environments.task_boxes import TaskBoxes
from agentgym.sandboxes.fake.box import FakeBox, FakeBoxes
from agentgym.sandboxes.local.local import Process
from agentgym.sandboxes.pool import Pool
from agentgym.sandboxes.protocol import Box, Boxes, Sandbox

pytestmark = pytest.mark.asyncio(loop_scope="module")
LEASE_ENDED = r"the box was closed \d+\.\d s ago, when its lease ended: use it before that"


async def enter(block: object) -> None:
    async with block:  # type: ignore[attr-defined]
        pass


async def plain(call: Callable[[], object]) -> None:
    call()


CALLS: Mapping[str, Callable[[Box, Path], Awaitable[object]]] = {
    "exec": lambda box, _: box.exec("true"),
    "python": lambda box, _: box.python("1"),
    "verify": lambda box, _: box.verify(command="true"),
    "start": lambda box, _: enter(box.start("true")),
    "shell": lambda box, _: enter(box.shell()),
    "write": lambda box, _: box.write({}),
    "read": lambda box, _: box.read("f"),
    "read_text": lambda box, _: box.read_text("f"),
    "list": lambda box, _: box.list(),
    "put": lambda box, folder: box.put(folder),
    "get": lambda box, folder: box.get("f", folder / "f"),
    "archive": lambda box, _: box.archive(),
    "unpack": lambda box, _: box.unpack(bytes(1024)),
    "fork": lambda box, _: box.fork(),
    "requests": lambda box, _: plain(box.requests),
    "port": lambda box, _: enter(box.port(80)),
    "service": lambda box, _: plain(lambda: box.service("db")),
    "snapshot": lambda box, folder: box.snapshot(folder / "it.tar"),
    "restore": lambda box, folder: box.restore(folder / "it.tar"),
    "reset": lambda box, _: box.reset(),
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool() -> AsyncIterator[Boxes]:
    async with Process(unsafe=True).open(1) as opened:
        yield opened


@pytest.mark.parametrize("name", CALLS)
async def test_every_call_of_a_box_raises_when_its_lease_has_ended(pool: Boxes, tmp_path: Path, name: str) -> None:
    fake = FakeBoxes(lambda: FakeBox(shell=lambda _: ""))
    for boxes in (pool, fake):
        async with boxes.lease() as box:
            pass
        async with boxes.lease() as next_one:
            with pytest.raises(ag.ClosedError, match=LEASE_ENDED):
                await CALLS[name](box, tmp_path)
            assert await next_one.list() == []


@pytest.mark.parametrize("name", sorted(CALLS.keys() - {"reset"}))
async def test_every_call_of_a_closed_branch_raises(pool: Boxes, tmp_path: Path, name: str) -> None:
    async with pool.lease() as box:
        async with await box.fork() as branch:
            pass
        with pytest.raises(ag.ClosedError, match=r"the branch was closed .* when its close\(\) was called"):
            await CALLS[name](branch, tmp_path)


async def test_the_calls_are_those_of_the_protocol() -> None:
    assert set(CALLS) == {name for name in vars(Box) if not name.startswith("_")} - {"digest"}


async def test_a_call_that_runs_when_the_lease_ends_is_ended(sandbox: Sandbox) -> None:
    begun = asyncio.Event()
    async with sandbox.open(1) as boxes:
        async with boxes.lease() as box:
            running = asyncio.create_task(
                box.python("go()\nwhile True: pass", functions={"go": begun.set}, timeout_s=600)
            )
            await begun.wait()
        with pytest.raises(ag.ClosedError, match=LEASE_ENDED):
            await running
        assert running.cancelling() == 0
        async with boxes.lease() as box:
            assert (await box.python("1")).stdout == "1\n"


async def test_a_call_that_was_cancelled_stays_cancelled_when_the_lease_ends_too(pool: Boxes) -> None:
    begun = asyncio.Event()
    async with pool.lease() as box:
        running = asyncio.create_task(box.python("go()\nwhile True: pass", functions={"go": begun.set}, timeout_s=600))
        await begun.wait()
        running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


async def test_a_program_and_a_shell_raise_after_their_block(pool: Boxes) -> None:
    async with pool.lease() as box:
        async with box.start("cat") as program, box.shell() as shell:
            pass
        for use in (
            lambda: program.write("x"),
            program.close_stdin,
            program.wait,
            program.kill,
            program.stdout.read,
            program.stderr.read,
        ):
            with pytest.raises(ag.ClosedError, match=r"the program was closed .* when its block ended"):
                await use()
        with pytest.raises(ag.ClosedError, match=r"the shell was closed .* when its block ended"):
            await shell.run("true")


async def test_what_was_opened_in_a_box_ends_when_it_is_reset(pool: Boxes) -> None:
    async with pool.lease() as box:
        async with await box.fork() as branch, box.start("sleep 60") as program, box.shell() as shell:
            await box.reset()
            for use in (lambda: branch.exec("true"), program.wait, lambda: shell.run("true")):
                with pytest.raises(ag.ClosedError, match=r"was closed .* when the box was reset"):
                    await use()
        assert (await box.exec("echo x")).stdout == "x\n"


async def test_a_closed_pool_raises_for_leases_that_wait_and_for_new_ones() -> None:
    async with Process(unsafe=True).open(1) as boxes, boxes.lease() as box:
        waiting = asyncio.create_task(enter(boxes.lease()))
        await box.python("1")
        assert isinstance(boxes, Pool)
        await boxes.close()
        with pytest.raises(ag.ClosedError, match="the pool was closed"):
            await waiting
        with pytest.raises(ag.ClosedError, match=r"the box was closed .* when the block of the pool ended"):
            await box.python("1")
    with pytest.raises(ag.ClosedError, match="the pool was closed"):
        await enter(boxes.lease())
    with pytest.raises(ag.ClosedError, match="the pool was closed"):
        await boxes.resize(2)


async def test_closed_pools_of_several_sandboxes_lease_nothing() -> None:
    boxes = TaskBoxes(1, Process(unsafe=True))
    async with boxes.lease():
        waiting = asyncio.create_task(enter(boxes.lease()))
        await asyncio.sleep(0)
        closing = asyncio.create_task(boxes.close())
        with pytest.raises(ag.ClosedError, match="the pool was closed"):
            await waiting
    await closing
    with pytest.raises(ag.ClosedError, match="the pool was closed"):
        await enter(boxes.lease())
