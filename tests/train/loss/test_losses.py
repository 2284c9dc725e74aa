"""The loss by hand, and its independence of how the batch is split."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from agentgym.samples import build_samples
from agentgym.train.batching.batch import Batch, collate
from agentgym.train.config import ImportanceSampling, LossAgg, TrainConfig
from agentgym.train.loss.losses import (
    LARGEST_LOG_RATIO,
    LossSums,
    denominator,
    importance_weights,
    policy_loss,
    weighted_sum,
)
from agentgym.train.policy.model import PolicyModel, load_policy
from agentgym.types.rollout import Group
from agentgym.types.sample import Sample


def one_row(logprobs: list[float], advantages: list[float], mask: list[int], *, weight: float = 1.0) -> Sample:
    n = len(logprobs)
    return Sample(
        group_id="g",
        rollout_id=f"r{weight}",
        segment=0,
        step=0,
        prompt_ids=np.array([1]),
        response_ids=np.arange(n) + 1,
        loss_mask=np.array(mask, np.bool_),
        logprobs=np.array(logprobs, np.float32),
        advantages=np.array(advantages, np.float32),
        weight=weight,
    )


def clipped(logprobs: Tensor, batch: Batch, loss_agg: LossAgg = "token", total: float = 1.0) -> Tensor:
    return policy_loss(logprobs, logprobs, batch, TrainConfig(loss_agg=loss_agg), denominator=total)[0]


def metrics(
    logprobs: Tensor, entropy: Tensor, batch: Batch, *, importance_sampling: ImportanceSampling = "none"
) -> LossSums:
    return policy_loss(logprobs, entropy, batch, TrainConfig(importance_sampling=importance_sampling), denominator=1.0)[
        1
    ]


def weights_of(log_ratios: list[list[float]], importance_sampling: ImportanceSampling, cap: float) -> Tensor:
    log_ratio = torch.tensor(log_ratios)
    return importance_weights(
        log_ratio, torch.ones_like(log_ratio).bool(), importance_sampling=importance_sampling, cap=cap
    )


# Means


def test_the_token_mean_counts_trained_tokens_only() -> None:
    values, mask = torch.tensor([[1.0, 2, 3], [4, 5, 6]]), torch.tensor([[1, 1, 0], [1, 1, 1]]).bool()
    assert float(weighted_sum(values, mask, torch.ones(2), "token") / 5) == pytest.approx(3.6)


def test_two_micro_batches_are_divided_by_their_common_denominator() -> None:
    parts = [torch.full((1, 100), 2.0), torch.full((1, 900), 0.5)]
    sums = [weighted_sum(part, torch.ones_like(part).bool(), torch.ones(1), "token") / 1000 for part in parts]
    assert float(sum(sums)) == pytest.approx(0.65)  # the mean of the two means would be 1.25


def test_the_sample_mean_gives_each_sample_the_same_weight() -> None:
    values, mask = torch.tensor([[1.0, 3, 9], [4, 0, 0]]), torch.tensor([[1, 1, 0], [1, 0, 0]]).bool()
    assert float(weighted_sum(values, mask, torch.tensor([0.1, 0.9]), "sample") / 2) == pytest.approx(3.0)


def test_the_rollout_mean_weighs_rollouts_equally_however_many_samples_they_have() -> None:
    # Rollout A: three tokens of 2, 2 and 8 in two samples, mean 4. Rollout B: one token of 10.
    values = torch.tensor([[2.0, 2], [0, 8], [0, 10]])
    mask = torch.tensor([[1, 1], [0, 1], [0, 1]]).bool()
    weight = torch.tensor([2 / 3, 1 / 3, 1])
    assert float(weighted_sum(values, mask, weight, "rollout") / 2) == pytest.approx(7.0)


def test_the_denominator_counts_only_trained_tokens_and_samples() -> None:
    rows = [one_row([0] * 3, [1] * 3, [1, 0, 1]), one_row([0] * 2, [1] * 2, [0, 0]), one_row([0], [1], [1], weight=0.5)]
    assert denominator(rows, "token") == 3
    assert denominator(rows, "sample") == 2
    assert denominator(rows, "rollout") == 2
    nothing = [one_row([0] * 2, [1] * 2, [0, 0], weight=0.25)]
    assert denominator(rows + nothing, "rollout") == 2
    assert (denominator(rows, 640.0), denominator(rows, 0.5)) == (640, 0.5)
    for wrong in ("mean", 0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="loss_agg"):
            denominator(rows, wrong)  # type: ignore[arg-type]


# The clipped objective


def test_the_loss_by_hand() -> None:
    # Ratios e^.1, e^.5, e^-.5, e^-.5; the second is clipped to 1.2, the fourth to .8.
    batch = collate([one_row([-1.0] * 4, [1, 1, 1, -1], [1, 1, 1, 1])], pad_id=0)
    loss = clipped(torch.tensor([[-0.9, -0.5, -1.5, -1.5]]), batch, total=4)
    by_hand = -(math.exp(0.1) + 1.2 + math.exp(-0.5) - 0.8) / 4
    assert float(loss) == pytest.approx(by_hand)


def test_a_clipped_token_has_no_gradient() -> None:
    batch = collate([one_row([-1.0] * 3, [1, 1, -1], [1, 1, 1])], pad_id=0)
    logprobs = torch.tensor([[-1.0, -0.5, -1.5]], requires_grad=True)
    clipped(logprobs, batch).backward()  # type: ignore[no-untyped-call]
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [[-1.0, 0.0, 0.0]]


def test_a_masked_column_is_ignored_whatever_its_value() -> None:
    batch = collate([one_row([-1.0, 0.0], [2, 0], [1, 0])], pad_id=0)
    logprobs = torch.tensor([[-1.0, 1e30]], requires_grad=True)
    loss = clipped(logprobs, batch)
    loss.backward()  # type: ignore[no-untyped-call]
    assert float(loss.detach()) == -2.0
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [[-2.0, 0.0]]


def test_the_metrics_by_hand() -> None:
    batch = collate([one_row([-1.0, -1.0, 0.0], [1, 1, 0], [1, 1, 0])], pad_id=0)
    logprobs, entropy = torch.tensor([[-0.5, -1.1, -9.0]]), torch.tensor([[1.0, 2.0, 9.0]])
    got = metrics(logprobs, entropy, batch)
    assert (got.tokens, got.clipped, got.entropy) == (2, 1.0, 3.0)
    assert got.loss == pytest.approx(-(1.2 + math.exp(-0.1)))
    assert got.gap == pytest.approx(0.5)
    assert metrics(torch.tensor([[-1.1, -1.7, -9.0]]), entropy, batch).gap == pytest.approx(0.7)
    assert got.kl == pytest.approx(math.exp(0.5) - 1.5 + math.exp(-0.1) - 0.9, rel=1e-5)


@pytest.mark.parametrize("dual_clip", [None, 3.0])
def test_a_token_with_zero_advantage_is_never_clipped(dual_clip: float | None) -> None:
    batch = collate([one_row([-9.0, -1.0], [0, 0], [1, 1])], pad_id=0)
    logprobs = torch.tensor([[-1.0, -9.0]])
    config = TrainConfig(dual_clip=dual_clip)
    assert policy_loss(logprobs, logprobs, batch, config, denominator=1.0)[1].clipped == 0


@pytest.mark.parametrize("loss", ["ppo", "cispo", "gspo"])
def test_a_token_at_the_edge_of_the_clip_is_not_clipped(loss: Any) -> None:
    batch = collate([one_row([-1.0, -1.0], [1, -1], [1, 1])], pad_id=0)
    logprobs = torch.tensor([[-1.0, -1.0]])  # both ratios are 1
    config = TrainConfig(loss=loss, clip_eps_low=0.0, clip_eps_high=0.0)
    assert policy_loss(logprobs, logprobs, batch, config, denominator=1.0)[1].clipped == 0


def test_dual_clip_leaves_tokens_with_positive_advantage_unchanged() -> None:
    batch = collate([one_row([-1.0, -1.0], [0.5, 0.01], [1, 1])], pad_id=0)
    logprobs = torch.tensor([[-0.9, -0.1]])
    plain, dual = (
        policy_loss(logprobs, logprobs, batch, TrainConfig(dual_clip=bound), denominator=1.0)[1].loss
        for bound in (None, 3.0)
    )
    assert plain == dual


def test_the_metrics_of_nothing_are_zero() -> None:
    batch = collate([one_row([-1.0], [1], [1])], pad_id=0, masked=True)
    got = metrics(torch.zeros(1, 1), torch.zeros(1, 1), batch)
    assert (got.tokens, got.gap, got.kl) == (0, 0.0, 0.0)


LOSSES = [
    TrainConfig(),
    TrainConfig(loss="cispo"),
    TrainConfig(loss="gspo"),
    TrainConfig(dual_clip=3.0),
    *(
        TrainConfig(importance_sampling=c)
        for c in ("token", "token_mask", "sequence", "sequence_mask", "geometric_mask")
    ),
]


@pytest.mark.parametrize(
    "config", LOSSES, ids=lambda c: c.importance_sampling if c.importance_sampling != "none" else c.loss
)
def test_a_ratio_beyond_float32_is_clipped_and_stays_finite(config: TrainConfig) -> None:
    # Both rows have good tokens; under dual_clip the second is bad, and the bound stops it.
    batch = collate(
        [one_row([-300.0], [1], [1]), one_row([-300.0], [1 if config.dual_clip is None else -1], [1])], pad_id=0
    )
    logprobs = torch.tensor([[-1.0], [-300.0 + 88.73]], requires_grad=True)
    loss, sums = policy_loss(logprobs, torch.zeros(2, 1), batch, config, denominator=1.0)
    loss.backward()  # type: ignore[no-untyped-call]
    assert logprobs.grad is not None
    assert torch.isfinite(loss)
    assert all(math.isfinite(value) for value in (sums.loss, sums.kl, sums.gap))
    assert logprobs.grad.abs().max() <= 2
    assert (sums.clipped if config.importance_sampling == "none" else sums.corrected) == 2


def test_the_bound_on_ratios_changes_none_that_float32_can_hold() -> None:
    largest = torch.tensor(LARGEST_LOG_RATIO)
    assert torch.isfinite(largest.exp())
    assert torch.isinf((largest + 0.01).exp())


# Importance weights

LOG_RATIOS = [0.5, -0.5, 1.0]
WEIGHTS: dict[ImportanceSampling, list[float]] = {
    "token": [1.6487, 0.6065, 2.0],
    "token_mask": [1.6487, 0.6065, 0.0],
    "sequence": [2.0, 2.0, 2.0],
    "sequence_mask": [0.0, 0.0, 0.0],
    "geometric_mask": [1.6487, 0.6065, 2.7183],
}


@pytest.mark.parametrize("importance_sampling", WEIGHTS)
def test_importance_weights_by_hand(importance_sampling: ImportanceSampling) -> None:
    weights = weights_of([LOG_RATIOS], importance_sampling, 2.0)
    assert weights.tolist()[0] == pytest.approx(WEIGHTS[importance_sampling], abs=1e-4)


@pytest.mark.parametrize("importance_sampling", ["sequence", "sequence_mask"])
def test_a_sequences_weight_is_the_product_of_its_tokens(importance_sampling: ImportanceSampling) -> None:
    weights = weights_of([LOG_RATIOS, [-0.4, -0.1, 0.0]], importance_sampling, 3.0)
    assert weights[:, 0].tolist() == pytest.approx([math.exp(1.0), math.exp(-0.5)])
    assert torch.equal(weights, weights[:, :1].expand(2, 3))


@pytest.mark.parametrize("importance_sampling", ["token_mask", "sequence_mask", "geometric_mask"])
def test_a_mask_also_drops_tokens_that_became_too_rare(importance_sampling: ImportanceSampling) -> None:
    assert weights_of([[-0.8]], importance_sampling, 2.0).tolist() == [[0.0]]


def test_the_geometric_mean_covers_trained_tokens_and_does_not_grow_with_their_number() -> None:
    log_ratio, mask = torch.tensor([[0.0, 0.9], [0.6, 0.6]]), torch.tensor([[False, True], [True, True]])
    weights = importance_weights(log_ratio, mask, importance_sampling="geometric_mask", cap=2.0)  # log 2 = 0.69
    assert weights[0].tolist() == [0, 0]
    assert weights[1].tolist() == pytest.approx([math.exp(0.6)] * 2)
    assert importance_weights(log_ratio, mask, importance_sampling="sequence_mask", cap=2.0)[1].tolist() == [0, 0]


@pytest.mark.parametrize("importance_sampling", WEIGHTS)
def test_the_gradient_of_a_corrected_token_is_its_weight_times_its_advantage(
    importance_sampling: ImportanceSampling,
) -> None:
    advantages = [1.0, -2.0, 3.0]
    batch = collate([one_row([-2.0] * 3 + [0.0], [*advantages, 0.0], [1, 1, 1, 0])], pad_id=0)
    logprobs = torch.tensor([[*(ratio - 2 for ratio in LOG_RATIOS), 1e30]], requires_grad=True)
    loss, _ = policy_loss(
        logprobs, logprobs, batch, TrainConfig(importance_sampling=importance_sampling), denominator=1.0
    )
    loss.backward()  # type: ignore[no-untyped-call]
    expected = [-w * a for w, a in zip(WEIGHTS[importance_sampling], advantages, strict=True)]
    assert float(loss.detach()) == pytest.approx(sum(expected), abs=1e-3)
    assert logprobs.grad is not None
    assert logprobs.grad.tolist()[0] == pytest.approx([*expected, 0.0], abs=1e-3)


def test_truncated_and_masked_tokens_are_counted() -> None:
    batch = collate([one_row([-2.0] * 3, [1] * 3, [1] * 3)], pad_id=0)
    logprobs = torch.tensor([[ratio - 2 for ratio in LOG_RATIOS]])
    counted: dict[ImportanceSampling, float] = {"token": 1, "token_mask": 1, "sequence": 3, "sequence_mask": 3}
    for importance_sampling, count in counted.items():
        sums = metrics(logprobs, logprobs, batch, importance_sampling=importance_sampling)
        assert (sums.corrected, sums.clipped) == (count, 0)
    assert metrics(logprobs, logprobs, batch, importance_sampling="geometric_mask").corrected == 0
    assert metrics(logprobs + 1, logprobs, batch, importance_sampling="geometric_mask").corrected == 3


def test_on_policy_all_corrections_equal_the_plain_gradient() -> None:
    batch = collate([one_row([-1.0] * 3, [1, -1, 2], [1, 1, 1])], pad_id=0)
    corrections: list[ImportanceSampling] = ["none", *WEIGHTS]
    for importance_sampling in corrections:
        logprobs = torch.full((1, 3), -1.0, requires_grad=True)
        policy_loss(logprobs, logprobs, batch, TrainConfig(importance_sampling=importance_sampling), denominator=1.0)[
            0
        ].backward()  # type: ignore[no-untyped-call]
        assert logprobs.grad is not None
        assert logprobs.grad.tolist() == [[-1.0, 1.0, -2.0]]


# The gradient does not depend on how the batch is split


@pytest.fixture(scope="module")
def policy(tiny_model: Path) -> PolicyModel:
    policy = load_policy(tiny_model, dtype=torch.float32, rank=4, alpha=8, seed=1)
    torch.manual_seed(2)
    for name, weight in policy.named_parameters():
        if "lora_B" in name:  # zero at the start, and A would have no gradient
            torch.nn.init.normal_(weight, std=0.1)
    return policy


def gradient(policy: PolicyModel, rows: list[Sample], loss_agg: LossAgg, size: int, pad_id: int = 0) -> Tensor:
    """Return the whole gradient as one vector, computed in micro-batches of `size` rows."""
    policy.zero_grad()
    total = denominator(rows, loss_agg)
    for start in range(0, len(rows), size):
        batch = collate(rows[start : start + size], pad_id=pad_id)
        logprobs, _ = policy(batch.inputs, batch.loss_mask_BR)
        clipped(logprobs, batch, loss_agg, total).backward()  # type: ignore[no-untyped-call]
    return torch.cat([w.grad.flatten() for w in policy.parameters() if w.grad is not None])


def assert_same(got: Tensor, expected: Tensor) -> None:
    assert float(expected.norm()) > 1e-3
    assert float((got - expected).norm() / expected.norm()) < 1e-5


@pytest.mark.parametrize("loss_agg", ["token", "sample", "rollout", 100.0])
def test_micro_batches_of_one_two_and_all_give_the_same_gradient(
    policy: PolicyModel, groups_of: Callable[..., list[Group]], loss_agg: LossAgg
) -> None:
    rows = list(build_samples(groups_of(1), merge=False))
    whole = gradient(policy, rows, loss_agg, len(rows))
    for size in (1, 2):
        assert_same(gradient(policy, rows, loss_agg, size), whole)


@pytest.mark.parametrize("loss_agg", ["token", "rollout", 100.0])
def test_merged_and_per_turn_samples_give_the_same_gradient(
    policy: PolicyModel, groups_of: Callable[..., list[Group]], loss_agg: LossAgg
) -> None:
    steps, merged = list(build_samples(groups_of(2), merge=False)), list(build_samples(groups_of(2)))
    assert len(steps) > len(merged)
    whole = gradient(policy, steps, loss_agg, len(steps))
    assert_same(gradient(policy, merged, loss_agg, len(merged)), whole)


def test_the_order_of_rows_and_the_padding_id_change_nothing(
    policy: PolicyModel, groups_of: Callable[..., list[Group]]
) -> None:
    rows = list(build_samples(groups_of(3), merge=False))
    mixed = [rows[i] for i in np.random.default_rng(0).permutation(len(rows))]
    assert_same(gradient(policy, mixed, "rollout", 4, pad_id=7), gradient(policy, rows, "rollout", 4))


def test_log_probabilities_equal_the_full_models(policy: PolicyModel, groups_of: Callable[..., list[Group]]) -> None:
    rows = list(build_samples(groups_of(4), merge=False))
    batch = collate(rows, pad_id=0)
    with torch.no_grad():
        got, _ = policy(batch.inputs, batch.loss_mask_BR)
        for i, row in enumerate(rows):
            ids = torch.from_numpy(np.concatenate([row.prompt_ids, row.response_ids]))[None]
            full = policy.model(input_ids=ids).logits[0, :-1].log_softmax(-1)
            expected = full.gather(-1, ids[0, 1:, None])[-len(row.response_ids) :, 0]
            np.testing.assert_allclose(got[i, -len(row.response_ids) :], expected, atol=1e-5)
