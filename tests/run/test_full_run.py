"""A run that trains the whole model: stopped and resumed, checked at each sync, and saved as a model folder."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import agentgym as ag
from agentgym.engines.scripted import Scripted, say
from agentgym.launch.train import train_policy
from agentgym.store.run_settings import refuse_changes
from tests.run.test_resume import SETTINGS, folder, metrics, resumed, steps, stop

FULL = replace(
    SETTINGS, train=replace(SETTINGS.train, method="full", lr=1e-3), eval_every=2, prompts_per_step=2, max_steps=3
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Complete a run without stopping it, and return its folder and its summary."""
    out = tmp_path_factory.mktemp("whole")
    return out, asyncio.run(train_policy(replace(FULL, output_dir=out)))


def weights(folder: Path) -> dict[str, Any]:
    return dict(load_file(folder / "model.safetensors"))


def test_each_step_changes_the_engines_weights_and_is_checked(whole: tuple[Path, dict[str, Any]]) -> None:
    rows = metrics(whole[0])
    assert sum(row["train/optimizer_steps"] for row in rows) >= 3
    for row in rows:
        assert row["sync/logprob_gap"] < 1e-3
        assert row["train/logprob_gap"] < 1e-3
        assert row["sync/arrived"] == pytest.approx(1, abs=0.05)
        assert row["train/adapter_coverage"] == 1.0


async def test_a_run_stopped_within_a_step_resumes_bit_for_bit_after_the_previous_step(
    whole: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    run = replace(FULL, output_dir=tmp_path / "run")
    await stop(run, 2 + 2 * 6 + 2 + 2)  # two evaluations, two steps, and two rollouts of the third
    assert steps(run) == ["step-000002"]
    left = weights(folder(run) / "model")
    assert not all(torch.equal(left[name], weight) for name, weight in weights(whole[0] / "model").items())
    await train_policy(resumed(run))
    assert metrics(folder(run)) == metrics(whole[0])
    ended = weights(folder(run) / "model")
    assert all(torch.equal(ended[name], weight) for name, weight in weights(whole[0] / "model").items())


async def test_the_final_model_folder_can_be_sampled_by_an_engine(whole: tuple[Path, dict[str, Any]]) -> None:
    out, summary = whole
    assert not (out / "adapter").exists()
    assert summary["best_step"] is not None
    for place in ("model", "best"):
        async with ag.TransformersEngine(out / place, ag.TransformersConfig(slots=4)) as engine:
            evaluation = await ag.evaluate("terse", engine, n=2, sampling=ag.Sampling(max_tokens=12))
            assert evaluation.failed == 0
            with pytest.raises(ValueError, match="it contains a whole model: pass it to the engine as its model"):
                await engine.load_adapter(out / place, version=1)


async def test_an_engine_without_load_weights_is_refused_before_the_first_rollout(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^train\.method: full loads .* Scripted has no `load_weights`"):
        await train_policy(replace(FULL, output_dir=tmp_path), engine=Scripted([say("1")]))


def test_adapters_for_servers_are_refused_and_merged_is_suggested() -> None:
    with pytest.raises(ValueError, match=r"^engine\.adapters, train\.method: tensors .*set engine\.adapters='merged'"):
        replace(FULL, engine=ag.SGLangConfig())
    assert replace(FULL, engine=ag.SGLangConfig(adapters="merged"))


def test_a_resumed_run_may_not_change_its_method_and_names_its_model_folder(
    whole: tuple[Path, dict[str, Any]],
) -> None:
    changed = replace(FULL, train=replace(FULL.train, method="lora"))
    with pytest.raises(
        ValueError, match=r"train\.method: the run has \"full\", not \"lora\".* model .*/model, in another out"
    ):
        refuse_changes(whole[0], changed)
