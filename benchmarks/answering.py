"""A server in a process of its own that answers POST /generate as SGLang does, and at once: its answers lie ready.

`python -m benchmarks.answering` reads what to answer from stdin, prints its port, and ends when stdin does. A
client's CPU time, measured beside it, holds nothing of the server's.
"""

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

_HEAD = (
    "HTTP/1.1 200 OK\r\ndate: Thu, 06 Aug 2026 12:00:00 GMT\r\nserver: uvicorn\r\n"
    "content-length: {}\r\ncontent-type: application/json\r\n\r\n"
)


class Reply(NamedTuple):
    """What a prompt is answered with: as many log-probabilities as ids, the stop id the last."""

    prompt: Sequence[int]
    token_ids: Sequence[int]
    logprobs: Sequence[float]


@contextmanager
def answering(replies: Iterable[Reply], info: Mapping[str, Any]) -> Iterator[str]:
    """The URL of a server that gives each prompt its reply, and `info` as /server_info, while the context is open."""
    answers: list[list[Any]] = [["/generate", list(reply.prompt), _generated(reply)] for reply in replies]
    answers += [["/server_info", [], dict(info)], ["/ready", [], None], ["/health_generate", [], None]]
    command = [sys.executable, "-m", "benchmarks.answering"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        print(json.dumps(answers), file=process.stdin, flush=True)
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"


def _generated(reply: Reply) -> dict[str, Any]:
    """The answer of POST /generate to ids: what SGLang 0.5.23 sends with log-probabilities asked for."""
    ids = list(reply.token_ids)
    meta = {
        "id": "0" * 32,
        "finish_reason": {"type": "stop", "matched": ids[-1]},
        "prompt_tokens": len(reply.prompt),
        "weight_version": "default",
        "weight_versions": [{"version": "default", "start": 0, "end": len(ids)}],
        "total_retractions": 0,
        "input_token_logprobs": [],
        "output_token_logprobs": [[value, id_, None] for value, id_ in zip(reply.logprobs, ids, strict=True)],
        "completion_tokens": len(ids),
        "cached_tokens": len(reply.prompt) - 1,
        "e2e_latency": 0.0123456789012345,
    }
    return {"text": "", "output_ids": ids, "meta_info": meta}


class _Connection(asyncio.Protocol):
    """Answers one request after the other by its path and ids; hangs up on one that it has no answer to."""

    def __init__(self, ready: Mapping[tuple[Any, ...], bytes]) -> None:
        self.ready, self.held = ready, bytearray()
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.held += data
        head, end, body = self.held.partition(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0] or 0)
        if not end or len(body) < length:
            return
        ids = json.loads(body)["input_ids"] if length else ()
        self.held.clear()
        self.transport.write(self.ready[head.split(b" ", 2)[1].decode(), *ids])


async def _serve(ready: Mapping[tuple[Any, ...], bytes]) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: _Connection(ready), "127.0.0.1", 0, backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.to_thread(sys.stdin.read)  # until whoever asked for the server has ended
    server.close()


def _ready(answer: Any) -> bytes:
    body = "" if answer is None else json.dumps(answer, separators=(",", ":"))
    return (_HEAD.format(len(body)) + body).encode()


if __name__ == "__main__":
    asyncio.run(_serve({(path, *ids): _ready(answer) for path, ids, answer in json.loads(sys.stdin.readline())}))
