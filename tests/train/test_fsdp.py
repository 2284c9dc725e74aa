"""Two processes train the same as one, on real processes: torchrun, gloo, FSDP2 on the CPU."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentgym.samples import build_samples
from agentgym.train.trainer import TrainConfig, Trainer
from agentgym.types.completion import Sampling
from agentgym.types.rollout import Group
from agentgym.types.sample import Sample
from tests.torchrun import of_each_rank, run_on_ranks

SCRIPT = Path(__file__).with_name("fsdp_script.py")


@pytest.fixture(scope="module")
def config() -> TrainConfig:
    return TrainConfig(
        lora_rank=4,
        lora_alpha=8,
        lr=1e-3,
        loss_agg="rollout",
        rollouts_per_minibatch=4,
        max_tokens_per_microbatch=48,
        device="cpu",
    )


@pytest.fixture(scope="module")
def batches(groups_of: Callable[..., list[Group]]) -> list[list[Sample]]:
    """Return three steps; the last has only one sample, so one of two ranks has nothing but padding."""
    last = list(build_samples(groups_of(9)))
    return [
        list(build_samples(groups_of(7), merge=False)),
        list(build_samples(groups_of(8))),
        [replace(last[0], weight=1.0)],
    ]


@pytest.fixture(scope="module")
def ranks(
    tiny_model: Path, config: TrainConfig, batches: list[list[Sample]], tmp_path_factory: pytest.TempPathFactory
) -> list[Any]:
    out = tmp_path_factory.mktemp("fsdp")
    run_on_ranks(SCRIPT, (tiny_model, config, batches), out)
    return of_each_rank(out)


@pytest.fixture(scope="module")
def alone(tiny_model: Path, config: TrainConfig, batches: list[list[Sample]]) -> dict[str, Any]:
    with Trainer(tiny_model, config) as trainer:
        return {
            "stats": [trainer.train(batch) for batch in batches],
            "tensors": {name: tensor.numpy() for name, tensor in trainer.adapter().tensors.items()},
            "scores": trainer.score([3, 1, 4, 1, 5], sampling=Sampling()),
        }


def test_two_ranks_have_the_same_loss_as_one(ranks: list[Any], alone: dict[str, Any]) -> None:
    for mine, theirs in zip(ranks[0]["stats"], alone["stats"], strict=True):
        for name in ("loss", "grad_norm", "kl", "entropy", "logprob_gap"):
            assert mine[f"train/{name}"] == pytest.approx(theirs[f"train/{name}"], rel=1e-4, abs=1e-6), name
        for name in ("optimizer_steps", "trained_tokens", "samples", "skipped_steps"):
            assert mine[f"train/{name}"] == theirs[f"train/{name}"], name


def test_two_ranks_have_the_same_adapter_as_one(ranks: list[Any], alone: dict[str, Any]) -> None:
    for result in ranks:
        assert result["tensors"].keys() == alone["tensors"].keys()
        for name, tensor in alone["tensors"].items():
            np.testing.assert_allclose(result["tensors"][name], tensor, atol=5e-5, err_msg=name)
        np.testing.assert_allclose(result["scores"], alone["scores"], atol=1e-4)
    moved = [np.abs(tensor).max() for name, tensor in alone["tensors"].items() if "lora_B" in name]
    assert min(moved) > 1e-3  # the tolerance above is far below the distance traveled


def test_all_ranks_report_the_same_metrics(ranks: list[Any]) -> None:
    for mine, theirs in zip(ranks[0]["stats"], ranks[1]["stats"], strict=True):
        assert {k: v for k, v in mine.items() if k != "train/seconds"} == {
            k: v for k, v in theirs.items() if k != "train/seconds"
        }


def test_every_rank_runs_the_same_number_of_forwards_even_with_one_sample(ranks: list[Any]) -> None:
    assert ranks[0]["stats"][2]["train/micro_batches"] == 2


def test_an_empty_batch_is_no_step_on_every_rank(ranks: list[Any]) -> None:
    assert [result["empty"]["train/optimizer_steps"] for result in ranks] == [0, 0]


def test_ranks_with_different_samples_are_refused_and_do_not_hang(ranks: list[Any]) -> None:
    for what in ("count", "ids", "advantages", "logprobs", "mask", "weight"):
        assert all("every rank must pass the same samples" in result["refused"][what] for result in ranks), what


def test_an_id_outside_the_vocabulary_is_refused_identically_on_every_rank(ranks: list[Any]) -> None:
    first, second = (result["refused"]["vocabulary"] for result in ranks)
    assert "token id 999" in first
    assert first == second


def test_objects_are_gathered_in_rank_order_on_every_rank(ranks: list[Any]) -> None:
    assert [result["gathered"] for result in ranks] == [[0, "rank 0", 1, "rank 1"]] * 2


def test_a_save_is_complete_on_every_rank_when_it_returns(ranks: list[Any]) -> None:
    assert all(result["written"] for result in ranks)
