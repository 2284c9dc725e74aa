"""Checkpoints are complete or absent, and training resumes from them as if it had never stopped."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agentgym.samples import build_samples
from agentgym.train.checkpoint import last_checkpoint, write_checkpoint
from agentgym.train.policy.adapter_io import write_merged
from agentgym.train.trainer import TrainConfig, Trainer
from agentgym.types.completion import Sampling
from agentgym.types.rollout import Group
from agentgym.types.sample import Sample
from tests.torchrun import of_each_rank, run_on_ranks

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def config() -> TrainConfig:
    return TrainConfig(lora_rank=4, lora_alpha=8, lr=1e-3, rollouts_per_minibatch=4, decay_steps=6, device="cpu")


@pytest.fixture(scope="module")
def batches(groups_of: Callable[..., list[Group]]) -> list[list[Sample]]:
    return [list(build_samples(groups_of(seed))) for seed in (1, 2, 3)]


Result = tuple[list[dict[str, float]], dict[str, Any]]


def train(trainer: Trainer, batches: list[list[Sample]]) -> Result:
    stats = [{k: v for k, v in trainer.train(b).items() if k != "train/seconds"} for b in batches]
    return stats, {name: tensor.numpy() for name, tensor in trainer.adapter().tensors.items()}


@pytest.fixture(scope="module")
def alone(
    tiny_model: Path, config: TrainConfig, batches: list[list[Sample]], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Result]:
    """Train in one process.

    Returns:
        Its checkpoint after the first batch, and its result on the other two without a stop.
    """
    folder = tmp_path_factory.mktemp("alone")
    with Trainer(tiny_model, config) as trainer:
        trainer.train(batches[0])
        trainer.checkpoint(folder, 1, run={"said": "by one", "probe": [1, 2]})
        return folder, train(trainer, batches[1:])


def test_training_resumes_bit_for_bit(
    tiny_model: Path, config: TrainConfig, batches: list[list[Sample]], alone: tuple[Path, Result]
) -> None:
    folder, (stats, tensors) = alone
    with Trainer(tiny_model, config, seed=7) as trainer:  # another start, of which nothing remains
        assert trainer.resume(folder) == (1, {"said": "by one", "probe": [1, 2]})
        assert trainer.optimizer_steps == 3
        again, resumed = train(trainer, batches[1:])
    assert again == stats
    assert all(np.array_equal(resumed[name], tensor) for name, tensor in tensors.items())


def test_random_number_generators_are_restored_too(tiny_model: Path, config: TrainConfig, tmp_path: Path) -> None:
    def draw() -> list[float]:
        import random

        return [random.random(), float(np.random.rand()), float(torch.rand(()))]

    with Trainer(tiny_model, config) as trainer:
        trainer.checkpoint(tmp_path, 1)
        drawn = draw()
        assert draw() != drawn
        trainer.resume(tmp_path)
        assert draw() == drawn


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"lora_alpha": 16}, "lora_alpha 8, but this run has 16"),
        ({"lora_rank": 8}, "lora_rank 4, but this run has 8"),
        ({"rslora": True}, "rslora False, but this run has True"),
        ({"dora": True}, "dora False, but this run has True"),
        ({"temperature": 0.5}, "temperature 1.0, but this run has 0.5"),
        ({"lora_targets": ("q_proj", "v_proj")}, r"lora_targets \['down_proj', .*this run has \['q_proj', 'v_proj'\]"),
    ],
)
def test_a_checkpoint_of_another_adapter_is_refused_by_its_setting_and_changes_nothing(
    tiny_model: Path, config: TrainConfig, alone: tuple[Path, Result], change: dict[str, Any], said: str
) -> None:
    with Trainer(tiny_model, replace(config, **change)) as trainer:
        before = trainer.score([3, 1, 4, 1, 5], sampling=Sampling())
        with pytest.raises(ValueError, match=f"^checkpoint: was written with {said}"):
            trainer.resume(alone[0])
        assert trainer.optimizer_steps == 0
        assert np.array_equal(before, trainer.score([3, 1, 4, 1, 5], sampling=Sampling()))


@pytest.mark.parametrize("change", ["a weight", "a setting"])
def test_a_checkpoint_of_another_base_model_of_the_same_shape_is_refused(
    tiny_model: Path, config: TrainConfig, alone: tuple[Path, Result], change: str, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    if change == "a weight":
        with torch.no_grad():
            model.get_decoder().layers[1].mlp.up_proj.weight.mul_(1.02)
    else:
        model.config.rms_norm_eps = 1e-3
    model.save_pretrained(tmp_path)
    with (
        Trainer(tmp_path, config) as trainer,
        pytest.raises(ValueError, match=r"^checkpoint: .* written with model "),
    ):
        trainer.resume(alone[0])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_same_base_can_resume_with_another_dtype_and_new_optimizer_settings(
    tiny_model: Path, config: TrainConfig, batches: list[list[Sample]], alone: tuple[Path, Result], dtype: Any
) -> None:
    ends = []
    for betas, decay in (((0.9, 0.95), 0.0), ((0.5, 0.9), 0.0), ((0.9, 0.95), 10.0)):
        changed = replace(config, betas=betas, weight_decay=decay, dtype=dtype)
        with Trainer(tiny_model, changed) as trainer:
            trainer.resume(alone[0])
            trainer.train(batches[1])
            ends.append(torch.cat([t.flatten() for t in trainer.adapter().tensors.values()]))
    assert not torch.allclose(ends[0], ends[1], atol=1e-5)
    assert not torch.allclose(ends[0], ends[2], atol=1e-4)


def test_a_checkpoint_that_does_not_name_its_policy_is_refused(
    tiny_model: Path, config: TrainConfig, alone: tuple[Path, Result], tmp_path: Path
) -> None:
    found = last_checkpoint(alone[0])
    del found.state["trainer"]["policy"]
    write_checkpoint(tmp_path, 1, found.state, keep=1)
    with (
        Trainer(tiny_model, config) as trainer,
        pytest.raises(ValueError, match="its base model and adapter are not recorded"),
    ):
        trainer.resume(tmp_path)


# Several ranks


@pytest.fixture(scope="module")
def ranks(
    tiny_model: Path,
    config: TrainConfig,
    batches: list[list[Sample]],
    alone: tuple[Path, Result],
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Path, list[Any]]:
    out = tmp_path_factory.mktemp("ranks")
    run_on_ranks(HERE / "checkpoint_script.py", (tiny_model, config, batches, alone[0]), out)
    return out, of_each_rank(out)


def close(one: Result, other: Result) -> None:
    for mine, theirs in zip(one[0], other[0], strict=True):
        for name in ("train/loss", "train/grad_norm", "train/kl", "train/lr"):
            assert mine[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-6), name
    for name, tensor in one[1].items():
        np.testing.assert_allclose(tensor, other[1][name], atol=5e-5, err_msg=name)


@pytest.mark.slow
def test_two_ranks_resume_from_the_checkpoint_of_one(ranks: tuple[Path, list[Any]], alone: tuple[Path, Result]) -> None:
    for result in ranks[1]:
        assert (result["step"], result["run"]["said"]) == (1, "by one")
        close((result["stats"], result["tensors"]), alone[1])


@pytest.mark.slow
def test_one_rank_resumes_from_the_checkpoint_of_two(
    tiny_model: Path,
    config: TrainConfig,
    batches: list[list[Sample]],
    ranks: tuple[Path, list[Any]],
    alone: tuple[Path, Result],
) -> None:
    with Trainer(tiny_model, config, seed=7) as trainer:
        assert trainer.resume(ranks[0] / "two") == (1, {"said": "by two"})
        close(train(trainer, batches[1:]), alone[1])


@pytest.mark.slow
def test_a_failure_on_the_first_rank_fails_on_all(ranks: tuple[Path, list[Any]]) -> None:
    first, second = (result["refused"] for result in ranks[1])
    assert first.startswith("resume: no complete checkpoint")
    assert second == f"rank 0: ValueError: {first}"


# Merging


@pytest.mark.slow
def test_a_merged_model_is_base_plus_adapter_without_peft(
    tiny_model: Path, config: TrainConfig, ranks: tuple[Path, list[Any]], alone: tuple[Path, Result], tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    ids = [3, 1, 4, 1, 5, 9, 2, 6]
    with Trainer(tiny_model, config) as trainer:
        untrained = trainer.score(ids, sampling=Sampling())
        trainer.resume(alone[0])
        trainer.merge(tmp_path / "merged")
        wanted = trainer.score(ids, sampling=Sampling())
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype="auto")
    with torch.no_grad():
        log = torch.log_softmax(model(torch.tensor([ids])).logits[0, :-1], -1)
    np.testing.assert_allclose(log.gather(-1, torch.tensor(ids)[1:, None])[:, 0], wanted, atol=1e-5)
    assert np.abs(wanted - untrained).max() > 1e-3
    assert not (tmp_path / "merged" / "adapter_config.json").exists()
    assert (ranks[0] / "merged" / "model.safetensors").exists()


def test_a_merged_model_is_summed_in_float32_and_written_in_the_bases_dtype(
    tiny_model: Path, alone: tuple[Path, Result], config: TrainConfig, tmp_path: Path
) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.bfloat16)
    base.save_pretrained(tmp_path / "base")
    words = Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="a").save_pretrained(tmp_path / "base")
    with Trainer(tiny_model, config) as trainer:
        trainer.resume(alone[0])
        adapter = trainer.adapter()
    write_merged(tmp_path / "base", adapter, tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype="auto").state_dict()
    for name, weight in base.state_dict().items():
        assert merged[name].dtype == torch.bfloat16
        key = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{key}.lora_A.weight" not in adapter.tensors:
            continue
        a, b = (adapter.tensors[f"{key}.lora_{which}.weight"] for which in "AB")
        expected = (weight.float() + (b @ a) * (config.lora_alpha / config.lora_rank)).to(torch.bfloat16)
        assert torch.equal(merged[name], expected), name
    assert PreTrainedTokenizerFast.from_pretrained(tmp_path / "merged").get_vocab() == {"a": 0, "b": 1}
