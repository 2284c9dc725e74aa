"""A small HTTP server in the test's process, for faults that a real server doesn't show on request."""

import asyncio
import json
import socket
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from types import TracebackType
from typing import Any, Self, TypeAlias

Handler: TypeAlias = Callable[[Any], Awaitable[Any]]
"""Maps a decoded body to the response: raw bytes, a pair of status and body, or a body sent with status 200."""


class HangUp(Exception):
    """Raised by a handler to close the connection without a response."""


class Peer:
    """A server that listens while it is open; `paths` may be changed at any time. Requests are counted by path."""

    def __init__(self, paths: dict[str, Handler] | None = None) -> None:
        self.paths = paths or {}
        self.asked: Counter[str] = Counter()
        self.connections = 0
        self.hung_up = asyncio.Event()
        """Set when a client closes a connection before it gets its response."""
        self._writers: set[asyncio.StreamWriter] = set()

    async def __aenter__(self) -> Self:
        self._held = socket.socket()  # Keeps the port reserved while the peer is dead.
        self._held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        self._held.bind(("127.0.0.1", 0))
        self.port: int = self._held.getsockname()[1]
        await self.rise()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.die()
        self._held.close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def die(self) -> None:
        """Close the port and every connection, as if the process had been killed."""
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()
        await self._server.wait_closed()

    async def rise(self) -> None:
        """Listen on the peer's port again."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port, reuse_port=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._writers.add(writer)
        try:
            with suppress(OSError, EOFError, HangUp):
                while True:
                    await self._answer(reader, writer)
        finally:
            self._writers.discard(writer)
            writer.transport.abort()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        lengths = [line.partition(":")[2] for line in head.split("\r\n") if line.lower().startswith("content-length:")]
        body = await reader.readexactly(int(lengths[0]))
        path = head.split(" ")[1]
        self.asked[path] += 1
        answer = await self._handled(reader, self.paths[path], json.loads(body) if body else None)
        writer.write(answer if isinstance(answer, bytes) else _encoded(answer))
        await writer.drain()

    async def _handled(self, reader: asyncio.StreamReader, handler: Handler, payload: Any) -> Any:
        """Return the handler's response; raise HangUp as soon as the client hangs up."""
        handling = asyncio.ensure_future(handler(payload))
        leaving = asyncio.ensure_future(reader.read(1))
        try:
            await asyncio.wait([handling, leaving], return_when=asyncio.FIRST_COMPLETED)
            if not handling.done():
                self.hung_up.set()
                raise HangUp
            return await handling
        finally:
            handling.cancel()
            leaving.cancel()
            await asyncio.wait([handling, leaving])


def _encoded(answer: Any) -> bytes:
    status, body = answer if isinstance(answer, tuple) else (200, answer)
    content = b"" if body is None else json.dumps(body).encode()
    return f"HTTP/1.1 {status} X\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content


def giving(answer: Any) -> Handler:
    """Return a handler that always sends the same response."""

    async def give(_: Any) -> Any:
        return answer

    return give


def generated(ids: list[int], reason: str = "length", **changes: Any) -> dict[str, Any]:
    """Return SGLang's response with these ids, each with log-probability -0.5."""
    meta = {"finish_reason": {"type": reason}, "output_token_logprobs": [[-0.5, id_, None] for id_ in ids]}
    return {"text": "", "output_ids": ids, "meta_info": meta} | changes


async def sample(payload: Any) -> dict[str, Any]:
    """Return as many ids as requested, counted from 10."""
    return generated([10 + i for i in range(payload["sampling_params"]["max_new_tokens"])])


def sglang(**changes: Handler) -> dict[str, Handler]:
    """Return SGLang's endpoints, each doing the minimum; `changes` replaces handlers by endpoint name."""
    info = {"max_req_input_len": 401, "model_path": "unknown"}
    paths: dict[str, Handler] = {"ready": giving(None), "server_info": giving(info), "generate": sample}
    paths["health_generate"] = giving(None)
    quiet = "abort_request pause_generation continue_generation unload_lora_adapter load_lora_adapter_from_tensors"
    paths |= {name: giving(None) for name in quiet.split()}
    return {f"/{name}": handler for name, handler in (paths | changes).items()}
