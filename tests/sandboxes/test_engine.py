"""Sandboxes on real engines: over attach, on several hosts, sweeps, and recovery after an engine went down."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from agentgym.errors import SandboxError
from agentgym.machine.process_identity import owner
from agentgym.sandboxes import pool as pools
from agentgym.sandboxes.docker import docker as docker_sandboxes
from agentgym.sandboxes.docker.client import address, connect
from agentgym.sandboxes.docker.docker import Docker, why_no_docker
from agentgym.sandboxes.docker.images.names import default_image
from agentgym.sandboxes.local.local import Process
from agentgym.sandboxes.pool import Pool
from agentgym.sandboxes.remote.sandbox import RemoteSandbox
from tests.sandboxes.conftest import descriptors

pytestmark = pytest.mark.docker


@pytest.fixture(autouse=True)
def engine() -> None:
    why_not = why_no_docker()
    if why_not is not None:
        pytest.skip(f"docker: {why_not}")


class Relay:
    """A TCP port in front of the local engine that can be closed and reopened; nobody else can take it in between."""

    def __init__(self) -> None:
        self.held = socket.socket()
        self.held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        self.held.bind(("127.0.0.1", 0))
        self.port = self.held.getsockname()[1]
        self.host = f"tcp://127.0.0.1:{self.port}"
        self.writers: set[asyncio.StreamWriter] = set()
        self.server: asyncio.Server | None = None

    async def up(self) -> None:
        self.server = await asyncio.start_server(self.serve, "127.0.0.1", self.port, reuse_port=True)

    async def down(self) -> None:
        if self.server is not None:
            self.server.close()
            self.server = None
        for writer in self.writers:
            writer.transport.abort()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_unix_connection(address().removeprefix("unix://"))
        self.writers |= {writer, back}
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(pump(reader, back))
            tasks.create_task(pump(there, writer))
        self.writers -= {writer, back}


async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    except OSError:
        pass
    finally:
        writer.close()


@asynccontextmanager
async def relay() -> AsyncIterator[Relay]:
    made = Relay()
    with made.held:
        await made.up()
        try:
            yield made
        finally:
            await made.down()
            await asyncio.sleep(0)


def owned() -> list[str]:
    """Return the names of this process's containers."""
    client = connect()
    try:
        found = client.containers(all=True, filters={"label": f"agentgym.owner={owner()}"})
    finally:
        client.close()
    return [container["Names"][0].lstrip("/") for container in found]


async def wait_until_gone(name: str) -> None:
    """Wait for the engine's event that the container was removed; it may be gone already."""
    from docker.errors import NotFound

    client = connect()
    try:
        with suppress(NotFound):
            await asyncio.to_thread(client.wait, name, condition="removed")
    finally:
        client.close()


async def test_a_remote_engine_is_used_over_attach() -> None:
    async with relay() as there, Docker(hosts=(there.host,)).open(1) as sandboxes:
        async with sandboxes.lease() as sandbox:
            assert (await sandbox.python("x = 'a'\nprint(x * 100_000)")).truncated
            await sandbox.write({"f": bytes(range(256)) * 4096})
            assert await sandbox.read("f", limit=1 << 20) == bytes(range(256)) * 4096
            assert (await sandbox.exec("wc -c < f")).stdout == "1048576\n"
            assert (await sandbox.python("f()", functions={"f": lambda: 3})).stdout == "3\n"
            async with await sandbox.fork() as branch:
                assert (await branch.python("x")).stdout == "'a'\n"
        async with sandboxes.lease() as sandbox:
            assert await sandbox.list() == []
    assert owned() == []


async def test_a_remote_sandbox_ends_when_its_client_is_gone() -> None:
    async with relay() as there, Docker(hosts=(there.host,)).open(1) as sandboxes:
        async with sandboxes.lease() as sandbox:
            assert (await sandbox.python("1")).ok
            (name,) = owned()
            await there.down()
            with pytest.raises(SandboxError, match="sandbox_lost"):
                await sandbox.python("1")
        client = connect()
        try:
            assert await asyncio.to_thread(client.wait, name)
        finally:
            client.close()
        await there.up()
    assert owned() == []


async def test_several_engines_form_one_pool_and_share_its_sandboxes() -> None:
    async with relay() as one, relay() as two, Docker(hosts=(one.host, two.host)).open(4) as sandboxes:
        async with sandboxes.lease() as a, sandboxes.lease() as b, sandboxes.lease() as c, sandboxes.lease() as d:
            for sandbox in (a, b, c, d):
                assert (await sandbox.python("1")).ok
            runs = [name.split("-")[1] for name in owned()]
        assert sorted(runs.count(run) for run in set(runs)) == [2, 2]
    assert owned() == []


async def test_an_engine_that_is_down_is_skipped_while_another_is_up() -> None:
    async with relay() as one, relay() as two, Docker(hosts=(one.host, two.host)).open(2) as sandboxes:
        await one.down()
        async with sandboxes.lease() as a, sandboxes.lease() as b:
            assert (await a.python("1")).ok
            assert (await b.python("1")).ok
        await one.up()
    assert owned() == []


async def test_leases_wait_for_an_engine_that_comes_back_and_its_old_sandboxes_are_lost() -> None:
    async with relay() as there, Docker(hosts=(there.host,)).open(2) as sandboxes:
        async with sandboxes.lease() as sandbox:
            assert (await sandbox.python("1")).ok
            await there.down()
            with pytest.raises(SandboxError, match="sandbox_lost"):
                await sandbox.python("1")

        async def lease() -> str:
            async with sandboxes.lease() as sandbox:
                return (await sandbox.python("6 * 7")).stdout

        waiting = asyncio.create_task(lease())
        done, _ = await asyncio.wait({waiting}, timeout=1.0)
        assert not done
        await there.up()
        assert await waiting == "42\n"
    assert owned() == []


async def test_a_lease_gives_up_on_an_engine_that_stays_down(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(docker_sandboxes, "PATIENCE_S", 0.2)
    async with relay() as there, Docker(hosts=(there.host,)).open(1) as sandboxes:
        await there.down()
        with pytest.raises(SandboxError, match="the Docker engine"):
            async with sandboxes.lease():
                pass


def test_a_refused_connection_leaves_no_socket_open_while_its_error_is_kept(tmp_path: Path) -> None:
    link, deaf = tmp_path / "engine.sock", tmp_path / "deaf.sock"
    link.symlink_to(address().removeprefix("unix://"))
    client = connect(host=f"unix://{link}")
    client.close()  # Close its connection; the next request needs another.
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(deaf))
        link.unlink()
        link.symlink_to(deaf)
        before = descriptors()
        with pytest.raises(OSError, match="refused") as kept:
            client.version()
        assert descriptors() == before
    assert kept.tb is not None
    client.close()


async def test_requests_that_an_engine_refuses_are_not_retried() -> None:
    async with Docker(network="agentgym-no-such-network").open(1) as sandboxes:
        with pytest.raises(SandboxError, match="no-such-network"):
            async with sandboxes.lease():
                pass
    async with Docker(runtime="agentgym-no-such-runtime").open(1) as sandboxes:
        with pytest.raises(SandboxError, match="no-such-runtime"):
            async with sandboxes.lease():
                pass
    assert owned() == []


async def test_a_sweep_removes_leftovers_of_a_start_and_spares_running_sandboxes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pools, "TEND_S", 0.3)
    client = connect()
    try:
        async with Docker().open(1) as sandboxes, sandboxes.lease() as sandbox:
            (name,) = owned()
            run = name.split("-")[1]
            labels = {"agentgym.owner": owner(), "agentgym.run": run}
            left = await asyncio.to_thread(client.create_container, default_image(), ["{}"], labels=labels)
            await wait_until_gone(left["Id"])
            assert owned() == [name]
            assert (await sandbox.python("1")).ok
    finally:
        client.close()
    assert owned() == []


async def test_a_sandbox_that_died_while_idle_is_not_leased() -> None:
    async with Docker().open(1) as sandboxes:
        async with sandboxes.lease() as sandbox:
            assert (await sandbox.python("1")).ok
        client = connect()
        try:
            await asyncio.to_thread(client.kill, owned()[0])
        finally:
            client.close()
        for _ in range(3):
            async with sandboxes.lease() as sandbox:
                assert (await sandbox.python("1")).stdout == "1\n"


async def test_idle_sandboxes_and_leases_without_a_call_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Process(unsafe=True).open(2) as sandboxes:
        assert isinstance(sandboxes, Pool)
        async with sandboxes.lease() as kept:
            async with sandboxes.lease() as sandbox:
                idle = sandbox
            await settled(sandboxes)
            assert isinstance(idle, RemoteSandbox)
            await sandboxes.maintain()
            assert idle.broken is None
            monkeypatch.setattr(pools, "IDLE_S", -1.0)
            await sandboxes.maintain()
            assert idle.broken
            assert (await kept.python("1")).ok
            monkeypatch.setattr(pools, "LEASE_S", -1.0)
            await sandboxes.maintain()
            with pytest.raises(SandboxError, match="sandbox_lost: its lease"):
                await kept.python("1")
        monkeypatch.setattr(pools, "LEASE_S", 60.0)
        monkeypatch.setattr(pools, "LIFE_S", -1.0)
        async with sandboxes.lease() as first:
            assert (await first.python("1")).ok
        await settled(sandboxes)
        async with sandboxes.lease() as second:
            assert second is not first


async def settled(sandboxes: Pool) -> None:
    """Return once every returned sandbox is clean."""
    if sandboxes._returning:
        await asyncio.wait(set(sandboxes._returning))
