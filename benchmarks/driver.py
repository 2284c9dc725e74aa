"""CPU microseconds a turn of the rollout driver, beside the bare asyncio loop of the same dialogs in the same run.

`python -m benchmarks.driver [--json] [--workloads FILE.py] [--seed N]`

An engine that answers at once plays `tool_dialog`: 8 turns, 7 calls of a tool. Ours is `run_groups`: ids and
log-probabilities into segments, the reply decoded and parsed, the call validated and made under its time limit, its
answer put into the template and encoded, the rollout scored. The floors do only what nobody can leave out: `text` asks,
reads the call's JSON and calls; `tokens` also encodes each answer and extends the ids.

`over_http` is ours on an attached SGLang engine, whose server is another process with the same answers (`answering`);
its floor posts the same requests with our HTTP client, and does nothing else. All of them take turns.
"""

import asyncio
import gc
import json
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any
from uuid import uuid4

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

import agentgym as ag
from agentgym.adapter import Adapter
from agentgym.chat.tokenizer import HuggingFaceTokenizer
from agentgym.engines.base import Engine
from agentgym.engines.sglang.http import JsonClient
from agentgym.engines.sglang.policies.parcels import PolicyVersion
from agentgym.engines.sglang.prompts import NOTHING
from agentgym.engines.sglang.server import Ask
from agentgym.types import Completion, Floats, Sampling, Version
from benchmarks.answering import Reply, answering
from benchmarks.harness import arguments, at_most, load_workloads, report
from recipes.base import CHECKPOINTS
from recipes.warm_start import MARKS, SPECIAL

DIALOGS = 48
GROUP = 8
ROUNDS = 12
REFERENCE: dict[str, float | str] = {
    "asyncio_text_us": 5.3,
    "asyncio_tokens_us": 46.0,
    "skyrl_us": 116.0,
    "verifiers_0.1_text_us": 140.0,
    "trl_us": 413.0,
    "verifiers_0.4_us": "4,061-9,941",
    "http_floor_us": 140.0,
    "verifiers_0.1_over_http_us": 9288.0,
}


class Adder(ag.ToolEnv[ag.Task]):
    """One tool, one reward."""

    @ag.tool
    async def add(self, a: int, b: int) -> str:
        """Add two numbers."""
        return added(a, b)

    @ag.reward
    def answered(self) -> float:
        """Whether the last message is the dialog's answer."""
        return float((self.answer or "").endswith("answer 42"))


def added(a: int, b: int) -> str:
    """What the tool says: long enough that its ids are made anew each time."""
    return f"The sum of {a} and {b} is {a + b}."


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

    def __init__(self, tokenizer: HuggingFaceTokenizer, dialogs: dict[str, list[str]]) -> None:
        self.tokenizer = tokenizer
        self.ids = {name: [np.array(tokenizer.encode(text)) for text in texts] for name, texts in dialogs.items()}
        draw = np.random.default_rng(0).random
        self.logprobs = {name: [-draw(len(i), np.float32) for i in ids] for name, ids in self.ids.items()}
        self.played: dict[str, int] = {}

    async def generate(
        self, token_ids: Sequence[int], *, session: str, max_tokens: int, sampling: Sampling, seed: int
    ) -> Completion:
        turn = self.played.get(session, 0)
        self.played[session] = turn + 1
        name = session.partition("/")[0]
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


class Recorder(Instant):
    """Also keeps what each turn of a dialog was asked and answered; every rollout of a dialog asks the same."""

    def __init__(self, tokenizer: HuggingFaceTokenizer, dialogs: dict[str, list[str]]) -> None:
        super().__init__(tokenizer, dialogs)
        self.asked: dict[str, dict[int, Ask]] = {name: {} for name in dialogs}
        self.replies: list[Reply] = []

    async def generate(
        self, token_ids: Sequence[int], *, session: str, max_tokens: int, sampling: Sampling, seed: int
    ) -> Completion:
        asked, turn = self.asked[session.partition("/")[0]], self.played.get(session, 0)
        given = await super().generate(token_ids, session=session, max_tokens=max_tokens, sampling=sampling, seed=seed)
        if turn not in asked:
            asked[turn] = Ask(
                prompt=NOTHING.then(list(token_ids)),
                rid=uuid4().hex,
                max_tokens=max_tokens,
                sampling=sampling,
                seed=seed,
                stop_ids=(int(given.token_ids[-1]),),
                policy=PolicyVersion(None, 0),
            )
            self.replies.append(Reply(list(token_ids), given.token_ids.tolist(), given.logprobs.tolist()))
        return given


async def ours(engine: Engine, tasks: Sequence[ag.Task]) -> int:
    """Every dialog in a group of rollouts; how many turns were played."""
    groups = await ag.run_groups(Adder, tasks, engine, n=GROUP)
    assert all(rollout.reward == 1.0 for rollout in groups.rollouts), groups.rollouts[0].error
    return sum(len(segment.turns) for rollout in groups.rollouts for segment in rollout.segments)


async def text_floor(dialogs: dict[str, list[str]]) -> int:
    """Ask, read the call, make it, keep the messages; nothing is checked and nothing is encoded."""

    async def ask(text: str) -> str:
        return text

    async def play(texts: Sequence[str]) -> int:
        messages = []
        for text in texts:
            said = await ask(text)
            messages.append({"role": "assistant", "content": said})
            _, call, rest = said.partition("<tool_call>\n")
            if call:
                made = json.loads(rest.partition("\n</tool_call>")[0])
                messages.append({"role": "tool", "content": added(**made["arguments"])})
        return len(texts)

    return sum(await asyncio.gather(*(play(texts) for texts in dialogs.values() for _ in range(GROUP))))


async def token_floor(engine: Instant, dialogs: dict[str, list[str]]) -> int:
    """The text floor with ids: each answer is encoded, each turn's ids and log-probabilities are kept."""
    encode = engine.tokenizer.tokenizer.encode

    async def play(name: str, texts: Sequence[str]) -> int:
        ids: list[int] = []
        logprobs: list[float] = []
        session = f"{name}/{id(ids)}"
        for text in texts:
            answer = await engine.generate(ids, session=session, max_tokens=1024, sampling=Sampling(), seed=0)
            ids += answer.token_ids.tolist()
            logprobs += answer.logprobs.tolist()
            _, call, rest = text.partition("<tool_call>\n")
            if call:
                made = json.loads(rest.partition("\n</tool_call>")[0])
                shown = f"\n<|im_start|>tool\n{added(**made['arguments'])}<|im_end|>\n<|im_start|>assistant\n"
                seen = encode(shown, add_special_tokens=False)
                ids += seen
                logprobs += [0.0] * len(seen)
        await engine.release(session)
        return len(texts)

    return sum(await asyncio.gather(*(play(name, texts) for name, texts in dialogs.items() for _ in range(GROUP))))


async def http_floor(client: JsonClient, dialogs: Iterable[Sequence[dict[str, Any]]]) -> int:
    """The requests that the rollouts send, one dialog behind each connection; the answers are decoded and dropped."""

    async def play(payloads: Sequence[dict[str, Any]]) -> int:
        for payload in payloads:
            assert (await client.post("/generate", payload)).status == 200
        return len(payloads)

    return sum(await asyncio.gather(*(play(payloads) for payloads in dialogs for _ in range(GROUP))))


async def measure(plays: dict[str, Callable[[], Awaitable[int]]]) -> tuple[dict[str, float], float]:
    """The least CPU microseconds a turn of each over the rounds, and the most turns per wall second of `ours`."""
    least = dict.fromkeys(plays, float("inf"))
    fastest = 0.0
    for _ in range(ROUNDS):
        for name, play in plays.items():
            gc.collect()
            wall, cpu = time.perf_counter(), time.process_time()
            turns = await play()
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            least[name] = min(least[name], cpu / turns * 1e6)
            if name == "ours":
                fastest = max(fastest, turns / wall)
    return least, fastest


def served(tokenizer: HuggingFaceTokenizer, folder: Path) -> dict[str, Any]:
    """What the server says of itself; in `folder` is what an engine with a tokenizer still reads of a model."""
    ends = tokenizer.tokenizer.eos_token_id
    config = {"model_type": "qwen2", "vocab_size": len(tokenizer.tokenizer), "eos_token_id": ends}
    (folder / "config.json").write_text(json.dumps(config))
    return {"model_path": str(folder), "max_req_input_len": Instant.context_tokens}


async def measured(module: ModuleType, seed: int) -> tuple[dict[str, float], float]:
    """What `measure` says of all plays of these dialogs."""
    dialogs = {f"t{n}": replies(module, seed + n) for n in range(DIALOGS)}
    tokenizer = word_tokenizer([text for texts in dialogs.values() for text in texts])
    engine, recorder = Instant(tokenizer, dialogs), Recorder(tokenizer, dialogs)
    question = "Add the numbers, two at a time, and answer with what they come to."
    tasks = [ag.Task(id=name, prompt=(ag.Message(role="user", content=f"{name}: {question}"),)) for name in dialogs]
    await ours(recorder, tasks)
    payloads = [[json.loads(ask.body()) for ask in asked.values()] for asked in recorder.asked.values()]
    with TemporaryDirectory() as folder, answering(recorder.replies, served(tokenizer, Path(folder))) as url:
        config = ag.SGLangConfig(context_tokens=engine.context_tokens)
        client = JsonClient(url)
        async with ag.SGLangEngine.attach(url, config=config, tokenizer=tokenizer) as remote:
            plays: dict[str, Callable[[], Awaitable[int]]] = {
                "text_floor": lambda: text_floor(dialogs),
                "token_floor": lambda: token_floor(engine, dialogs),
                "ours": lambda: ours(engine, tasks),
                "http_floor": lambda: http_floor(client, payloads),
                "over_http": lambda: ours(remote, tasks),
            }
            gc.freeze()  # what was imported is not looked through again and again
            figures = await measure(plays)
        client.close()
    return figures


def main() -> None:
    args = arguments(__doc__ or "")
    us, fastest = asyncio.run(measured(load_workloads(args.workloads), args.seed))
    figures: dict[str, Any] = {f"{name}_us": value for name, value in us.items()}
    figures["turns_per_s"] = fastest
    figures["times_the_token_floor"] = us["ours"] / us["token_floor"]
    figures["times_the_http_floor"] = us["over_http"] / us["http_floor"]
    report(
        "driver",
        figures=figures,
        reference=REFERENCE,
        goals={
            "CPU us a turn, in process": at_most(us["ours"], 70),
            "CPU us a turn, over HTTP": at_most(us["over_http"], 200),
        },
        as_json=args.json,
    )


if __name__ == "__main__":
    main()
