"""Ctrl-C while a pool opens, leases, calls and closes: the run ends as interrupted and leaves nothing."""

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from agentgym.errors import ClosedError
from agentgym.sandboxes import pool as pools
from agentgym.sandboxes.docker.client import EngineDown
from agentgym.sandboxes.docker.heartbeat import Heart
from agentgym.sandboxes.local.local import Process
from agentgym.sandboxes.pool import open_pool
from agentgym.sandboxes.remote.sandbox import RemoteSandbox
from tests.sandboxes.conftest import below, containers_of, wait_for_end

CLIENT = """
import asyncio, sys
from agentgym.sandboxes.choose import named

async def busy(pool, begun):
    async with pool.lease() as sandbox:
        begun.set()
        await sandbox.exec("sleep 77.125", timeout_s=60)

async def main(kind, phase):
    if phase == "open":
        print("ready", flush=True)
    async with named(kind).open(2) as pool:
        begun = asyncio.Event()
        if phase == "lease":
            print("ready", flush=True)
        if phase != "close":
            async with asyncio.TaskGroup() as calls:
                for _ in range(4):
                    calls.create_task(busy(pool, begun))
                await begun.wait()
                if phase == "exec":
                    print("ready", flush=True)
        async with pool.lease() as sandbox:
            await sandbox.python("import subprocess; left = subprocess.Popen(['sleep', '77.125'])")
        print("ready", flush=True)

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.mark.parametrize("phase", ["open", "lease", "exec", "close"])
def test_ctrl_c_leaves_nothing_and_one_traceback(kind: str, phase: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", CLIENT, kind, phase], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as client:
        assert client.stdout is not None
        assert client.stdout.readline() == "ready\n"
        pids = [*below(client.pid), *filter(None, containers_of(client.pid) if kind == "docker" else ())]
        os.kill(client.pid, signal.SIGINT)
        _, said = client.communicate()
    assert client.returncode in (-signal.SIGINT, 0 if phase == "close" else -signal.SIGINT), said
    # Python's own traceback of the interrupt, and that of the interrupted call.
    assert said.count("Traceback") <= 2, said
    assert "never retrieved" not in said
    assert wait_for_end(pids) == []
    assert [*Path(tempfile.gettempdir()).glob(f"agentgym-*_{client.pid}_*")] == []
    if kind == "docker":
        assert containers_of(client.pid) == []


async def test_a_closing_pool_ends_starting_sandboxes_and_waits_for_their_end() -> None:
    begun = asyncio.Event()
    ended: list[str] = []

    async def start() -> RemoteSandbox:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append("start")
        raise AssertionError

    async def lease() -> None:
        async with pool.lease():
            pass

    async with open_pool(start, 1) as pool:
        leasing = asyncio.create_task(lease())
        await begun.wait()
    assert ended == ["start"]
    with pytest.raises(ClosedError, match="the pool was closed"):
        await leasing


async def test_a_lease_that_waits_long_is_logged_once_with_advice(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pools, "SLOW_LEASE_S", 0.0)

    async def lease() -> None:
        async with pool.lease():
            pass

    async with Process(unsafe=True).open(1) as pool:
        async with pool.lease() as sandbox:
            waiting = [asyncio.create_task(lease()) for _ in range(3)]
            for _ in range(3):
                await sandbox.python("1")
        await asyncio.gather(*waiting)
    said = [record.message for record in caplog.records if "a lease has waited" in record.message]
    assert said == [
        "a lease has waited 0 s: all 1 sandboxes of the pool are leased; open it with a larger size, or end "
        "leases sooner"
    ]


def test_a_heartbeat_that_is_stopped_while_it_starts_stops() -> None:
    begun, go_on = threading.Event(), threading.Event()

    def down() -> None:
        begun.set()
        go_on.wait()
        raise EngineDown("it is down")

    heart = Heart("token", down, lambda error: None)  # type: ignore[arg-type]
    with ThreadPoolExecutor() as threads:
        starting = threads.submit(heart.start)
        begun.wait()
        stopping = threads.submit(heart.stop)
        heart._stop.wait()
        go_on.set()
        assert isinstance(starting.exception(), EngineDown)
        assert stopping.exception() is None
    assert heart._thread is not None
    heart._thread.join()
