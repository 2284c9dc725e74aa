"""A token's upstream gradient is known from its own log-probability, and training uses that."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agentgym.samples import build_samples
from agentgym.train.loss import linear_head
from agentgym.train.loss.objective import Objective
from agentgym.train.trainer import TrainConfig, Trainer
from agentgym.types.rollout import Group
from agentgym.types.sample import Sample

FULL = TrainConfig(method="full", lr=1e-3, device="cpu", threads=1)
BY_TOKEN: list[dict[str, Any]] = [
    {},
    {"layout": "tree", "loss_agg": "rollout"},
    {"kl_coef": 0.1, "dual_clip": 3.0},
    {"loss": "cispo"},
    {"loss": "gspo_rollout", "rollouts_per_minibatch": 4},
    {"loss": "sft"},
    {"importance_sampling": "token", "old_logprobs": "trainer", "rollouts_per_minibatch": 4},
    {"importance_sampling": "token_mask", "max_tokens_per_microbatch": 60},
]
BY_SEGMENT: list[dict[str, Any]] = [
    {"loss": "gspo"},
    {"importance_sampling": "sequence"},
    {"importance_sampling": "geometric_mask"},
]


@pytest.fixture
def samples(groups_of: Callable[..., list[Group]]) -> list[Sample]:
    """Return samples, some of them without a token that has an advantage."""
    found = list(build_samples(groups_of(1)))
    none = [replace(row, advantages=np.zeros_like(row.advantages)) for row in found[::3]]
    return [none[i // 3] if i % 3 == 0 else row for i, row in enumerate(found)]


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that records how many tokens' part of the layer's gradient was computed in backward."""
    real, seen = linear_head._LayerGradient.add, list[int]()

    def add(self: Any, gradient_N: torch.Tensor, *rest: Any) -> None:
        seen.append(len(gradient_N))
        real(self, gradient_N, *rest)

    monkeypatch.setattr(linear_head._LayerGradient, "add", add)
    return seen


@pytest.mark.parametrize("settings", BY_TOKEN, ids=str)
def test_the_upstream_gradient_is_exactly_as_predicted(
    tiny_model: Path, samples: list[Sample], late: list[int], settings: dict[str, Any]
) -> None:
    with Trainer(tiny_model, replace(FULL, **settings)) as trainer:
        trainer._open_now.learner.train(samples)
    assert not late


@pytest.mark.parametrize("settings", BY_SEGMENT, ids=str)
def test_a_ratio_over_a_whole_segment_is_left_to_backward(
    tiny_model: Path, samples: list[Sample], late: list[int], settings: dict[str, Any]
) -> None:
    with Trainer(tiny_model, replace(FULL, **settings)) as trainer:
        trainer._open_now.learner.train(samples)
    assert sum(late) > 0


@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.parametrize("settings", [BY_TOKEN[0], BY_TOKEN[2], BY_TOKEN[6]], ids=str)
def test_training_is_the_same_without_predicted_gradients(
    tiny_model: Path, samples: list[Sample], method: Any, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def norm() -> float:
        with Trainer(tiny_model, replace(FULL, method=method, **settings)) as trainer:
            return trainer._open_now.learner.train(samples)["train/grad_norm"]

    foreseen = norm()
    monkeypatch.setattr(Objective, "by_token", lambda *_: None)
    assert foreseen == pytest.approx(norm(), rel=1e-5)
