"""The decoupled loss: it clips against the trainer before the batch, and weights the engine's mismatch separately."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from agentgym.samples import build_samples
from agentgym.train.batching.batch import Batch, collate
from agentgym.train.batching.plan import mini_batches
from agentgym.train.learner import Learner
from agentgym.train.loss.losses import policy_loss
from agentgym.train.trainer import TrainConfig, Trainer
from agentgym.types.completion import Sampling
from agentgym.types.rollout import Group
from agentgym.types.sample import Sample

Groups = Callable[..., list[Group]]

CONFIG = TrainConfig(
    lora_rank=4,
    lora_alpha=8,
    lr=1e-2,
    warmup_steps=0,
    device="cpu",
    rollouts_per_minibatch=3,
    importance_sampling="token",
    old_logprobs="trainer",
)


# The loss, against a plain computation

WEIGHTS: dict[str, Callable[[Tensor], Tensor]] = {
    "token": lambda w: torch.where(w > 1.5, 1.5, w),
    "token_mask": lambda w: torch.where((w > 1.5) | (w < 1 / 1.5), 0.0, w),
    "sequence": lambda w: torch.where(w.prod() > 1.5, 1.5, w.prod()).expand(len(w)),
    "sequence_mask": lambda w: torch.where((w.prod() > 1.5) | (w.prod() < 1 / 1.5), 0.0, w.prod()).expand(len(w)),
    "geometric_mask": lambda w: w if 1 / 1.5 <= w.prod() ** (1 / len(w)) <= 1.5 else torch.zeros(len(w)),
}


def plain(loss: str, importance_sampling: str, here: Tensor, old: Tensor, rows: list[Sample]) -> tuple[Tensor, int]:
    """Compute Hilton et al. 2021 token by token: the sum of -w min(r A, clip(r) A), and the tokens whose w was cut."""
    total, cut = torch.zeros(()), 0
    for row, h, o in zip(rows, here, old, strict=True):
        kept = torch.from_numpy(np.array(row.loss_mask))
        if not kept.any():
            continue
        n = len(kept)
        prob, proximal = h[len(h) - n :][kept].exp(), o[len(o) - n :][kept].exp()
        behavior = torch.from_numpy(np.array(row.logprobs))[kept].exp()
        advantage = torch.from_numpy(np.array(row.advantages))[kept]
        raw = proximal / behavior
        weight = WEIGHTS[importance_sampling](raw)
        whole = raw.prod().expand(len(raw)) if importance_sampling.startswith("sequence") else raw
        cut += int((~torch.isclose(weight, whole)).sum())
        r = prob / proximal
        if loss == "cispo":
            terms = (r.clamp(0.9, 1.1) * advantage).detach() * prob.log()
        else:
            if loss == "gspo":  # in its token form: the value of the mean ratio, each token with its own gradient
                r = (r.log().mean().exp() / r).detach() * r
            terms = torch.stack([r * advantage, r.clamp(0.9, 1.1) * advantage]).amin(0)
        total = total - (weight * terms).sum()
    return total, cut


def drawn(groups_of: Groups) -> tuple[list[Sample], Batch, Tensor, Tensor]:
    """Return samples, and log-probabilities that differ from the engine's and from each other.

    Masked log-probabilities are arbitrary.
    """
    rows = list(build_samples(groups_of(5)))
    batch = collate(rows, pad_id=0)
    torch.manual_seed(0)
    shape, mask = batch.logprobs_BR.shape, batch.loss_mask_BR
    off = 0.4 * torch.randn(shape) + 0.3 * torch.randn(shape[0], 1)
    old = torch.where(mask, batch.logprobs_BR + off, 1e30)
    return rows, batch, old, torch.where(mask, old + 0.2 * torch.randn(shape), -1e30)


APART: dict[str, Any] = {"old_logprobs": "trainer", "rollouts_per_minibatch": 8}
"""Settings in which importance_sampling weights the gap between the trainer's and the engine's log-probabilities."""


@pytest.mark.parametrize("importance_sampling", WEIGHTS)
@pytest.mark.parametrize("loss", ["ppo", "cispo", "gspo"])
def test_the_decoupled_gradient_equals_a_plain_computation(
    groups_of: Groups, loss: Any, importance_sampling: Any
) -> None:
    rows, batch, old, start = drawn(groups_of)
    ours, theirs = start.clone().requires_grad_(), start.clone().requires_grad_()
    config = TrainConfig(
        loss=loss, clip_eps_low=0.1, clip_eps_high=0.1, importance_sampling=importance_sampling, is_cap=1.5, **APART
    )
    value, sums = policy_loss(ours, torch.zeros_like(ours), batch, config, denominator=1.0, old_BR=old)
    expected, cut = plain(loss, importance_sampling, theirs, old, rows)
    value.backward()  # type: ignore[no-untyped-call]
    expected.backward()  # type: ignore[no-untyped-call]
    assert ours.grad is not None
    assert theirs.grad is not None
    assert float(theirs.grad.norm()) > 1e-2
    assert float((ours.grad - theirs.grad).norm() / theirs.grad.norm()) < 1e-5
    if loss != "cispo":  # its value is the weight times the advantage, without the paper's log-probability
        assert value.item() == pytest.approx(expected.item(), rel=1e-4)
    assert sums.corrected == cut > 0
    assert 0 < sums.clipped < sums.tokens


def test_the_decoupled_loss_is_the_clipped_one_if_the_engine_equals_the_trainer(groups_of: Groups) -> None:
    _, batch, _, start = drawn(groups_of)
    gradients = []
    decoupled = TrainConfig(importance_sampling="token", dual_clip=1.1, **APART)
    for old, config in ((batch.logprobs_BR, decoupled), (None, TrainConfig(dual_clip=1.1))):
        here = start.clone().requires_grad_()
        loss, sums = policy_loss(here, torch.zeros_like(here), batch, config, denominator=1.0, old_BR=old)
        loss.backward()  # type: ignore[no-untyped-call]
        assert here.grad is not None
        gradients.append((loss.detach(), here.grad, sums.clipped, sums.corrected, sums.kl))
    for one, other in zip(*gradients, strict=True):
        assert torch.equal(torch.as_tensor(one), torch.as_tensor(other))


# The trainer


def of_the_trainer(model: Path, rows: list[Sample], shift: float = 0.0) -> list[Sample]:
    """Return the samples as if the trainer had sampled them.

    The engine finds every other token less likely by `shift`.
    """
    found = []
    with Trainer(model, CONFIG) as trainer:
        for row in rows:
            ids = np.concatenate([row.prompt_ids, row.response_ids]).tolist()
            logprobs = trainer.score(ids, sampling=Sampling())[-len(row.response_ids) :]
            odd = np.arange(len(row.response_ids)) % 2
            found.append(replace(row, logprobs=np.where(row.loss_mask, logprobs - shift * odd, 0)))
    return found


def trained(model: Path, config: TrainConfig, rows: list[Sample]) -> tuple[dict[str, float], Mapping[str, Tensor]]:
    with Trainer(model, config) as trainer:
        return trainer.train(rows), trainer.adapter().tensors


def distance(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    return max(float((one[name] - other[name]).abs().max()) for name in one)


@pytest.fixture(scope="module")
def rows(groups_of: Groups) -> list[Sample]:
    return list(build_samples(groups_of(1)))


def test_with_an_engine_that_agrees_both_modes_give_the_same_run(tiny_model: Path, rows: list[Sample]) -> None:
    agreeing = of_the_trainer(tiny_model, rows)
    by_engine = replace(CONFIG, old_logprobs="engine", importance_sampling="none")
    (stats, apart), (plainly, clipped) = (trained(tiny_model, config, agreeing) for config in (CONFIG, by_engine))
    assert stats["train/optimizer_steps"] == 3
    assert stats["train/clip_fraction"] == pytest.approx(plainly["train/clip_fraction"])
    assert stats["train/clip_fraction"] > 0
    assert stats["train/is_fraction"] == 0
    assert stats["train/loss"] == pytest.approx(plainly["train/loss"], abs=1e-5)
    assert distance(apart, clipped) < 1e-4


def test_the_engines_deviation_is_weighted_and_never_clipped(tiny_model: Path, rows: list[Sample]) -> None:
    """Every other token is 1.35 times as likely in the trainer: beyond the clip, within the cap."""
    off = of_the_trainer(tiny_model, rows, shift=0.3)
    still = replace(CONFIG, lr=0.0)
    stats, _ = trained(tiny_model, still, off)
    plainly, _ = trained(tiny_model, replace(still, old_logprobs="engine", importance_sampling="none"), off)
    shifted = np.concatenate([(np.arange(len(r.response_ids)) % 2)[r.loss_mask] for r in off])
    assert (stats["train/clip_fraction"], stats["train/is_fraction"]) == (0, 0)
    worth = np.concatenate([r.advantages[r.loss_mask] for r in off])
    assert plainly["train/clip_fraction"] == pytest.approx(((worth > 0) & (shifted == 1)).mean())
    truncated, _ = trained(tiny_model, replace(still, is_cap=1.2), off)
    assert truncated["train/clip_fraction"] == 0
    assert truncated["train/is_fraction"] == pytest.approx(shifted.mean())
    # A token's term is -w A before the policy has moved: by hand over the three mini-batches.
    terms = [
        [
            -advantage * (np.exp(0.3) if place % 2 else 1.0)
            for i in part
            for place, advantage in enumerate(off[i].advantages)
            if off[i].loss_mask[place]
        ]
        for part in mini_batches(off, rollouts=3)
    ]
    assert stats["train/loss"] == pytest.approx(np.mean([np.mean(part) for part in terms]), abs=1e-5)


def test_the_old_logprobs_are_those_before_the_first_step_of_the_batch(tiny_model: Path, rows: list[Sample]) -> None:
    """Check the loss of the second mini-batch against the policies after and before the first step."""
    config = replace(CONFIG, rollouts_per_minibatch=5, lr=3e-2, clip_eps_low=0.1, clip_eps_high=0.1, is_cap=1.5)
    begun, rest = ([rows[i] for i in part] for part in mini_batches(rows, rollouts=5))

    def scores(trainer: Trainer) -> list[Tensor]:
        whole = [np.concatenate([row.prompt_ids, row.response_ids]).tolist() for row in rest]
        of_all = [trainer.score(ids, sampling=Sampling()) for ids in whole]
        return [torch.from_numpy(s[-len(r.response_ids) :].copy()) for s, r in zip(of_all, rest, strict=True)]

    with Trainer(tiny_model, config) as trainer:
        old = scores(trainer)
        one = trainer.train(begun)
        here = scores(trainer)
    both, _ = trained(tiny_model, config, rows)
    batch = collate(rest, pad_id=0)
    wide = batch.logprobs_BR.shape[1]
    old_BR, here_BR = (torch.stack([torch.nn.functional.pad(o, (wide - len(o), 0)) for o in of]) for of in (old, here))
    assert float((old_BR - here_BR).abs().max()) > 0.05  # a step was applied
    loss, _ = plain("ppo", "token", here_BR, old_BR, rest)
    expected = (one["train/loss"] + float(loss) / float(batch.loss_mask_BR.sum())) / 2
    assert both["train/loss"] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("loss", ["ppo", "cispo", "gspo", "gspo_rollout"])
def test_layouts_and_micro_batches_change_nothing(tiny_model: Path, rows: list[Sample], loss: Any) -> None:
    config = replace(CONFIG, loss=loss, clip_eps_low=0.003, clip_eps_high=0.003, loss_agg="rollout", grad_clip=1e-3)
    stats, adapter = trained(tiny_model, replace(config, max_tokens_per_microbatch=None), rows)
    assert stats["train/clip_fraction"] > 0
    cuts: list[dict[str, Any]] = [
        {"layout": layout, "max_tokens_per_microbatch": 60} for layout in ("padded", "packed", "tree")
    ]
    for cut in cuts:
        again, other = trained(tiny_model, replace(config, **cut), rows)
        for name in ("loss", "grad_norm", "clip_fraction", "is_fraction"):
            assert again[f"train/{name}"] == pytest.approx(stats[f"train/{name}"], rel=1e-4), (cut, name)
        assert distance(adapter, other) < 1e-3


def test_one_extra_forward_is_run_for_all_mini_batches_but_the_first(
    tiny_model: Path, rows: list[Sample], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    scored = Learner._logprobs

    def counted(self: Learner, batch: Batch, temperature: float) -> Tensor:
        seen.append(len(batch))
        return scored(self, batch, temperature)

    monkeypatch.setattr(Learner, "_logprobs", counted)
    trained(tiny_model, CONFIG, rows)
    assert sum(seen) == sum(len(part) for part in mini_batches(rows, rollouts=3)[1:])
    seen.clear()
    trained(tiny_model, replace(CONFIG, old_logprobs="engine"), rows)
    trained(tiny_model, replace(CONFIG, rollouts_per_minibatch=1000), rows)
    assert seen == []


async def test_stored_logprobs_of_every_mini_batch_are_those_before_the_first_step(
    tiny_model: Path, rows: list[Sample]
) -> None:
    async with Trainer(tiny_model, CONFIG) as trainer:
        _, kept = await trainer.step_and_logprobs(rows)
    agreeing = {(r.rollout_id, r.segment, r.step): r for r in of_the_trainer(tiny_model, rows)}
    assert kept.keys() == agreeing.keys()
    for name, (logprobs, moved) in kept.items():
        assert not moved
        np.testing.assert_allclose(logprobs, agreeing[name].logprobs[agreeing[name].loss_mask], atol=1e-5)


@pytest.mark.parametrize("change", [{"loss": "gspo"}, {"importance_sampling": "sequence"}])
def test_unmerged_segments_are_refused_by_the_field_that_needs_whole_segments(
    tiny_model: Path, groups_of: Groups, change: dict[str, Any]
) -> None:
    parts = list(build_samples(groups_of(1), merge=False))
    with (
        Trainer(tiny_model, replace(CONFIG, **change)) as trainer,
        pytest.raises(ValueError, match=rf"^{next(iter(change))}: .* needs each segment whole"),
    ):
        trainer.train(parts)
