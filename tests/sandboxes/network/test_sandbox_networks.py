"""Sandbox networks: the loopback, the list of hosts, and ports forwarded into a sandbox."""

import asyncio
import http.server
import socket
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from agentgym.errors import ClosedError
from agentgym.sandboxes.docker.docker import Docker
from agentgym.sandboxes.local.local import Bubblewrap
from agentgym.sandboxes.network.rules import Allow
from agentgym.sandboxes.protocol import LocalAddress, Sandbox
from agentgym.sandboxes.remote.sandbox import RemoteSandbox
from tests.sandboxes.conftest import descriptors, make
from tests.sandboxes.network.conftest import host, sandbox_of

SERVE = """
import http.server, threading
class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"from the sandbox " + self.path.encode())
    def log_message(self, *_):
        pass
server = http.server.ThreadingHTTPServer(("127.0.0.1", 8000), Answer)
threading.Thread(target=server.serve_forever, daemon=True).start()
"""
FETCH = """
import urllib.error, urllib.request
def fetch(url):
    try:
        return urllib.request.urlopen(url, timeout=5).read()
    except urllib.error.HTTPError as error:
        return f"{error.code} {error.read().decode()}"
    except OSError as error:
        return f"{type(error).__name__} {error}"
"""
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def get(url: str) -> bytes:
    """Return the response that this machine gets from `url`."""
    with DIRECT.open(url, timeout=10) as answer:
        return bytes(answer.read())


async def fetched(address: LocalAddress, path: str = "/") -> bytes:
    return await asyncio.to_thread(get, address.url + path)


async def text(sandbox: Sandbox, code: str) -> str:
    done = await sandbox.python(code, timeout_s=20)
    assert done.ok, done.text()
    return done.stdout.rstrip("\n")


async def test_a_server_in_a_sandbox_is_reached_over_its_loopback_and_nothing_else_is(kind: str) -> None:
    async with host() as there, sandbox_of(kind, network="loopback").open(1) as sandboxes, sandboxes.lease() as sandbox:
        await text(sandbox, SERVE + FETCH)
        assert await text(sandbox, "fetch('http://127.0.0.1:8000/a')") == "b'from the sandbox /a'"
        assert "refused" in await text(sandbox, f"fetch('http://{there.address}/')")
        for away in ("http://1.1.1.1/", "http://169.254.169.254/", "http://172.17.0.1/", "http://10.0.0.1/"):
            assert "unreachable" in await text(sandbox, f"fetch({away!r})")
        assert "name resolution" in await text(sandbox, "fetch('http://example.org/')")
        assert there.got == []


async def test_code_in_a_sandbox_reaches_listed_hosts_and_the_log_records_its_attempts(kind: str) -> None:
    async with host() as there:
        async with sandbox_of(kind, network=Allow(there.address)).open(1) as sandboxes:
            for _ in range(2):
                async with sandboxes.lease() as sandbox:
                    assert sandbox.requests() == []
                    await text(sandbox, FETCH + "import os\nos.environ['no_proxy'] = os.environ['NO_PROXY'] = ''")
                    assert await text(sandbox, f"fetch('http://{there.address}/x')") == "b'hello'"
                    assert "403 agentgym proxy: example.org:80" in await text(sandbox, "fetch('http://example.org/')")
                    assert "403" in await text(sandbox, "fetch('https://example.org/')")
                    assert [(each.method, each.host, each.outcome) for each in sandbox.requests()] == [
                        ("GET", "127.0.0.1", "allowed"),
                        ("GET", "example.org", "refused"),
                        ("CONNECT", "example.org", "refused"),
                    ]
                    async with await sandbox.fork() as branch:
                        assert branch.requests() == sandbox.requests()
        assert len(there.got) == 2


async def test_code_cannot_stop_the_proxy_or_take_its_port(kind: str) -> None:
    code = """
import os, signal, socket
taken = []
for place in ("127.0.0.1", "0.0.0.0"):
    for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
        with socket.socket() as one:
            one.setsockopt(socket.SOL_SOCKET, option, 1)
            try:
                one.bind((place, 3128))
                one.listen()
                taken.append(place)
            except OSError:
                pass
print(taken)
if os.fork() == 0:
    os.kill(-1, signal.SIGKILL)
os.wait()
"""
    async with (
        host() as there,
        sandbox_of(kind, network=Allow(there.address)).open(1) as sandboxes,
        sandboxes.lease() as sandbox,
    ):
        assert (await sandbox.python(code)).stdout in ("[]\n", "")
        assert await text(sandbox, code.partition("if os.fork")[0]) == "[]"
        await text(sandbox, FETCH + "import os\nos.environ['no_proxy'] = os.environ['NO_PROXY'] = ''")
        assert await text(sandbox, f"fetch('http://{there.address}/x')") == "b'hello'"


async def test_a_request_that_waits_at_the_end_of_an_episode_is_not_made_in_the_next(kind: str) -> None:
    code = """
import socket
held = [socket.create_connection(("127.0.0.1", 3128)) for _ in range(60)]
for each in held[32:]:
    each.sendall(b"GET http://%s/late HTTP/1.1\\r\\n\\r\\n")
"""
    async with host() as there, sandbox_of(kind, network=Allow(there.address)).open(1) as sandboxes:
        async with sandboxes.lease() as sandbox:
            await text(sandbox, code.replace("%s", there.address))
            while len(sandbox.requests()) < 32:  # noqa: ASYNC110
                await asyncio.sleep(0)
        async with sandboxes.lease() as sandbox:
            await text(sandbox, FETCH)
            assert await text(sandbox, "fetch('http://example.org/')")
            assert len(sandbox.requests()) == 1
        assert there.got == []


async def test_a_request_that_is_made_while_its_episode_ends_is_dropped_and_counted(kind: str) -> None:
    code = """
import socket
held = [socket.socket() for _ in range(300)]
for each in held:
    each.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 0)  # The end of the handshake waits for the first words.
    each.setblocking(False)
    each.connect_ex(("127.0.0.1", 3128))
for each in held:
    try:
        each.send(b"GET http://%s/late HTTP/1.1\\r\\n\\r\\n")
    except OSError:
        pass
"""
    only_the_proxy = "while len(open('/proc/net/tcp').readlines()) > 2: pass"
    async with host() as there, sandbox_of(kind, network=Allow(there.address)).open(1) as sandboxes:
        async with sandboxes.lease() as sandbox:
            assert isinstance(sandbox, RemoteSandbox)
            await sandbox.network.end()  # Like the start of a reset: the code still runs until it is killed.
            await text(sandbox, code.replace("%s", there.address))
            await sandbox.reset()
            assert sandbox.network.late > 0
            await text(sandbox, only_the_proxy + "\n" + FETCH)
            assert "403" in await text(sandbox, "fetch('http://example.org/')")
            assert [each.host for each in sandbox.requests()] == ["example.org"]
        assert there.got == []


async def test_a_port_of_an_episode_is_free_in_the_next(kind: str) -> None:
    """The server binds without SO_REUSEADDR and closes the connection first, since that side keeps the port longest."""
    serve = """
import socket, threading
listener = socket.socket()
listener.bind(("127.0.0.1", 8000))
listener.listen()
def answer():
    while True:
        listener.accept()[0].close()
threading.Thread(target=answer, daemon=True).start()
for _ in range(20):
    with socket.create_connection(("127.0.0.1", 8000)) as one:
        one.recv(1)
held = socket.create_connection(("127.0.0.1", 8000))
"""
    connections = "[line.split()[1:4] for line in open('/proc/net/tcp')][1:]"
    async with sandbox_of(kind, network="loopback").open(1) as sandboxes:
        for _ in range(2):
            async with sandboxes.lease() as sandbox:
                assert await text(sandbox, connections) == "[]"
                await text(sandbox, serve)
                async with sandbox.port(8000) as address:
                    for _ in range(3):
                        await asyncio.to_thread(socket.create_connection(address).close)


async def test_no_flow_label_of_an_episode_exists_in_the_next(kind: str) -> None:
    """The kernel keeps a flow label as long as requested, with the 16 bytes of its address, for the whole network."""
    label = "b'SECRET-OF-EP-ONE' + struct.pack('!I', 0x12345) + struct.pack('=BBHHHI', 0, 255, 1, 60, 60, 0)"
    keep = f"""
import socket, struct
with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as one:
    try:
        one.setsockopt(socket.IPPROTO_IPV6, 32, {label})
        print("kept")
    except OSError as error:
        print(error.errno)
"""
    async with sandbox_of(kind, network="loopback").open(1) as sandboxes:
        async with sandboxes.lease() as sandbox:
            assert await text(sandbox, keep) == "92"
        async with sandboxes.lease() as sandbox:
            labels = "open('/proc/net/ip6_flowlabel').read().split('\\n')[1:]"
            assert await text(sandbox, f"[line for line in {labels} if line.strip()]") == "[]"


async def test_nothing_that_tcp_measured_in_an_episode_is_known_in_the_next(kind: str) -> None:
    """The kernel would store it by address: round-trip times, and TCP Fast Open cookies."""
    settings = "[open(f'/proc/sys/net/ipv4/{name}').read() for name in ('tcp_no_metrics_save', 'tcp_fastopen')]"
    async with sandbox_of(kind, network="loopback").open(1) as sandboxes, sandboxes.lease() as sandbox:
        assert await text(sandbox, settings) == r"['1\n', '0\n']"


@contextmanager
def host_in_a_thread() -> Iterator[tuple[int, threading.Event]]:
    """Run a server in a separate thread; yield its port and an event that is set on each request."""
    reached = threading.Event()

    class Answer(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            reached.set()
            self.send_response(204)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Answer) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        try:
            yield server.server_port, reached
        finally:
            server.shutdown()
            serving.join()


async def test_the_proxy_serves_while_the_clients_event_loop_is_blocked(kind: str) -> None:
    with host_in_a_thread() as (port, reached):
        address = f"127.0.0.1:{port}"
        async with sandbox_of(kind, network=Allow(address)).open(1) as sandboxes, sandboxes.lease() as sandbox:
            await text(sandbox, FETCH + "import os, threading\nos.environ['no_proxy'] = os.environ['NO_PROXY'] = ''")
            await text(sandbox, f"threading.Thread(target=fetch, args=['http://{address}/']).start()")
            assert reached.wait(30)


async def test_a_sandbox_port_can_be_reached_from_this_machine(kind: str) -> None:
    async with sandbox_of(kind, network="loopback").open(1) as sandboxes:
        for _ in range(2):
            async with sandboxes.lease() as sandbox:
                await text(sandbox, SERVE)
                async with sandbox.port(8000) as address, sandbox.port(8000) as other:
                    assert await fetched(address, "/a") == b"from the sandbox /a"
                    assert await fetched(other, "/b") == b"from the sandbox /b"
                    many = [fetched(address, f"/{number}") for number in range(100)]
                    assert await asyncio.gather(*many) == [b"from the sandbox /%d" % number for number in range(100)]
                with pytest.raises(OSError, match="refused"):
                    await fetched(address)


async def test_a_forwarded_port_closes_when_its_episode_ends(kind: str) -> None:
    async with sandbox_of(kind, network="loopback").open(1) as sandboxes, sandboxes.lease() as sandbox:
        await text(sandbox, SERVE)
        async with sandbox.port(8000) as address:
            assert await fetched(address) == b"from the sandbox /"
            await sandbox.reset()
            with pytest.raises(OSError, match="refused"):
                await fetched(address)


async def test_a_port_is_forwarded_once_something_listens_there(kind: str) -> None:
    async with sandbox_of(kind, network="loopback").open(1) as sandboxes, sandboxes.lease() as sandbox:
        with pytest.raises(TimeoutError, match=r"nothing listens on port 8000 of the sandbox after 0\.2 s"):
            async with sandbox.port(8000, timeout_s=0.2):
                pass
        with pytest.raises(ValueError, match="port: must be a whole number from 1 to 65535, got 0"):
            async with sandbox.port(0):
                pass

        async def lend() -> bytes:
            async with sandbox.port(8000) as address:
                return await fetched(address)

        lending = asyncio.create_task(lend())
        await text(sandbox, SERVE)
        assert await lending == b"from the sandbox /"


async def test_a_sandbox_without_a_network_forwards_no_port(kind: str) -> None:
    async with sandbox_of(kind).open(1) as sandboxes, sandboxes.lease() as sandbox:
        with pytest.raises(ValueError, match=r'port: .*network="loopback"'):
            async with sandbox.port(8000):
                pass
        assert sandbox.requests() == []
        with pytest.raises(ValueError, match="service: the sandbox has no service named 'db'"):
            sandbox.service("db")


async def test_networks_leave_no_open_file_and_no_thread(kind: str) -> None:
    async with sandbox_of(kind, network=Allow("a.org")).open(1) as sandboxes, sandboxes.lease():
        pass
    before = descriptors()
    async with (
        sandbox_of(kind, network=Allow("a.org")).open(2) as sandboxes,
        sandboxes.lease() as sandbox,
        sandboxes.lease(),
    ):
        await text(sandbox, SERVE + FETCH)
        async with sandbox.port(8000) as address:
            assert await fetched(address)
        await text(sandbox, "fetch('http://b.org/')")
    assert descriptors() == before
    assert "agentgym-network" not in {thread.name for thread in threading.enumerate()}


async def test_a_sandbox_that_dies_ends_its_network(kind: str) -> None:
    async with sandbox_of(kind, network="loopback").open(1) as sandboxes:
        async with sandboxes.lease() as sandbox:
            await text(sandbox, SERVE)
            async with sandbox.port(8000) as address:
                assert await fetched(address)
                sandbox.cut()  # type: ignore[attr-defined]
                with pytest.raises(ClosedError, match="the sandbox was closed"):
                    await sandbox.python("1")
        async with sandboxes.lease() as sandbox:
            await text(sandbox, SERVE)
            async with sandbox.port(8000) as address:
                assert await fetched(address)


@pytest.mark.docker
async def test_gvisor_has_a_loopback_but_forwards_no_port() -> None:
    make("runsc")
    async with Docker(network="loopback", runtime="runsc").open(1) as sandboxes, sandboxes.lease() as sandbox:
        await text(sandbox, SERVE + FETCH)
        assert await text(sandbox, "fetch('http://127.0.0.1:8000/a')") == "b'from the sandbox /a'"
        with pytest.raises(ValueError, match="port: "):
            async with sandbox.port(8000):
                pass


LISTENS = """
import socket
listener = socket.create_server(("127.0.0.1", 5000))
listener.setblocking(False)
def heard():
    try:
        return listener.accept()[0].recv(100)
    except BlockingIOError:
        return b""
"""
TELLS = """
import socket
def tell():
    try:
        socket.create_connection(("127.0.0.1", 5000)).sendall(b"what is hidden")
    except ConnectionRefusedError:
        return "refused"
def talk():
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as one:
        one.sendall(b"hello")
        return listener.accept()[0].recv(100).decode()
"""


async def test_hidden_tests_have_their_own_loopback(kind: str) -> None:
    async with sandbox_of(kind, network="loopback").open(1) as sandboxes, sandboxes.lease() as sandbox:
        assert isinstance(sandbox, RemoteSandbox)
        if sandbox.reset_in_place:
            pytest.skip("sandboxes are reset in place: verifiers share their loopback")
        await text(sandbox, LISTENS)
        await sandbox.write({"solution.py": TELLS})
        expect = {"tell()": "refused", "talk()": "hello"}
        verdict = await sandbox.verify(code="from solution import tell, talk", expect=expect, timeout_s=30)
        assert verdict.ok, verdict
        assert await text(sandbox, "heard()") == "b''"


async def test_a_plain_sandbox_has_no_internet_sockets() -> None:
    make("bubblewrap")
    async with Bubblewrap().open(1) as sandboxes, sandboxes.lease() as sandbox:
        done = await sandbox.python("import socket\nsocket.socket()")
        assert "PermissionError" in done.stderr
