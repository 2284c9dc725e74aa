"""CPU microseconds per turn of tool dialogs with an SGLang server over HTTP, compared with loops and bare clients.

`python -m benchmarks.http [--json] [--workloads FILE.py] [--seed N] [--quick]`

The server is another process whose responses are ready (`answering`), in SGLang's format; only the client's CPU time
counts. The dialogs are those of `benchmarks.driver`, 8 turns and 7 tool calls:

- `short64` and `short384`: 384 rollouts, 64 or all of them at once; a prompt has a few hundred ids;
- `unseen64`: the same, but the tool answers with texts that were never seen before, of about 250 ids;
- `long32`: 32 rollouts at once whose first message is a document of 20,000 ids, which each turn sends again.

On each of them, these take turns:

- `bare`: posts ready-made bytes over open connections, finds the response by its length, and decodes it with json, or
  in `bare_orjson` with orjson; nothing is encoded and nothing is stored.
- `client`: our HTTP client posts the same bodies; in `aiohttp_client` an aiohttp session does.
- `aiohttp`: a loop over an aiohttp session (`loops.TokenLoop`): it sends all ids as JSON, decodes the response,
  stores ids, log-probabilities and a mask, decodes new ids and encodes tool answers with the tokenizer's own backend,
  and makes the call. It has no checks, retries, limits, messages or rewards. `aiohttp_text` reads the call from the
  server's text instead of decoding ids; `aiohttp_orjson` reads and writes JSON with orjson. The first prompts are
  encoded once, before the measurement.
- `in_process`: `run_groups` with an engine in this process that has the responses ready: ids, parsing, the validated
  call under its time limit, template, segments, rewards.
- `ours`: `run_groups` with an attached SGLang engine: the same plus the requests, with the standard library's JSON;
  `ours_orjson` is the same with orjson, which our engine uses if it is installed.

aiohttp and orjson are not dependencies of agentgym (`pip install aiohttp orjson`); if one is missing, the ways that
need it are not measured.
"""

import asyncio
import gc
import importlib
import importlib.util
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any, TypeAlias
from unittest.mock import patch

import agentgym as ag
from agentgym.engines import SGLangEngine
from agentgym.engines.base import Engine
from agentgym.engines.sglang import http, prompts
from agentgym.engines.sglang.http import JsonClient
from benchmarks.driver.dialogs import tracebacks
from benchmarks.driver.instant import Instant
from benchmarks.driver.measured import Measured
from benchmarks.driver.ours import GROUP, TOOL
from benchmarks.harness import Goal, arguments, at_least, at_most, load_workloads, over, report
from benchmarks.http.answering import answering
from benchmarks.http.loops import Bare, TokenLoop, each_of, over_aiohttp
from benchmarks.http.works import Ready, Work, all_works, served

Ways: TypeAlias = dict[str, Callable[[], Awaitable[int]]]
ROUNDS = 5
ENCODING = frozenset({"aiohttp", "aiohttp_text", "aiohttp_orjson", "in_process", "ours", "ours_orjson"})
"""The ways that call the tool, and therefore need its unseen texts."""


def found(name: str) -> Any:
    """Return the module of this name, or None if it isn't installed."""
    return importlib.import_module(name) if importlib.util.find_spec(name) else None


@contextmanager
def plain_json() -> Iterator[None]:
    """Make our engine use the standard library's JSON even if orjson is installed."""
    with patch.object(http, "_fast", None), patch.object(prompts, "_written", prompts._plainly):
        yield


async def ours(engine: Engine, work: Work) -> int:
    """Run all rollouts with our driver and the standard library's JSON; return the number of turns."""
    with plain_json():
        return await work.play(engine)


@asynccontextmanager
async def clients(url: str, bodies: Sequence[Sequence[bytes]], work: Work) -> AsyncIterator[Ways]:
    """Yield the ways that post ready-made bodies."""
    bare, client = await Bare.open(url, work.concurrency), JsonClient(url)
    requests = [[bare.ready(body) for body in each] for each in bodies for _ in range(GROUP)]
    orjson = found("orjson")

    async def one(each: Sequence[bytes]) -> int:
        for body in each:
            assert (await client.post("/generate", body)).status == 200
        return len(each)

    async def post() -> int:
        with plain_json():
            return await each_of((each for each in bodies for _ in range(GROUP)), work.concurrency, one)

    ways: Ways = {"bare": lambda: bare.play(requests, json.loads), "client": post}
    if orjson:
        ways["bare_orjson"] = lambda: bare.play(requests, orjson.loads)
    yield ways
    bare.close()
    client.close()


@asynccontextmanager
async def loops(url: str, bodies: Sequence[Sequence[bytes]], work: Work, backend: Any) -> AsyncIterator[Ways]:
    """Yield the ways that use aiohttp; none if it isn't installed."""
    aiohttp, orjson = found("aiohttp"), found("orjson")
    if aiohttp is None:
        yield {}
        return

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=work.concurrency)) as session:

        def way(ask: Any, **settings: Any) -> Callable[[], Awaitable[int]]:
            loop = TokenLoop(backend, TOOL, **settings)
            every = [dialog for dialog in work.dialogs.values() for _ in range(GROUP)]
            return lambda: each_of(every, work.concurrency, lambda dialog: loop.play(dialog, ask))

        async def one(each: Sequence[bytes]) -> int:
            for body in each:
                async with session.post(f"{url}/generate", data=body) as response:
                    await response.json()
            return len(each)

        ways: Ways = {
            "aiohttp": way(over_aiohttp(session, url, json.loads)),
            "aiohttp_text": way(over_aiohttp(session, url, json.loads), reads_text=True),
            "aiohttp_client": lambda: each_of((each for each in bodies for _ in range(GROUP)), work.concurrency, one),
        }
        if orjson:
            ways["aiohttp_orjson"] = way(over_aiohttp(session, url, orjson.loads, orjson.dumps))
        yield ways


async def rounds(
    name: str, work: Work, url: str, ready: Ready, remote: Engine, seed: int, *, quick: bool
) -> dict[str, float]:
    """Return the microseconds per turn of every way to run a work, the least of the rounds in which they take turns."""
    measured = Measured()
    bodies = work.bodies(ready.tokenizer)
    async with clients(url, bodies, work) as posts, loops(url, bodies, work, ready.tokenizer.backend) as theirs:
        ways = posts | theirs | {"in_process": lambda: work.play(ready), "ours": lambda: ours(remote, work)}
        if found("orjson"):
            ways["ours_orjson"] = lambda: work.play(remote)
        for number in range(2 if quick else ROUNDS):
            for place, (way, play) in enumerate(ways.items()):
                if work.unseen and way in ENCODING:
                    TOOL.unseen.extend(tracebacks(work.calls, hash((seed, number, place))))
                await measured.play(way, play)
                assert not TOOL.unseen
    return {f"{name}_{way}_us": us for way, us in measured.us.items()}


async def measured(module: ModuleType, seed: int, *, quick: bool) -> dict[str, float]:
    """Return the measurements of all works."""
    works, ready = await all_works(module, seed)
    dialogs = [dialog for name in ("short64", "long32") for dialog in works[name].dialogs.values()]
    figures: dict[str, float] = {}
    with TemporaryDirectory() as folder, answering(dialogs, served(ready.tokenizer, Path(folder))) as url:
        config = ag.SGLangConfig(context_tokens=Instant.context_tokens)
        async with SGLangEngine.attach(url, config=config, tokenizer=ready.tokenizer) as remote:
            gc.collect()
            gc.freeze()  # so that collections don't traverse the imported modules again and again
            for name, work in works.items():
                figures |= await rounds(name, work, url, ready, remote, seed, quick=quick)
    return figures


def goals(figures: Mapping[str, float]) -> dict[str, Goal]:
    """Return the goals."""
    made: dict[str, Goal] = {}
    for work in ("short64", "short384", "unseen64", "long32"):
        loop = over(figures, f"{work}_aiohttp_us", f"{work}_ours_us")
        made[f"{work}: an aiohttp loop over ours"] = at_least(loop, 2)
        loop = over(figures, f"{work}_aiohttp_orjson_us", f"{work}_ours_orjson_us")
        made[f"{work}: the same, both with orjson"] = at_least(loop, 2)
        bare = over(figures, f"{work}_ours_us", f"{work}_bare_us")
        made[f"{work}: ours over the bare client"] = at_most(bare, 1.8)
    return made


def main() -> None:
    args = arguments(__doc__ or "", quick=True)
    figures = asyncio.run(measured(load_workloads(args.workloads), args.seed, quick=args.quick))
    report("http", figures=figures, reference={}, goals=goals(figures), as_json=args.json)


if __name__ == "__main__":
    main()
