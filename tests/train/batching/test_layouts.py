"""Loss and gradient do not depend on the layout, the merging or the micro-batch size."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, assume, given, settings, strategies as st
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from agentgym.samples import build_samples
from agentgym.train.batching.batch import collate
from agentgym.train.batching.layouts import Layout, PackedInputs
from agentgym.train.batching.prefix_tree import unique_tokens
from agentgym.train.trainer import TrainConfig, Trainer
from agentgym.types.completion import Sampling
from agentgym.types.rollout import Group
from agentgym.types.sample import Sample

Grown = Callable[..., list[Group]]
LAYOUTS: tuple[Layout, ...] = get_args(Layout)
STATS = ("loss", "grad_norm", "kl", "entropy", "clip_fraction", "logprob_gap", "trained_tokens")


@pytest.fixture(scope="module")
def config() -> TrainConfig:
    """Return a config with learning rate 0, so that a trainer computes the same gradient repeatedly."""
    return TrainConfig(lora_rank=4, lora_alpha=8, lr=0.0, loss_agg="rollout", grad_clip=1e9, device="cpu")


@contextmanager
def opened(model: Path, config: TrainConfig) -> Iterator[Trainer]:
    """Open a trainer whose adapter has nonzero B matrices."""
    with Trainer(model, config) as trainer:
        generator = torch.Generator().manual_seed(2)
        for name, weight in trainer._open_now.learner.policy.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(weight, std=0.1, generator=generator)
        yield trainer


@pytest.fixture(scope="module")
def trainers(tiny_model: Path, config: TrainConfig) -> Iterator[dict[Any, Trainer]]:
    """Yield one trainer per layout and micro-batch size."""
    with ExitStack() as stack:
        yield {
            (layout, tokens): stack.enter_context(
                opened(tiny_model, replace(config, layout=layout, max_tokens_per_microbatch=tokens))
            )
            for layout, tokens in product(LAYOUTS, (None, 40))
        }


def step(trainer: Trainer, rows: Sequence[Sample]) -> tuple[dict[str, float], Tensor]:
    """Return a step's metrics, and its gradient as one vector."""
    seen: list[Tensor] = []

    def keep(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        grads = [weight.grad for group in optimizer.param_groups for weight in group["params"]]
        seen.append(torch.cat([grad.flatten() for grad in grads if grad is not None]))

    hook = register_optimizer_step_pre_hook(keep)
    try:
        stats = trainer.train(rows)
    finally:
        hook.remove()
    (gradient,) = seen
    return stats, gradient


# Without shrinking: every attempt is a dozen steps.
thorough = settings(deadline=None, suppress_health_check=list(HealthCheck), phases=[Phase.reuse, Phase.generate])


def on_an_edge(trainer: Trainer, rows: Sequence[Sample]) -> bool:
    """Return whether a probability ratio is so close to a clip that rounding decides about its token's gradient."""
    for row in rows:
        ids = np.concatenate([row.prompt_ids, row.response_ids]).tolist()
        policy = np.asarray(trainer.score(ids, sampling=Sampling()))[-len(row.response_ids) :]
        ratios = np.exp(policy - row.logprobs)[row.loss_mask]
        clips = 1 - trainer.config.clip_eps_low, 1 + trainer.config.clip_eps_high
        if any(np.isclose(ratios, clip, rtol=1e-4).any() for clip in clips):
            return True
    return False


def assert_all_same(trainers: dict[Any, Trainer], groups: list[Group]) -> None:
    rows = {merged: build_samples(groups, merge=merged) for merged in (True, False)}
    assume(not on_an_edge(trainers["padded", None], rows[True]))
    expected, gradient = step(trainers["padded", None], rows[True])
    for (how, trainer), merged in product(trainers.items(), rows):
        stats, got = step(trainer, rows[merged])
        for name in STATS:
            assert stats[f"train/{name}"] == pytest.approx(expected[f"train/{name}"], rel=1e-5, abs=1e-6), (how, name)
        assert float((got - gradient).norm()) <= 1e-5 * float(gradient.norm()) + 1e-6, (how, merged)


@given(st.data())
@settings(thorough, max_examples=6)
def test_every_layout_merging_and_micro_batch_gives_the_same_loss_and_gradient(
    trainers: dict[Any, Trainer], grown: Grown, data: st.DataObject
) -> None:
    assert_all_same(trainers, grown(lambda low, high: data.draw(st.integers(low, high)), size=2))


@pytest.mark.slow
@given(st.data())
@settings(thorough, max_examples=20)
def test_larger_trees_give_the_same_loss_and_gradient_too(
    trainers: dict[Any, Trainer], grown: Grown, data: st.DataObject
) -> None:
    assert_all_same(trainers, grown(lambda low, high: data.draw(st.integers(low, high)), groups=3, size=4))


@pytest.mark.slow
@pytest.mark.proof
@given(st.data())
@settings(thorough, max_examples=60)
def test_sixty_larger_trees_give_the_same_loss_and_gradient_too(
    trainers: dict[Any, Trainer], grown: Grown, data: st.DataObject
) -> None:
    assert_all_same(trainers, grown(lambda low, high: data.draw(st.integers(low, high)), groups=3, size=4))


def test_a_ratio_at_a_clip_edge_is_detected(trainers: dict[Any, Trainer], grown: Grown) -> None:
    trainer = trainers["padded", None]
    (row, *_) = build_samples(grown(1))
    ids = np.concatenate([row.prompt_ids, row.response_ids]).tolist()
    policy = np.asarray(trainer.score(ids, sampling=Sampling()))[-len(row.response_ids) :]
    for clip in (1 - trainer.config.clip_eps_low, 1 + trainer.config.clip_eps_high):
        assert on_an_edge(trainer, [replace(row, logprobs=policy - np.log(clip))])
    assert not on_an_edge(trainer, [replace(row, logprobs=policy)])


def test_packed_rows_have_no_padding_and_a_tree_computes_each_token_once(
    trainers: dict[Any, Trainer], grown: Grown
) -> None:
    rows = list(build_samples(grown(1), merge=False))
    stats = {layout: trainers[layout, None].train(rows) for layout in LAYOUTS}
    real, block = sum(map(len, rows)), len(rows) * max(map(len, rows))
    assert stats["padded"]["train/padding"] == pytest.approx(1 - real / block)
    assert stats["packed"]["train/padding"] == stats["tree"]["train/padding"] == 0
    assert stats["tree"]["train/unique_tokens"] == unique_tokens(rows) < real / 2
    assert "train/unique_tokens" not in stats["packed"]


def test_a_score_is_the_same_in_every_layout(trainers: dict[Any, Trainer]) -> None:
    scores = [trainers[layout, None].score([3, 1, 4, 1, 5], sampling=Sampling()) for layout in LAYOUTS]
    for score in scores[1:]:
        np.testing.assert_allclose(score, scores[0], atol=1e-5)


def test_tokens_shared_by_two_samples_are_computed_once(grown: Grown) -> None:
    (row, *_) = build_samples(grown(1))
    twin = replace(row, rollout_id="twin")
    batch = collate([row, twin], pad_id=0, layout="tree")
    trained = int(row.loss_mask.sum())
    assert batch.inputs.tokens == len(row)
    assert batch.inputs.source_N.shape == (trained,)
    assert batch.inputs.index_M.tolist() == [*range(trained)] * 2


def test_the_gradient_of_a_shared_token_is_the_sum_of_its_samples() -> None:
    batch = collate(three_that_share(), pad_id=0, layout="tree")
    values = torch.tensor([1.0, 2.0, 3.0, 9.0], requires_grad=True)
    scatter_to_samples = batch.inputs.scatter_to_samples(values, batch.loss_mask_BR)
    assert scatter_to_samples.tolist() == [[0, 1, 2], [1, 2, 3], [0, 0, 9]]
    weights = torch.tensor([[5.0, 1, 2], [10, 20, 30], [5, 5, 4]])
    (scatter_to_samples * weights).sum().backward()  # type: ignore[no-untyped-call]
    assert values.grad is not None
    assert values.grad.tolist() == [11, 22, 30, 4]


def three_that_share() -> list[Sample]:
    """Return samples with responses 4 5, 4 5 6 and 7 to one prompt."""
    return [
        Sample(
            group_id="g",
            rollout_id=str(ids),
            segment=0,
            step=0,
            prompt_ids=np.array([2, 3]),
            response_ids=np.array(ids),
            loss_mask=np.ones(len(ids), np.bool_),
            logprobs=np.full(len(ids), -1, np.float32),
            advantages=np.ones(len(ids), np.float32),
            weight=1.0,
        )
        for ids in ([4, 5], [4, 5, 6], [7])
    ]


PADDED = [[0, 2, 3, 4, 5], [2, 3, 4, 5, 6], [0, 0, 2, 3, 7]]
PACKED = [[2, 3, 4, 5, 2, 3, 4, 5, 6, 2, 3, 7]]


@pytest.mark.parametrize(
    ("layout", "ids", "positions", "source", "target", "place"),
    [
        ("padded", PADDED, None, [2, 3, 6, 7, 8, 13], [4, 5, 4, 5, 6, 7], [0, 1, 2, 3, 4, 5]),
        ("packed", PACKED, [0, 1, 2, 3, 0, 1, 2, 3, 4, 0, 1, 2], [1, 2, 5, 6, 7, 10], [4, 5, 4, 5, 6, 7], None),
        ("tree", [[2, 3, 4, 5, 6, 7]], [0, 1, 2, 3, 4, 2], [1, 2, 3, 1], [4, 5, 6, 7], [0, 1, 0, 1, 2, 3]),
    ],
)
def test_hidden_states_are_mapped_to_the_tokens_they_predict(
    layout: Layout, ids: Any, positions: Any, source: Any, target: Any, place: Any
) -> None:
    inputs = collate(three_that_share(), pad_id=0, layout=layout).inputs
    assert inputs.input_ids_BT.tolist() == ids
    if positions is not None:
        assert isinstance(inputs, PackedInputs)
        assert inputs.positions_BT.tolist() == [positions]
    assert (inputs.source_N.tolist(), inputs.target_N.tolist()) == (source, target)
    assert inputs.index_M.tolist() == (place or [*range(len(source))])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_masked_batch_computes_its_tokens_but_trains_none(layout: Layout) -> None:
    batch = collate(three_that_share(), pad_id=0, layout=layout, masked=True)
    assert batch.inputs.input_ids_BT.numel() >= 6
    assert batch.inputs.source_N.numel() == 0
    assert not batch.loss_mask_BR.any()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_loss_tensors_are_the_same_in_every_layout(layout: Layout, grown: Grown) -> None:
    rows = list(build_samples(grown(4), merge=False))
    mine, padded = collate(rows, pad_id=0, layout=layout), collate(rows, pad_id=0)
    for name in ("loss_mask_BR", "logprobs_BR", "advantages_BR", "weight_B"):
        assert torch.equal(getattr(mine, name), getattr(padded, name))


def test_a_packed_row_keeps_its_content_when_moved_to_a_device() -> None:
    inputs = collate(three_that_share(), pad_id=0, layout="tree").to("cpu").inputs
    assert isinstance(inputs, PackedInputs)
    assert (inputs.tokens, inputs.end_T.tolist()) == (6, [6, 6, 5, 5, 5, 6])


def test_an_unknown_layout_is_refused() -> None:
    with pytest.raises(ValueError, match="layout: expected padded, packed or tree, got 'ragged'"):
        collate(three_that_share(), pad_id=0, layout="ragged")  # type: ignore[arg-type]
