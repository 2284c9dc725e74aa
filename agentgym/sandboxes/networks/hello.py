"""The first words of a TLS client: the name of the host that it asks for, which a tunnel must lead to."""

from agentgym.sandboxes.networks.heads import Malformed

HANDSHAKE = 0x16
RECORD_HEAD = 5
MAX_RECORD = 1 << 14
CLIENT_HELLO, SERVER_NAME, HOST_NAME = 1, 0, 0


class _Reader:
    """Takes pieces from the front of bytes; Malformed where they end too early."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def take(self, size: int) -> bytes:
        if len(self.data) < size:
            raise Malformed("a TLS greeting that ends too early")
        piece, self.data = self.data[:size], self.data[size:]
        return piece

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size), "big")

    def block(self, size: int) -> bytes:
        """Bytes that stand behind their own length, which has `size` bytes."""
        return self.take(self.number(size))


def record_size(head: bytes) -> int:
    """Return how many bytes follow the five of a record's head; Malformed where it is none of a TLS greeting."""
    size = int.from_bytes(head[3:5], "big")
    if head[0] != HANDSHAKE or head[1] != 3 or not 0 < size <= MAX_RECORD:
        raise Malformed("no TLS greeting")
    return size


def server_name(record: bytes) -> str | None:
    """Return the host that a TLS client asks for in its first record; None where it names none, as RFC 6066 has it.

    Malformed where the record does not hold a whole greeting.
    """
    reader = _Reader(record)
    if reader.number(1) != CLIENT_HELLO:
        raise Malformed("no TLS greeting")
    hello = _Reader(reader.block(3))
    hello.take(2 + 32)  # Version and random bytes.
    for size in (1, 2, 1):  # Session, ciphers and compressions.
        hello.block(size)
    extensions = _Reader(hello.block(2) if hello.data else b"")
    names: list[bytes] = []
    while extensions.data:
        kind, content = extensions.number(2), extensions.block(2)
        if kind == SERVER_NAME:
            listed = _Reader(_Reader(content).block(2))
            while listed.data:
                if listed.number(1) != HOST_NAME:
                    raise Malformed("a TLS greeting with a name of an unknown kind")
                names.append(listed.block(2))
    if len(names) > 1:
        raise Malformed("a TLS greeting with several names")
    try:
        return names[0].decode("ascii").lower() if names else None
    except UnicodeDecodeError:
        raise Malformed("a TLS greeting with a name that is no ASCII") from None
