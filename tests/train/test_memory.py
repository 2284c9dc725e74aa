"""The trainer's memory: its estimate against a measured peak, and a probe of the speed that changes nothing."""

import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from agentgym.causal_lm import model_defaults
from agentgym.train import memory
from agentgym.train.learner import Learner
from agentgym.train.trainer import TrainConfig, Trainer
from agentgym.types.sample import Sample

ROOT = Path(__file__).parents[2]
PEAK = """
import sys
import numpy as np
from transformers import LlamaConfig, LlamaForCausalLM
from agentgym.machine.resources import peak_memory
from agentgym.train.trainer import TrainConfig, Trainer
from tests.train.test_memory import samples

LlamaForCausalLM(LlamaConfig(
    vocab_size=512, hidden_size=192, intermediate_size=512, num_hidden_layers=8, num_attention_heads=6,
    num_key_value_heads=2, max_position_embeddings=256,
)).save_pretrained(sys.argv[1])
with Trainer(sys.argv[1], TrainConfig(max_tokens_per_microbatch=4096, device="cpu")) as trainer:
    trainer.train(samples(2, 16))
    before = peak_memory()
    trainer.train(samples(64, 64))
    print(peak_memory() - before, trainer.describe().memory.activations)
"""


def samples(count: int, tokens: int) -> list[Sample]:
    """Return samples of this many tokens each, half of them trained."""
    half = tokens // 2
    return [
        Sample(
            group_id=f"g{count}",
            rollout_id=f"r{count}-{number}",
            segment=0,
            step=0,
            prompt_ids=np.arange(half) % 30 + 2,
            response_ids=np.arange(half) % 30 + 3,
            loss_mask=np.ones(half, np.bool_),
            logprobs=np.full(half, -3.0, np.float32),
            advantages=np.full(half, (-1.0) ** number, np.float32),
            weight=1.0,
        )
        for number in range(count)
    ]


def test_the_estimated_activations_are_within_a_factor_of_2_of_the_measured_peak(tmp_path: Path) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", PEAK, str(tmp_path)]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=True)
    measured, estimated = map(int, done.stdout.split()[-2:])
    assert measured > 50 << 20
    assert 0.5 < estimated / measured < 2


@pytest.mark.parametrize("method", ["lora", "full"])
def test_a_probe_of_the_speed_leaves_training_as_it_is_bit_for_bit(tiny_model: Path, method: str) -> None:
    config = TrainConfig(method=method, lr=1e-3, device="cpu")  # type: ignore[arg-type]
    found = []
    for probed in (False, True):
        random.seed(0), np.random.seed(0), torch.manual_seed(0)
        with Trainer(tiny_model, config) as trainer:
            if probed:
                assert (trainer.probe(300.0) or 0) > 0
            stats = trainer.train(samples(4, 16))
            after = trainer.adapter() if method == "lora" else trainer.weights()
            assert after is not None
            drawn = (random.random(), float(np.random.rand()), float(torch.rand(())))
            found.append((stats["train/loss"], stats["train/grad_norm"], drawn, after.tensors))
    plain, other = found
    assert plain[:3] == other[:3]
    assert all(np.array_equal(plain[3][name], other[3][name]) for name in plain[3])


def test_a_probe_takes_no_more_memory_than_there_is(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []
    compute = Learner._forward_and_backward

    def recorded(learner: Learner, tokens: int) -> None:
        tried.append(tokens)
        compute(learner, tokens)

    monkeypatch.setattr(Learner, "_forward_and_backward", recorded)
    monkeypatch.setattr(model_defaults, "CPU_ACTIVATIONS", 1 << 16)
    monkeypatch.setattr(model_defaults, "LEAST_TOKENS", 32)
    with Trainer(tiny_model, TrainConfig(device="cpu", max_tokens_per_microbatch=1_000_000)) as trainer:
        trainer.probe(300.0)
    assert tried == [16, 32]


def test_an_open_trainer_describes_what_it_trains(tiny_model: Path) -> None:
    with Trainer(tiny_model, TrainConfig(lora_rank=4, device="cpu")) as trainer:
        facts = trainer.describe()
    layer = 4 * (3 * (32 + 48) + (32 + 32) + 2 * (32 + 16) + (32 + 32))  # rank x (inputs + outputs) of each matrix
    assert facts.trained == 2 * layer
    assert facts.coverage == 1
    assert (facts.dtype, facts.device) == ("float32", "cpu")
    assert facts.memory.weights == 4 * (facts.weights + facts.trained)
    assert facts.memory.optimizer == 12 * facts.trained


def test_the_frozen_copy_of_a_model_that_is_trained_whole_counts_as_memory(tiny_model: Path) -> None:
    with Trainer(tiny_model, TrainConfig(method="full", lr=1e-5, kl_coef=0.1, device="cpu")) as trainer:
        facts = trainer.describe()
    assert facts.memory.weights == 2 * 4 * facts.weights
    assert facts.memory.optimizer == 12 * facts.weights


def test_an_open_trainers_config_has_the_values_found_for_the_model(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "usable_memory", lambda: 1 << 20)
    with Trainer(tiny_model, TrainConfig(device="cpu")) as trainer:
        assert trainer.config.max_tokens_per_microbatch == 256
        assert trainer.config.threads == 1
    with Trainer(tiny_model, TrainConfig(device="cpu", max_tokens_per_microbatch=100, threads=2)) as trainer:
        assert (trainer.config.max_tokens_per_microbatch, trainer.config.threads) == (100, 2)
