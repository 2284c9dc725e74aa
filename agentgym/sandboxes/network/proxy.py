"""The HTTP proxy of one sandbox: it checks the rules, connects to allowed hosts, and logs every request."""

import asyncio
import ipaddress
import socket
import time
from contextlib import closing
from dataclasses import asdict, dataclass, field

import h11

from agentgym.sandboxes.network.acceptor import Acceptor
from agentgym.sandboxes.network.heads import MAX_HEAD, Malformed, Request, for_client, parse_request
from agentgym.sandboxes.network.hello import Tunnel
from agentgym.sandboxes.network.rules import TLS_PORT, Address, Allow, Rule, parse_address
from agentgym.sandboxes.network.streams import PIECE, Count, Stream, both_ways, first_error
from agentgym.sandboxes.protocol import NetworkRequest, RequestOutcome
from agentgym.sandboxes.protocol.programs import cut_middle

PROXY_PORT = 3128
CONNECTIONS = 32
LOOK_UPS = 4
HEAD_S, CONNECT_S, IDLE_S, LIFE_S = 10.0, 10.0, 60.0, 900.0
LINGER_S = 1.0
MAX_SAID = 1000
"""Maximum length in characters of each text in the log.

The sandbox's code chooses these texts, and this machine stores them.
"""
REASONS = {400: "Bad Request", 403: "Forbidden", 408: "Request Timeout", 429: "Too Many Requests", 502: "Bad Gateway"}


class Refusal(Exception):
    """Raised to end a request, with its outcome for the log, the HTTP status of the proxy's response, and the reason.

    The status is 0 if the request is cut off while it is forwarded, because the proxy then sends no response of its
    own.
    """

    def __init__(self, outcome: RequestOutcome, status: int, why: str) -> None:
        super().__init__(why)
        self.outcome, self.status = outcome, status


@dataclass(slots=True)
class Record:
    """The log entry of a request, updated while the request is running."""

    at: float = field(default_factory=time.time)
    method: str = ""
    host: str = ""
    port: int = 0
    path: str = ""
    outcome: RequestOutcome = "failed"
    why: str = "the request head is incomplete"
    sent: int = 0
    received: int = 0

    def view(self) -> NetworkRequest:
        """Return the current state of the request."""
        return NetworkRequest(**asdict(self))


class Proxy:
    """Serves the connections to a listener in the sandbox's network, for one episode, all in one event loop."""

    def __init__(self, listener: socket.socket, allow: Allow) -> None:
        self.rule = Rule(allow)
        self.records: list[Record] = []
        self.room = allow.mb << 20
        """Bytes that the episode may still send and receive."""
        self._acceptor = Acceptor(listener, self._serve, CONNECTIONS)
        self._looking_up = asyncio.Semaphore(LOOK_UPS)

    def start(self) -> None:
        """Start serving."""
        self._acceptor.start()

    async def stop(self) -> None:
        """End every request; connections that have not been accepted are left to `forget_waiting`."""
        await self._acceptor.stop()

    async def _serve(self, connection: socket.socket) -> None:
        client = await Stream.over(connection, MAX_HEAD)
        connection.close()  # The stream has a duplicate of the socket.
        record = Record()
        try:
            await self._answer(client, record)
        except Refusal as refusal:
            record.outcome, record.why = refusal.outcome, str(refusal)
            client.writer.write(_refused(refusal.status, str(refusal)))
            await client.finish(LINGER_S)
        except OSError as error:
            if record.outcome != "allowed":  # Once allowed, an error only means that one end closed the connection.
                record.why = f"the connection ended: {error}"
        finally:
            client.close()

    async def _answer(self, client: Stream, record: Record) -> None:
        if len(self.records) >= self.rule.allow.requests:
            raise Refusal("refused", 429, f"more than {self.rule.allow.requests} requests in one episode")
        self.records.append(record)
        request = await _request(client, record)
        record.method, record.path = cut_middle(request.method, MAX_SAID), cut_middle(request.path, MAX_SAID)
        record.host, record.port = request.host, request.port
        why_not = self.rule.why_not(request.host, request.port, tunnel=request.is_tunnel)
        if why_not is not None:
            raise Refusal("refused", 403, why_not[:MAX_SAID])
        with await self._connect(request.host, request.port) as connection:
            record.outcome, record.why = "allowed", ""
            with closing(await Stream.over(connection)) as host:
                connection.close()
                await self._carry(client, host, request, record)

    async def _carry(self, client: Stream, host: Stream, request: Request, record: Record) -> None:
        """Forward the bytes of an allowed request within its limits."""
        meter = Meter(self, record)
        work = asyncio.ensure_future(_exchange(client, host, request, meter))
        try:
            while not work.done():
                why = meter.over()
                if why is not None:
                    record.outcome, record.why = "cut", why
                    return
                await asyncio.wait({work}, timeout=meter.left())
            work.result()
        except (Refusal, Malformed) as refusal:
            record.outcome, record.why = "cut", str(refusal)
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)

    async def _connect(self, host: str, port: int) -> socket.socket:
        """Look the host up once, and connect to the first of its allowed addresses that accepts.

        Since the address itself is used, a later DNS answer can't replace an address that was checked.
        """
        error: OSError | None = None
        try:
            async with asyncio.timeout(CONNECT_S):
                async with self._looking_up:
                    addresses = await _look_up(host, port)
                allowed = [each for each in addresses if self.rule.may_connect(each, port)]
                if not allowed:
                    found = ", ".join(map(str, addresses))
                    raise Refusal(
                        "refused",
                        403,
                        f"{host} resolves to {found}, which is not a public address; list that address to allow it",
                    )
                for address in allowed:
                    try:
                        return await self._connect_to(address, port)
                    except OSError as caught:
                        error = caught
        except TimeoutError:
            raise Refusal("failed", 502, f"{host}:{port} did not respond within {CONNECT_S:.0f} s") from None
        except OSError as caught:
            error = caught
        raise Refusal("failed", 502, f"{host}:{port} cannot be reached: {error}")

    async def _connect_to(self, address: Address, port: int) -> socket.socket:
        family = socket.AF_INET if address.version == 4 else socket.AF_INET6
        connection = socket.socket(family, socket.SOCK_STREAM)
        try:
            connection.setblocking(False)
            await asyncio.get_running_loop().sock_connect(connection, (str(address), port))
            own = connection.getsockname()[0] == connection.getpeername()[0]
            if own and not self.rule.lists(str(address), port):
                raise Refusal("refused", 403, f"{address} is this machine's own address; to allow it, list it")
        except BaseException:
            connection.close()
            raise
        return connection


class Meter:
    """Counts the bytes of one request against its episode's limit, and the time since the last bytes."""

    def __init__(self, proxy: Proxy, record: Record) -> None:
        self._proxy, self._record = proxy, record
        self._clock = asyncio.get_running_loop().time
        self._last = self._clock()
        self._end = self._last + LIFE_S

    def over(self) -> str | None:
        """Return why the request must end now, or None if it may continue."""
        now = self._clock()
        if now >= self._end:
            return f"open for over {LIFE_S:.0f} s"
        return f"idle for {IDLE_S:.0f} s" if now >= self._last + IDLE_S else None

    def left(self) -> float:
        """Return the seconds until `over` must be checked again."""
        return min(self._last + IDLE_S, self._end) - self._clock() + 0.01

    def sent(self, size: int) -> None:
        self._take(size)
        self._record.sent += size

    def received(self, size: int) -> None:
        self._take(size)
        self._record.received += size

    def _take(self, size: int) -> None:
        self._last = self._clock()
        self._proxy.room -= size
        if self._proxy.room < 0:
            raise Refusal("cut", 0, f"more than {self._proxy.rule.allow.mb} MB in one episode")


async def _exchange(client: Stream, host: Stream, request: Request, meter: Meter) -> None:
    """Serve an allowed request: forward a tunnel in both directions, or forward one HTTP request and its response."""
    if request.is_tunnel:
        client.writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
        if parse_address(request.host) is not None:  # Listing an address allows every host that responds there.
            await both_ways(client, host, meter.sent, meter.received)
            return
        tunnel = Tunnel(client, host, request, only_tls=request.port == TLS_PORT)
        await first_error(tunnel.send(meter.sent), tunnel.receive(meter.received))
        return
    there = h11.Connection(h11.CLIENT, MAX_HEAD)
    head = there.send(request.for_host())
    meter.sent(len(head))
    host.writer.write(head)
    body = asyncio.ensure_future(_pass_on(client, request.connection, host, there, meter.sent))
    answer = asyncio.ensure_future(_pass_on(host, there, client, request.connection, meter.received))
    try:
        await asyncio.wait({body, answer}, return_when=asyncio.FIRST_COMPLETED)
        if body.done():
            body.result()
        await answer
    finally:
        body.cancel()
        answer.cancel()
        await asyncio.gather(body, answer, return_exceptions=True)
    await client.finish(LINGER_S)


async def _request(client: Stream, record: Record) -> Request:
    try:
        async with asyncio.timeout(HEAD_S):
            head = await client.reader.readuntil(b"\r\n\r\n")
        return parse_request(head)
    except TimeoutError:
        raise Refusal("malformed", 408, f"the request head did not end within {HEAD_S:.0f} s") from None
    except asyncio.LimitOverrunError:
        raise Refusal("malformed", 400, f"the request head has over {MAX_HEAD} bytes") from None
    except asyncio.IncompleteReadError as error:
        record.outcome = "malformed"
        raise ConnectionError("the client closed the connection") from error
    except Malformed as error:
        raise Refusal("malformed", 400, str(error)) from None


async def _look_up(host: str, port: int) -> list[Address]:
    """Return the host's addresses, each once.

    Raises:
        OSError: If it has none.
    """
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP)
    return list(dict.fromkeys(ipaddress.ip_address(str(place[0]).partition("%")[0]) for *_, place in found))


async def _pass_on(
    source: Stream, reading: h11.Connection, target: Stream, writing: h11.Connection, count: Count
) -> None:
    """Forward the rest of one message, rewritten without trailers, interim responses or anything after its end.

    Args:
        source: The connection that the message comes from.
        reading: Parses the message.
        target: The connection that the message goes to.
        writing: Formats the message anew.
        count: Called with the size of each piece that was read.
    """
    event: object = None
    try:
        while not isinstance(event, h11.EndOfMessage):
            event = reading.next_event()
            if event is h11.NEED_DATA:
                data = await source.reader.read(PIECE)
                count(len(data))
                reading.receive_data(data)
            elif isinstance(event, h11.Response):
                target.writer.write(writing.send(for_client(event)))
            elif isinstance(event, h11.Data):
                target.writer.write(writing.send(event))
            await target.writer.drain()
            await asyncio.sleep(0)  # Let other tasks run during a message of many small chunks.
        target.writer.write(writing.send(h11.EndOfMessage()))
    except h11.ProtocolError as error:
        raise Malformed(f"the request or the response is not HTTP/1.1: {error}"[:MAX_SAID]) from None


def _refused(status: int, why: str) -> bytes:
    body = f"agentgym proxy: {why}\n".encode()
    head = f"HTTP/1.1 {status} {REASONS[status]}\r\nContent-Type: text/plain; charset=utf-8\r\n"
    return f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body
