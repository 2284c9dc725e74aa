"""CPU microseconds a turn of the rollout driver, beside other kits' drivers and bare loops of the same dialogs.

`python -m benchmarks.driver [--json] [--workloads FILE.py] [--seed N] [--peers VENV] [--quick]`

An engine whose answers lie ready plays `tool_dialog`: 8 turns, 7 calls of a tool. Ours is `run_groups`: ids and
log-probabilities into segments, the reply decoded and parsed, the call validated and made under its time limit, its
answer put into the template and encoded, the rollout scored. There are three ways to play, each beside the peers'
(`driver_peers`):

- one after the other: the engine answers at once, so nothing waits, and one rollout is alive at a time;
- `alive`: the engine yields to the event loop before each answer, and all 384 rollouts are alive at once;
- `unseen`: as the first, but the tool answers with a text that nobody has seen before, a traceback of about 275 ids.

The floors do only what nobody can leave out: `text` asks, reads the call's JSON and calls; `token` also encodes each
answer by the tokenizer's own backend and extends the ids. All of them take turns. `driver_scale` has more rollouts
alive, and their memory; `http` asks a server.

The peers are in an environment of their own, which `make bench-peers` makes; without it their goals are not measured.
"""

import asyncio
import gc
import json
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

import agentgym as ag
from agentgym.adapter import Adapter
from agentgym.chat.tokenizer import HuggingFaceTokenizer
from agentgym.engines.base import Engine
from agentgym.types import Completion, Floats, Sampling, Version
from benchmarks.driver.alive import alive, kept_bytes, open_bytes
from benchmarks.driver.dialogs import QUESTION, Tool, added, call_in, tracebacks
from benchmarks.driver.others import Others, playing
from benchmarks.harness import Goal, arguments, at_least, at_most, load_workloads, report
from recipes.base import CHECKPOINTS
from recipes.warm_start import MARKS, SPECIAL

DIALOGS = 48
GROUP = 8
ROUNDS = 10
SLOW_ROUNDS = 3
"""Rounds in which the ways take part that cost many times as much as the others."""
SCALES = (100, 1_000, 10_000)
TOOL = Tool()


class Adder(ag.ToolEnv[ag.Task]):
    """One tool, one reward."""

    @ag.tool
    async def add(self, a: int, b: int) -> str:
        """Add two numbers."""
        return TOOL.answer(a, b)

    @ag.reward
    async def answered(self) -> float:
        """Whether the last message is the dialog's answer."""
        return float((self.answer or "").endswith("answer 42"))


class PlainAdder(ag.ToolEnv[ag.Task]):
    """The same with a plain reward method, which has a thread of its own for each rollout."""

    add = Adder.add

    @ag.reward
    def answered(self) -> float:
        """Whether the last message is the dialog's answer."""
        return float((self.answer or "").endswith("answer 42"))


def word_tokenizer(texts: Sequence[str]) -> HuggingFaceTokenizer:
    """A byte-level BPE with about one token a word, as those of large models have, and the recipes' template."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bpe.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=2000, special_tokens=SPECIAL, initial_alphabet=alphabet, min_frequency=2, show_progress=False
        ),
    )
    bpe.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in MARKS])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.chat_template = (CHECKPOINTS.parent / "chat_template.jinja").read_text()
    return HuggingFaceTokenizer(tokenizer)


def replies(module: ModuleType, seed: int, **size: int) -> list[str]:
    """The assistant's side of one dialog, as the model writes it."""
    calls, answer = module.tool_dialog(seed=seed, **size)
    bodies = [json.dumps({"name": call["name"], "arguments": call["args"]}) for call in calls]
    said = [f"{c['text']}\n<tool_call>\n{body}\n</tool_call>" for c, body in zip(calls, bodies, strict=True)]
    return [f"{text}<|im_end|>" for text in [*said, answer]]


class Instant:
    """An engine that has every answer ready: the ids and log-probabilities of dialog `t<n>`."""

    context_tokens = 1 << 20
    version = 0
    yields = False
    """Whether the event loop goes on before each answer, so that all rollouts are alive at once."""

    def __init__(self, tokenizer: HuggingFaceTokenizer, dialogs: dict[str, list[str]]) -> None:
        self.tokenizer = tokenizer
        self.ids = {name: [np.array(tokenizer.encode(text)) for text in texts] for name, texts in dialogs.items()}
        draw = np.random.default_rng(0).random
        self.logprobs = {name: [-draw(len(i), np.float32) for i in ids] for name, ids in self.ids.items()}
        self.played: dict[str, int] = {}

    async def generate(
        self, token_ids: Sequence[int], *, session: str, max_tokens: int, sampling: Sampling, seed: int
    ) -> Completion:
        if self.yields:
            await asyncio.sleep(0)
        turn = self.played.get(session, 0)
        self.played[session] = turn + 1
        name = session.partition("/")[0].partition("-")[0]
        return Completion(
            token_ids=self.ids[name][turn],
            logprobs=self.logprobs[name][turn],
            finish_reason="stop",
            versions=(Version(0, 0),),
        )

    async def release(self, session: str) -> None:
        self.played.pop(session, None)

    async def load_adapter(self, adapter: Adapter | None, *, version: int) -> None:
        self.version = version

    async def score(self, token_ids: Sequence[int], *, sampling: Sampling) -> Floats:
        return np.zeros(max(len(token_ids) - 1, 0), np.float32)


async def ours(engine: Engine, tasks: Sequence[ag.Task], env: type[ag.ToolEnv[ag.Task]] = Adder) -> int:
    """Every dialog in a group of rollouts; how many turns were played."""
    return sum(len(segment.turns) for rollout in await rollouts(engine, tasks, env) for segment in rollout.segments)


async def rollouts(
    engine: Engine, tasks: Sequence[ag.Task], env: type[ag.ToolEnv[ag.Task]] = Adder
) -> list[ag.Rollout]:
    """The rollouts of every dialog, all of them started at once."""
    groups = await ag.run_groups(env, tasks, engine, n=GROUP, concurrency=GROUP * len(tasks))
    assert all(rollout.reward == 1.0 for rollout in groups.rollouts), groups.rollouts[0].error
    return list(groups.rollouts)


async def text_floor(dialogs: dict[str, list[str]]) -> int:
    """Ask, read the call, make it, keep the messages; nothing is checked and nothing is encoded."""

    async def ask(text: str) -> str:
        return text

    async def play(texts: Sequence[str]) -> int:
        messages = []
        for text in texts:
            said = await ask(text)
            messages.append({"role": "assistant", "content": said})
            call = call_in(said)
            if call:
                messages.append({"role": "tool", "content": added(**call)})
        return len(texts)

    return sum(await asyncio.gather(*(play(texts) for texts in dialogs.values() for _ in range(GROUP))))


async def token_floor(engine: Instant, dialogs: dict[str, list[str]]) -> int:
    """The text floor with ids: answers are encoded by the backend, each turn's ids and log-probabilities are kept."""
    encode = engine.tokenizer.backend.encode

    async def play(name: str, texts: Sequence[str]) -> int:
        ids: list[int] = []
        logprobs: list[float] = []
        session = f"{name}/{id(ids)}"
        for text in texts:
            answer = await engine.generate(ids, session=session, max_tokens=1024, sampling=Sampling(), seed=0)
            ids += answer.token_ids.tolist()
            logprobs += answer.logprobs.tolist()
            call = call_in(text)
            if call:
                shown = f"\n<|im_start|>tool\n{TOOL.answer(**call)}<|im_end|>\n<|im_start|>assistant\n"
                seen = encode(shown, add_special_tokens=False).ids
                ids += seen
                logprobs += [0.0] * len(seen)
        await engine.release(session)
        return len(texts)

    return sum(await asyncio.gather(*(play(name, texts) for name, texts in dialogs.items() for _ in range(GROUP))))


class Measured:
    """The least CPU microseconds a turn of each way to play, over rounds in which all of them take turns."""

    def __init__(self) -> None:
        self.us: dict[str, float] = {}
        self.turns_per_s = 0.0

    async def play(self, name: str, way: Callable[[], Awaitable[int]]) -> None:
        """Play one way once, in this process."""
        gc.collect()
        wall, cpu = time.perf_counter(), time.process_time()
        turns = await way()
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        self.note(name, cpu / turns * 1e6)
        if name == "ours":
            self.turns_per_s = max(self.turns_per_s, turns / wall)

    def note(self, name: str, us: float) -> None:
        """Take one figure in."""
        self.us[name] = min(self.us.get(name, us), us)


async def measured(module: ModuleType, seed: int, peers: Path | None, *, quick: bool) -> dict[str, float]:
    """The figures of all ways to play these dialogs."""
    dialogs = {f"t{n}": replies(module, seed + n) for n in range(DIALOGS)}
    calls = GROUP * sum(call_in(text) is not None for texts in dialogs.values() for text in texts)
    tokenizer = word_tokenizer([*(text for texts in dialogs.values() for text in texts), *tracebacks(300, seed + 1)])
    engine, yielding = Instant(tokenizer, dialogs), Instant(tokenizer, dialogs)
    yielding.yields = True
    tasks = [task(name) for name in dialogs]
    found = Measured()
    ways: dict[str, Callable[[], Awaitable[int]]] = {
        "text_floor": lambda: text_floor(dialogs),
        "token_floor": lambda: token_floor(engine, dialogs),
        "ours": lambda: ours(engine, tasks),
        "ours_plain_reward": lambda: ours(engine, tasks, PlainAdder),
        "token_floor_alive": lambda: token_floor(yielding, dialogs),
        "ours_alive": lambda: ours(yielding, tasks),
        "token_floor_unseen": lambda: token_floor(engine, dialogs),
        "ours_unseen": lambda: ours(engine, tasks),
    }
    with playing(peers, tokenizer, dialogs, group=GROUP, calls=calls) as others:
        gc.collect()
        gc.freeze()  # what was imported is not looked through again and again
        for number in range(2 if quick else ROUNDS):
            await _round(number, ways, others, found, seed, calls)
    figures = {f"{name}_us": value for name, value in found.us.items()}
    figures["turns_per_s"] = found.turns_per_s
    figures["unseen_ids"] = float(np.mean([len(tokenizer.encode(text)) for text in tracebacks(100, seed + 2)]))
    figures |= await _scaled(engine, tasks, quick=quick)
    return figures


async def _round(
    number: int,
    ways: dict[str, Callable[[], Awaitable[int]]],
    others: Others,
    found: Measured,
    seed: int,
    calls: int,
) -> None:
    """Play every way once."""
    for place, (name, way) in enumerate(ways.items()):
        if name.endswith("_unseen"):
            TOOL.unseen.extend(tracebacks(calls, hash((seed, number, place))))
        await found.play(name, way)
        assert not TOOL.unseen
    for name in others.ways:
        if number < SLOW_ROUNDS or name not in others.slow:
            found.note(name, others.play(name))


async def _scaled(engine: Instant, tasks: Sequence[ag.Task], *, quick: bool) -> dict[str, float]:
    """What changes with the number of rollouts, and what they hold in memory."""

    async def play(paced: Engine, rollouts: int) -> int:
        return await ours(paced, [task(f"t{n % DIALOGS}-{n}") for n in range(-(-rollouts // GROUP))])

    figures: dict[str, float] = {}
    for scale in SCALES[:2] if quick else SCALES:
        figures |= await alive(play, engine, scale)
    figures |= await kept_bytes(lambda: rollouts(engine, tasks))
    figures["open_bytes_an_id"] = open_bytes()
    return figures


def task(name: str) -> ag.Task:
    """The task of a dialog; what stands behind a hyphen tells tasks of one dialog apart."""
    return ag.Task(id=name, prompt=(ag.Message(role="user", content=f"{name}: {QUESTION}"),))


def over(figures: Mapping[str, float], one: str, other: str) -> float | None:
    """One figure over another; None where either was not measured."""
    return figures[one] / figures[other] if one in figures and other in figures else None


def goals(figures: dict[str, float]) -> dict[str, Goal]:
    """What is aimed at."""
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
