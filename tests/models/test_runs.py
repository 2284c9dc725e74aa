"""Runs that train a pretrained model: each method and layout, resumed, merged, reloaded elsewhere and exported."""

import asyncio
import json
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import agentgym as ag
from agentgym.cli.main import main
from agentgym.launch.train import train_policy

pytestmark = pytest.mark.models

WORDS = ("color", "animal", "city", "fruit")


@ag.register("brief_words")
class BriefWords(ag.ToolEnv[ag.Task]):
    """Rewards shorter answers, so that almost every group has a signal."""

    limits = ag.Limits(turns=1, turn_tokens=8)

    @classmethod
    def tasks(cls, split: ag.Split) -> list[ag.Task]:
        return [ag.Task(id=f"{split}-{word}", prompt=f"Name one {word}, in one word.") for word in WORDS]

    @ag.reward
    def brief(self) -> float:
        return 1 / (1 + len(self.answer or ""))


# One rollout at a time, so that the engine computes every token in the same shapes, with the same float noise.
SETTINGS = ag.RunConfig(
    recipe="brief_words",
    env="brief_words",
    model="tiny",
    engine=ag.TransformersConfig(slots=1, context_tokens=128, device="cpu"),
    train=ag.TrainConfig(device="cpu"),
    prompts_per_step=2,
    group_size=4,
    eval_tasks=0,
)
METHODS: dict[str, tuple[int, dict[str, Any]]] = {
    "lora, padded": (1, {"layout": "padded"}),
    "lora, packed": (1, {"layout": "packed"}),
    "lora, tree": (2, {"layout": "tree"}),
    "full, packed": (1, {"layout": "packed", "method": "full"}),
}
"""The steps and the trainer's settings of each run."""


def metrics(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def tensors(folder: Path) -> dict[str, Any]:
    return dict(load_file(folder / "adapter" / "adapter_model.safetensors"))


@pytest.fixture(scope="module")
def trained(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that trains with a method and returns the run's folder; each method is trained once."""

    @cache
    def train(name: str) -> Path:
        steps, changes = METHODS[name]
        folder = tmp_path_factory.mktemp("run")
        run = replace(SETTINGS, model=smollm2, max_steps=steps, train=replace(SETTINGS.train, **changes))
        asyncio.run(train_policy(replace(run, output_dir=folder)))
        return folder

    return train


@pytest.mark.parametrize("name", METHODS)
def test_training_computes_the_log_probabilities_that_the_engine_sampled_with(
    name: str, trained: Callable[[str], Path]
) -> None:
    rows = metrics(trained(name))
    assert all(row["train/optimizer_steps"] == 1 for row in rows)
    assert max(row["mismatch/mean"] for row in rows) < 1e-4
    assert max(row["mismatch/max"] for row in rows) < 2e-3
    assert max(row["sync/logprob_gap"] for row in rows) < 2e-3


def test_the_layouts_give_the_same_gradient(trained: Callable[[str], Path]) -> None:
    first, *others = [metrics(trained(name))[0] for name in METHODS if name.startswith("lora")]
    for row in others:
        assert row["train/grad_norm"] == pytest.approx(first["train/grad_norm"], rel=1e-3)


def test_a_resumed_run_is_equal_bit_for_bit(trained: Callable[[str], Path], smollm2: Path, tmp_path: Path) -> None:
    steps, changes = METHODS["lora, tree"]
    run = replace(SETTINGS, model=smollm2, train=replace(SETTINGS.train, **changes))
    asyncio.run(train_policy(replace(run, output_dir=tmp_path / "run", max_steps=1)))
    asyncio.run(train_policy(replace(run, resume=tmp_path / "run", max_steps=steps)))
    ours, whole = tensors(tmp_path / "run"), tensors(trained("lora, tree"))
    assert ours.keys() == whole.keys()
    assert all(np.array_equal(tensor, whole[name]) for name, tensor in ours.items())


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT reads it
def test_plain_peft_and_transformers_load_what_was_trained(
    trained: Callable[[str], Path], smollm2: Path, tmp_path: Path
) -> None:
    adapter = trained("lora, tree") / "adapter"
    assert main(["merge", str(adapter), str(tmp_path / "merged")]) == 0
    ids = AutoTokenizer.from_pretrained(tmp_path / "merged")("The capital of France is", return_tensors="pt").input_ids
    base = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32).eval()
    with torch.inference_mode():
        before = base(ids).logits
        with_adapter = peft.PeftModel.from_pretrained(base, str(adapter)).eval()(ids).logits
        after = merged(ids).logits
    assert (after - with_adapter).abs().max() < 1e-3
    assert (after - before).abs().max() > 1e-2


def test_the_adapter_is_evaluated_on_its_model(trained: Callable[[str], Path]) -> None:
    result = asyncio.run(ag.evaluate("brief_words", trained("lora, tree") / "adapter", n=2))
    assert (result.failed, len(result.rollouts)) == (0, 2)


def test_the_rollouts_are_exported_as_conversations(
    trained: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = trained("lora, tree")
    capsys.readouterr()
    out = tmp_path / "chats.jsonl"
    assert main(["export", str(folder), "--to", "sft", "--output", str(out)]) == 0
    chats = [json.loads(line)["messages"] for line in out.read_text().splitlines()]
    left_out = sum(int(count) for count in re.findall(r"left out: (\d+)", capsys.readouterr().out))
    steps, _ = METHODS["lora, tree"]
    assert len(chats) + left_out == steps * SETTINGS.prompts_per_step * SETTINGS.group_size
    assert {message["role"] for chat in chats for message in chat} == {"user", "assistant"}
