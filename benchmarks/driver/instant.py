"""An engine whose responses are ready, and those responses: the replies of a workload's dialogs as ids."""

import asyncio
import json
from collections.abc import Sequence
from types import ModuleType

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from agentgym.chat.tokenizer import HuggingFaceTokenizer
from agentgym.types.arrays import Floats
from agentgym.types.completion import Completion, Sampling, Version
from agentgym.types.weights import Adapter
from recipes.base import CHECKPOINTS
from recipes.warm_start import MARKS, SPECIAL


def word_tokenizer(texts: Sequence[str]) -> HuggingFaceTokenizer:
    """Return a byte-level BPE with about one token per word, as large models have, and the recipes' chat template."""
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
    """Return the assistant's side of one dialog, as the model writes it."""
    calls, answer = module.tool_dialog(seed=seed, **size)
    bodies = [json.dumps({"name": call["name"], "arguments": call["args"]}) for call in calls]
    said = [f"{c['text']}\n<tool_call>\n{body}\n</tool_call>" for c, body in zip(calls, bodies, strict=True)]
    return [f"{text}<|im_end|>" for text in [*said, answer]]


class Instant:
    """An engine that has every response ready: the ids and log-probabilities of dialog `t<n>`."""

    context_tokens = 1 << 20
    version = 0
    yields = False
    """Whether to yield to the event loop before each response, so that all rollouts are alive at once."""

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
