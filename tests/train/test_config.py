"""Settings that are out of bounds or contradict others are refused by field name."""

import math
from pathlib import Path
from typing import Any

import pytest

from agentgym.train.config import learning_rate, with_rate
from agentgym.train.trainer import TrainConfig, Trainer

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"loss": "reinforce"}, "loss: .*'ppo', 'cispo', 'gspo', 'gspo_rollout' or 'sft'"),
        ({"kl_estimator": "k4"}, "kl_estimator: .*'k1', 'k2' or 'k3'"),
        ({"balance": "rows"}, "balance: .*'length', 'square' or 'flops'"),
        (
            {"loss": "gspo", "importance_sampling": "token"},
            "importance_sampling, loss: gspo accepts no importance weight, .*set loss='ppo'",
        ),
        ({"loss": "cispo", "importance_sampling": "sequence_mask"}, "importance_sampling, loss: cispo accepts no"),
        ({"loss": "sft", "importance_sampling": "token"}, "importance_sampling, loss: sft accepts no"),
        ({"old_logprobs": "trainer", "loss": "sft"}, "old_logprobs, loss: .*set another loss"),
        (
            {"old_logprobs": "trainer", "rollouts_per_minibatch": 8},
            "old_logprobs, importance_sampling: .*set importance_sampling='token'",
        ),
        (
            {"old_logprobs": "trainer", "importance_sampling": "token"},
            "old_logprobs, rollouts_per_minibatch: .*set rollouts_per_minibatch",
        ),
        ({"old_logprobs": "both"}, "old_logprobs: .*'engine' or 'trainer'"),
        ({"dual_clip": 1.0}, "dual_clip: .*above 1"),
        ({"dual_clip": 3.0, "loss": "gspo"}, "dual_clip, loss, importance_sampling: .*loss='ppo'"),
        (
            {"dual_clip": 3.0, "importance_sampling": "token"},
            "dual_clip, loss, importance_sampling: .*importance_sampling='none'",
        ),
        (
            {"clip_eps_high": 0.3, "importance_sampling": "token"},
            "clip_eps_high, loss, importance_sampling: .*or leave clip_eps_high at 0.2",
        ),
        (
            {"clip_eps_low": 0.3, "loss": "sft"},
            "clip_eps_low, loss, importance_sampling: .*or leave clip_eps_low at 0.2",
        ),
        ({"kl_estimator": "k1"}, "kl_estimator, kl_coef: .*set kl_coef, or leave kl_estimator at 'k3'"),
        ({"is_cap": 3.0}, "is_cap, importance_sampling: .*set importance_sampling, or leave is_cap at 2.0"),
        ({"kl_coef": -0.1}, "kl_coef: .*at least 0"),
        ({"clip_eps_low": 1.5}, "clip_eps_low: .*at most 1"),
        ({"clip_eps_low": -0.1}, "clip_eps_low: .*at least 0"),
        ({"clip_eps_high": -0.1}, "clip_eps_high: .*at least 0"),
        ({"is_cap": 0.5}, "is_cap: .*at least 1"),
        ({"decay_steps": 0}, "decay_steps: .*at least 1"),
        ({"temperature": math.nan}, "temperature: .*finite"),
        ({"temperature": -1.0}, "temperature: .*at least 0"),
        ({"loss_agg": "mean"}, "loss_agg: .*'token', 'sample' or 'rollout'"),
        ({"loss_agg": 0.0}, "loss_agg: .*above 0"),
        ({"loss_agg": math.inf}, "loss_agg: .*finite"),
        ({"grad_clip": 0.0}, "grad_clip: .*above 0"),
        ({"grad_clip": -1.0}, "grad_clip: .*above 0"),
        ({"grad_clip": math.nan}, "grad_clip: .*finite"),
        ({"lr": -1e-3}, "lr: .*at least 0"),
        ({"lora_alpha": 0}, "lora_alpha: .*at least 1"),
        ({"lora_targets": "q_proj"}, "lora_targets: .*valid tuple"),
        ({"betas": (0.9, 1.0)}, "betas.1: .*below 1"),
        ({"weight_decay": -0.1}, "weight_decay: .*at least 0"),
        ({"loss_agg": True}, "loss_agg: .*valid number"),
        ({"shard": "yes"}, "shard: .*valid boolean"),
        ({"shard": 1}, "shard: .*valid boolean"),
        ({"lora_rank": True}, "lora_rank: .*valid integer"),
        ({"lr": "0.1"}, "lr: .*valid number"),
        ({"threads": 0}, "threads: .*at least 1"),
        ({"lora_targets": ()}, "lora_targets: .*at least 1 item"),
        ({"lora_targets": ("q_proj", "")}, "lora_targets.1: must not be empty"),
        ({"device": ""}, "device: must not be empty"),
        ({"device": "cpu\0"}, "device: must not contain a NUL character"),
        ({"rollouts_per_minibatch": 0}, "rollouts_per_minibatch: .*at least 1"),
        ({"method": "qlora"}, "method: .*'lora' or 'full'"),
        ({"method": "full", "lora_rank": 8}, "lora_rank, method: .*set method='lora', or leave lora_rank at 16"),
        ({"method": "full", "lora_alpha": 8}, "lora_alpha, method: .*or leave lora_alpha at 32"),
        ({"method": "full", "lora_targets": ("q_proj",)}, "lora_targets, method: .*method='full' trains no adapter"),
        ({"method": "full", "rslora": True}, "rslora, method: .*method='full' trains no adapter"),
        ({"method": "full", "dora": True}, "dora, method: .*method='full' trains no adapter"),
    ],
)
def test_contradictory_settings_are_refused_by_field_name(change: dict[str, Any], error: str) -> None:
    with pytest.raises(ValueError, match=f"^{error}"):
        TrainConfig(**change)


def test_lists_are_accepted_for_tuples_and_integers_for_floats() -> None:
    config = TrainConfig(lora_targets=["q_proj"], betas=[0.9, 0.99], lr=1, loss_agg=8)  # type: ignore[arg-type]
    assert (config.lora_targets, config.betas, config.lr, config.loss_agg) == (("q_proj",), (0.9, 0.99), 1.0, 8.0)


@pytest.mark.parametrize(
    ("model", "method", "rate"),
    [
        ("tiny", "lora", 2e-3),
        ("recipes/checkpoints/chase_compaction", "full", 2e-3),
        ("Qwen/Qwen3-0.6B", "lora", 1e-4),
        ("some/folder", "full", 1e-6),
    ],
)
def test_the_default_learning_rate_depends_on_the_model(
    model: str, method: Any, rate: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    config = TrainConfig(method=method)
    assert with_rate(config, model).lr == Trainer(model, config).config.lr == rate
    assert with_rate(TrainConfig(method=method, lr=0.5), model).lr == 0.5


def test_a_rate_without_a_value_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"^lr: the default depends on the model"):
        learning_rate(TrainConfig(), 0)
