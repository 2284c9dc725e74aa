"""The peers and the floors of `benchmarks.http`: loops that run tool dialogs over HTTP without a kit.

`TokenLoop` does the work of a competent loop on a client library: in each turn, it posts all ids of the dialog as JSON,
decodes the response, stores ids, log-probabilities and which ids were sampled, decodes the new ids with the tokenizer's
own backend, reads the call's JSON, makes the call, and encodes its answer with the backend. It checks nothing, and has
no time limits, no retries and no messages. `Bare` is the floor of any client: it writes ready-made bytes and finds the
response by its length.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeAlias, TypeVar
from urllib.parse import urlsplit

from benchmarks.driver.dialogs import Tool, call_in
from benchmarks.http.answering import Dialog

T = TypeVar("T")
Ask: TypeAlias = Callable[[dict[str, Any]], Awaitable[Any]]
"""Posts a request to /generate and returns the decoded response."""
_JSON = {"Content-Type": "application/json"}
SETTINGS = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "max_new_tokens": 4096,
}
"""Sampling settings that a loop sends: those that change what is sampled, which our engine sends, too."""


def request(ids: Sequence[int], number: int) -> dict[str, Any]:
    """Return the payload of one turn."""
    sampling = SETTINGS | {"sampling_seed": number}
    return {"input_ids": ids, "return_logprob": True, "rid": f"{number:032x}", "sampling_params": sampling}


def shown(text: str) -> str:
    """Return a tool's answer as the template writes it, with the opening of the model's next message."""
    return f"\n<|im_start|>tool\n{text}<|im_end|>\n<|im_start|>assistant\n"


@dataclass(frozen=True)
class TokenLoop:
    """A loop over dialogs whose backend encodes and decodes.

    With `reads_text`, it reads the server's text instead of decoding ids.
    """

    backend: Any
    tool: Tool
    reads_text: bool = False

    async def play(self, dialog: Dialog, ask: Ask) -> int:
        """Run a dialog to its end, and return its number of turns."""
        ids, logprobs, sampled = list(dialog.opening), [0.0] * len(dialog.opening), [False] * len(dialog.opening)
        turns = 0
        while True:
            answer = await ask(request(ids, turns))
            turns += 1
            new = answer["output_ids"]
            ids += new
            logprobs += [row[0] for row in answer["meta_info"]["output_token_logprobs"]]
            sampled += [True] * len(new)
            said = answer["text"] if self.reads_text else self.backend.decode(new, skip_special_tokens=False)
            call = call_in(said)
            if call is None:
                assert said.removesuffix("<|im_end|>").endswith("answer 42")
                assert len(ids) == len(logprobs) == len(sampled)
                return turns
            seen = self.backend.encode(shown(self.tool.answer(**call)), add_special_tokens=False).ids
            ids += seen
            logprobs += [0.0] * len(seen)
            sampled += [False] * len(seen)


def over_aiohttp(
    session: Any, url: str, loads: Callable[[bytes], Any], dumps: Callable[[Any], bytes] | None = None
) -> Ask:
    """Return a function that posts requests through an aiohttp session.

    `dumps` encodes the payload; None leaves that to the session.
    """

    def written(payload: dict[str, Any]) -> dict[str, Any]:
        return {"json": payload} if dumps is None else {"data": dumps(payload), "headers": _JSON}

    async def ask(payload: dict[str, Any]) -> Any:
        async with session.post(f"{url}/generate", **written(payload)) as response:
            response.raise_for_status()
            return loads(await response.read())

    return ask


class _Link(asyncio.Protocol):
    """A connection that finds the end of a response by its Content-Length and reads nothing else of its head."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport
        self.held = b""
        self.answer: asyncio.Future[bytes]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.held = data = self.held + data
        end = data.find(b"\r\n\r\n") + 4
        at = data.find(b"content-length: ") + 16
        if end > 3 and len(data) == end + int(data[at : data.index(b"\r", at)]):
            self.held = b""
            self.answer.set_result(data[end:])

    def connection_lost(self, exc: Exception | None) -> None:
        if hasattr(self, "answer") and not self.answer.done():
            self.answer.set_exception(exc or ConnectionError("the server closed the connection"))


class Bare:
    """A few connections to a server; each runs one dialog of ready-made requests after another."""

    def __init__(self, links: Sequence[_Link], host: str) -> None:
        self.links, self.host = links, host

    @classmethod
    async def open(cls, url: str, connections: int) -> Self:
        """Connect to a server."""
        parts, loop = urlsplit(url), asyncio.get_running_loop()
        links = [
            (await loop.create_connection(_Link, parts.hostname or "", parts.port or 80))[1] for _ in range(connections)
        ]
        return cls(links, parts.netloc)

    def ready(self, body: bytes) -> bytes:
        """Return the bytes of a request."""
        head = f"POST /generate HTTP/1.1\r\nHost: {self.host}\r\nContent-Type: application/json\r\n"
        return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body

    async def play(self, dialogs: Iterable[Sequence[bytes]], decode: Callable[[bytes], Any]) -> int:
        """Send every dialog's requests, each after the response to the one before, which is decoded and dropped.

        Returns:
            The number of turns.
        """
        left, loop = iter(dialogs), asyncio.get_running_loop()

        async def one(link: _Link) -> int:
            turns = 0
            for requests in left:
                for each in requests:
                    link.answer = loop.create_future()
                    link.transport.write(each)
                    decode(await link.answer)
                turns += len(requests)
            return turns

        return sum(await asyncio.gather(*(one(link) for link in self.links)))

    def close(self) -> None:
        """Close the connections."""
        for link in self.links:
            link.transport.abort()


async def each_of(dialogs: Iterable[T], concurrency: int, play: Callable[[T], Awaitable[int]]) -> int:
    """Run dialogs, `concurrency` of them at once, and return the sum of the results of `play`."""
    left = iter(dialogs)

    async def worker() -> int:
        return sum([await play(dialog) for dialog in left])

    return sum(await asyncio.gather(*(worker() for _ in range(concurrency))))
