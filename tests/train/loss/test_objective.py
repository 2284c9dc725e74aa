"""Losses by hand and by plain autograd, and their independence of how the mini-batch is split."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from agentgym.samples import build_samples
from agentgym.train.batching.batch import Batch, collate
from agentgym.train.config import Divergence
from agentgym.train.loss.losses import divergence, policy_loss
from agentgym.train.loss.objective import rollout_log_ratios, sample_log_ratios
from agentgym.train.trainer import TrainConfig, Trainer
from agentgym.types.completion import Sampling
from agentgym.types.rollout import Group
from agentgym.types.sample import Sample

Groups = Callable[..., list[Group]]

OLD = -2.0
"""Log-probability of every token under the policy that sampled it."""


def row(advantages: list[float], mask: list[int] | None = None, *, name: str = "r") -> Sample:
    n = len(advantages)
    trained = np.array(mask or [1] * n, np.bool_)
    return Sample(
        group_id="g",
        rollout_id=name,
        segment=0,
        step=0,
        prompt_ids=np.array([1]),
        response_ids=np.arange(n) + 1,
        loss_mask=trained,
        logprobs=np.where(trained, OLD, 0),
        advantages=np.array(advantages, np.float32),
        weight=1.0,
    )


def terms(ratios: list[list[float]], batch: Batch, **settings: Any) -> tuple[float, list[list[float]]]:
    """Return the loss at these probability ratios, summed over trained tokens, and its gradient by the logprobs."""
    logprobs = torch.tensor([[math.log(r) + OLD for r in one] for one in ratios], requires_grad=True)
    loss, _ = policy_loss(logprobs, torch.zeros_like(logprobs), batch, TrainConfig(**settings), denominator=1.0)
    loss.backward()  # type: ignore[no-untyped-call]
    assert logprobs.grad is not None
    return float(loss.detach()), logprobs.grad.tolist()


# By hand


def test_clip_higher_lets_good_tokens_rise_further_than_bad_ones_fall() -> None:
    batch = collate([row([1, 1, -1])], pad_id=0)
    loss, gradient = terms([[1.25, 1.5, 0.75]], batch, clip_eps_high=0.28)
    assert loss == pytest.approx(-(1.25 + 1.28 - 0.8))
    assert gradient[0] == pytest.approx([-1.25, 0, 0])


def test_dual_clip_bounds_the_weight_of_a_bad_token_that_became_likely() -> None:
    batch = collate([row([-2, -2, 1])], pad_id=0)
    loss, gradient = terms([[2.5, 5, 5]], batch, dual_clip=3.0)
    assert loss == pytest.approx(2 * 2.5 + 2 * 3 - 1.2)
    assert gradient[0] == pytest.approx([2 * 2.5, 0, 0])
    assert terms([[2.5, 5, 5]], batch)[0] == pytest.approx(2 * 2.5 + 2 * 5 - 1.2)


def test_cispo_clips_the_weight_and_keeps_the_gradient_of_every_token() -> None:
    batch = collate([row([1, 2, -1, 9], [1, 1, 1, 0])], pad_id=0)
    loss, gradient = terms([[1.1, 4, 0.5, 1e30]], batch, loss="cispo")
    expected = [-1.1, -2 * 1.2, 0.8, 0]
    assert loss == pytest.approx(sum(expected), rel=1e-6)
    assert gradient[0] == pytest.approx(expected, rel=1e-6)


def test_gspo_uses_the_geometric_mean_of_the_segments_ratios() -> None:
    # sqrt(1.44 * 1) = 1.2 and sqrt(4 * 1) = 2; the second is clipped at 1.5, and the masked column is ignored.
    batch = collate([row([1, 1, 9], [1, 1, 0]), row([2, 2])], pad_id=0)
    loss, gradient = terms([[1.44, 1, 1e30], [0.5, 4, 1]], batch, loss="gspo", clip_eps_high=0.5)
    assert loss == pytest.approx(-(1.2 + 1.2 + 2 * 1.5 + 2 * 1.5))
    assert gradient == [pytest.approx([-1.2, -1.2, 0]), pytest.approx([0, 0, 0])]


def test_gspo_rollout_uses_the_mean_over_all_rows_of_a_rollout() -> None:
    rows = [row([1, 1], name="a"), row([1], name="a"), row([1], name="b")]
    batch = collate(rows, pad_id=0)
    logprobs = torch.tensor([[1.0, 0.5], [0.0, 0.0], [0.0, 0.25]]) + OLD
    found = rollout_log_ratios(sample_log_ratios(rows, batch, logprobs))
    assert found == {"a": pytest.approx(1.5 / 3), "b": pytest.approx(0.25)}


@pytest.mark.parametrize(
    ("estimator", "value", "gradient"),
    [("k1", 0.5, 0.5), ("k2", 0.125, 0.5), ("k3", math.exp(-0.5) - 0.5, 1 - math.exp(-0.5))],
)
def test_a_divergence_by_hand(estimator: Divergence, value: float, gradient: float) -> None:
    logprobs = torch.tensor([[-1.0, 1e30]], requires_grad=True)
    kl = divergence(logprobs, torch.tensor([[-1.5, 0.0]]), torch.tensor([[True, False]]), estimator=estimator)
    kl.sum().backward()  # type: ignore[no-untyped-call]
    assert kl.tolist() == [pytest.approx([value, 0])]
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [pytest.approx([gradient, 0])]


@pytest.mark.parametrize("below", [21.0, 60.0, 89.0, 1000.0])
def test_far_below_the_reference_k3_keeps_the_gradient_at_its_bound(below: float) -> None:
    logprobs = torch.tensor([[-below, -20.0, 0.0]], requires_grad=True)
    kl = divergence(logprobs, torch.zeros(1, 3), torch.ones(1, 3).bool(), estimator="k3")
    kl.sum().backward()  # type: ignore[no-untyped-call]
    assert logprobs.grad is not None
    steepest = 1 - math.exp(20)
    assert logprobs.grad.tolist() == [pytest.approx([steepest, steepest, 0.0], rel=1e-6)]
    at_bound = math.exp(20) - 1 - 20
    assert kl.tolist() == [pytest.approx([at_bound + (below - 20) * -steepest, at_bound, 0.0], rel=1e-6)]


def test_k1_and_k2_have_the_gradient_of_the_divergence_on_policy_but_k3_does_not() -> None:
    reference = torch.tensor([0.2, 0.3, 0.5]).log()

    def gradient(by: Callable[[Tensor], Tensor]) -> Tensor:
        logits = torch.tensor([0.5, -0.5, 0.25], requires_grad=True)
        by(logits.log_softmax(-1)).backward()  # type: ignore[no-untyped-call]
        assert logits.grad is not None
        return logits.grad

    exact = gradient(lambda log: (log.exp() * (log - reference)).sum())

    def expected(estimator: Divergence) -> Tensor:  # over the policy's own samples, which carry no gradient
        mask = torch.ones(1, 3).bool()
        return gradient(
            lambda log: (log.exp().detach() * divergence(log[None], reference[None], mask, estimator=estimator)).sum()
        )

    assert torch.allclose(expected("k1"), exact, atol=1e-6)
    assert torch.allclose(expected("k2"), exact, atol=1e-6)
    assert not torch.allclose(expected("k3"), exact, atol=1e-2)


def test_clipped_tokens_are_counted_by_every_loss() -> None:
    batch = collate([row([1, -1, -1, 1])], pad_id=0)
    logprobs = torch.tensor([[1.5, 0.5, 5, 0.5]]).log() + OLD
    mean = 1.875**0.25

    def clipped(**settings: Any) -> float:
        return policy_loss(logprobs, logprobs, batch, TrainConfig(**settings), denominator=1.0)[1].clipped

    assert [clipped(), clipped(dual_clip=3.0), clipped(loss="cispo")] == [2, 3, 4]
    assert clipped(loss="gspo", clip_eps_high=mean - 1 - 1e-4) == 2
    assert clipped(loss="gspo", clip_eps_high=mean - 1 + 1e-4) == 0


# Against plain autograd


def plain(name: str, logprobs: Tensor, rows: list[Sample]) -> Tensor:
    """Compute the papers' formulas, one row at a time."""
    total = torch.zeros(())
    for mine, sample in zip(logprobs, rows, strict=True):
        n = len(sample.response_ids)
        kept = torch.from_numpy(np.array(sample.loss_mask))
        log = mine[len(mine) - n :][kept]
        old = torch.from_numpy(np.array(sample.logprobs))[kept]
        worth = torch.from_numpy(np.array(sample.advantages))[kept]
        r = torch.exp(log - old)
        if name == "gspo":
            s = torch.exp((log - old).mean())  # one differentiable number, as in the paper
            total = total - torch.minimum(s * worth[0], s.clamp(0.8, 1.3) * worth[0])
        elif name == "cispo":
            total = total - (r.clamp(0.8, 1.3).detach() * worth * log).mean()
        else:
            pessimist = torch.minimum(r * worth, r.clamp(0.8, 1.3) * worth)
            total = total - torch.where(worth < 0, torch.maximum(pessimist, 2 * worth), pessimist).mean()
    return total / len(rows)


@pytest.mark.parametrize("name", ["ppo", "cispo", "gspo"])
def test_the_gradient_equals_that_of_the_papers_formula(name: str, groups_of: Groups) -> None:
    rows = list(build_samples(groups_of(5)))
    batch = collate(rows, pad_id=0)
    torch.manual_seed(0)
    start = torch.where(batch.loss_mask_BR, batch.logprobs_BR + 0.5 * torch.randn(batch.logprobs_BR.shape), 0)
    gradients = []
    for ours in (True, False):
        logprobs = start.clone().requires_grad_()
        settings: dict[str, Any] = {"loss": name, "dual_clip": 2.0 if name == "ppo" else None}
        made = TrainConfig(clip_eps_high=0.3, loss_agg="sample", **settings)
        loss = (
            policy_loss(logprobs, logprobs, batch, made, denominator=len(rows))[0]
            if ours
            else plain(name, logprobs, rows)
        )
        loss.backward()  # type: ignore[no-untyped-call]
        assert logprobs.grad is not None
        gradients.append(logprobs.grad)
    assert float(gradients[1].norm()) > 1e-2
    assert float((gradients[0] - gradients[1]).norm() / gradients[1].norm()) < 1e-5


# In the trainer


@pytest.fixture
def config() -> TrainConfig:
    return TrainConfig(lora_rank=4, lora_alpha=8, lr=1e-2, warmup_steps=0, grad_clip=1e-3, device="cpu")


LOSSES: list[dict[str, Any]] = [
    {"loss": "ppo", "dual_clip": 1.5, "kl_coef": 0.5},
    {"loss": "cispo", "kl_coef": 0.5, "kl_estimator": "k2"},
    {"loss": "gspo", "clip_eps_low": 0.05, "clip_eps_high": 0.05},
    {"loss": "gspo_rollout", "clip_eps_low": 0.05, "clip_eps_high": 0.05, "kl_coef": 0.5, "kl_estimator": "k1"},
]


def metrics(tiny_model: Path, config: TrainConfig, rows: list[Sample]) -> list[float]:
    """Return loss, gradient and divergence of a second step, at which adapter and base differ."""
    with Trainer(tiny_model, config) as trainer:
        trainer.train(rows)
        stats = trainer.train(rows)
    assert stats["train/clip_fraction"] > 0
    return [stats[f"train/{name}"] for name in ("loss", "grad_norm", "clip_fraction", "kl")] + [
        stats.get("train/reference_kl", 0.0)
    ]


@pytest.mark.parametrize("change", LOSSES, ids=lambda change: str(change["loss"]))
def test_a_loss_does_not_depend_on_its_split_into_micro_batches(
    tiny_model: Path, config: TrainConfig, groups_of: Groups, change: dict[str, Any]
) -> None:
    rows = list(build_samples(groups_of(1)))
    whole = metrics(tiny_model, replace(config, **change), rows)
    for max_tokens_per_microbatch in (1, 40):
        again = metrics(
            tiny_model, replace(config, **change, max_tokens_per_microbatch=max_tokens_per_microbatch), rows
        )
        assert again == pytest.approx(whole, rel=1e-4)


@pytest.mark.parametrize("layout", ["packed", "tree"])
@pytest.mark.parametrize("change", LOSSES, ids=lambda change: str(change["loss"]))
def test_a_loss_does_not_depend_on_its_layout(
    tiny_model: Path, config: TrainConfig, groups_of: Groups, change: dict[str, Any], layout: Any
) -> None:
    rows = list(build_samples(groups_of(1), merge=change["loss"] == "gspo"))
    padded, other = (
        metrics(tiny_model, replace(config, **change, layout=name, max_tokens_per_microbatch=120), rows)
        for name in ("padded", layout)
    )
    assert other == pytest.approx(padded, rel=1e-4)


def test_the_ratio_of_a_rollout_is_the_same_for_merged_and_unmerged_samples(
    tiny_model: Path, config: TrainConfig, groups_of: Groups
) -> None:
    by_rollout = replace(
        config, loss="gspo_rollout", clip_eps_low=0.05, clip_eps_high=0.05, max_tokens_per_microbatch=40
    )
    merged, parts = (metrics(tiny_model, by_rollout, list(build_samples(groups_of(1), merge=m))) for m in (True, False))
    assert parts == pytest.approx(merged, rel=1e-4)


def test_both_ratios_agree_for_a_rollout_with_one_segment(
    tiny_model: Path, config: TrainConfig, groups_of: Groups
) -> None:
    rows = [replace(row, weight=1.0) for row in build_samples(groups_of(1)) if row.segment == 0]
    one, other = (
        metrics(tiny_model, replace(config, loss=loss, clip_eps_low=0.05, clip_eps_high=0.05), rows)
        for loss in ("gspo", "gspo_rollout")
    )
    assert one == pytest.approx(other, rel=1e-5, abs=1e-6)


def test_the_reference_is_the_model_without_its_adapter(
    tiny_model: Path, config: TrainConfig, groups_of: Groups
) -> None:
    rows = list(build_samples(groups_of(1)))

    def scores(trainer: Trainer) -> np.ndarray:
        every = []
        for row in rows:
            ids = np.concatenate([row.prompt_ids, row.response_ids]).tolist()
            every.append(trainer.score(ids, sampling=Sampling())[-len(row.response_ids) :][row.loss_mask])
        return np.concatenate(every)

    with Trainer(tiny_model, replace(config, kl_coef=0.1, kl_estimator="k2")) as trainer:
        base = scores(trainer)
        assert trainer.train(rows)["train/reference_kl"] == 0
        away = scores(trainer) - base
        assert trainer.train(rows)["train/reference_kl"] == pytest.approx((away**2 / 2).mean(), rel=1e-3)
    assert np.abs(away).max() > 1e-2


def test_the_divergence_keeps_the_policy_near_its_reference(
    tiny_model: Path, config: TrainConfig, groups_of: Groups
) -> None:
    rows = list(build_samples(groups_of(1)))
    ends = []
    for coef in (1e-6, 10.0):
        with Trainer(tiny_model, replace(config, kl_coef=coef, kl_estimator="k2", grad_clip=1.0)) as trainer:
            ends.append([trainer.train(rows)["train/reference_kl"] for _ in range(8)][-1])
    assert ends[1] < ends[0] / 10


@pytest.mark.parametrize(
    ("change", "instead"),
    [
        ({"loss": "gspo"}, "loss='gspo_rollout'"),
        ({"importance_sampling": "sequence"}, "importance_sampling='token'"),
        ({"importance_sampling": "sequence_mask"}, "importance_sampling='token_mask'"),
        ({"importance_sampling": "geometric_mask"}, "importance_sampling='token_mask'"),
    ],
)
def test_unmerged_segments_are_refused_by_segment_losses(
    tiny_model: Path, config: TrainConfig, groups_of: Groups, change: dict[str, Any], instead: str
) -> None:
    parts = list(build_samples(groups_of(1), merge=False))
    ((field, value),) = change.items()
    with (
        Trainer(tiny_model, replace(config, **change)) as trainer,
        pytest.raises(
            ValueError, match=rf"^{field}: {value} needs each segment whole .*merge=True\), or set {instead}"
        ),
    ):
        trainer.train(parts)
