"""Samples, models and devices on which a step would fail or compute wrongly are refused by name."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from agentgym.samples import build_samples
from agentgym.train.checks import ModelLimits
from agentgym.train.policy.fsdp import checkpoint_layers
from agentgym.train.policy.model import load_policy
from agentgym.train.trainer import TrainConfig, Trainer
from agentgym.types.completion import Sampling
from agentgym.types.rollout import Group
from agentgym.types.sample import Sample

Groups = Callable[..., list[Group]]
PLAIN = TrainConfig(lora_rank=4, lora_alpha=8, warmup_steps=0, device="cpu")


@pytest.fixture
def rows(groups_of: Groups) -> list[Sample]:
    return list(build_samples(groups_of(1)))


def tokens(row: Sample, place: int, value: int) -> Sample:
    ids = np.array(row.response_ids)
    ids[place] = value
    return replace(row, response_ids=ids)


def long(row: Sample, length: int) -> Sample:
    return replace(row, prompt_ids=np.full(length - len(row.response_ids), 3))


SPOILT: dict[str, tuple[Callable[[Sample], Sample], str]] = {
    "an id above the vocabulary": (lambda row: tokens(row, -1, 48), "token id 48, but the model's ids are 0 to 47"),
    "a negative id": (lambda row: tokens(row, 0, -1), "token id -1, but the model's ids are 0 to 47"),
    "an id of the prompt": (lambda row: replace(row, prompt_ids=np.array([999])), "token id 999"),
    "too many positions": (lambda row: long(row, 257), r"257 tokens, but the model has only 256 positions"),
    "a probability above 1": (
        lambda row: replace(row, logprobs=np.where(row.loss_mask, 0.5, 0)),
        "log-probability 0.5, which is above 0",
    ),
    "a log-probability that is not a number": (
        lambda sample: replace(sample, logprobs=np.where(sample.loss_mask, np.nan, 0)),
        "a log-probability that is not finite",
    ),
    "an advantage that is not a number": (
        lambda sample: replace(sample, advantages=np.where(sample.loss_mask, np.nan, 0)),
        "an advantage that is not finite",
    ),
    "an infinite advantage": (
        lambda sample: replace(sample, advantages=np.where(sample.loss_mask, -np.inf, 0)),
        "an advantage that is not finite",
    ),
    "a probability of 0": (
        lambda sample: replace(sample, logprobs=np.where(sample.loss_mask, -np.inf, 0)),
        "a log-probability that is not finite",
    ),
}


@pytest.mark.parametrize("spoilt", SPOILT)
def test_a_sample_that_does_not_fit_the_model_is_named_before_a_step(
    tiny_model: Path, rows: list[Sample], spoilt: str
) -> None:
    spoil, said = SPOILT[spoilt]
    odd = spoil(rows[1])
    with Trainer(tiny_model, PLAIN) as trainer:
        whose = f"^samples: rollout '{odd.rollout_id}', segment {odd.segment}, step {odd.step} has .*{said}"
        with pytest.raises(ValueError, match=whose):
            trainer.train([rows[0], odd])
        assert trainer.optimizer_steps == 0
        assert trainer.train(rows)["train/optimizer_steps"] == 1


def test_rows_up_to_the_last_position_and_small_rounding_errors_are_trained(
    tiny_model: Path, rows: list[Sample]
) -> None:
    row = replace(long(rows[0], 256), logprobs=np.where(rows[0].loss_mask, 1e-6, 0))
    with Trainer(tiny_model, PLAIN) as trainer:
        assert trainer.train([row])["train/optimizer_steps"] == 1
        with pytest.raises(ValueError, match="token id 48"):
            trainer.score([1, 48], sampling=Sampling())


def test_positions_of_a_scaled_rotary_embedding_count() -> None:
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}
    text = SimpleNamespace(max_position_embeddings=32_768, rope_parameters=rope)

    class Model:
        config = SimpleNamespace(get_text_config=lambda: text)

        def get_input_embeddings(self) -> Any:
            return torch.nn.Embedding(100, 2)

        def get_output_embeddings(self) -> Any:
            return torch.nn.Linear(2, 90)

    assert ModelLimits.of(Model()) == ModelLimits(vocabulary=90, positions=131_072)


@pytest.mark.parametrize("pad", [None, -1])
def test_any_padding_id_in_a_models_config_gives_the_same_step(
    tiny_model: Path, rows: list[Sample], tmp_path: Path, pad: int | None
) -> None:
    copy = edited(tiny_model, tmp_path, pad_token_id=pad)
    losses = []
    for model in (tiny_model, copy):
        with Trainer(model, PLAIN) as trainer:
            losses.append(trainer.train(rows)["train/grad_norm"])
    assert losses[0] == losses[1]


def test_a_padding_id_above_the_vocabulary_is_refused_by_its_name(tiny_model: Path, tmp_path: Path) -> None:
    vocabulary = json.loads((tiny_model / "config.json").read_text())["vocab_size"]
    copy = edited(tiny_model, tmp_path, pad_token_id=vocabulary)
    refused(copy, f"^model: .*pad_token_id is {vocabulary}, but .* 0 to {vocabulary - 1}; set it to null")


def edited(model: Path, folder: Path, **settings: Any) -> Path:
    copy = folder / "model"
    shutil.copytree(model, copy)
    config = json.loads((copy / "config.json").read_text()) | settings
    (copy / "config.json").write_text(json.dumps(config))
    return copy


# Models


def refused(model: Path | str, said: str, config: TrainConfig = PLAIN) -> None:
    with pytest.raises(ValueError, match=said), Trainer(model, config):
        pass


def test_an_adapter_folder_is_not_accepted_as_a_model(tiny_model: Path, tmp_path: Path) -> None:
    with Trainer(tiny_model, PLAIN) as trainer:
        trainer.save(tmp_path / "adapter")
    refused(tmp_path / "adapter", r"^model: .* contains an adapter, .*`agentgym merge`")


@pytest.mark.parametrize("name", ["/nowhere/model", "./nowhere", "runs/of/mine/model"])
def test_a_missing_folder_is_reported_as_missing(name: str) -> None:
    refused(name, f"^model: there is no folder {name}")


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    refused(tmp_path, f"^model: {tmp_path} cannot be loaded")


def test_a_checkpoint_that_lacks_a_weight_is_refused_and_not_filled_randomly(tiny_model: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    copy = edited(tiny_model, tmp_path)
    weights = load_file(copy / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    refused(
        copy,
        r"^model: the checkpoint in .* lacks 1 of the model's weights, such as model\.layers\.1\.mlp\.up_proj\.weight",
    )


def test_a_truncated_weight_file_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    copy = edited(tiny_model, tmp_path)
    content = (copy / "model.safetensors").read_bytes()
    (copy / "model.safetensors").write_bytes(content[: len(content) // 2])
    refused(copy, f"^model: {copy} cannot be loaded")


@pytest.mark.parametrize("setting", ["final_logit_softcapping", "logit_scale", "logits_scaling"])
def test_a_logit_setting_that_the_model_does_not_use_changes_nothing(
    tiny_model: Path, tmp_path: Path, setting: str
) -> None:
    scores = []
    for model in (tiny_model, edited(tiny_model, tmp_path, **{setting: 0.1})):
        with Trainer(model, PLAIN) as trainer:
            scores.append(trainer.score([3, 1, 4, 1, 5], sampling=Sampling()))
    assert scores[0].tolist() == scores[1].tolist()


@pytest.mark.filterwarnings("ignore:fan_in_fan_out:UserWarning")  # PEFT's own
@pytest.mark.parametrize("setting", ["gradient_checkpointing", "shard"])
def test_layers_are_found_by_their_number_whatever_their_name(tmp_path: Path, setting: str) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    size = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 64}
    GPT2LMHeadModel(GPT2Config(vocab_size=48, **size)).save_pretrained(tmp_path)
    plain = replace(PLAIN, lora_targets=("all-linear",))
    scores = []
    for config in (plain, replace(plain, **{setting: True})):  # type: ignore[arg-type]
        with Trainer(tmp_path, config) as trainer:
            scores.append(trainer.score([3, 1, 4, 1, 5], sampling=Sampling()))
    np.testing.assert_allclose(scores[1], scores[0], atol=1e-6)


def test_a_model_whose_layers_are_not_found_is_refused_by_the_setting_that_needs_them(tiny_model: Path) -> None:
    policy = load_policy(tiny_model, dtype=torch.float32, rank=2, alpha=4, seed=0)
    policy.causal.model.layers = torch.nn.ModuleDict()
    with pytest.raises(ValueError, match=r"^gradient_checkpointing: qwen3 has no list of its 2 decoder layers"):
        checkpoint_layers(policy)


# Devices


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_missing_gpu_is_reported_as_missing(tiny_model: Path) -> None:
    refused(tiny_model, "^device: cuda was requested, but torch finds no GPU", replace(PLAIN, device="cuda"))


def test_an_unknown_device_is_refused(tiny_model: Path) -> None:
    refused(tiny_model, "^device: expected auto, cpu, cuda or cuda:N, got 'gpu'", replace(PLAIN, device="gpu"))
