"""Models with sliding windows, chunks, capped scores or scaled logits: log-probabilities equal the model's own."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from agentgym.engines.transformers.batcher import Batcher, Request
from agentgym.engines.transformers.model import InferenceModel
from agentgym.train.config import TrainConfig
from agentgym.train.trainer import Trainer
from agentgym.types.completion import Completion, Sampling

CONTEXT, WINDOW, VOCABULARY = 96, 8, 61
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral": ("Mistral", {"sliding_window": WINDOW}),
    "qwen2": ("Qwen2", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1, "head_dim": 16}),
    "gemma2": (
        "Gemma2",
        {
            "sliding_window": WINDOW,
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma3": (
        "Gemma3Text",
        {
            "sliding_window": WINDOW,
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 10.0},
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            },
        },
    ),
    "cohere": ("Cohere", {"logit_scale": 0.25}),
    "granite": ("Granite", {"logits_scaling": 2.0}),
}


def build(name: str, attention: str = "eager") -> Any:
    """Return a random model of two layers, with weights large enough that each id in its context matters."""
    kind, changes = KINDS[name]
    shape = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": CONTEXT,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "attn_implementation": attention,
    }
    config = getattr(transformers, f"{kind}Config")(**shape | changes)
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind.removesuffix('Text')}ForCausalLM")(config)
    for weight in model.parameters():
        if weight.ndim > 1:
            torch.nn.init.normal_(weight, std=0.3)
    return model.eval()


def plain(model: Any, ids: Sequence[int]) -> np.ndarray:
    """Return the log-probability of each id but the first, from a plain forward pass of the model."""
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0, :-1].float()
    return torch.log_softmax(logits, -1).gather(-1, torch.tensor(list(ids[1:]))[:, None])[:, 0].numpy()


def answers(batcher: Batcher, prompts: dict[str, list[int]], max_tokens: int) -> dict[str, Completion]:
    done: dict[str, Any] = {}
    for name, ids in prompts.items():
        batcher.submit(Request(np.array(ids), name, max_tokens, Sampling(), 1, partial(done.__setitem__, name)))
    while batcher.busy:
        batcher.step()
    return done


def batcher_of(model: Any) -> Batcher:
    policy = InferenceModel(model, slots=8, context=CONTEXT, threads=1)
    return Batcher(policy, slots=8, prefill_tokens=32, stop_ids=frozenset())


def drawn(count: int, seed: int) -> list[int]:
    ids: list[int] = np.random.default_rng(seed).integers(0, VOCABULARY, count).tolist()
    return ids


@pytest.mark.parametrize("name", KINDS)
def test_log_probabilities_beyond_the_window_equal_those_of_plain_transformers(name: str) -> None:
    reference, batcher = build(name), batcher_of(build(name))
    shared = drawn(5 * WINDOW, 0)
    # Rows of different lengths, so that some are padded, and several with a common prefix, which is copied.
    prompts = {str(n): [*shared, *drawn(n, n)] for n in (1, 2, 9, 25)} | {"short": drawn(3, 9), "long": drawn(60, 8)}
    for name, done in answers(batcher, prompts, 3 * WINDOW).items():
        expected = plain(reference, [*prompts[name], *done.token_ids.tolist()])[len(prompts[name]) - 1 :]
        np.testing.assert_allclose(done.logprobs, expected, atol=1e-4)
    assert batcher.stats.copied_tokens >= 3 * len(shared)
    # A second turn continues on the KV of the first one.
    again = {"1": [*prompts["1"], *drawn(4, 3)]}
    done = answers(batcher, again, WINDOW)["1"]
    expected = plain(reference, [*again["1"], *done.token_ids.tolist()])[len(again["1"]) - 1 :]
    np.testing.assert_allclose(done.logprobs, expected, atol=1e-4)
    np.testing.assert_allclose(batcher.policy.score(np.array(shared), 1.0), plain(reference, shared), atol=1e-4)


@pytest.mark.parametrize("name", [name for name in KINDS if name not in ("cohere", "granite")])
def test_the_window_of_these_models_matters(name: str) -> None:
    """Otherwise the comparison above would show nothing."""
    model = build(name)
    ids = drawn(6 * WINDOW, 0)
    near = plain(model, ids)
    model.config.sliding_window = CONTEXT
    assert np.abs(plain(model, ids) - near).max() > 0.05


@pytest.mark.parametrize(("context", "fast"), [(WINDOW, True), (WINDOW + 1, False)])
@pytest.mark.parametrize("name", ["mistral", "qwen2", "qwen3"])
def test_the_fast_decoder_is_used_if_the_whole_context_is_in_the_window(name: str, context: int, fast: bool) -> None:
    policy = InferenceModel(build(name), slots=2, context=context, threads=1)
    assert (policy._dense is not None) == fast


@pytest.mark.parametrize("layout", ["padded", "packed", "tree"])
@pytest.mark.parametrize("name", ["mistral", "qwen2", "gemma2", "gemma3"])
def test_the_trainer_agrees_with_the_engine_beyond_the_window(name: str, layout: Any, tmp_path: Path) -> None:
    build(name).save_pretrained(tmp_path)
    policy = InferenceModel(build(name), slots=2, context=CONTEXT, threads=1)
    ids = drawn(6 * WINDOW, 0)
    with Trainer(tmp_path, TrainConfig(device="cpu", layout=layout)) as trainer:
        trained = trainer.score(ids, sampling=Sampling())
    np.testing.assert_allclose(policy.score(np.array(ids), 1.0), trained, atol=1e-4)
