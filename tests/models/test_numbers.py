"""What the embedded engine samples from a pretrained model, and its log-probabilities, beside plain transformers."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import agentgym as ag
from agentgym.chat.tokenizer import chat_tokenizer
from agentgym.types.arrays import Floats
from agentgym.types.completion import Completion
from recipes.real_models import GEMMA, GEMMA_TEMPLATE

pytestmark = pytest.mark.models

QUESTIONS = ("What is the capital of France?", "Name three colors.", "Write a line about the sea.", "3 + 6 =")
NEW_TOKENS = 12
GREEDY = ag.Sampling(temperature=0.0)


def prompts(folder: Path) -> list[list[int]]:
    """Return the ids of the questions, as transformers encodes them."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    template = tokenizer.chat_template or GEMMA_TEMPLATE.read_text()
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    return [
        tokenizer.apply_chat_template(chat, chat_template=template, add_generation_prompt=True, return_dict=False)
        for chat in chats
    ]


async def sampled(folder: Path, dtype: Any, asked: list[list[int]]) -> list[Completion]:
    """Sample from all prompts at once, as in a run."""
    config = ag.TransformersConfig(slots=len(asked), context_tokens=128, dtype=dtype, device="cpu")
    template = GEMMA_TEMPLATE if folder == GEMMA.folder else None
    async with ag.TransformersEngine(folder, config, tokenizer=chat_tokenizer(folder, template=template)) as engine:
        made = [
            engine.generate(ids, session=str(place), max_tokens=NEW_TOKENS, sampling=GREEDY, seed=0)
            for place, ids in enumerate(asked)
        ]
        return await asyncio.gather(*made)


@torch.inference_mode()
def logprobs(model: Any, prompt: list[int], completion: Completion) -> Floats:
    """Return the log-probabilities of the whole vocabulary at each sampled token, from one forward without a cache."""
    ids = torch.tensor([[*prompt, *completion.token_ids.tolist()]])
    logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
    scores: Floats = torch.log_softmax(logits.float(), -1).numpy()
    return scores


def of_sampled(scores: Floats, completion: Completion) -> Floats:
    """Return the log-probabilities of the sampled tokens."""
    return scores[range(len(completion.token_ids)), completion.token_ids]


@pytest.mark.parametrize("name", ["smollm2", "gemma"])
async def test_in_float32_greedy_ids_and_logprobs_equal_those_of_transformers(
    name: str, request: pytest.FixtureRequest
) -> None:
    folder: Path = request.getfixturevalue(name)
    asked = prompts(folder)
    completions = await sampled(folder, "float32", asked)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for prompt, completion in zip(asked, completions, strict=True):
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            made = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0
            )
        assert completion.token_ids.tolist() == made[0, len(prompt) :].tolist()
        expected = logprobs(model, prompt, completion)
        np.testing.assert_allclose(completion.logprobs, of_sampled(expected, completion), atol=2e-4)


@pytest.mark.parametrize("name", ["smollm2", "gemma"])
async def test_in_bfloat16_they_differ_no_more_than_transformers_differs_from_itself(
    name: str, request: pytest.FixtureRequest
) -> None:
    """The distance of bfloat16 from float32 in plain transformers is the yardstick."""
    folder: Path = request.getfixturevalue(name)
    asked = prompts(folder)
    completions = await sampled(folder, "bfloat16", asked)
    rough = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    exact = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ours, theirs, lost = [], [], []
    for prompt, completion in zip(asked, completions, strict=True):
        fine = logprobs(exact, prompt, completion)
        expected = of_sampled(fine, completion)
        ours.append(np.abs(completion.logprobs - expected))
        theirs.append(np.abs(of_sampled(logprobs(rough, prompt, completion), completion) - expected))
        lost.append(fine.max(-1) - expected)
    noise, own = np.concatenate(theirs), np.concatenate(ours)
    assert own.mean() < 2 * noise.mean()
    assert np.concatenate(lost).max() < 2 * noise.max()
