"""Training every weight: on one process and on two, in checkpoints and model folders, and with a frozen reference."""

import logging
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from agentgym.causal_lm.model_defaults import LARGE
from agentgym.cli.main import main as command
from agentgym.samples import build_samples
from agentgym.train import checks as settings_warnings, snapshot as snapshots
from agentgym.train.checkpoint import last_checkpoint
from agentgym.train.trainer import TrainConfig, Trainer
from agentgym.types.completion import Sampling
from agentgym.types.rollout import Group
from agentgym.types.sample import Sample
from tests.torchrun import of_each_rank, run_on_ranks
from tests.train.full_training import IDS, Result, train

TINY = Path(__file__).parents[2] / "recipes" / "checkpoints" / "chase"
SCRIPT = Path(__file__).with_name("full_script.py")
FULL = TrainConfig(method="full", lr=1e-3, rollouts_per_minibatch=4, decay_steps=6, kl_coef=0.1, device="cpu")


@pytest.fixture(scope="module")
def batches(groups_of: Callable[..., list[Group]]) -> list[list[Sample]]:
    return [list(build_samples(groups_of(seed))) for seed in (1, 2, 3)]


@pytest.fixture(scope="module")
def alone(
    tiny_model: Path, batches: list[list[Sample]], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Result, Result, Any]:
    """Train in one process.

    Returns:
        Its checkpoint after the first batch, all its results, the later ones, and its scores.
    """
    folder = tmp_path_factory.mktemp("alone")
    with Trainer(tiny_model, FULL) as trainer:
        first, _ = train(trainer, batches[:1])
        trainer.checkpoint(folder, 1, run={"said": "by one"})
        rest, weights = train(trainer, batches[1:])
        return folder, (first + rest, weights), (rest, weights), trainer.score(IDS, sampling=Sampling())


@pytest.fixture(scope="module")
def ranks(
    tiny_model: Path,
    batches: list[list[Sample]],
    alone: tuple[Path, Result, Result, Any],
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Path, list[Any]]:
    out = tmp_path_factory.mktemp("ranks")
    run_on_ranks(SCRIPT, (tiny_model, FULL, batches, alone[0]), out)
    return out, of_each_rank(out)


def scores_of(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    with torch.no_grad():
        log = model(input_ids=torch.tensor([IDS])).logits[0, :-1].float().log_softmax(-1)
    return log.gather(-1, torch.tensor(IDS[1:])[:, None])[:, 0].numpy()


def close(one: Result, other: Result) -> None:
    for mine, theirs in zip(one[0], other[0], strict=True):
        for name in ("train/loss", "train/grad_norm", "train/kl", "train/reference_kl", "train/lr"):
            assert mine[name] == pytest.approx(theirs[name], rel=1e-3, abs=1e-6), name
    assert one[1].keys() == other[1].keys()
    for name, weight in one[1].items():
        np.testing.assert_allclose(weight, other[1][name], atol=5e-5, err_msg=name)


# One process


def test_every_weight_moves_and_the_metrics_report_full_training(
    tiny_model: Path, alone: tuple[Path, Result, Result, Any]
) -> None:
    from transformers import AutoModelForCausalLM

    stats, weights = alone[1]
    before = dict(AutoModelForCausalLM.from_pretrained(tiny_model).named_parameters())
    assert weights.keys() == before.keys()  # the output layer is the embedding and has its name
    for name, weight in weights.items():
        assert np.abs(weight - before[name].detach().numpy()).max() > 1e-4, name
    assert {row["train/adapter_coverage"] for row in stats} == {1.0}


def test_a_checkpoint_resumes_bit_for_bit(
    tiny_model: Path, batches: list[list[Sample]], alone: tuple[Path, Result, Result, Any]
) -> None:
    with Trainer(tiny_model, FULL) as trainer:
        trainer.train(batches[2])  # another start, of which nothing remains
        assert trainer.resume(alone[0]) == (1, {"said": "by one"})
        stats, weights = train(trainer, batches[1:])
    assert stats == alone[2][0]
    assert all(np.array_equal(weights[name], weight) for name, weight in alone[2][1].items())


def test_bfloat16_keeps_float32_weights_and_rounds_them_only_for_the_forward(
    tiny_model: Path, batches: list[list[Sample]]
) -> None:
    small = replace(FULL, dtype="bfloat16", lr=1e-6, kl_coef=0.0, warmup_steps=0)
    with Trainer(tiny_model, small) as trainer:
        stored = dict(trainer._open_now.learner.policy.causal.named_parameters())
        before = {name: weight.detach().full_tensor().clone() for name, weight in stored.items()}
        trainer.train(batches[0])
        assert {weight.dtype for weight in stored.values()} == {torch.float32}
        moved = [float((weight.detach().full_tensor() - before[name]).abs().max()) for name, weight in stored.items()]
        assert 0 < max(moved) < 1e-4  # far below bfloat16's resolution
        given = trainer.weights()
        assert given is not None
        assert {weight.dtype for weight in given.tensors.values()} == {torch.bfloat16}
        assert trainer.dtype == "bfloat16"
    assert not dist.is_initialized()


def test_a_model_is_saved_as_a_folder_that_transformers_loads(
    tiny_model: Path, batches: list[list[Sample]], tmp_path: Path
) -> None:
    with Trainer(tiny_model, FULL) as trainer:
        trainer.train(batches[0])
        trainer.save(tmp_path / "saved")
        trainer.merge(tmp_path / "merged")
        trainer.checkpoint(tmp_path, 1)
        wanted = trainer.score(IDS, sampling=Sampling())
        assert np.abs(wanted - trainer.score(IDS, sampling=Sampling(), base=True)).max() > 1e-3
        with pytest.raises(ValueError, match=r"^method: full trains no adapter; use `weights\(\)`"):
            trainer.adapter()
    assert command(["merge", str(tmp_path / "step-000001"), str(tmp_path / "of-checkpoint")]) == 0
    for folder in ("saved", "merged", "of-checkpoint"):
        np.testing.assert_allclose(scores_of(tmp_path / folder), wanted, atol=1e-5)


def test_models_that_cannot_be_merged_raise_errors_with_advice(
    tiny_model: Path, alone: tuple[Path, Result, Result, Any], tmp_path: Path, capsys: Any
) -> None:
    assert command(["merge", str(tiny_model), str(tmp_path / "out")]) == 1
    assert "is a full model with nothing to merge; use it as `model`" in capsys.readouterr().err
    with Trainer(tiny_model, TrainConfig(device="cpu")) as trainer:
        trainer.checkpoint(tmp_path, 1)
        with pytest.raises(ValueError, match=r"^method: lora trains an adapter; use `adapter\(\)`"):
            trainer.weights()
    assert command(["merge", str(tmp_path / "step-000001"), str(tmp_path / "out")]) == 1
    assert "belongs to a run that trains an adapter; merge that run's adapter/ folder" in capsys.readouterr().err
    checkpoint = str(alone[0] / "step-000001")
    assert command(["merge", checkpoint, str(tmp_path / "out"), "--base", str(TINY)]) == 1
    assert "is not the model that was trained; pass that model" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_base_is_scored_before_the_first_step_or_with_a_frozen_copy(
    tiny_model: Path, batches: list[list[Sample]]
) -> None:
    with Trainer(tiny_model, replace(FULL, kl_coef=0.0)) as trainer:
        first = trainer.score(IDS, sampling=Sampling(), base=True)
        trainer.train(batches[0])
        with pytest.raises(ValueError, match=r"^base: all weights are trained .*set kl_coef above 0"):
            trainer.score(IDS, sampling=Sampling(), base=True)
    with Trainer(tiny_model, FULL) as trainer:
        trainer.train(batches[0])
        np.testing.assert_array_equal(trainer.score(IDS, sampling=Sampling(), base=True), first)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"method": "lora"}, "method full, but this run has lora"),
        ({"temperature": 0.5}, "temperature 1.0, but this run has 0.5"),
    ],
)
def test_a_checkpoint_of_another_method_or_temperature_is_refused_and_changes_nothing(
    tiny_model: Path, alone: tuple[Path, Result, Result, Any], change: dict[str, Any], said: str
) -> None:
    with Trainer(tiny_model, replace(FULL, **change)) as trainer:
        before = trainer.score(IDS, sampling=Sampling())
        with pytest.raises(ValueError, match=f"^checkpoint: was written with {said}"):
            trainer.resume(alone[0])
        assert np.array_equal(before, trainer.score(IDS, sampling=Sampling()))


def test_a_checkpoint_with_a_modified_part_is_not_used(alone: tuple[Path, Result, Result, Any], tmp_path: Path) -> None:
    shutil.copytree(alone[0] / "step-000001", tmp_path / "step-000001")
    part = tmp_path / "step-000001" / "rank-0" / "__0_0.distcp"
    content = bytearray(part.read_bytes())
    content[len(content) // 2] ^= 1
    part.write_bytes(content)
    with (
        pytest.warns(UserWarning, match=r"rank-0/__0_0\.distcp has changed since it was written: its checksum differs"),
        pytest.raises(ValueError, match="no complete checkpoint"),
    ):
        last_checkpoint(tmp_path)


def test_a_part_that_never_arrives_leaves_the_previous_checkpoint(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshots, "STILL_S", 0.0)
    with Trainer(tiny_model, FULL) as trainer:
        trainer.checkpoint(tmp_path, 1)
        alone_of_two = replace(trainer.snapshot(), world=2)
        with pytest.raises(TimeoutError, match="rank-1 did not write its part"):
            trainer.write(alone_of_two, tmp_path, 2)
        assert last_checkpoint(tmp_path).step == 1
        trainer.checkpoint(tmp_path, 3)  # the leftovers of step 2 are removed with the next one
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000001", "step-000003"]


@pytest.mark.parametrize("change", [{"dtype": "bfloat16"}, {"shard": True}, {}])
def test_an_opening_that_fails_leaves_nothing_open(
    tiny_model: Path, change: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from agentgym.train import learner

    def no_room(*_: Any) -> None:
        raise MemoryError("the reference does not fit")

    threads = torch.get_num_threads()
    with pytest.raises(ValueError, match="there is no folder"), Trainer("/nowhere", replace(FULL, **change)):
        pass
    assert not dist.is_initialized()
    monkeypatch.setattr(learner, "open_reference", no_room)
    with pytest.raises(MemoryError), Trainer(tiny_model, replace(FULL, **change)):
        pass
    assert not dist.is_initialized()
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"method": "full", "lr": 1e-3}, ["train.lr is 0.001, which is far above {}; set 1e-6 to 1e-5"]),
        ({"lr": 2e-3}, ["train.lr is 0.002, which is far above {}; set 1e-5 to 5e-4"]),
        ({"lr": 1e-6}, ["train.lr is 1e-06, which is far below {}; set 1e-5 to 5e-4"]),
        ({"temperature": 2.0}, ["train.temperature is 2, which is far above {}; set 1"]),
        ({"temperature": 0.1}, ["train.temperature is 0.1, which is far below {}; set 1"]),
        ({"lora_rank": 512}, ["train.lora_rank is 512, which is far above {}; set 8 to 64"]),
        ({}, []),
        ({"method": "full"}, []),
        ({"lr": 0.0}, []),
    ],
)
def test_a_value_far_outside_a_large_models_range_is_warned_of_with_the_value_to_set(
    change: dict[str, Any],
    said: list[str],
    tiny_model: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert LARGE == 50_000_000
    config = TrainConfig(device="cpu", **change)
    with caplog.at_level(logging.WARNING), Trainer(tiny_model, config):
        assert caplog.messages == []
    monkeypatch.setattr(settings_warnings, "LARGE", 1000)
    with caplog.at_level(logging.WARNING), Trainer(tiny_model, config):
        pass
    assert caplog.messages == [each.format("the usual range for a model of this size") for each in said]


# Several ranks


@pytest.mark.slow
def test_two_ranks_train_the_same_weights_as_one(
    ranks: tuple[Path, list[Any]], alone: tuple[Path, Result, Result, Any]
) -> None:
    for result in ranks[1]:
        close(result["trained"], alone[1])
        np.testing.assert_allclose(result["scores"], alone[3], atol=1e-4)
    np.testing.assert_allclose(scores_of(ranks[0] / "model"), alone[3], atol=1e-4)
    assert [result["kept"] for result in ranks[1]] == [True, False]


@pytest.mark.slow
def test_two_ranks_resume_full_training_from_the_checkpoint_of_one(
    ranks: tuple[Path, list[Any]], alone: tuple[Path, Result, Result, Any]
) -> None:
    for result in ranks[1]:
        assert result["resumed_at"] == (1, {"said": "by one"})
        close(result["resumed"], alone[2])


@pytest.mark.slow
def test_a_state_saved_by_one_rank_then_two_resumes_bit_for_bit(
    tiny_model: Path,
    batches: list[list[Sample]],
    ranks: tuple[Path, list[Any]],
    alone: tuple[Path, Result, Result, Any],
) -> None:
    files = {path.name for path in (ranks[0] / "two" / "step-000001").iterdir()}
    assert files == {"rank-0", "rank-1", ".metadata", "state.pt", "manifest.json"}
    with Trainer(tiny_model, FULL) as trainer:
        assert trainer.resume(ranks[0] / "two") == (1, {"said": "by two"})
        stats, weights = train(trainer, batches[1:])
    assert stats == alone[2][0]
    assert all(np.array_equal(weights[name], weight) for name, weight in alone[2][1].items())


# Families


@pytest.mark.parametrize("family", ["qwen3_moe", "gemma3"])
def test_weights_that_the_files_split_differently_are_named_as_in_the_files(family: str, tmp_path: Path) -> None:
    """Experts are one tensor in memory and many in files.

    Only the language model of a multimodal wrapper is trained.
    """
    from safetensors import safe_open

    from tests.support.model_families import build, samples

    build(family).save_pretrained(tmp_path / "base")
    with safe_open(tmp_path / "base" / "model.safetensors", framework="pt") as file:
        shapes = {name: torch.Size(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    with Trainer(tmp_path / "base", replace(FULL, loss="sft", shard=True, kl_coef=0.0, warmup_steps=0)) as trainer:
        before = trainer.score(IDS, sampling=Sampling())
        trainer.train(samples())
        given = trainer.weights()
        trainer.save(tmp_path / "saved")
        wanted = trainer.score(IDS, sampling=Sampling())
    assert given is not None
    assert {name: weight.shape for name, weight in given.files.items()}.items() <= shapes.items()
    assert sum(weight.numel() for weight in given.files.values()) == sum(w.numel() for w in given.tensors.values())
    left_out = shapes.keys() - given.files.keys()
    assert all("vision" in name or "multi_modal" in name for name in left_out)
    assert np.abs(wanted - before).max() > 1e-3
    np.testing.assert_allclose(scores_of(tmp_path / "saved"), wanted, atol=1e-5)
