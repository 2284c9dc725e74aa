"""CPU microseconds per turn of the rollout driver, compared with other kits' drivers and with bare loops.

`python -m benchmarks.driver [--json] [--workloads FILE.py] [--seed N] [--peers VENV] [--quick]`

An engine whose responses are ready runs `tool_dialog`: 8 turns, 7 tool calls. Our side is `run_groups`: it puts ids
and log-probabilities into segments, decodes and parses the reply, validates the call and makes it under its time
limit, puts its result into the template and encodes it, and scores the rollout. There are three settings, each also
run by the other kits (`peers`):

- one after the other: the engine responds at once, so nothing waits, and one rollout is alive at a time;
- `alive`: the engine yields to the event loop before each response, and all 384 rollouts are alive at once;
- `unseen`: as the first, but the tool answers with a text that was never seen before, a traceback of about 250 ids.

The floors are loops that do only the work that no driver can leave out. `text` requests a reply, reads the call's JSON
and makes the call. `token` also encodes each tool answer with the tokenizer's own backend and extends the ids. All of
them take turns. `alive` measures more rollouts at once and their memory; `benchmarks.http` sends requests to a server.

The other kits are in a separate environment, which `make bench-peers` creates; without it their goals are not
measured.
"""

import asyncio
import gc
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from types import ModuleType

import numpy as np

import agentgym as ag
from agentgym.engines.base import Engine
from benchmarks.driver.alive import alive, kept_bytes, open_bytes
from benchmarks.driver.dialogs import call_in, tracebacks
from benchmarks.driver.floors import text_floor, token_floor
from benchmarks.driver.instant import Instant, replies, word_tokenizer
from benchmarks.driver.measured import Measured
from benchmarks.driver.others import Others, playing
from benchmarks.driver.ours import DIALOGS, GROUP, TOOL, PlainAdder, ours, rollouts, task
from benchmarks.harness import Goal, arguments, at_least, at_most, load_workloads, over, report

ROUNDS = 10
SCALES = (100, 1_000, 10_000)


async def measured(module: ModuleType, seed: int, peers: Path | None, *, quick: bool) -> dict[str, float]:
    """Return the measurements of all ways to run these dialogs."""
    dialogs = {f"t{n}": replies(module, seed + n) for n in range(DIALOGS)}
    calls = GROUP * sum(call_in(text) is not None for texts in dialogs.values() for text in texts)
    tokenizer = word_tokenizer([*(text for texts in dialogs.values() for text in texts), *tracebacks(300, seed + 1)])
    engine, yielding = Instant(tokenizer, dialogs), Instant(tokenizer, dialogs)
    yielding.yields = True
    found = Measured()

    def ways(number: int) -> dict[str, Callable[[], Awaitable[int]]]:
        def fresh(way: str) -> list[ag.Task]:  # new ids give new first prompts, which are rendered and encoded again
            return [task(f"{name}-{way}{number}") for name in dialogs]

        return {
            "text_floor": lambda: text_floor(dialogs),
            "token_floor": lambda: token_floor(engine, dialogs),
            "ours": lambda: ours(engine, fresh("a")),
            "ours_plain_reward": lambda: ours(engine, fresh("b"), PlainAdder),
            "token_floor_alive": lambda: token_floor(yielding, dialogs),
            "ours_alive": lambda: ours(yielding, fresh("c")),
            "token_floor_unseen": lambda: token_floor(engine, dialogs),
            "ours_unseen": lambda: ours(engine, fresh("d")),
        }

    with playing(peers, tokenizer, dialogs, group=GROUP, calls=calls) as others:
        gc.collect()
        gc.freeze()  # so that collections don't traverse the imported modules again and again
        for number in range(2 if quick else ROUNDS):
            await _round(number, ways(number), others, found, seed, calls)
    figures = {f"{name}_us": value for name, value in found.us.items()}
    figures["turns_per_s"] = found.turns_per_s
    figures["unseen_ids"] = float(np.mean([len(tokenizer.encode(text)) for text in tracebacks(100, seed + 2)]))
    figures |= await _scaled(engine, [task(name) for name in dialogs], quick=quick)
    return figures


async def _round(
    number: int,
    ways: dict[str, Callable[[], Awaitable[int]]],
    others: Others,
    found: Measured,
    seed: int,
    calls: int,
) -> None:
    """Run every way once, and record its time."""
    for place, (name, way) in enumerate(ways.items()):
        if name.endswith("_unseen"):
            TOOL.unseen.extend(tracebacks(calls, hash((seed, number, place))))
        await found.play(name, way)
        assert not TOOL.unseen
    for name in others.ways:
        found.note(name, others.play(name))


async def _scaled(engine: Instant, tasks: Sequence[ag.Task], *, quick: bool) -> dict[str, float]:
    """Return the measurements that depend on the number of rollouts, and the memory that rollouts take."""

    async def play(paced: Engine, rollouts: int) -> int:
        return await ours(paced, [task(f"t{n % DIALOGS}-{n}") for n in range(-(-rollouts // GROUP))])

    figures: dict[str, float] = {}
    for scale in SCALES[:2] if quick else SCALES:
        figures |= await alive(play, engine, scale)
    figures |= await kept_bytes(lambda: rollouts(engine, tasks))
    figures["open_bytes_an_id"] = open_bytes()
    return figures


def goals(figures: dict[str, float]) -> dict[str, Goal]:
    """Return the goals."""
    last = f"alive_{SCALES[-1]}"
    unseen = over(figures, "ours_unseen_us", "token_floor_unseen_us")
    return {
        "skyrl over ours": at_least(over(figures, "skyrl_us", "ours_us"), 2.5),
        "skyrl over ours, all alive": at_least(over(figures, "skyrl_alive_us", "ours_alive_us"), 2.5),
        "skyrl over ours, unseen text": at_least(over(figures, "skyrl_unseen_us", "ours_unseen_us"), 1.6),
        "ours over the token floor, unseen text": at_most(unseen, 1.02),
        "10,000 alive over 100": at_most(over(figures, f"{last}_us", "alive_100_us"), 1.15),
        "longest pause with 10,000 alive, CPU ms": at_most(figures.get(f"{last}_pause_ms"), 50),
        "bytes a finished rollout keeps": at_most(figures["kept_bytes_a_rollout"], 25_000),
        "bytes an id of an open segment": at_most(figures["open_bytes_an_id"], 8.2),
    }


def main() -> None:
    args = arguments(__doc__ or "", quick=True, peers=True)
    figures = asyncio.run(measured(load_workloads(args.workloads), args.seed, args.peers, quick=args.quick))
    report("driver", figures=figures, reference={}, goals=goals(figures), as_json=args.json)


if __name__ == "__main__":
    main()
