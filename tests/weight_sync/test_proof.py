"""A policy that was lost or arrived only in part is detected in float32 and bfloat16; tiny updates are counted."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal
from unittest.mock import AsyncMock

import numpy as np
import pytest
import torch

import agentgym as ag
from agentgym.engines.transformers.engine import TransformersConfig, TransformersEngine
from agentgym.errors import EngineError
from agentgym.scheduling import Groups
from agentgym.train.trainer import TrainConfig, Trainer
from agentgym.types.completion import Sampling
from agentgym.types.sample import Sample
from agentgym.types.weights import Adapter
from agentgym.weight_sync.proof import Scored, judge, refuse_other_model
from agentgym.weight_sync.sync import WeightSync
from tests.run.test_resume import SETTINGS

MODEL = Path(__file__).parents[2] / "recipes" / "checkpoints" / "chase_compaction"
SAMPLING = Sampling(temperature=0.7)
PROBE = np.random.default_rng(0).integers(5, 500, 256).tolist()
DTYPES = ["float32", "bfloat16"]


def batch(seed: int) -> list[Sample]:
    """Return samples that change the policy."""
    draw = np.random.default_rng(seed)
    return [
        Sample(
            group_id="g",
            rollout_id=f"{i}",
            segment=0,
            step=0,
            prompt_ids=draw.integers(5, 500, 8),
            response_ids=draw.integers(5, 500, 40),
            loss_mask=np.ones(40, np.bool_),
            logprobs=np.full(40, -6.0, np.float32),
            advantages=np.full(40, 1.0 if i % 2 else -1.0, np.float32),
            weight=1.0,
        )
        for i in range(4)
    ]


class Faulty(TransformersEngine):
    """An engine that loads another adapter than the given one."""

    fault: Literal["none", "lost", "half", "old"] = "none"
    before: Adapter | None = None

    async def load_adapter(self, adapter: Any, *, version: int) -> None:
        before, self.before = self.before, adapter
        if self.fault == "lost":
            return
        given = before if self.fault == "old" else adapter
        if self.fault == "half":
            layers = sorted({name.split(".layers.")[1].split(".")[0] for name in adapter.tensors})
            kept = {f".layers.{layer}." for layer in layers[: len(layers) // 2]}
            tensors = {
                name: tensor if any(part in name for part in kept) else torch.zeros_like(tensor)
                for name, tensor in adapter.tensors.items()
            }
            given = Adapter(config=adapter.config, tensors=tensors)
        await super().load_adapter(given, version=version)

    async def load_weights(self, weights: Any, *, version: int) -> None:
        if self.fault != "lost":
            await super().load_weights(weights, version=version)


@asynccontextmanager
async def pair(
    dtype: Any, *, lr: float = 2e-3, trainers: Any = None, **settings: Any
) -> AsyncIterator[tuple[Trainer, Faulty, WeightSync]]:
    """Yield a trainer and an engine of one dtype, or with another dtype for the trainer."""
    config = TrainConfig(
        temperature=0.7, lr=lr, warmup_steps=0, device="cpu", dtype=trainers or dtype, loss="cispo", **settings
    )
    async with (
        Trainer(MODEL, config) as trainer,
        Faulty(MODEL, TransformersConfig(slots=1, dtype=dtype, device="cpu", context_tokens=256)) as engine,
    ):
        yield trainer, engine, WeightSync(trainer, engine, PROBE, SAMPLING)


@pytest.mark.parametrize("dtype", DTYPES)
async def test_a_policy_that_arrives_is_verified_step_after_step(dtype: str) -> None:
    async with pair(dtype) as (trainer, _, sync):
        for version in (1, 2, 3):
            await trainer.step(batch(version))
            metrics = await sync(version)
            assert metrics["sync/arrived"] == pytest.approx(1, abs=0.1)
            assert metrics["sync/unproven"] == 0


@pytest.mark.parametrize("fault", ["lost", "half", "old"])
@pytest.mark.parametrize("dtype", DTYPES)
async def test_a_policy_that_is_lost_halved_or_one_step_old_is_refused(dtype: str, fault: Any) -> None:
    async with pair(dtype) as (trainer, engine, sync):
        await trainer.step(batch(1))
        await sync(1)
        await trainer.step(batch(2))
        engine.fault = fault
        with pytest.raises(EngineError, match="does not sample from the policy that is trained"):
            await sync(2)


@pytest.mark.parametrize("dtype", DTYPES)
async def test_a_full_model_that_arrives_is_verified_and_one_that_is_lost_is_refused(dtype: str) -> None:
    async with pair(dtype, method="full", lr=1e-3) as (trainer, engine, sync):
        await sync.begin()
        for version in (1, 2):
            await trainer.step(batch(version))
            metrics = await sync(version)
            assert metrics["sync/arrived"] == pytest.approx(1, abs=0.1)
        resumed = WeightSync(trainer, engine, PROBE, SAMPLING, base=sync.base)
        await engine.load_adapter(None, version=0)  # like an engine that was opened again
        assert (await resumed(2))["sync/arrived"] == pytest.approx(1, abs=0.1)
        await trainer.step(batch(3))
        engine.fault = "lost"
        with pytest.raises(EngineError, match="does not sample from the policy that is trained"):
            await sync(3)


async def test_checking_a_full_model_requires_a_start_before_the_first_step() -> None:
    async with pair("float32", method="full") as (trainer, _, sync):
        await trainer.step(batch(1))
        with pytest.raises(ValueError, match=r"^base: all weights are trained .*score before the first step"):
            await sync(1)


@pytest.mark.parametrize("fault", ["none", "lost", "half", "old"])
async def test_a_bfloat16_run_ends_at_the_first_policy_that_did_not_arrive(fault: Any, tmp_path: Path) -> None:
    run = replace(
        SETTINGS,
        output_dir=tmp_path / "run",
        train=ag.TrainConfig(temperature=0.7, lr=2e-3, warmup_steps=0, device="cpu", dtype="bfloat16"),
        eval_tasks=0,
    )
    config = TransformersConfig(slots=6, dtype="bfloat16", device="cpu")
    rows: list[dict[str, float]] = []

    class Note(ag.Callback):
        def on_step(self, step: int, groups: Groups, metrics: Mapping[str, float]) -> None:
            rows.append(dict(metrics))
            engine.fault = fault  # from the second policy on

    async with Faulty(run.model, config) as engine:
        assert engine.dtype == "bfloat16"
        ended = (
            nullcontext() if fault == "none" else pytest.raises(EngineError, match="does not sample from the policy")
        )
        with ended:
            await ag.train_policy(run, callbacks=[Note()], engine=engine)
    assert all(row["sync/arrived"] == pytest.approx(1, abs=0.25) and not row["sync/unproven"] for row in rows)
    assert len(rows) == (run.max_steps if fault == "none" else 1)


async def test_an_update_too_small_to_detect_is_counted_and_verified_with_later_ones() -> None:
    async with pair("bfloat16", lr=3e-6, trainers="float32") as (trainer, _, sync):
        await trainer.step(batch(1))
        metrics = await sync(1)
        assert metrics["sync/unproven"] == 1
        assert "sync/arrived" not in metrics
        trainer.config = replace(trainer.config, lr=2e-3)
        trainer._open_now.learner.config = trainer.config  # larger steps, so that the test is short
        for version in (2, 3, 4):
            await trainer.step(batch(1))
            metrics = await sync(version)
        assert metrics["sync/arrived"] == pytest.approx(1, abs=0.25)


async def test_small_updates_that_are_lost_are_refused_as_soon_as_they_add_up() -> None:
    async with pair("bfloat16", lr=5e-6, trainers="float32") as (trainer, engine, sync):
        engine.fault = "lost"
        await trainer.step(batch(1))
        assert (await sync(1))["sync/unproven"] == 1

        async def go_on() -> None:
            for version in range(2, 100):
                await trainer.step(batch(1))
                await sync(version)

        with pytest.raises(EngineError, match="does not sample from the policy that is trained"):
            await go_on()


async def test_an_engine_that_left_the_base_model_before_the_first_sync_is_refused() -> None:
    async with pair("float32") as (trainer, engine, sync):
        await trainer.step(batch(1))
        await engine.load_adapter(trainer.adapter(), version=1)
        with pytest.raises(EngineError, match=r"before the first sync .* or it has loaded an adapter"):
            await sync(1)


def noisy(trainer: Any, size: float, seed: int) -> Scored:
    noise = np.random.default_rng(seed).normal(0, size, len(trainer))
    return Scored(trainer=trainer, engine=trainer + noise)


@pytest.mark.parametrize("ids", [30, 255])
@pytest.mark.parametrize("size", [1e-6, 0.02, 0.1])
def test_the_power_is_as_documented_whatever_the_noise(ids: int, size: float) -> None:
    """An update of 20 standard deviations in length is distinguished from none and from half of it in all 300 draws."""
    draw = np.random.default_rng(1)
    for seed in range(300):
        old_scores: Any = draw.normal(-2, 1, ids)
        change = draw.normal(0, 1, ids)
        start = old = noisy(old_scores, size, 4 * seed)
        change *= 20.5 * np.sqrt(2) * start.noise / np.linalg.norm(change)
        new = noisy(old_scores + change, size, 4 * seed + 1)
        assert judge(start, old, new, version=1, tolerance=1e-3).proven
        for part in (0.0, 0.5):
            partly = noisy(old_scores + part * change, size, 4 * seed + 2)
            lost = Scored(trainer=new.trainer, engine=partly.engine)
            with pytest.raises(EngineError, match="does not sample from the policy"):
                judge(start, old, lost, version=1, tolerance=1.0 if size > 1e-3 else 1e-3)


def test_two_float32_models_that_differ_are_refused_but_rounding_is_not() -> None:
    trainer: Any = np.linspace(-3, -1, 100)
    near = Scored(trainer=trainer, engine=trainer + 0.02)
    refuse_other_model(near, tolerance=1e-3, exact=False)
    with pytest.raises(EngineError, match="its model is not the trainer's"):
        refuse_other_model(near, tolerance=1e-3, exact=True)
    with pytest.raises(EngineError, match="its model is not the trainer's"):
        refuse_other_model(replace(near, engine=trainer - 0.5), tolerance=1e-3, exact=False)


@pytest.mark.parametrize("scores", [[0.0], [0.0] * len(PROBE), None])
async def test_an_engine_that_returns_the_wrong_number_of_scores_is_refused_by_name(scores: Any) -> None:
    async with pair("float32") as (_, engine, sync):
        engine.score = AsyncMock(return_value=scores)  # type: ignore[method-assign]
        with pytest.raises(EngineError, match=r"^engine: its scores of 256 ids have the shape .* expected \(255,\)"):
            await sync.begin()
