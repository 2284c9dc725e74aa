"""What a pool promises: bounded, clean, and nothing left behind however it ends."""

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from agentgym.errors import SandboxError
from agentgym.machine.finished import finished
from agentgym.sandboxes import pool as pools
from agentgym.sandboxes.choose import named
from agentgym.sandboxes.local.local import Process
from agentgym.sandboxes.pool import Pool, open_pool
from agentgym.sandboxes.protocol import Box, Sandbox
from agentgym.sandboxes.remote.box import RemoteBox
from tests.sandboxes.conftest import below, containers_of, wait_for_end

CLIENT = """
import asyncio, sys
from agentgym.sandboxes.choose import named

async def main(kind):
    async with named(kind).open(2) as boxes, boxes.lease() as one, boxes.lease() as two:
        for box in (one, two):
            await box.python("import subprocess; p = subprocess.Popen(['sleep', '64.5'], start_new_session=True)")
        print("ready", flush=True)
        await one.exec("sleep 64.5", timeout_s=60)

asyncio.run(main(sys.argv[1]))
"""


async def test_each_lease_is_clean(sandbox: Sandbox) -> None:
    async with sandbox.open(1) as boxes:
        for i in range(3):
            async with boxes.lease() as box:
                assert "NameError" in (await box.python("x")).stderr
                assert await box.list() == []
                await box.python(f"x = {i}")
                await box.write({"f": "x"})


async def test_leases_run_at_once_and_at_most_size_of_them(sandbox: Sandbox) -> None:
    inside = 0
    most = 0
    full = asyncio.Event()

    async def rollout(boxes: Pool, number: int) -> str:
        nonlocal inside, most
        async with boxes.lease() as box:
            inside += 1
            most = max(most, inside)
            if inside == 3:
                full.set()
            await full.wait()
            answer = await box.python(f"x = {number}\nx")
            inside -= 1
            return answer.stdout

    async with sandbox.open(3) as boxes, asyncio.TaskGroup() as tasks:
        assert isinstance(boxes, Pool)
        answers = [tasks.create_task(rollout(boxes, i)) for i in range(12)]
    assert most == 3
    assert [answer.result() for answer in answers] == [f"{i}\n" for i in range(12)]


async def test_a_cancelled_call_ends_in_the_box_and_the_box_goes_on(sandbox: Sandbox) -> None:
    started = asyncio.Event()
    async with sandbox.open(1) as boxes:
        for shell in (True, False):
            async with boxes.lease() as box:

                async def run(box: Box = box, shell: bool = shell) -> None:
                    if shell:
                        started.set()
                        await box.exec("sleep 60", timeout_s=60)
                    else:
                        await box.python("go()\nwhile True: pass", functions={"go": started.set}, timeout_s=60)

                task = asyncio.create_task(run())
                await started.wait()
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                started.clear()
                assert (await box.python("1")).stdout == "1\n"


async def test_a_cancelled_rollout_gives_its_box_back_clean(sandbox: Sandbox) -> None:
    started = asyncio.Event()

    async def rollout(boxes: Pool) -> None:
        async with boxes.lease() as box:
            await box.write({"left": "x"})
            await box.python("x = 1\ngo()\nwhile True: pass", functions={"go": started.set}, timeout_s=60)

    async with sandbox.open(1) as boxes:
        assert isinstance(boxes, Pool)
        task = asyncio.create_task(rollout(boxes))
        await started.wait()
        waiting = asyncio.create_task(rollout(boxes))
        await asyncio.sleep(0)
        for cancelled in (task, waiting):
            cancelled.cancel()
            with pytest.raises(asyncio.CancelledError):
                await cancelled
        async with boxes.lease() as box:
            assert await box.list() == []
            assert "NameError" in (await box.python("x")).stderr


async def test_a_cancelled_start_leaves_no_process(sandbox: Sandbox) -> None:
    before = set(below(os.getpid()))
    async with sandbox.open(4) as boxes:

        async def lease() -> None:
            async with boxes.lease() as box:
                await box.python("1")

        tasks = [asyncio.create_task(lease()) for _ in range(4)]
        for _ in range(3):
            await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        async with boxes.lease() as box:
            assert (await box.python("1")).ok
    assert set(below(os.getpid())) <= before


async def test_work_that_cannot_be_undone_is_waited_for_however_often_its_caller_is_cancelled() -> None:
    for fails in (False, True):
        may_end = asyncio.Event()

        async def work(may_end: asyncio.Event = may_end, fails: bool = fails) -> None:
            await may_end.wait()
            if fails:
                raise ValueError("of the work")

        caller = asyncio.create_task(finished(work()))
        for _ in range(3):
            await asyncio.sleep(0)
            caller.cancel()
            await asyncio.sleep(0)
            assert not caller.done()
        may_end.set()
        with pytest.raises(asyncio.CancelledError) as cancelled:
            await caller
        assert isinstance(cancelled.value.__cause__, ValueError) is fails


async def test_a_pool_that_is_cancelled_again_while_it_closes_leaves_no_box(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cancelled at every turn of the loop, from before the ends of its boxes begin until they are done."""
    ended: list[RemoteBox] = []
    close = RemoteBox.close

    async def counted(self: RemoteBox) -> None:
        await close(self)
        ended.append(self)

    monkeypatch.setattr(RemoteBox, "close", counted)
    idle = asyncio.Event()

    async def work() -> None:
        async with Process(unsafe=True).open(2) as boxes:
            assert isinstance(boxes, Pool)
            async with boxes.lease(), boxes.lease():
                pass
            await asyncio.wait(boxes._returning)  # Else the end of a lease would end them.
            idle.set()
            await asyncio.Event().wait()

    before = set(below(os.getpid()))
    task = asyncio.create_task(work())
    await idle.wait()
    while not task.done():
        task.cancel()
        await asyncio.sleep(0)
    assert task.cancelled()
    assert len(set(ended)) == 2
    assert set(below(os.getpid())) <= before


async def test_closing_leaves_no_process_and_no_folder(sandbox: Sandbox) -> None:
    before = set(below(os.getpid()))
    async with sandbox.open(2) as boxes, boxes.lease() as one, boxes.lease() as two:
        for box in (one, two):
            await box.exec("mkdir -p a/b; touch a/b/c")
            await box.python("import subprocess; p = subprocess.Popen(['sleep', '65.5'], start_new_session=True)")
        during = set(below(os.getpid())) - before
    assert wait_for_end(sorted(during)) == []
    assert set(below(os.getpid())) <= before
    assert run_folders() == []


async def test_a_closed_pool_leases_nothing(sandbox: Sandbox) -> None:
    async with sandbox.open(1) as boxes, boxes.lease():
        pass
    with pytest.raises(SandboxError, match="closed"):
        async with boxes.lease():
            pass


async def test_a_pool_of_no_boxes_is_a_value_error(sandbox: Sandbox) -> None:
    with pytest.raises(ValueError, match="size"):
        async with sandbox.open(0):
            pass


def test_a_killed_client_leaves_nothing(kind: str) -> None:
    with subprocess.Popen([sys.executable, "-c", CLIENT, kind], stdout=subprocess.PIPE) as client:
        assert client.stdout is not None
        assert client.stdout.readline() == b"ready\n"
        pids = below(client.pid) + containers_of(client.pid)
        folders = [path for path in map(working_folder, pids) if path is not None and path.name.startswith("agentgym-")]
        assert len(pids) >= 2
        os.kill(client.pid, signal.SIGKILL)
    assert wait_for_end(pids) == []
    assert not any(folder.exists() for folder in folders)


def run_folders() -> list[Path]:
    """Of this process."""
    return list(Path(tempfile.gettempdir()).glob(f"agentgym-run-*_{os.getpid()}_*"))


def working_folder(pid: int) -> Path | None:
    try:
        return Path(f"/proc/{pid}/cwd").readlink()
    except OSError:
        return None


@pytest.mark.docker
async def test_the_next_client_sweeps_what_a_killed_one_left() -> None:
    from agentgym.machine.process_identity import state_of
    from agentgym.sandboxes.docker.client import connect
    from agentgym.sandboxes.docker.docker import why_no_docker

    why_not = why_no_docker()
    if why_not is not None:
        pytest.skip(f"docker: {why_not}")
    test_a_killed_client_leaves_nothing("docker")
    async with named("docker").open(1) as boxes, boxes.lease() as box:
        assert (await box.python("1")).ok
    client = connect()
    try:
        left = client.containers(all=True, filters={"label": "agentgym.owner"})
    finally:
        client.close()
    assert [c["Id"] for c in left if state_of(c["Labels"]["agentgym.owner"]) == "ended"] == []


IN_THE_WAY = """
import os
for process in {1, os.getppid()}:
    for number in range(1, 4):
        os.makedirs(f'{os.environ["HOME"]}/.lifted-{process}-{number}/d/e/f')
"""
"""What an earlier server named the folders that it lifted out of others."""


async def test_no_name_in_a_folder_stands_in_the_way_of_a_reset(sandbox: Sandbox) -> None:
    async with sandbox.open(1) as boxes:
        assert isinstance(boxes, Pool)
        for _ in range(3):
            async with boxes.lease() as box:
                assert await box.list() == []
                assert (await box.python(IN_THE_WAY)).ok
                async with await box.fork() as branch:
                    assert (await branch.python(IN_THE_WAY.replace("HOME", "TMPDIR"))).state_lost is False
        assert (boxes.started, boxes.unclean) == (1, 0)


async def test_a_box_whose_reset_raises_is_ended_and_counted_and_never_one_too_many() -> None:
    alive = most = 0

    async def reset(*, timeout_s: float = 0.0) -> None:
        raise OSError(39, "Directory not empty")

    async def start() -> RemoteBox:
        nonlocal alive, most
        alive += 1  # From the moment on that it is begun.
        most = max(most, alive)
        box = await Process(unsafe=True)._start()
        end = box._end

        async def ended() -> None:
            nonlocal alive
            await end()
            alive -= 1

        box._end = ended
        box.reset = reset  # type: ignore[method-assign]
        return box

    async with open_pool(start, 2) as boxes:

        async def episode() -> None:
            async with boxes.lease() as box:
                assert (await box.python("1")).ok

        for _ in range(3):
            async with asyncio.TaskGroup() as tasks:
                for _ in range(4):
                    tasks.create_task(episode())
    assert most == 2
    assert alive == 0
    assert boxes.started == boxes.ended == 12
    assert boxes.unclean >= 10  # Those that were on their way back when the pool closed are only ended.


async def test_a_working_folder_in_whose_place_code_has_put_a_file_is_made_anew() -> None:
    async with named("unsafe").open(1) as boxes:
        assert isinstance(boxes, Pool)
        for _ in range(3):
            async with boxes.lease() as box:
                home = "import os; home = os.environ['HOME']; os.chdir('/'); os.rmdir(home); open(home, 'w').close()"
                assert (await box.python(home)).ok
        async with boxes.lease() as box:
            assert await box.list() == []
            assert (boxes.started, boxes.ended, boxes.unclean) == (1, 0, 0)


async def test_an_idle_box_keeps_its_place_until_it_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    ending, go_on = asyncio.Event(), asyncio.Event()
    alive = most = 0

    async def start() -> RemoteBox:
        nonlocal alive, most
        alive += 1  # From the moment on that it is begun.
        most = max(most, alive)
        box = await Process(unsafe=True)._start()
        end = box._end

        async def ended() -> None:
            nonlocal alive
            ending.set()
            await go_on.wait()
            await end()
            alive -= 1

        box._end = ended
        return box

    async with open_pool(start, 1) as boxes:
        async with boxes.lease():
            pass
        while boxes._returning:
            await asyncio.wait(boxes._returning)
        monkeypatch.setattr(pools, "IDLE_S", -1.0)
        tending = asyncio.create_task(boxes.maintain())
        await ending.wait()

        async def lease() -> None:
            async with boxes.lease() as box:
                assert (await box.python("1")).ok

        leasing = asyncio.create_task(lease())
        for _ in range(5):
            await asyncio.sleep(0)
        assert alive == most == 1
        go_on.set()
        await tending
        await leasing
        assert alive == most == 1
