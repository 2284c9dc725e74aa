"""Containers next to a sandbox: an app with a database that an agent's tool talks to, from start to end."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import agentgym as ag
from agentgym.cli.gc import gc
from agentgym.errors import SandboxError, SandboxKilledError
from agentgym.sandboxes import pool as pools
from agentgym.sandboxes.docker import guard
from agentgym.sandboxes.docker.client import connect
from agentgym.sandboxes.docker.docker import Docker, why_no_docker
from agentgym.sandboxes.docker.heartbeat import traces
from agentgym.sandboxes.docker.images.names import default_image
from agentgym.sandboxes.network.rules import Allow
from agentgym.sandboxes.network.services import LABEL, Service, Services
from agentgym.sandboxes.remote.sandbox import RemoteSandbox
from agentgym.testing import Scripted, call, say
from tests.sandboxes.conftest import below, wait_for_end
from tests.sandboxes.network.conftest import host
from tests.sandboxes.network.test_sandbox_networks import FETCH, get, text
from tests.sandboxes.test_engine import relay, wait_until_gone

if TYPE_CHECKING:
    import docker

pytestmark = pytest.mark.docker
APP = """
import http.server, json, sqlite3
shop = sqlite3.connect("/tmp/shop.db")
shop.execute("create table stock (name text primary key, count integer)")
shop.execute("insert into stock values ('apple', 3)")
class Shop(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        rows = dict(shop.execute("select name, count from stock"))
        body = json.dumps(rows).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def do_POST(self):
        name = self.rfile.read(int(self.headers["Content-Length"])).decode()
        shop.execute("update stock set count = count - 1 where name = ?", (name,))
        shop.commit()
        self.send_response(204)
        self.end_headers()
http.server.HTTPServer.handle_error = lambda *of: None
print("the shop is open", flush=True)
http.server.HTTPServer(("0.0.0.0", 8000), Shop).serve_forever()
"""
BUY = "import urllib.request\nurllib.request.urlopen('http://shop:8000/', b'apple').status"


@pytest.fixture(autouse=True)
def engine() -> None:
    why_not = why_no_docker()
    if why_not is not None:
        pytest.skip(f"docker: {why_not}")


ENDS_ON_A_WORD = """
import socket
server = socket.create_server(("127.0.0.1", 8000))
said = b""
while said != b"end":
    try:
        said = server.accept()[0].recv(3)
    except OSError:
        said = b""
"""


def program(code: str, **settings: Any) -> Service:
    """Return a service in the sandbox's own image that runs this Python code."""
    return Service(image=default_image(), entrypoint=["python3", "-c", code], **settings)


def shop(**settings: Any) -> Service:
    return program(APP, ready="http://shop:8000/", **settings)


def with_shop(**settings: Any) -> Docker:
    return Docker(network="loopback", services={"shop": shop()}, **settings)


@contextmanager
def client() -> "Iterator[docker.APIClient]":
    made = connect()
    try:
        yield made
    finally:
        made.close()


def containers_of(pid: int) -> list[dict[str, Any]]:
    with client() as there:
        found = there.containers(all=True, filters={"label": "agentgym.owner"})
    return [each for each in found if each["Labels"]["agentgym.owner"].split("/")[3] == str(pid)]


class Errand(ag.Task):
    """A task with the name of the item to buy."""

    name: str


class Buys(ag.ToolEnv[Errand]):
    """An env whose reward is 1 if the shop has sold one of the requested item and nothing else."""

    sandbox_spec = with_shop()

    @ag.tool
    async def buy(self, name: str) -> str:
        """Buy one of what the shop has."""
        code = f"import urllib.request\nurllib.request.urlopen('http://shop:8000/', {name.encode()!r}).status"
        return (await self.sandbox.python(code)).text()

    @ag.reward
    async def bought(self) -> float:
        async with self.sandbox.port(8000) as address:
            return float(json.loads(await asyncio.to_thread(get, address.url)) == {self.task.name: 2})


async def test_an_agents_tool_talks_to_an_app_with_a_database_in_a_second_container() -> None:
    task = Errand(id="apple", prompt="Buy an apple.", name="apple")
    async with with_shop().open(1) as sandboxes:
        for name, reward in (("apple", 1.0), ("pear", 0.0), ("apple", 1.0)):
            rollout = await ag.rollout(
                Buys, task, Scripted([call("buy", name=name), say("Done.")]), sandboxes=sandboxes
            )
            assert (rollout.error, rollout.reward) == (None, reward)


async def test_services_are_new_in_every_episode_and_gone_with_their_sandbox() -> None:
    async with with_shop().open(1) as sandboxes:
        for _ in range(3):
            async with sandboxes.lease() as sandbox:
                assert await text(sandbox, BUY) == "204"
                assert await text(sandbox, FETCH + "fetch('http://shop:8000/')") == "b'{\"apple\": 2}'"
                assert "the shop is open" in await sandbox.service("shop").logs()
                assert len(containers_of(os.getpid())) == 2
    assert containers_of(os.getpid()) == []


async def test_services_reach_each_other_by_name_and_nothing_outside() -> None:
    front = program(
        "import http.server, urllib.request\n"
        "class Front(http.server.BaseHTTPRequestHandler):\n"
        "    def do_GET(self):\n"
        "        try:\n"
        "            said = urllib.request.urlopen('http:/' + self.path, timeout=5).read()\n"
        "        except OSError as error:\n"
        "            said = str(error).encode()\n"
        "        self.send_response(200)\n"
        "        self.end_headers()\n"
        "        self.wfile.write(said)\n"
        "http.server.HTTPServer(('0.0.0.0', 9000), Front).serve_forever()",
        ready=9000,
    )
    services = {"shop": shop(), "front": front}
    async with (
        host() as there,
        Docker(network="loopback", services=services).open(1) as sandboxes,
        sandboxes.lease() as sandbox,
    ):
        await text(sandbox, FETCH)
        assert await text(sandbox, "fetch('http://front:9000/shop:8000/')") == "b'{\"apple\": 3}'"
        for away in (there.address, "172.17.0.1", "169.254.169.254", "1.1.1.1"):
            said = await text(sandbox, f"fetch('http://front:9000/{away}/')")
            assert "refused" in said or "unreachable" in said
        assert "name resolution" in await text(sandbox, "fetch('http://front:9000/example.org/')")


async def test_a_sandbox_with_services_may_have_an_allow_list_too() -> None:
    async with host() as there:
        spec = Docker(network=Allow(there.address), services={"shop": shop()})
        async with spec.open(1) as sandboxes, sandboxes.lease() as sandbox:
            assert await text(sandbox, BUY) == "204"
            await text(sandbox, FETCH + "import os\nos.environ['no_proxy'] = os.environ['NO_PROXY'] = ''")
            assert await text(sandbox, f"fetch('http://{there.address}/')") == "b'hello'"
            assert [each.host for each in sandbox.requests()] == ["127.0.0.1"]


async def test_a_service_that_ends_or_is_not_ready_raises_an_error_with_its_last_output() -> None:
    ends = program(r"print('no such table\n2026-01-01 \x1b[31mforged\r'); raise SystemExit(3)", ready=8000)
    said = r"'db' ended with exit code 3; its last output: no such table\n2026-01-01 \x1b[31mforged"
    async with Docker(network="loopback", services={"db": ends}).open(1) as sandboxes:
        with pytest.raises(SandboxError, match=re.escape(said)):  # One log line, whatever it wrote.
            async with sandboxes.lease():
                pass
    for ready_s in (1, 8, 64):  # On a loaded machine, the program may not have said anything after a second.
        sleeps = program("print('hm', flush=True); import time; time.sleep(600)", ready=8000, ready_s=ready_s)
        async with Docker(network="loopback", services={"db": sleeps}).open(1) as sandboxes:
            with pytest.raises(SandboxError, match=rf"'db' was not ready within {ready_s} s \(ready=8000\)") as late:
                async with sandboxes.lease():
                    pass
        if "its last output: hm" in str(late.value):
            break
    assert "its last output: hm" in str(late.value)
    assert containers_of(os.getpid()) == []


async def test_a_service_that_ended_in_an_episode_is_reported_and_new_in_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pools, "TEND_S", 0.3)
    async with with_shop().open(1) as sandboxes:
        async with sandboxes.lease() as sandbox:
            await asyncio.to_thread(kill_service)
            assert isinstance(sandbox, RemoteSandbox)
            while sandbox.broken is None:  # noqa: ASYNC110 - until the engine has reported it
                await asyncio.sleep(0)
            with pytest.raises(SandboxError, match=r"sandbox_lost: the service 'shop' ended .* with exit code 137"):
                await sandbox.python("1")
            await wait_until_gone(await asyncio.to_thread(make_leftover))  # A sweep removes it.
            assert "the shop is open" in await sandbox.service("shop").logs()
        async with sandboxes.lease() as sandbox:
            assert await text(sandbox, BUY) == "204"


async def test_a_service_that_ended_unnoticed_is_counted_and_named_when_its_episode_ends(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def says_nothing(*_: object) -> AsyncIterator[dict[str, Any]]:
        await asyncio.Event().wait()
        yield {}

    monkeypatch.setattr(guard, "_events", says_nothing)
    async with with_shop().open(1) as sandboxes, sandboxes.lease() as sandbox:
        assert isinstance(sandbox, RemoteSandbox)
        assert isinstance(sandbox.network.beside, Services)
        await asyncio.to_thread(kill_service)
        assert (await sandbox.python("1")).ok
        await sandbox.reset()
        assert sandbox.network.beside.lost == 1
        assert await text(sandbox, BUY) == "204"
    assert "'shop' ended in the middle of an episode with exit code 137 (1 such ends" in caplog.text
    assert "its last output: the shop is open" in caplog.text


async def test_code_that_brings_down_a_service_counts_as_ending_its_sandbox() -> None:
    falls = program(ENDS_ON_A_WORD, ready=8000)
    async with Docker(network="loopback", services={"app": falls}).open(1) as sandboxes:
        async with sandboxes.lease() as sandbox:
            assert isinstance(sandbox, RemoteSandbox)
            await sandbox.python("import socket; socket.create_connection(('app', 8000)).sendall(b'end')")
            while sandbox.broken is None:  # noqa: ASYNC110 - until the engine has reported it
                await asyncio.sleep(0)
            assert (await sandbox.exec("true")).status == "sandbox_killed"
            with pytest.raises(SandboxKilledError, match="the service 'app' ended in the middle of an episode"):
                await sandbox.read("f")
        async with sandboxes.lease() as sandbox:
            assert (await sandbox.exec("true")).ok


async def test_a_service_that_finished_its_work_may_exit() -> None:
    async with Docker(network="loopback", services={"fill": program("print('done')")}).open(1) as sandboxes:
        for _ in range(2):
            async with sandboxes.lease() as sandbox:
                assert isinstance(sandbox, RemoteSandbox)
                assert isinstance(sandbox.network.beside, Services)
                while "done" not in await sandbox.service("fill").logs():
                    assert (await sandbox.python("1")).ok
                await sandbox.reset()
                assert (await sandbox.python("1")).ok
                assert sandbox.network.beside.lost == 0


def make_leftover() -> str:
    """Create a container of this run that no sandbox knows, and return its name."""
    labels = {name: text for name, text in containers_of(os.getpid())[0]["Labels"].items() if name != LABEL}
    with client() as there:
        there.create_container(default_image(), ["{}"], name="agentgym-leftover", labels=labels)
    return "agentgym-leftover"


def kill_service() -> None:
    (found,) = [each for each in containers_of(os.getpid()) if LABEL in each["Labels"]]
    with client() as there:
        there.kill(found["Id"])
        there.wait(found["Id"])


async def test_a_missing_image_is_named_before_any_sandbox_starts() -> None:
    spec = Docker(network="loopback", services={"db": Service(image="agentgym-no-such-image")})
    with pytest.raises(SandboxError, match=r"no image 'agentgym-no-such-image' for 'db'; run `docker pull"):
        async with spec.open(1):
            pass


async def test_a_service_is_bounded_and_has_no_privileges() -> None:
    code = (
        "import os, socket\n"
        "def tried(work):\n"
        "    try: return str(work())\n"
        "    except OSError as error: return error.strerror\n"
        "print(tried(lambda: open('/etc/x', 'w')))\n"
        "print(tried(lambda: os.chown('/tmp', 1, 1)))\n"
        "print(tried(lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)))\n"
        "print(tried(lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)))\n"
        "print(tried(lambda: open('/tmp/x', 'wb').write(bytes(3 << 20))))\n"
    )
    service = program(code, user="0:0", disk_mb=2, memory_mb=100, cpus=0.5, pids=50)
    async with Docker(network="loopback", services={"db": service}).open(1) as sandboxes, sandboxes.lease() as sandbox:
        with client() as there:
            (found,) = [each for each in containers_of(os.getpid()) if LABEL in each["Labels"]]
            await asyncio.to_thread(there.wait, found["Id"])
            said = there.inspect_container(found["Id"])["HostConfig"]
        assert (said["Memory"], said["NanoCpus"], said["PidsLimit"]) == (100 << 20, 500_000_000, 50)
        assert (await sandbox.service("db").logs()).splitlines() == [
            "Read-only file system",
            "Operation not permitted",
            "Operation not permitted",
            "Operation not permitted",
            "No space left on device",
        ]


async def test_services_of_a_remote_engine_are_refused() -> None:
    async with relay() as there, with_shop(hosts=(there.host,)).open(1) as sandboxes:
        with pytest.raises(SandboxError, match=r"services and Allow\(\.\.\.\) need an engine on this machine"):
            async with sandboxes.lease():
                pass


CLIENT = """
import asyncio, sys
from tests.sandboxes.network.test_services import with_shop
async def main():
    shop = with_shop()
    async with shop.open(1) as sandboxes, sandboxes.lease() as sandbox, with_shop().open(1) as others, others.lease():
        assert (await sandbox.python("1")).ok
        async with sandbox.port(8000):
            print("ready", flush=True)
            await asyncio.sleep(600)
asyncio.run(main())
"""


@contextmanager
def running_client() -> "Iterator[subprocess.Popen[str]]":
    """Run a client in a separate process group, with two pools that each have a sandbox with a service."""
    command = [sys.executable, "-c", CLIENT]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            assert len(containers_of(process.pid)) == 4
            yield process
        finally:
            process.kill()


def watchmen_of(pid: int) -> list[int]:
    """Return the processes that remove the client's services when it dies."""
    return [child for child in below(pid) if b"watchman" in Path(f"/proc/{child}/cmdline").read_bytes()]


async def test_services_of_a_killed_client_end_by_themselves() -> None:
    with running_client() as process:
        left, watchmen = containers_of(process.pid), watchmen_of(process.pid)
        os.killpg(process.pid, signal.SIGKILL)
    assert len(watchmen) == 2
    for each in left:
        await wait_until_gone(each["Id"])
    assert await asyncio.to_thread(wait_for_end, watchmen) == []
    with client() as there:
        tokens = {each["Labels"]["agentgym.run"] for each in left}
        assert tokens.isdisjoint(traces(there))


async def test_an_interrupted_client_removes_its_services_and_leaves_no_process() -> None:
    with running_client() as process:
        watchmen = watchmen_of(process.pid)
        os.killpg(process.pid, signal.SIGINT)
        process.wait()
        assert containers_of(process.pid) == []
    assert await asyncio.to_thread(wait_for_end, watchmen) == []


@pytest.mark.slow
async def test_services_end_with_a_client_that_forked() -> None:
    """A forked child holds the watchman's input open."""
    with running_client() as process:
        left, watchmen = containers_of(process.pid), watchmen_of(process.pid)
        held = [os.open(f"/proc/{process.pid}/fd/{name}", os.O_WRONLY) for name in pipes_to(process.pid, watchmen)]
        try:
            process.kill()
            for each in left:
                await wait_until_gone(each["Id"])
        finally:
            for fd in held:
                os.close(fd)
    assert len(held) == 2


def pipes_to(pid: int, readers: list[int]) -> list[str]:
    """Return the descriptor numbers of the process's pipes that are these processes' input."""
    inputs = {Path(f"/proc/{reader}/fd/0").readlink() for reader in readers}
    return [path.name for path in Path(f"/proc/{pid}/fd").iterdir() if path.readlink() in inputs]


@pytest.fixture
def killed() -> int:
    """Return the process id of a client that was killed, with its watchmen, while it had sandboxes with services."""
    with running_client() as process:
        for pid in (*watchmen_of(process.pid), process.pid):
            os.kill(pid, signal.SIGKILL)
        process.wait()
    return process.pid


@pytest.mark.slow
async def test_containers_of_a_killed_client_are_removed_by_gc(killed: int) -> None:
    left = containers_of(killed)
    assert len(left) == 4
    assert await asyncio.to_thread(gc) == 0
    for each in left:  # Another client's sweep may be removing it right now.
        await wait_until_gone(each["Id"])
    assert containers_of(killed) == []


@pytest.mark.slow
async def test_containers_of_a_killed_client_are_removed_by_the_next_client(killed: int) -> None:
    left = containers_of(killed)
    assert len(left) == 4
    async with Docker().open(1):
        pass
    for each in left:
        await wait_until_gone(each["Id"])
    assert containers_of(killed) == []
