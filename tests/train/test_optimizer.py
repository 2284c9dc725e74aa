"""The optimizer's input and its use: gradient, clip, moments, decay and schedule."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from agentgym.samples import build_samples, demonstrations
from agentgym.train.batching.batch import collate
from agentgym.train.config import peak_rate
from agentgym.train.learner import Learner
from agentgym.train.loss.losses import denominator, policy_loss
from agentgym.train.loss.nonfinite import gradient_is_finite
from agentgym.train.trainer import TrainConfig, Trainer
from agentgym.types.rollout import Group
from agentgym.types.sample import Sample

Groups = Callable[..., list[Group]]
PLAIN = TrainConfig(lora_rank=4, lora_alpha=8, lr=1e-2, warmup_steps=0, grad_clip=1e9, device="cpu")


@pytest.fixture
def rows(groups_of: Groups) -> list[Sample]:
    return list(build_samples(groups_of(1)))


def learner_of(trainer: Trainer) -> Learner:
    return trainer._open_now.learner


def given_to_the_optimizer(trainer: Trainer, *batches: list[Sample]) -> list[Tensor]:
    """Return the gradients of each step that the optimizer takes."""
    learner, given = learner_of(trainer), list[Tensor]()

    def look(*_: Any) -> None:
        given.append(torch.cat([w.grad.flatten().clone() for w in learner._weights if w.grad is not None]))

    handle = learner._optimizer.register_step_pre_hook(look)
    for batch in batches:
        trainer.train(batch)
    handle.remove()
    return given


def stir(trainer: Trainer) -> None:
    """Set B to nonzero weights, so that the adapter changes the policy and A has a gradient."""
    torch.manual_seed(2)
    with torch.no_grad():
        for name, weight in learner_of(trainer).policy.named_parameters():
            if "lora_B" in name:
                weight.normal_(std=0.1)


def moved(trainer: Trainer) -> Tensor:
    return torch.cat([tensor.flatten().clone() for tensor in trainer.adapter().tensors.values()])


# The gradient


@pytest.mark.parametrize("loss_agg", ["token", "sample", "rollout", 50.0])
def test_the_optimizer_gets_the_gradient_of_the_mini_batchs_loss(
    tiny_model: Path, rows: list[Sample], loss_agg: Any
) -> None:
    with Trainer(tiny_model, replace(PLAIN, loss_agg=loss_agg, max_tokens_per_microbatch=40)) as trainer:
        stir(trainer)
        policy = learner_of(trainer).policy
        batch = collate(rows, pad_id=0)
        logprobs, entropy = policy(batch.inputs, batch.loss_mask_BR)
        total = denominator(rows, loss_agg)
        policy_loss(logprobs, entropy, batch, TrainConfig(loss_agg=loss_agg), denominator=total)[0].backward()  # type: ignore[no-untyped-call]
        expected = torch.cat([w.grad.flatten().clone() for w in learner_of(trainer)._weights if w.grad is not None])
        (given,) = given_to_the_optimizer(trainer, rows)
    assert float((given - expected).norm() / expected.norm()) < 1e-5


def test_a_gradient_above_the_clip_is_scaled_down_and_one_below_is_unchanged(
    tiny_model: Path, rows: list[Sample]
) -> None:
    with Trainer(tiny_model, PLAIN) as trainer:
        stir(trainer)
        (whole,) = given_to_the_optimizer(trainer, rows)
    norm = float(whole.norm())
    for clip, scale in ((norm / 10, 0.1), (norm * 10, 1.0)):
        with Trainer(tiny_model, replace(PLAIN, grad_clip=clip)) as trainer:
            stir(trainer)
            (given,) = given_to_the_optimizer(trainer, rows)
            assert float(given.norm()) == pytest.approx(norm * scale, rel=1e-4)
            assert float((given - whole * scale).norm()) < 1e-4 * norm


def test_each_step_gets_its_own_mini_batchs_gradient(tiny_model: Path, rows: list[Sample]) -> None:
    still = replace(PLAIN, lr=0.0)
    with Trainer(tiny_model, still) as trainer:
        stir(trainer)
        first, second, third = given_to_the_optimizer(trainer, rows, rows[:1], rows)
    assert torch.equal(first, third)  # nothing is left over from earlier steps
    assert not torch.allclose(first, second)


def test_the_divergence_is_normalized_like_the_loss(tiny_model: Path, rows: list[Sample]) -> None:
    nothing = [replace(row, advantages=np.zeros(len(row.response_ids), np.float32)) for row in rows]
    config = replace(PLAIN, kl_coef=1.0, kl_estimator="k2")
    norms = {}
    for loss_agg in ("token", 1.0, 4.0, "rollout"):
        with Trainer(tiny_model, replace(config, loss_agg=loss_agg)) as trainer:
            stir(trainer)
            (given,) = given_to_the_optimizer(trainer, nothing)
            norms[loss_agg] = given
    tokens = denominator(rows, "token")
    assert float(norms["token"].norm()) > 0
    np.testing.assert_allclose(norms[4.0] * 4, norms[1.0], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(norms["token"] * tokens, norms[1.0], rtol=1e-4, atol=1e-4)
    cosine = torch.nn.functional.cosine_similarity(norms["token"], norms["rollout"], dim=0)
    assert float(cosine) < 0.9999  # rollouts of different lengths weigh the same


# Adam


@pytest.mark.parametrize(("betas", "decay"), [((0.9, 0.95), 0.0), ((0.5, 0.8), 0.0), ((0.9, 0.95), 3.0)])
def test_a_step_equals_adamw_with_the_configs_betas_and_weight_decay(
    tiny_model: Path, rows: list[Sample], betas: tuple[float, float], decay: float
) -> None:
    with Trainer(tiny_model, replace(PLAIN, betas=betas, weight_decay=decay)) as trainer:
        stir(trainer)
        weights = [weight.detach().clone().requires_grad_() for weight in learner_of(trainer)._weights]
        gradients = given_to_the_optimizer(trainer, rows, rows[:3])
        own = torch.cat([weight.detach().flatten() for weight in learner_of(trainer)._weights])
    reference = torch.optim.AdamW(weights, lr=peak_rate(PLAIN), betas=betas, weight_decay=decay)
    for gradient in gradients:
        parts = torch.split(gradient, [weight.numel() for weight in weights])
        for weight, part in zip(weights, parts, strict=True):
            weight.grad = part.view_as(weight)
        reference.step()
    expected = torch.cat([weight.detach().flatten() for weight in weights])
    assert torch.allclose(own, expected, atol=1e-6)


def test_a_skipped_step_does_not_count_in_the_schedule(tiny_model: Path, rows: list[Sample]) -> None:
    broken = [replace(row, advantages=np.where(row.loss_mask, 3e38, 0)) for row in rows]
    with Trainer(tiny_model, replace(PLAIN, warmup_steps=4, lr=0.4)) as trainer:
        trainer.train(rows)
        with pytest.warns(RuntimeWarning, match="skipped"):
            trainer.train(broken)
        assert trainer.train(rows)["train/lr"] == pytest.approx(0.2)
        assert trainer.optimizer_steps == 2


# Steps that are skipped


def untrained(row: Sample) -> Sample:
    return replace(row, loss_mask=np.zeros(len(row.response_ids), np.bool_))


def test_a_mini_batch_without_trained_tokens_is_no_step_and_causes_a_warning(
    tiny_model: Path, rows: list[Sample]
) -> None:
    ids = list(dict.fromkeys(row.rollout_id for row in rows))
    first = [row if row.rollout_id != ids[-1] else untrained(row) for row in rows]
    with Trainer(tiny_model, replace(PLAIN, rollouts_per_minibatch=1)) as trainer:
        stats = trainer.train(rows)  # momentum, which would keep moving the weights
        with pytest.warns(RuntimeWarning, match=r"^1 mini-batch\(es\) without an optimizer step: the loss masks"):
            stats = trainer.train(first)
        assert (stats["train/untrained_steps"], stats["train/skipped_steps"]) == (1, 0)
        assert stats["train/optimizer_steps"] == len(ids) - 1
        before = moved(trainer)
        with pytest.warns(RuntimeWarning, match=f"^{len(ids)} mini-batch"):
            stats = trainer.train([untrained(row) for row in rows])
        assert (stats["train/untrained_steps"], stats["train/optimizer_steps"]) == (len(ids), 0)
        assert torch.equal(moved(trainer), before)


def test_metrics_cover_only_steps_that_were_applied(tiny_model: Path, rows: list[Sample]) -> None:
    name = rows[-1].rollout_id
    good = [row for row in rows if row.rollout_id != name]
    bad = [replace(r, advantages=np.where(r.loss_mask, 3e38, 0)) for r in rows if r.rollout_id == name]
    one_each = replace(PLAIN, rollouts_per_minibatch=1, kl_coef=0.1)
    with Trainer(tiny_model, one_each) as trainer:
        expected = trainer.train(good)
    with Trainer(tiny_model, one_each) as trainer, pytest.warns(RuntimeWarning, match="skipped"):
        stats = trainer.train([*good, *bad])
    assert stats["train/skipped_steps"] == 1
    for metric in ("loss", "grad_norm", "kl", "entropy", "clip_fraction", "reference_kl", "trained_tokens"):
        assert stats[f"train/{metric}"] == pytest.approx(expected[f"train/{metric}"], rel=1e-4, abs=1e-7), metric


def test_a_nonfinite_part_of_a_gradient_is_detected() -> None:
    weights = [torch.zeros(3, requires_grad=True) for _ in range(3)]
    weights[0].grad, weights[1].grad = torch.ones(3), torch.ones(3)
    assert gradient_is_finite(weights)
    for broken in (float("nan"), float("inf")):
        weights[1].grad = torch.tensor([0.0, broken, 0.0])
        assert not gradient_is_finite(weights)


# The trained policy


def test_the_policy_and_its_reference_are_scored_at_the_configs_temperature(
    tiny_model: Path, rows: list[Sample]
) -> None:
    hot = replace(PLAIN, temperature=0.5, kl_coef=0.1, kl_estimator="k2")
    with Trainer(tiny_model, hot) as trainer:
        assert trainer.train(rows)["train/reference_kl"] < 1e-9  # the policy equals its reference
        policy, batch = learner_of(trainer).policy, collate(rows, pad_id=0)
        with torch.no_grad():
            here = policy(batch.inputs, batch.loss_mask_BR, 0.5)[0]
            with policy.without_adapter():
                there = policy(batch.inputs, batch.loss_mask_BR, 0.5)[0]
        expected = float(((here - there)[batch.loss_mask_BR] ** 2 / 2).mean())
        assert trainer.train(rows)["train/reference_kl"] == pytest.approx(expected, rel=1e-3)


def test_a_rollouts_ratio_is_at_the_configs_temperature(tiny_model: Path, rows: list[Sample]) -> None:
    warm = replace(PLAIN, temperature=0.5, loss="gspo_rollout", clip_eps_low=1e-4, clip_eps_high=1e-4)
    with Trainer(tiny_model, warm) as trainer:
        policy, batch = learner_of(trainer).policy, collate(rows, pad_id=0)
        with torch.no_grad():
            scores = policy(batch.inputs, batch.loss_mask_BR, 0.5)[0]
        own = [
            replace(row, logprobs=np.where(row.loss_mask, part[-len(row.response_ids) :].numpy(), 0))
            for row, part in zip(rows, scores, strict=True)
        ]
        assert trainer.train(own)["train/clip_fraction"] == 0  # on policy all ratios are 1


def test_dropout_in_a_models_config_is_off_during_training(
    tiny_model: Path, rows: list[Sample], tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    model.config.attention_dropout = 0.5
    model.save_pretrained(tmp_path)
    gradients = []
    for folder in (tiny_model, tmp_path):
        with Trainer(folder, PLAIN) as trainer:
            stir(trainer)
            assert not any(part.training for part in learner_of(trainer).policy.model.modules())
            gradients += given_to_the_optimizer(trainer, rows)
    assert torch.equal(*gradients)


def test_bfloat16_shards_reduce_their_gradients_in_float32(tiny_model: Path) -> None:
    with Trainer(tiny_model, replace(PLAIN, shard=True, dtype="bfloat16")) as trainer:
        policy: Any = learner_of(trainer).policy
        sharded = [part for part in policy.modules() if hasattr(part, "_get_fsdp_state")]
        policies = [part._get_fsdp_state()._mp_policy for part in sharded]
    assert len(policies) == 3  # two layers and the root
    assert {(how.param_dtype, how.reduce_dtype) for how in policies} == {(torch.bfloat16, torch.float32)}


# Demonstrations


def test_a_demonstrations_segments_are_weighted_by_their_share_of_the_rollout(groups_of: Groups) -> None:
    rollouts = [rollout for group in groups_of(1) for rollout in group.rollouts]
    rows = demonstrations(rollouts)
    assert len(rows) > len(rollouts)
    for rollout in rollouts:
        mine = [row for row in rows if row.rollout_id == rollout.rollout_id]
        assert sum(row.weight for row in mine) == pytest.approx(1)
        for row in mine:
            assert row.weight == pytest.approx(row.loss_mask.sum() / rollout.sampled_tokens)
