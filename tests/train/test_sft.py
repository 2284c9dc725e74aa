"""Imitation: demonstrations as samples, and their cross-entropy in the policy gradient's code path."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import agentgym as ag
from agentgym.samples import demonstrations
from agentgym.train.batching.batch import collate
from agentgym.train.loss.losses import policy_loss
from agentgym.train.trainer import TrainConfig, Trainer
from agentgym.types.completion import Version
from agentgym.types.rollout import Group, Rollout, Segment, Turn
from agentgym.types.sample import Sample

Groups = Callable[..., list[Group]]


def rollout(*spans: tuple[int, int], length: int = 8) -> Rollout:
    """Return one segment of ids 1, 2, 3, ... whose turns are these spans."""
    sampled = np.zeros(length, np.bool_)
    for start, stop in spans:
        sampled[start:stop] = True
    message = ag.Message(role="assistant", content="")
    segment = Segment(
        index=0,
        parent=None,
        kind="root",
        token_ids=np.arange(1, length + 1),
        sampled=sampled,
        logprobs=np.where(sampled, -1.0, 0.0),
        turns=tuple(
            Turn(start=a, stop=b, finish_reason="stop", versions=(Version(0, 0),), message=message) for a, b in spans
        ),
    )
    return Rollout(rollout_id="r", group_id="g", segments=(segment,), reward=0.0, stop_reason="done")


def test_sampled_tokens_are_imitated_and_later_tokens_are_cut() -> None:
    [row] = demonstrations([rollout((2, 4), (5, 6))])
    assert row.prompt_ids.tolist() == [1, 2]
    assert row.response_ids.tolist() == [3, 4, 5, 6]
    assert row.loss_mask.tolist() == [True, True, False, True]
    assert row.weight == 1.0


def test_context_has_the_given_weight_from_the_second_token() -> None:
    [row] = demonstrations([rollout((2, 4), (5, 6))], context_weight=0.25)
    assert row.prompt_ids.tolist() == [1]
    assert row.response_ids.tolist() == [2, 3, 4, 5, 6]
    assert row.loss_mask.all()
    assert row.advantages.tolist() == [0.25, 1, 1, 0.25, 1]


def test_a_segment_without_a_turn_has_nothing_to_imitate() -> None:
    assert demonstrations([rollout()]) == []


def test_a_weight_out_of_bounds_is_refused() -> None:
    with pytest.raises(ValueError, match="context_weight"):
        demonstrations([rollout((2, 4))], context_weight=1.5)


def test_the_loss_is_the_weighted_mean_of_the_cross_entropy() -> None:
    batch = collate(demonstrations([rollout((2, 4), (5, 6))], context_weight=0.25), pad_id=0)
    logprobs = torch.tensor([[-4.0, -1.0, -2.0, -8.0, -3.0]])
    config = TrainConfig(loss="sft", loss_agg=3.5)
    loss, metrics = policy_loss(logprobs, logprobs, batch, config, denominator=3.5)
    assert (metrics.kl, metrics.gap, metrics.clipped) == (0, 0, 0)  # nobody sampled a demonstration
    assert float(loss) == pytest.approx((0.25 * 4 + 1 + 2 + 0.25 * 8 + 3) / 3.5)


def test_imitation_has_the_gradient_of_an_on_policy_rollout_with_advantage_one(
    tiny_model: Path, groups_of: Groups
) -> None:
    """Both are the sum of the log-probabilities' gradients."""
    config = TrainConfig(lora_rank=4, lora_alpha=8, device="cpu")
    rows = demonstrations([r for group in groups_of(1) for r in group.rollouts])
    with Trainer(tiny_model, config) as trainer:
        policy = [replace(row, logprobs=np.where(row.loss_mask, scored(trainer, row), 0)) for row in rows]
        clipped = trainer.train(policy)["train/grad_norm"]
    with Trainer(tiny_model, replace(config, loss="sft")) as trainer:
        assert trainer.train(rows)["train/grad_norm"] == pytest.approx(clipped, rel=1e-5)
    assert clipped > 0


def scored(trainer: Trainer, row: Sample) -> np.ndarray:
    ids = np.concatenate([row.prompt_ids, row.response_ids]).tolist()
    return trainer.score(ids, sampling=ag.Sampling())[-len(row.response_ids) :]


def test_imitation_makes_the_demonstrations_more_likely(tiny_model: Path, groups_of: Groups) -> None:
    rows = demonstrations([r for group in groups_of(1) for r in group.rollouts], context_weight=0.1)
    config = TrainConfig(loss="sft", lora_rank=8, lr=2e-2, device="cpu", max_tokens_per_microbatch=64)
    with Trainer(tiny_model, config) as trainer:
        stats = [trainer.train(rows) for _ in range(15)]
    assert stats[-1]["train/loss"] < 0.5 * stats[0]["train/loss"]
    for name in (
        "train/kl",
        "train/logprob_gap",
        "train/clip_fraction",
    ):  # there is no sampling policy
        assert all(row[name] == 0 for row in stats)


def test_imitation_is_the_same_in_every_layout(tiny_model: Path, groups_of: Groups) -> None:
    rows = demonstrations([r for group in groups_of(1) for r in group.rollouts], context_weight=0.1)
    norms = []
    config = TrainConfig(loss="sft", lora_rank=4, device="cpu", loss_agg="rollout", max_tokens_per_microbatch=None)
    cut = replace(config, max_tokens_per_microbatch=30)
    for one in (config, cut, replace(cut, layout="packed"), replace(cut, layout="tree")):
        with Trainer(tiny_model, one) as trainer:
            stats = trainer.train(rows)
            norms.append((stats["train/loss"], stats["train/grad_norm"]))
    assert all(pair == pytest.approx(norms[0], rel=1e-5) for pair in norms)


def test_a_run_refuses_to_imitate_its_own_rollouts(tiny_model: Path) -> None:
    with pytest.raises(ValueError, match=r"^train\.loss: sft imitates demonstrations"):
        ag.RunConfig(recipe="r", env="chase", model=tiny_model, train=TrainConfig(loss="sft"))


def test_a_rollout_of_two_segments_gives_two_samples_whose_weights_sum_to_one() -> None:
    (first,), (second,) = rollout((2, 4)).segments, rollout((3, 4), (6, 8)).segments
    segments = (first, replace(second, index=1, parent=0, kind="rerender"))
    rows = demonstrations([replace(rollout((2, 4)), segments=segments)])
    assert [(row.segment, row.step) for row in rows] == [(0, 0), (1, 0)]
    assert [row.weight for row in rows] == [2 / 5, 3 / 5]
