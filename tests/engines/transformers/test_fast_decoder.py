"""The fast decoder computes the same as the model and sees every change of the model's weights."""

from typing import Any

import numpy as np
import pytest
import torch
import transformers

from agentgym.engines.transformers.fast_decoder import dense
from agentgym.engines.transformers.lora import Merger
from agentgym.engines.transformers.model import InferenceModel
from agentgym.types.weights import Adapter

CONTEXT = 64
MODELS: list[tuple[str, dict[str, Any]]] = [
    ("Qwen3", {"head_dim": 16}),
    ("Qwen3", {"head_dim": 8, "num_key_value_heads": 4, "tie_word_embeddings": True}),
    ("Qwen2", {}),
    ("Llama", {"attention_bias": True, "mlp_bias": True}),
    ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}),
    ("Mistral", {"sliding_window": None}),
]


def build(kind: str, **changes: Any) -> Any:
    """Return a model with random weights, norms and biases."""
    shape = {
        "vocab_size": 61,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": CONTEXT,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**shape | changes))
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    return model.eval().requires_grad_(False)


def logits(model: Any, ids: np.ndarray) -> np.ndarray:
    """Return the model's own logits of every row's last id."""
    with torch.inference_mode():
        return np.asarray(model(input_ids=torch.from_numpy(ids), use_cache=False).logits[:, -1])


def by_parts(policy: InferenceModel, ids: np.ndarray) -> np.ndarray:
    """Return the engine's logits: prefill most ids, then decode one id at a time."""
    rows, width = np.arange(len(ids)), ids.shape[1] - 3
    hidden = policy.forward(rows, ids[:, :width], np.zeros(len(ids), np.int64), np.full(len(ids), width))
    for at in range(width, ids.shape[1]):
        hidden = policy.forward(rows, ids[:, at : at + 1], np.full(len(ids), at), np.ones(len(ids), np.int64))
    with torch.inference_mode():
        return np.asarray(policy._head(hidden))


@pytest.fixture
def ids() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 61, (3, 17))


@pytest.mark.parametrize(("kind", "changes"), MODELS)
def test_hidden_states_equal_the_models_own(kind: str, changes: dict[str, Any], ids: np.ndarray) -> None:
    model = build(kind, **changes)
    wanted = logits(model, ids)
    policy = InferenceModel(model, slots=3, context=CONTEXT, threads=1)
    assert policy._dense is not None
    np.testing.assert_allclose(by_parts(policy, ids), wanted, atol=2e-4)
    np.testing.assert_allclose(logits(model, ids), wanted, atol=1e-6)  # its weights are parts of others and unchanged


@pytest.mark.parametrize("target", ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"])
def test_an_adapter_merged_into_the_model_takes_effect(target: str, ids: np.ndarray) -> None:
    model = build("Qwen3", head_dim=8)
    policy = InferenceModel(model, slots=3, context=CONTEXT, threads=1)
    before = by_parts(policy, ids)
    name = next(name for name, _ in model.named_modules() if name.endswith(target))
    out, into = model.get_submodule(name).weight.shape
    tensors = {
        f"base_model.model.{name}.lora_A.weight": torch.full((2, into), 0.3),
        f"base_model.model.{name}.lora_B.weight": torch.randn(out, 2),
    }
    merger = Merger(model)
    merger.load(Adapter(config={"r": 2, "lora_alpha": 2}, tensors=tensors))
    after = by_parts(policy, ids)
    np.testing.assert_allclose(after, logits(model, ids), atol=2e-4)
    assert np.abs(after - before).max() > 1e-2
    merger.load(None)
    np.testing.assert_array_equal(by_parts(policy, ids), before)


def test_an_unknown_model_is_computed_by_its_own_modules(ids: np.ndarray) -> None:
    model = build("Olmo2")
    assert dense(model, CONTEXT) is None
    policy = InferenceModel(model, slots=3, context=CONTEXT, threads=1)
    np.testing.assert_allclose(by_parts(policy, ids), logits(model, ids), atol=2e-4)


def test_a_known_model_that_computes_something_else_is_detected(ids: np.ndarray) -> None:
    model = build("Qwen3", head_dim=8)
    mlp = model.model.layers[1].mlp
    forward = mlp.forward
    mlp.forward = lambda hidden: 1.5 * forward(hidden)
    policy = InferenceModel(model, slots=3, context=CONTEXT, threads=1)
    assert policy._dense is None
    np.testing.assert_allclose(by_parts(policy, ids), logits(model, ids), atol=2e-4)
