"""The works of `benchmarks.http`: dialogs, the responses of their server, and ready-made requests for the floors."""

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import agentgym as ag
from agentgym.chat.tokenizer import HuggingFaceTokenizer
from agentgym.engines.base import Engine
from agentgym.scheduling import run_groups
from agentgym.types.completion import Completion, Sampling
from benchmarks.driver.dialogs import call_in, tracebacks
from benchmarks.driver.instant import Instant, replies, word_tokenizer
from benchmarks.driver.ours import DIALOGS, GROUP, TOOL, Adder, collect_put_off, task
from benchmarks.http.answering import Dialog, Reply
from benchmarks.http.loops import request, shown

LONG_DIALOGS = 4
LONG_IDS = 20_000
_WORDS = ["The", "sum", "of", "and", "is", "alpha", "bravo", "delta", "golf", "hotel", "india", "kilo", "lima"]


class RoomyAdder(Adder):
    """The driver benchmark's env with a context that is large enough for documents."""

    limits = ag.Limits(context_tokens=Instant.context_tokens)


@dataclass(frozen=True, kw_only=True)
class Work:
    """Dialogs and how they are run: each by `GROUP` rollouts, `concurrency` rollouts at once."""

    tasks: Sequence[ag.Task]
    dialogs: Mapping[str, Dialog]
    concurrency: int
    unseen: bool = False

    @property
    def calls(self) -> int:
        """The number of tool calls in all rollouts."""
        return GROUP * sum(len(dialog.replies) - 1 for dialog in self.dialogs.values())

    def bodies(self, tokenizer: HuggingFaceTokenizer) -> list[list[bytes]]:
        """Return the requests of each dialog as JSON, with unseen texts if the work has them."""
        if self.unseen:
            TOOL.unseen.extend(tracebacks(self.calls // GROUP, 7))
        return [_bodies(dialog, tokenizer) for dialog in self.dialogs.values()]

    async def play(self, engine: Engine) -> int:
        """Run all rollouts with our driver, and return the number of turns."""
        groups = await run_groups(RoomyAdder, self.tasks, engine, n=GROUP, concurrency=self.concurrency)
        collect_put_off()
        assert all(rollout.reward == 1.0 for rollout in groups.rollouts), groups.rollouts[0].error
        return sum(len(segment.turns) for rollout in groups.rollouts for segment in rollout.segments)


def _bodies(dialog: Dialog, tokenizer: HuggingFaceTokenizer) -> list[bytes]:
    ids, made = list(dialog.opening), []
    for turn, reply in enumerate(dialog.replies):
        made.append(json.dumps(request(ids, turn), separators=(",", ":")).encode())
        call = call_in(reply.text)
        seen = tokenizer.backend.encode(shown(TOOL.answer(**call)), add_special_tokens=False).ids if call else []
        ids = [*ids, *reply.token_ids, *seen]
    return made


class Ready(Instant):
    """An engine that has the responses ready, yields before each one, and stores the opening ids of each dialog."""

    yields = True

    def __init__(self, tokenizer: HuggingFaceTokenizer, dialogs: dict[str, list[str]]) -> None:
        super().__init__(tokenizer, dialogs)
        self.openings: dict[str, list[int]] = {}

    async def generate(
        self, token_ids: Sequence[int], *, session: str, max_tokens: int, sampling: Sampling, seed: int
    ) -> Completion:
        if session not in self.played:
            self.openings.setdefault(session.partition("/")[0], list(token_ids))
        return await super().generate(token_ids, session=session, max_tokens=max_tokens, sampling=sampling, seed=seed)

    async def dialogs(self, tasks: Sequence[ag.Task]) -> dict[str, Dialog]:
        """Return the dialogs of these tasks as a server runs them."""
        await run_groups(RoomyAdder, tasks, self, n=1)
        return {each.id: Dialog(self.openings[each.id], self._replies(each.id)) for each in tasks}

    def _replies(self, name: str) -> list[Reply]:
        turns = zip(self.ids[name], self.logprobs[name], strict=True)
        return [Reply(ids.tolist(), logprobs.tolist(), self.tokenizer.decode(ids.tolist())) for ids, logprobs in turns]


def document(seed: int) -> str:
    """Return a text of `LONG_IDS` words, which are about as many ids."""
    draw = random.Random(seed)
    return " ".join(draw.choice(_WORDS) for _ in range(LONG_IDS))


async def all_works(module: ModuleType, seed: int) -> tuple[dict[str, Work], Ready]:
    """Return every work by its name, and the engine that has the responses of all of them."""
    texts = {f"t{n}": replies(module, seed + n) for n in range(DIALOGS)}
    said = [text for each in texts.values() for text in each]
    tokenizer = word_tokenizer([*said, *tracebacks(300, seed + 1), document(seed)])
    engine = Ready(tokenizer, texts)
    short, long = [task(name) for name in texts], [_with_document(name, seed) for name in [*texts][:LONG_DIALOGS]]
    dialogs: dict[str, Any] = {"tasks": short, "dialogs": await engine.dialogs(short)}
    engine.openings.clear()
    return {
        "short64": Work(**dialogs, concurrency=64),
        "short384": Work(**dialogs, concurrency=GROUP * DIALOGS),
        "unseen64": Work(**dialogs, concurrency=64, unseen=True),
        "long32": Work(tasks=long, dialogs=await engine.dialogs(long), concurrency=GROUP * LONG_DIALOGS),
    }, engine


def _with_document(name: str, seed: int) -> ag.Task:
    asked = task(name).prompt[0]
    return ag.Task(id=name, prompt=(ag.Message(role="user", content=f"{asked['content']}\n{document(seed)}"),))


def served(tokenizer: HuggingFaceTokenizer, folder: Path) -> dict[str, Any]:
    """Return the server's info about itself.

    This also writes the config to `folder` that an engine with a tokenizer still reads from a model.
    """
    ends = tokenizer.tokenizer.eos_token_id
    config = {"model_type": "qwen2", "vocab_size": len(tokenizer.tokenizer), "eos_token_id": ends}
    (folder / "config.json").write_text(json.dumps(config))
    return {"model_path": str(folder), "max_req_input_len": Instant.context_tokens}
