"""The contract of a pool: bounded, clean, and without leftovers however it ends."""

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
from agentgym.sandboxes.protocol import Sandbox, SandboxSpec
from agentgym.sandboxes.remote.sandbox import RemoteSandbox
from tests.sandboxes.conftest import below, containers_of, wait_for_end

CLIENT = """
import asyncio, sys
from agentgym.sandboxes.choose import named

async def main(kind):
    async with named(kind).open(2) as sandboxes, sandboxes.lease() as one, sandboxes.lease() as two:
        for sandbox in (one, two):
            await sandbox.python("import subprocess; p = subprocess.Popen(['sleep', '64.5'], start_new_session=True)")
        print("ready", flush=True)
        await one.exec("sleep 64.5", timeout_s=60)

asyncio.run(main(sys.argv[1]))
"""


async def test_each_lease_is_clean(spec: SandboxSpec) -> None:
    async with spec.open(1) as sandboxes:
        for i in range(3):
            async with sandboxes.lease() as sandbox:
                assert "NameError" in (await sandbox.python("x")).stderr
                assert await sandbox.list() == []
                await sandbox.python(f"x = {i}")
                await sandbox.write({"f": "x"})


async def test_at_most_size_leases_run_at_once(spec: SandboxSpec) -> None:
    inside = 0
    most = 0
    full = asyncio.Event()

    async def rollout(sandboxes: Pool, number: int) -> str:
        nonlocal inside, most
        async with sandboxes.lease() as sandbox:
            inside += 1
            most = max(most, inside)
            if inside == 3:
                full.set()
            await full.wait()
            answer = await sandbox.python(f"x = {number}\nx")
            inside -= 1
            return answer.stdout

    async with spec.open(3) as sandboxes, asyncio.TaskGroup() as tasks:
        assert isinstance(sandboxes, Pool)
        answers = [tasks.create_task(rollout(sandboxes, i)) for i in range(12)]
    assert most == 3
    assert [answer.result() for answer in answers] == [f"{i}\n" for i in range(12)]


async def test_a_cancelled_call_ends_in_the_sandbox_and_the_sandbox_continues(spec: SandboxSpec) -> None:
    started = asyncio.Event()
    async with spec.open(1) as sandboxes:
        for shell in (True, False):
            async with sandboxes.lease() as sandbox:

                async def run(sandbox: Sandbox = sandbox, shell: bool = shell) -> None:
                    if shell:
                        started.set()
                        await sandbox.exec("sleep 60", timeout_s=60)
                    else:
                        await sandbox.python("go()\nwhile True: pass", functions={"go": started.set}, timeout_s=60)

                task = asyncio.create_task(run())
                await started.wait()
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                started.clear()
                assert (await sandbox.python("1")).stdout == "1\n"


async def test_a_cancelled_rollout_returns_its_sandbox_clean(spec: SandboxSpec) -> None:
    started = asyncio.Event()

    async def rollout(sandboxes: Pool) -> None:
        async with sandboxes.lease() as sandbox:
            await sandbox.write({"left": "x"})
            await sandbox.python("x = 1\ngo()\nwhile True: pass", functions={"go": started.set}, timeout_s=60)

    async with spec.open(1) as sandboxes:
        assert isinstance(sandboxes, Pool)
        task = asyncio.create_task(rollout(sandboxes))
        await started.wait()
        waiting = asyncio.create_task(rollout(sandboxes))
        await asyncio.sleep(0)
        for cancelled in (task, waiting):
            cancelled.cancel()
            with pytest.raises(asyncio.CancelledError):
                await cancelled
        async with sandboxes.lease() as sandbox:
            assert await sandbox.list() == []
            assert "NameError" in (await sandbox.python("x")).stderr


async def test_a_cancelled_start_leaves_no_process(spec: SandboxSpec) -> None:
    before = set(below(os.getpid()))
    async with spec.open(4) as sandboxes:

        async def lease() -> None:
            async with sandboxes.lease() as sandbox:
                await sandbox.python("1")

        tasks = [asyncio.create_task(lease()) for _ in range(4)]
        for _ in range(3):
            await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        async with sandboxes.lease() as sandbox:
            assert (await sandbox.python("1")).ok
    assert set(below(os.getpid())) <= before


async def test_uncancellable_work_is_awaited_however_often_its_caller_is_cancelled() -> None:
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


async def test_a_pool_that_is_cancelled_again_while_it_closes_leaves_no_sandbox(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Cancel at every turn of the loop, from before the sandboxes start closing until all are closed."""
    ended: list[RemoteSandbox] = []
    close = RemoteSandbox.close

    async def counted(self: RemoteSandbox) -> None:
        await close(self)
        ended.append(self)

    monkeypatch.setattr(RemoteSandbox, "close", counted)
    idle = asyncio.Event()

    async def work() -> None:
        async with Process(unsafe=True).open(2) as sandboxes:
            assert isinstance(sandboxes, Pool)
            async with sandboxes.lease(), sandboxes.lease():
                pass
            await asyncio.wait(sandboxes._returning)  # Otherwise the end of a lease would end them.
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


async def test_closing_leaves_no_process_and_no_folder(spec: SandboxSpec) -> None:
    before = set(below(os.getpid()))
    async with spec.open(2) as sandboxes, sandboxes.lease() as one, sandboxes.lease() as two:
        for sandbox in (one, two):
            await sandbox.exec("mkdir -p a/b; touch a/b/c")
            await sandbox.python("import subprocess; p = subprocess.Popen(['sleep', '65.5'], start_new_session=True)")
        during = set(below(os.getpid())) - before
    assert wait_for_end(sorted(during)) == []
    assert set(below(os.getpid())) <= before
    assert run_folders() == []


async def test_a_closed_pool_leases_nothing(spec: SandboxSpec) -> None:
    async with spec.open(1) as sandboxes, sandboxes.lease():
        pass
    with pytest.raises(SandboxError, match="closed"):
        async with sandboxes.lease():
            pass


async def test_a_pool_size_of_zero_is_a_value_error(spec: SandboxSpec) -> None:
    with pytest.raises(ValueError, match="size"):
        async with spec.open(0):
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
    """Return the run folders of this process."""
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
    async with named("docker").open(1) as sandboxes, sandboxes.lease() as sandbox:
        assert (await sandbox.python("1")).ok
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
"""The names that an earlier server gave to folders that it moved out of others."""


async def test_no_name_in_a_folder_blocks_a_reset(spec: SandboxSpec) -> None:
    async with spec.open(1) as sandboxes:
        assert isinstance(sandboxes, Pool)
        for _ in range(3):
            async with sandboxes.lease() as sandbox:
                assert await sandbox.list() == []
                assert (await sandbox.python(IN_THE_WAY)).ok
                async with await sandbox.fork() as branch:
                    assert (await branch.python(IN_THE_WAY.replace("HOME", "TMPDIR"))).state_lost is False
        assert (sandboxes.started, sandboxes.unclean) == (1, 0)


async def test_a_sandbox_whose_reset_raises_is_ended_and_counted_and_never_one_too_many() -> None:
    alive = most = 0

    async def reset(*, timeout_s: float = 0.0) -> None:
        raise OSError(39, "Directory not empty")

    async def start() -> RemoteSandbox:
        nonlocal alive, most
        alive += 1  # From the moment it starts.
        most = max(most, alive)
        sandbox = await Process(unsafe=True)._start()
        end = sandbox._end

        async def ended() -> None:
            nonlocal alive
            await end()
            alive -= 1

        sandbox._end = ended
        sandbox.reset = reset  # type: ignore[method-assign]
        return sandbox

    async with open_pool(start, 2) as sandboxes:

        async def episode() -> None:
            async with sandboxes.lease() as sandbox:
                assert (await sandbox.python("1")).ok

        for _ in range(3):
            async with asyncio.TaskGroup() as tasks:
                for _ in range(4):
                    tasks.create_task(episode())
    assert most == 2
    assert alive == 0
    assert sandboxes.started == sandboxes.ended == 12
    assert sandboxes.unclean >= 10  # Sandboxes that were being returned when the pool closed are only ended.


async def test_a_working_folder_that_code_replaced_with_a_file_is_created_again() -> None:
    async with named("unsafe").open(1) as sandboxes:
        assert isinstance(sandboxes, Pool)
        for _ in range(3):
            async with sandboxes.lease() as sandbox:
                home = "import os; home = os.environ['HOME']; os.chdir('/'); os.rmdir(home); open(home, 'w').close()"
                assert (await sandbox.python(home)).ok
        async with sandboxes.lease() as sandbox:
            assert await sandbox.list() == []
            assert (sandboxes.started, sandboxes.ended, sandboxes.unclean) == (1, 0, 0)


async def test_an_idle_sandbox_counts_toward_the_size_until_it_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    ending, go_on = asyncio.Event(), asyncio.Event()
    alive = most = 0

    async def start() -> RemoteSandbox:
        nonlocal alive, most
        alive += 1  # From the moment it starts.
        most = max(most, alive)
        sandbox = await Process(unsafe=True)._start()
        end = sandbox._end

        async def ended() -> None:
            nonlocal alive
            ending.set()
            await go_on.wait()
            await end()
            alive -= 1

        sandbox._end = ended
        return sandbox

    async with open_pool(start, 1) as sandboxes:
        async with sandboxes.lease():
            pass
        while sandboxes._returning:
            await asyncio.wait(sandboxes._returning)
        monkeypatch.setattr(pools, "IDLE_S", -1.0)
        tending = asyncio.create_task(sandboxes.maintain())
        await ending.wait()

        async def lease() -> None:
            async with sandboxes.lease() as sandbox:
                assert (await sandbox.python("1")).ok

        leasing = asyncio.create_task(lease())
        for _ in range(5):
            await asyncio.sleep(0)
        assert alive == most == 1
        go_on.set()
        await tending
        await leasing
        assert alive == most == 1
