"""Checks of the TLS ClientHello messages in a tunnel: the client must request the host that the tunnel leads to."""

import asyncio

from agentgym.sandboxes.network.heads import Malformed, Request
from agentgym.sandboxes.network.streams import PIECE, Count, Stream, pump

CHANGE_CIPHER, ALERT, HANDSHAKE = 0x14, 0x15, 0x16
RECORD_HEAD = 5
MAX_RECORD = 1 << 14
MAX_GREETING = 1 << 16
MESSAGE_HEAD = 4
CLIENT_HELLO, SERVER_HELLO, SERVER_NAME, HOST_NAME = 1, 2, 0, 0
ENCRYPTED_NAMES = (0xFE0D, 0xFFCE)
"""The extensions with which a client hides the requested host: ECH and its predecessor ESNI."""
RETRY = bytes.fromhex("cf21ad74e59a6111be1d8c021e65b891c2a211167abb8c5e079e09e2c8a8339c")
"""The random bytes by which a HelloRetryRequest is recognized; it requests a second ClientHello (RFC 8446, 4.1.3)."""
RANDOM = slice(MESSAGE_HEAD + 2, MESSAGE_HEAD + 2 + 32)


class _Reader:
    """Reads pieces from the front of bytes; raises Malformed if they end too early."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def take(self, size: int) -> bytes:
        if len(self.data) < size:
            raise Malformed("the TLS ClientHello ends too early")
        piece, self.data = self.data[:size], self.data[size:]
        return piece

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size), "big")

    def block(self, size: int) -> bytes:
        """Return the bytes after a length field of `size` bytes, as many as that field says."""
        return self.take(self.number(size))

    def end(self) -> None:
        if self.data:
            raise Malformed("the TLS ClientHello has trailing data")


def server_name(message: bytes) -> str | None:
    """Return the host that a TLS client requests in its ClientHello, or None if it names none (RFC 6066).

    Raises:
        Malformed: If the message is not one whole ClientHello, or if the name is encrypted.
    """
    reader = _Reader(message)
    if reader.number(1) != CLIENT_HELLO:
        raise Malformed("not a TLS ClientHello")
    hello = _Reader(reader.block(3))
    reader.end()
    hello.take(2 + 32)  # Version and random bytes.
    for size in (1, 2, 1):  # Session, ciphers and compression methods.
        hello.block(size)
    extensions = _Reader(hello.block(2) if hello.data else b"")
    hello.end()
    names: list[bytes] = []
    while extensions.data:
        kind, content = extensions.number(2), extensions.block(2)
        if kind in ENCRYPTED_NAMES:
            raise Malformed(
                "the TLS ClientHello has an encrypted name (ECH), which could be any host; turn ECH off in the client"
            )
        if kind == SERVER_NAME:
            names += _names(content)
    if len(names) > 1:
        raise Malformed("the TLS ClientHello has several names")
    try:
        return names[0].decode("ascii").lower() if names else None
    except UnicodeDecodeError:
        raise Malformed("the name in the TLS ClientHello is not ASCII") from None


def _names(content: bytes) -> list[bytes]:
    """Return the names in the server name extension."""
    whole, found = _Reader(content), []
    listed = _Reader(whole.block(2))
    whole.end()
    while listed.data:
        if listed.number(1) != HOST_NAME:
            raise Malformed("the TLS ClientHello has a name of unknown type")
        found.append(listed.block(2))
    return found


class Tunnel:
    """Forwards a tunnel in both directions; every TLS ClientHello in it must request the tunnel's host.

    Many hosts share addresses, and the name in the ClientHello decides which of them responds. A host may request a
    second ClientHello (HelloRetryRequest), which must be checked, too. So the client's next handshake message is held
    back until the host's response shows whether the host has requested one.
    """

    def __init__(self, client: Stream, host: Stream, request: Request, *, only_tls: bool) -> None:
        self._client, self._host, self._request, self._only_tls = client, host, request, only_tls
        self._is_tls = False
        self._asked_again: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    async def send(self, sent: Count) -> None:
        """Forward the client's bytes.

        Raises:
            Malformed: If a ClientHello is for another host, or if TLS is missing.
        """
        start = await self._client.reader.read(1)
        if start == bytes([HANDSHAKE]):
            await self._greet(start, sent)
            self._is_tls = True
            await self._go_on(sent)
        elif start and self._only_tls:
            raise Malformed(f"the client must use TLS in the tunnel to {self._request.host}:{self._request.port}")
        elif start:
            self._say(start, sent)
        await pump(self._client, self._host, sent)

    async def receive(self, received: Count) -> None:
        """Forward the host's bytes, and find out whether it requests a second ClientHello."""
        held = b""
        while not self._asked_again.done() and (said := await self._host.reader.read(PIECE)):
            received(len(said))
            held += said
            known = self._look(held) if self._is_tls else len(held)
            self._client.writer.write(held[:known])
            held = held[known:]
            await self._client.writer.drain()
        if not self._asked_again.done():
            self._asked_again.set_result(False)  # The host sends no more.
        self._client.writer.write(held)
        await pump(self._host, self._client, received)

    def _look(self, said: bytes) -> int:
        """Return how many of the host's bytes in `said` may be forwarded now.

        The first record other than an alert shows whether the host requests a second ClientHello.
        """
        at = 0
        while said[at : at + 1] == bytes([ALERT]):
            end = at + RECORD_HEAD + int.from_bytes(said[at + 3 : at + 5], "big")
            if len(said) < max(end, at + RECORD_HEAD):
                return at
            at = end
        record = said[at:]
        if not record or (record[0] == HANDSHAKE and len(record) < RECORD_HEAD):
            return at
        is_greeting = record[0] == HANDSHAKE
        if is_greeting and int.from_bytes(record[3:5], "big") < RANDOM.stop:
            raise Malformed("the host's TLS ServerHello is fragmented")
        message = record[RECORD_HEAD:]
        if is_greeting and len(message) < RANDOM.stop:
            return at
        self._asked_again.set_result(is_greeting and message[0] == SERVER_HELLO and message[RANDOM] == RETRY)
        return len(said)

    async def _go_on(self, sent: Count) -> None:
        """Forward the client's records, until no further ClientHello is possible or the second one has been forwarded.

        Raises:
            Malformed: If a record is invalid, or if a second ClientHello is for another host or was not requested by
                the host.
        """
        quiet = True
        while head := await self._client.reader.read(1):
            if head[0] == HANDSHAKE:
                if await self._asked_again:
                    await self._greet(head, sent)
                    return
                record = await self._record(head)
                if quiet and record[RECORD_HEAD] == CLIENT_HELLO:
                    raise Malformed("the client sent a second TLS ClientHello, but the host did not request one")
                self._say(record, sent)
                return
            quiet = quiet and head[0] != CHANGE_CIPHER  # Later records are encrypted.
            self._say(await self._record(head), sent)
            await self._host.writer.drain()
            if self._asked_again.done() and not self._asked_again.result():
                return

    async def _greet(self, start: bytes, sent: Count) -> None:
        """Forward one ClientHello, which may span several records, if its name is the tunnel's host."""
        raw = message = b""
        while True:
            record = await self._record(start)
            if record[0] != HANDSHAKE or record[1] != 3:
                raise Malformed("not a TLS ClientHello")
            raw, message = raw + record, message + record[RECORD_HEAD:]
            if len(message) >= MESSAGE_HEAD:
                size = MESSAGE_HEAD + int.from_bytes(message[1:MESSAGE_HEAD], "big")
                if message[0] != CLIENT_HELLO or size > MAX_GREETING:
                    raise Malformed("not a TLS ClientHello")
                if len(message) >= size:
                    break
            start = b""
        name = server_name(message)
        if name != self._request.host:
            raise Malformed(
                f"the TLS ClientHello names {name or 'no host'}, but the tunnel leads to {self._request.host}"
            )
        self._say(raw, sent)

    async def _record(self, start: bytes) -> bytes:
        """Read one record from the client; its first bytes, `start`, have already been read."""
        try:
            head = start + await self._client.reader.readexactly(RECORD_HEAD - len(start))
            size = int.from_bytes(head[3:5], "big")
            if not 0 < size <= MAX_RECORD + 256:
                raise Malformed("not a TLS ClientHello")
            return head + await self._client.reader.readexactly(size)
        except asyncio.IncompleteReadError:
            raise Malformed("the TLS ClientHello ends too early") from None

    def _say(self, data: bytes, sent: Count) -> None:
        sent(len(data))
        self._host.writer.write(data)
