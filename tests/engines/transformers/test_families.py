"""The embedded engine computes a model family like transformers, or refuses it by name."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from agentgym.engines.transformers.batcher import Batcher, Request
from agentgym.engines.transformers.model import InferenceModel
from agentgym.types.completion import Completion, Sampling
from tests.support.model_families import FAMILIES, VOCAB, build

CONTEXT = 64
REFUSED = {
    "has layers of": [
        "bailing_hybrid",
        "bamba",
        "falcon_h1",
        "granitemoehybrid",
        "inkling_text",
        "jamba",
        "kimi_linear",
        "lfm2_moe",
        "lfm3",
        "minimax",
        "nemotron_h",
        "olmo_hybrid",
        "qwen3_5_moe_text",
        "qwen3_5_text",
        "qwen3_next",
        "recurrent_gemma",
        "zamba2",
    ],
    "can't compute it": [
        "axk1",
        "deepseek_v2",
        "deepseek_v3",
        "glm4_moe_lite",
        "gpt_bigcode",
        "mimo_v2_flash",
        "minicpm3",
        "youtu",
    ],
    "has no attention": ["falcon_mamba", "mamba", "mamba2", "rwkv", "xlstm"],
    "can't be replaced": ["bloom", "codegen", "falcon", "gpt_neo", "gpt_neox_japanese", "gptj", "mpt", "xglm"],
    "rope makes": ["phi3, longrope"],
}
"""The families that the engine doesn't support, by words of the error."""
WORDS = {name: words for words, names in REFUSED.items() for name in names}


def sampled(policy: InferenceModel, prompts: dict[str, np.ndarray]) -> dict[str, Completion]:
    """Return a turn of each prompt, sampled together."""
    batcher = Batcher(policy, slots=4, prefill_tokens=16, stop_ids=frozenset())
    done: dict[str, Any] = {}
    for name, ids in prompts.items():
        batcher.submit(Request(ids, name, 12, Sampling(), 1, partial(done.__setitem__, name)))
    while batcher.busy:
        batcher.step()
    return done


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in WORDS])
def test_log_probabilities_of_a_family_equal_those_of_transformers(name: str) -> None:
    """Windows and chunks are 5 tokens long, and the prompts share more than that."""
    reference, policy = build(name), InferenceModel(build(name), slots=4, context=CONTEXT, threads=1)
    draw = np.random.default_rng(0)
    shared = draw.integers(3, VOCAB, 24)
    prompts = {str(more): np.concatenate([shared, draw.integers(3, VOCAB, more)]) for more in (1, 5, 11)}
    for which, done in sampled(policy, prompts).items():
        ids = torch.tensor(np.concatenate([prompts[which], done.token_ids]))[None]
        with torch.inference_mode():
            logits = reference(input_ids=ids, use_cache=False).logits[0, :-1].float()
        expected = torch.log_softmax(logits, -1).gather(-1, ids[0, 1:, None])[len(prompts[which]) - 1 :, 0]
        np.testing.assert_allclose(done.logprobs, expected, atol=1e-4)


@pytest.mark.parametrize("name", WORDS)
def test_a_family_that_the_engine_does_not_support_is_refused_by_name(name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name.partition(',')[0]}: .*{WORDS[name]}"):
        InferenceModel(build(name), slots=4, context=CONTEXT, threads=1)
