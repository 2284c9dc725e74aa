"""Two and four processes compute the gradient of one, in every layout, on real processes: torchrun, gloo, FSDP2."""

import importlib.util
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from agentgym.samples import build_samples
from agentgym.train.trainer import TrainConfig
from agentgym.types.rollout import Group
from tests.torchrun import run_on_ranks

SCRIPT = Path(__file__).with_name("layout_script.py")


def run(ranks: int, work: Any, folder: Path) -> dict[Any, Any]:
    """Return the script's results on that many processes."""
    run_on_ranks(SCRIPT, work, folder, ranks=ranks)
    found: dict[Any, Any] = pickle.loads((folder / "out").read_bytes())
    return found


def alone(work: Any) -> dict[Any, Any]:
    """Return the script's results in this process."""
    spec = importlib.util.spec_from_file_location("layout_script", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    found: dict[Any, Any] = script.steps(*work)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_compute_the_gradient_of_one_process_in_every_layout(
    ranks: int, tiny_model: Path, grown: Callable[..., list[Group]], tmp_path: Path
) -> None:
    groups = grown(5)
    batches = {merged: list(build_samples(groups, merge=merged)) for merged in (True, False)}
    config = TrainConfig(
        lora_rank=4, lora_alpha=8, loss_agg="rollout", grad_clip=1e9, max_tokens_per_microbatch=150, device="cpu"
    )
    work = (tiny_model, config, batches)
    expected, gradients = alone((tiny_model, config, {True: batches[True]}))["padded", True]
    assert float(torch.cat([g.flatten() for g in gradients]).norm()) > 1e-3
    for how, (stats, found) in run(ranks, work, tmp_path).items():
        for name in ("loss", "grad_norm", "kl", "entropy", "trained_tokens"):
            assert stats[f"train/{name}"] == pytest.approx(expected[f"train/{name}"], rel=1e-5), (how, name)
        for mine, theirs in zip(found, gradients, strict=True):
            assert float((mine - theirs).norm()) <= 1e-5 * float(theirs.norm()) + 1e-9, how


@pytest.mark.slow
def test_two_ranks_clip_to_the_same_old_logprobs_as_one_process_in_every_layout(
    tiny_model: Path, grown: Callable[..., list[Group]], tmp_path: Path
) -> None:
    config = TrainConfig(
        lora_rank=4,
        lora_alpha=8,
        lr=5e-3,
        warmup_steps=0,
        clip_eps_low=0.01,
        clip_eps_high=0.01,
        importance_sampling="token_mask",
        old_logprobs="trainer",
        rollouts_per_minibatch=2,
        max_tokens_per_microbatch=60,
        device="cpu",
    )
    work = (tiny_model, config, {True: list(build_samples(grown(5)))})
    expected, gradients = alone(work)["padded", True]
    assert expected["train/clip_fraction"] > 0
    assert expected["train/optimizer_steps"] == 3
    for how, (stats, found) in run(2, work, tmp_path).items():
        for name in ("loss", "grad_norm", "clip_fraction", "is_fraction"):
            assert stats[f"train/{name}"] == pytest.approx(expected[f"train/{name}"], rel=1e-3), (how, name)
        for mine, theirs in zip(found, gradients, strict=True):
            assert float((mine - theirs).norm()) <= 1e-3 * float(theirs.norm()) + 1e-9, how
