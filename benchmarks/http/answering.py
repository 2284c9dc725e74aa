"""A server in a separate process that responds to POST /generate as SGLang does, at once: its responses are ready.

`python -m benchmarks.http.answering` reads its responses from stdin, prints its port, and exits when stdin ends. So a
client's CPU time contains none of the server's. The server never sleeps, so that no client's time contains waking a
process on the same machine either.

A prompt's dialog is the one whose opening ids it starts with. Its turn is the number of end-of-message ids after the
opening, divided by two: each earlier turn has one in the model's message and one in the answer to it, whatever the
answer says.
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
    """One turn of a dialog, with a log-probability per id; the last id ends the message."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    text: str


class Dialog(NamedTuple):
    """The opening ids of a dialog, and the replies of its turns."""

    opening: Sequence[int]
    replies: Sequence[Reply]


@contextmanager
def answering(dialogs: Iterable[Dialog], info: Mapping[str, Any]) -> Iterator[str]:
    """Yield the URL of a server that runs these dialogs, while the context is open.

    Its /server_info returns `info`.
    """
    plays = [[list(dialog.opening), [_generated(dialog, reply) for reply in dialog.replies]] for dialog in dialogs]
    pages = {"/server_info": dict(info), "/ready": None, "/health_generate": None}
    command = [sys.executable, "-m", "benchmarks.http.answering"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        print(json.dumps({"dialogs": plays, "pages": pages}), file=process.stdin, flush=True)
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"


def _generated(dialog: Dialog, reply: Reply) -> dict[str, Any]:
    """Return a response of POST /generate to ids: what SGLang 0.5.23 sends if log-probabilities are requested."""
    ids = list(reply.token_ids)
    meta = {
        "id": "0" * 32,
        "finish_reason": {"type": "stop", "matched": ids[-1]},
        "prompt_tokens": len(dialog.opening),
        "weight_version": "default",
        "weight_versions": [{"version": "default", "start": 0, "end": len(ids)}],
        "total_retractions": 0,
        "input_token_logprobs": [],
        "output_token_logprobs": [[value, id_, None] for value, id_ in zip(reply.logprobs, ids, strict=True)],
        "completion_tokens": len(ids),
        "cached_tokens": len(dialog.opening) - 1,
        "e2e_latency": 0.0123456789012345,
    }
    return {"text": reply.text, "output_ids": ids, "meta_info": meta}


class _Answers:
    """The bytes of every response, ready to send."""

    def __init__(self, dialogs: Sequence[Any], pages: Mapping[str, Any]) -> None:
        self.pages = {path: _ready(page) for path, page in pages.items()}
        self.end = dialogs[0][1][0]["output_ids"][-1]
        self.dialogs = {tuple(opening): [_ready(answer) for answer in answers] for opening, answers in dialogs}
        self.lengths = sorted({len(opening) for opening in self.dialogs})

    def to(self, path: str, body: bytes) -> bytes:
        """Return the response to a request.

        Raises:
            KeyError: If there is no page at this path.
            ValueError: If no dialog opens with the request's ids.
        """
        if path != "/generate":
            return self.pages[path]
        ids = json.loads(body)["input_ids"]
        opening = max((o for o in (tuple(ids[:length]) for length in self.lengths) if o in self.dialogs), key=len)
        turn: int = ids[len(opening) :].count(self.end) // 2
        return self.dialogs[opening][turn]


class _Connection(asyncio.Protocol):
    """A connection that responds to one request after the other, and hangs up if it has no response."""

    def __init__(self, answers: _Answers) -> None:
        self.answers, self.held, self.needed = answers, bytearray(), 0
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.held += data
        if len(self.held) < self.needed:
            return
        head, end, body = bytes(self.held).partition(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0] or 0)
        self.needed = len(head) + 4 + length
        if not end or len(body) < length:
            return
        self.held.clear()
        self.needed = 0
        self.transport.write(self.answers.to(head.split(b" ", 2)[1].decode(), body))


async def _serve(answers: _Answers) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: _Connection(answers), "127.0.0.1", 0, backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)

    def spin() -> None:
        loop.call_soon(spin)

    spin()
    await asyncio.to_thread(sys.stdin.read)  # serve until the process that started the server ends
    server.close()


def _ready(answer: Any) -> bytes:
    body = b"" if answer is None else json.dumps(answer, separators=(",", ":")).encode()
    return _HEAD.format(len(body)).encode() + body


if __name__ == "__main__":
    asyncio.run(_serve(_Answers(**json.loads(sys.stdin.readline()))))
