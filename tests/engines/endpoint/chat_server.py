"""A chat endpoint on this machine that answers, refuses, sends garbage, hangs up or hangs, as a test requires."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

Request: TypeAlias = dict[str, Any]


@dataclass(frozen=True)
class Sent:
    """A response of the server; a body that is a string is sent unchanged."""

    body: Any = ""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)


HANG, HANG_UP = "hang", "hang up"
Answers: TypeAlias = Callable[[Request, int], "Sent | str"]
"""A function of a request and its number (from 0); it may return HANG or HANG_UP."""
SOON = {"retry-after-ms": "1"}


def said(content: Any, *, reason: str = "stop", usage: Any = None, **fields: Any) -> Sent:
    """Return a chat completion."""
    message = {"role": "assistant", "content": content, **fields}
    counted = {"prompt_tokens": 100, "completion_tokens": 10} if usage is None else usage
    choice = {"index": 0, "message": message, "finish_reason": reason}
    return Sent({"id": "1", "object": "chat.completion", "choices": [choice], "usage": counted})


def called(name: str, arguments: str, call_id: str = "call_1") -> Sent:
    """Return a chat completion that calls one tool."""
    call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
    return said(None, reason="tool_calls", tool_calls=[call])


class ChatServer:
    """A server that records every request."""

    def __init__(self, answers: Answers) -> None:
        self.answers = answers
        self.requests: list[Request] = []
        self.headers: list[str] = []
        self.running = self.most_at_once = 0
        self.url = ""
        self.before: Callable[[], Awaitable[None]] | None = None
        """Awaited before each response."""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one request and hang up."""
        try:
            await self._serve(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # The client is gone, for example after a timeout.
        finally:
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = int(head.partition("content-length:")[2].split("\r\n")[0] or 0)
        request = json.loads(await reader.readexactly(length) or "{}")
        self.requests.append(request)
        self.headers.append(head)
        self.running += 1
        self.most_at_once = max(self.running, self.most_at_once)
        if self.before is not None:
            await self.before()
        answer = self.answers(request, len(self.requests) - 1)
        self.running -= 1
        if answer == HANG:
            await reader.read()  # until the client gives up
        elif isinstance(answer, Sent):
            writer.write(_written(answer))
            await writer.drain()


def _written(answer: Sent) -> bytes:
    body = answer.body if isinstance(answer.body, str) else json.dumps(answer.body)
    headers = {"content-type": "application/json", "content-length": str(len(body.encode())), "connection": "close"}
    lines = [f"HTTP/1.1 {answer.status} x", *(f"{k}: {v}" for k, v in (headers | answer.headers).items())]
    return ("\r\n".join(lines) + "\r\n\r\n" + body).encode()


@asynccontextmanager
async def chat_server(answers: Answers) -> AsyncIterator[ChatServer]:
    """Run a server on a separate port until the block ends."""
    made = ChatServer(answers)
    server = await asyncio.start_server(made.serve, "127.0.0.1", 0)
    made.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    try:
        yield made
    finally:
        server.close()
