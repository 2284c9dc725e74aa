"""The embedded engine loads a whole model's weights, computes with them everywhere, and restores its own."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from agentgym.engines.base import WeightsEngine
from agentgym.engines.transformers.engine import TransformersConfig, TransformersEngine
from agentgym.types.completion import Sampling
from agentgym.types.weights import ModelWeights
from tests.engines.test_adapter_files import adapter_of

MODEL = Path(__file__).parents[3] / "recipes" / "checkpoints" / "chase"
IDS = [5, 6, 7, 8, 9]
PLAIN = Sampling(temperature=1.0)


def moved(dtype: torch.dtype = torch.float32) -> tuple[ModelWeights, Any]:
    """Return every weight changed by a fraction of itself, norms included, and the model with these weights."""
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=dtype)
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.1 * weight * torch.randn(weight.shape, generator=draw).to(dtype))
    tensors = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    return ModelWeights(tensors=tensors, files=tensors), model


def scores_of(model: Any, ids: list[int]) -> Any:
    with torch.no_grad():
        log = model(input_ids=torch.tensor([ids])).logits[0, :-1].float().log_softmax(-1)
    return log.gather(-1, torch.tensor(ids[1:])[:, None])[:, 0].numpy()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_new_weights_are_scored_and_sampled_from(dtype: Any) -> None:
    weights, model = moved(getattr(torch, dtype))
    async with TransformersEngine(MODEL, TransformersConfig(slots=2, device="cpu", dtype=dtype)) as engine:
        assert isinstance(engine, WeightsEngine)
        before = await engine.score(IDS, sampling=PLAIN)
        await engine.generate(IDS, session="s", max_tokens=4, sampling=PLAIN, seed=1)  # its KV is useless afterwards
        await engine.load_weights(weights, version=1)
        atol = 1e-5 if dtype == "float32" else 0.05
        scored = await engine.score(IDS, sampling=PLAIN)
        np.testing.assert_allclose(scored, scores_of(model, IDS), atol=atol)
        assert np.abs(scored - before).max() > 0.1
        said = await engine.generate(IDS, session="s", max_tokens=6, sampling=PLAIN, seed=2)
        assert {version.version for version in said.versions} == {1}
        whole = [*IDS, *said.token_ids.tolist()]
        np.testing.assert_allclose(said.logprobs, scores_of(model, whole)[len(IDS) - 1 :], atol=atol)


async def test_the_models_own_weights_are_restored_exactly_whatever_was_loaded() -> None:
    weights, _ = moved()
    some = ModelWeights(tensors=dict(list(weights.tensors.items())[:3]), files={})
    async with TransformersEngine(MODEL, TransformersConfig(slots=1, device="cpu", dtype="float32")) as engine:
        own = await engine.score(IDS, sampling=PLAIN)
        sampled = await engine.generate(IDS, session="a", max_tokens=6, sampling=PLAIN, seed=2)
        adapter = adapter_of(engine)
        await engine.load_adapter(adapter, version=1)
        adapted = await engine.score(IDS, sampling=PLAIN)
        await engine.load_weights(weights, version=2)
        moved_ = await engine.score(IDS, sampling=PLAIN)
        await engine.load_weights(some, version=3)  # weights that are not given are the model's own
        assert not np.array_equal(await engine.score(IDS, sampling=PLAIN), moved_)
        await engine.load_weights(weights, version=4)
        assert np.array_equal(await engine.score(IDS, sampling=PLAIN), moved_)
        await engine.load_adapter(adapter, version=5)
        assert np.array_equal(await engine.score(IDS, sampling=PLAIN), adapted)
        await engine.load_adapter(None, version=6)
        assert np.array_equal(await engine.score(IDS, sampling=PLAIN), own)
        again = await engine.generate(IDS, session="b", max_tokens=6, sampling=PLAIN, seed=2)
        assert np.array_equal(again.logprobs, sampled.logprobs)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"strange.weight": torch.zeros(2)}, r"^weights: strange\.weight of shape \(2,\) is not in this model"),
        ({"model.norm.weight": torch.zeros(2)}, r"^weights: model\.norm\.weight of shape \(2,\) is \(\d+,\) in this"),
        (
            {"model.norm.weight": torch.full((64,), torch.nan)},
            r"^weights: model\.norm\.weight contains a value that is not",
        ),
    ],
)
async def test_weights_of_another_model_are_refused_and_change_nothing(change: dict[str, Any], error: str) -> None:
    async with TransformersEngine(MODEL, TransformersConfig(slots=1, device="cpu", dtype="float32")) as engine:
        before = await engine.score(IDS, sampling=PLAIN)
        size = engine._opened().policy.model.config.hidden_size
        change = {name: torch.full((size,), torch.nan) if len(value) == 64 else value for name, value in change.items()}
        tensors = {**moved()[0].tensors, **change}
        with pytest.raises(ValueError, match=error):
            await engine.load_weights(ModelWeights(tensors=tensors, files=tensors), version=1)
        assert engine.version == 0
        assert np.array_equal(await engine.score(IDS, sampling=PLAIN), before)
