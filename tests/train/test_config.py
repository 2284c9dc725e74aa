"""Settings out of their bounds, and settings that mean nothing beside others, are refused by the field's name."""

import math
from typing import Any

import pytest

from agentgym.train.trainer import TrainConfig


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"loss": "reinforce"}, "loss\n.*'ppo', 'cispo', 'gspo', 'gspo_rollout' or 'sft'"),
        ({"kl_estimator": "k4"}, "kl_estimator\n.*'k1', 'k2' or 'k3'"),
        ({"balance": "rows"}, "balance\n.*'length', 'square' or 'flops'"),
        ({"loss": "gspo", "correction": "token"}, "correction, loss: gspo takes no correction, .*set loss='ppo'"),
        ({"loss": "cispo", "correction": "sequence_mask"}, "correction, loss: cispo takes no"),
        ({"loss": "sft", "correction": "token"}, "correction, loss: sft takes no"),
        ({"dual_clip": 1.0}, "dual_clip\n.*greater than 1"),
        ({"dual_clip": 3.0, "loss": "gspo"}, "dual_clip, loss, correction: .*loss='ppo'"),
        ({"dual_clip": 3.0, "correction": "token"}, "dual_clip, loss, correction: .*correction='none'"),
        ({"clip_high": 0.3, "correction": "token"}, "clip_high, loss, correction: .*or leave clip_high at 0.2"),
        ({"clip_low": 0.3, "loss": "sft"}, "clip_low, loss, correction: .*or leave clip_low at 0.2"),
        ({"kl_estimator": "k1"}, "kl_estimator, kl_coef: .*set kl_coef, or leave kl_estimator at 'k3'"),
        ({"correction_cap": 3.0}, "correction_cap, correction: .*set correction, or leave correction_cap at 2.0"),
        ({"kl_coef": -0.1}, "kl_coef\n.*greater than or equal to 0"),
        ({"clip_low": 1.5}, "clip_low\n.*less than or equal to 1"),
        ({"clip_low": -0.1}, "clip_low\n.*greater than or equal to 0"),
        ({"clip_high": -0.1}, "clip_high\n.*greater than or equal to 0"),
        ({"correction_cap": 0.5}, "correction_cap\n.*greater than or equal to 1"),
        ({"decay_steps": 0}, "decay_steps\n.*greater than or equal to 1"),
        ({"temperature": math.nan}, "temperature\n.*finite"),
        ({"temperature": -1.0}, "temperature\n.*greater than or equal to 0"),
        ({"normalise": "mean"}, "normalise.*\n.*'token', 'sample' or 'rollout'"),
        ({"normalise": 0.0}, "normalise.*\n.*greater than 0"),
        ({"normalise": math.inf}, "normalise.*\n.*finite"),
        ({"grad_clip": 0.0}, "grad_clip\n.*greater than 0"),
        ({"grad_clip": -1.0}, "grad_clip\n.*greater than 0"),
        ({"grad_clip": math.nan}, "grad_clip\n.*finite"),
        ({"lr": -1e-3}, "lr\n.*greater than or equal to 0"),
        ({"lora_alpha": 0}, "lora_alpha\n.*greater than or equal to 1"),
        ({"lora_targets": "q_proj"}, "lora_targets\n.*valid tuple"),
        ({"betas": (0.9, 1.0)}, "betas.1\n.*less than 1"),
        ({"weight_decay": -0.1}, "weight_decay\n.*greater than or equal to 0"),
        ({"normalise": True}, "normalise.*\n.*valid number"),
        ({"shard": "yes"}, "shard\n.*valid boolean"),
        ({"shard": 1}, "shard\n.*valid boolean"),
        ({"lora_rank": True}, "lora_rank\n.*valid integer"),
        ({"lr": "0.1"}, "lr\n.*valid number"),
        ({"threads": 0}, "threads\n.*greater than or equal to 1"),
        ({"rollouts_per_step": 0}, "rollouts_per_step\n.*greater than or equal to 1"),
    ],
)
def test_settings_that_mean_nothing_are_refused_by_the_name_of_the_field(change: dict[str, Any], error: str) -> None:
    with pytest.raises(ValueError, match=rf"(?s)for TrainConfig.*\n(  Value error, )?{error}"):
        TrainConfig(**change)


def test_lists_are_taken_for_tuples_and_whole_numbers_for_floats() -> None:
    config = TrainConfig(lora_targets=["q_proj"], betas=[0.9, 0.99], lr=1, normalise=8)  # type: ignore[arg-type]
    assert (config.lora_targets, config.betas, config.lr, config.normalise) == (("q_proj",), (0.9, 0.99), 1.0, 8.0)
