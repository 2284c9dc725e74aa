"""The critic: its learning, its isolation from the policy, and resuming it."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agentgym.advantages.gae import GAEConfig
from agentgym.samples import SampleBatch, build_samples, value_samples
from agentgym.train.batching.layouts import Layout
from agentgym.train.critic import value_loss, value_metrics
from agentgym.train.trainer import TrainConfig, Trainer
from agentgym.types.arrays import Floats
from agentgym.types.rollout import Group, Rollout, Segment
from agentgym.types.sample import Sample, SampleKey
from tests.torchrun import of_each_rank, run_on_ranks
from tests.train.conftest import make_segment

HERE = Path(__file__).parent
CONFIG = TrainConfig(
    lora_rank=4,
    lora_alpha=8,
    lr=1e-3,
    rollouts_per_minibatch=4,
    max_tokens_per_microbatch=48,
    value_lr=3e-3,
    device="cpu",
)


def numbered(groups: Sequence[Group]) -> list[Group]:
    """Return the groups with turns numbered in the order of their segments."""

    def one(rollout: Rollout) -> Rollout:
        segments, number = list[Segment](), 0
        for segment in rollout.segments:
            turns = tuple(turn._replace(number=number + i) for i, turn in enumerate(segment.turns))
            segments.append(replace(segment, turns=turns))
            number += len(turns)
        return replace(rollout, segments=tuple(segments))

    return [replace(group, rollouts=tuple(map(one, group.rollouts))) for group in groups]


@pytest.fixture(scope="module")
def batches(groups_of: Callable[..., list[Group]]) -> list[list[Group]]:
    return [numbered(groups_of(seed)) for seed in (1, 2, 3)]


def step(trainer: Trainer, groups: list[Group]) -> tuple[dict[str, float], SampleBatch]:
    batch = value_samples(groups, trainer.values)
    return {name: value for name, value in trainer.train(batch).items() if name != "train/seconds"}, batch


def adapter(trainer: Trainer) -> dict[str, Any]:
    return {name: tensor.numpy() for name, tensor in trainer.adapter().tensors.items()}


WORTH = {2: 0.0, 3: 1.0, 4: 2.0, 5: -1.0}
"""The mean reward of a rollout, by the token before each of its turns."""
NOISE = 0.5


def known(seed: int) -> list[Group]:
    """Return rollouts of two turns, whose reward is the worth of the token before each turn plus noise."""
    rng = np.random.default_rng(seed)
    rollouts = []
    for i in range(48):
        segment = make_segment(rng, 0, [(1, 2), (1, 2)])
        ids = segment.token_ids.copy()
        ids[[0, 3]] = rng.choice(list(WORTH))
        reward = WORTH[int(ids[0])] + rng.normal(0, NOISE)
        made = replace(segment, token_ids=ids)
        rollouts.append(
            Rollout(rollout_id=f"{seed}/{i}", group_id=str(seed), segments=(made,), reward=reward, stop_reason="done")
        )
    return numbered([Group(group_id=str(seed), rollouts=tuple(rollouts))])


def test_the_head_learns_the_values_of_a_known_env(tiny_model: Path) -> None:
    config = replace(CONFIG, lr=0.0, value_lr=3e-3, rollouts_per_minibatch=None, max_tokens_per_microbatch=None)
    with Trainer(tiny_model, config) as trainer:
        seen = [step(trainer, known(seed))[0] for seed in range(30)]
    explained = [metrics["train/explained_variance"] for metrics in seen]
    # The values are of rollouts that the head hasn't learned from. The true values explain this much of them:
    spread = np.var(list(WORTH.values()))
    best = spread / (spread + NOISE**2)
    assert explained[0] == 0  # before any training every value is 0
    assert np.mean(explained[-3:]) > 0.7 * best
    assert np.mean(explained[-3:]) < best + 0.1
    assert np.mean([metrics["train/value_loss"] for metrics in seen[-3:]]) < seen[0]["train/value_loss"] / 2
    assert all(metrics["train/value_skipped_steps"] == 0 for metrics in seen)


@pytest.mark.parametrize("layout", ["packed", "tree"])
def test_values_are_the_same_in_every_layout(tiny_model: Path, batches: list[list[Group]], layout: Layout) -> None:
    found = list[dict[SampleKey, Floats]]()
    for each in ("padded", layout):
        with Trainer(tiny_model, replace(CONFIG, layout=each)) as trainer:
            step(trainer, batches[0])

            def values_of(samples: Sequence[Sample], trainer: Trainer = trainer) -> dict[SampleKey, Floats]:
                found.append(trainer.values(samples))
                return found[-1]

            value_samples(batches[1], values_of)
    assert found[0].keys() == found[1].keys()
    for key, values in found[0].items():
        np.testing.assert_allclose(found[1][key], values, atol=1e-4)
    assert np.ptp(np.concatenate(list(found[0].values()))) > 0.05  # far above the tolerance


def test_the_policy_learns_the_same_as_without_a_value_head(tiny_model: Path, batches: list[list[Group]]) -> None:
    with Trainer(tiny_model, CONFIG) as trainer:
        batch = step(trainer, batches[0])[1]
        with_head = adapter(trainer)
    with Trainer(tiny_model, CONFIG) as trainer:
        assert not any("value" in name for name in trainer.train(list(batch)))
        alone = adapter(trainer)
    assert with_head.keys() == alone.keys()  # and none of the head is sent to engines
    assert all(np.array_equal(with_head[name], tensor) for name, tensor in alone.items())


def stopped_and_not(
    model: Path, config: TrainConfig, batches: list[list[Group]], folder: Path
) -> tuple[list[Any], list[Any]]:
    """Return the metrics and samples of two steps after a checkpoint, without a stop and after one."""

    def rest(trainer: Trainer) -> list[Any]:
        done = [step(trainer, groups) for groups in batches[1:]]
        return [(metrics, [sample.advantages.tolist() for sample in batch]) for metrics, batch in done]

    with Trainer(model, config) as trainer:
        step(trainer, batches[0])
        trainer.checkpoint(folder, 1)
        through = rest(trainer)
    with Trainer(model, config, seed=7) as trainer:
        trainer.resume(folder)
        return through, rest(trainer)


@pytest.mark.parametrize("method", ["lora", "full"])
def test_the_critic_resumes_bit_for_bit(
    tiny_model: Path, batches: list[list[Group]], tmp_path: Path, method: str
) -> None:
    config = CONFIG if method == "lora" else TrainConfig(method="full", lr=1e-4, rollouts_per_minibatch=4, device="cpu")
    through, again = stopped_and_not(tiny_model, config, batches, tmp_path)
    assert through == again
    assert through[0][0]["train/value_mean"] != 0


def test_resuming_from_a_checkpoint_without_a_critic_removes_it(
    tiny_model: Path, batches: list[list[Group]], tmp_path: Path
) -> None:
    with Trainer(tiny_model, CONFIG) as trainer:
        trainer.checkpoint(tmp_path, 0)
        step(trainer, batches[0])
        trainer.resume(tmp_path)
        assert step(trainer, batches[1])[0]["train/value_mean"] == 0


@pytest.fixture(scope="module")
def two_ranks(tiny_model: Path, batches: list[list[Group]], tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    out = tmp_path_factory.mktemp("critic")
    run_on_ranks(HERE / "critic_script.py", (tiny_model, CONFIG, batches), out)
    return of_each_rank(out)


@pytest.mark.slow
def test_two_ranks_train_the_same_critic_as_one(
    tiny_model: Path, batches: list[list[Group]], two_ranks: list[Any]
) -> None:
    with Trainer(tiny_model, CONFIG) as trainer:
        alone = [step(trainer, groups) for groups in batches]
    assert two_ranks[0] == two_ranks[1]
    for (mine, advantages), (metrics, batch) in zip(two_ranks[0], alone, strict=True):
        for name in ("value_loss", "value_mean", "explained_variance", "loss"):
            assert mine[f"train/{name}"] == pytest.approx(metrics[f"train/{name}"], rel=1e-3, abs=1e-4), name
        for found, sample in zip(advantages, batch, strict=True):
            np.testing.assert_allclose(found, sample.advantages, atol=1e-3)


def test_returns_for_samples_without_values_are_refused(tiny_model: Path, batches: list[list[Group]]) -> None:
    with Trainer(tiny_model, CONFIG) as trainer:
        first = value_samples(batches[0], trainer.values)
        value_samples(batches[1][:1], trainer.values)
        with pytest.raises(ValueError, match=r"^samples: the critic has no values for"):
            trainer.train(replace(first, places={}))


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda given: given[:-1], r"^returns: \('\S+', \d+, \d+\) must have \d+ numbers, one for each value, got \d+"),
        (lambda given: given * np.float32(np.nan), r"^returns: \('\S+', \d+, \d+\) must have finite numbers"),
        (lambda given: given[:, None], r"^returns: \('\S+', \d+, \d+\) must have one number for each value"),
    ],
)
def test_invalid_returns_are_refused_before_anything_is_trained(
    tiny_model: Path, batches: list[list[Group]], spoil: Callable[[Floats], Floats], said: str
) -> None:
    with Trainer(tiny_model, CONFIG) as trainer:
        batch = value_samples(batches[0], trainer.values)
        last = list(batch.returns)[-1]
        before = adapter(trainer)
        with pytest.raises(ValueError, match=said):
            trainer.train(replace(batch, returns={**batch.returns, last: spoil(batch.returns[last])}))
        assert all(np.array_equal(before[name], tensor) for name, tensor in adapter(trainer).items())
        assert trainer.train(batch)["train/value_loss"] >= 0  # the refused call has trained on none of it


def test_returns_are_refused_by_a_trainer_that_never_computed_values(
    tiny_model: Path, batches: list[list[Group]]
) -> None:
    with Trainer(tiny_model, CONFIG) as trainer:
        batch = value_samples(batches[0], trainer.values)
    with Trainer(tiny_model, CONFIG) as trainer, pytest.raises(ValueError, match=r"^samples: the critic has no values"):
        trainer.train(batch)


def test_a_batch_that_lost_its_returns_is_refused_before_anything_is_trained(
    tiny_model: Path, batches: list[list[Group]]
) -> None:
    with Trainer(tiny_model, CONFIG) as trainer:
        batch = value_samples(batches[0], trainer.values)
        with pytest.raises(
            ValueError, match=r"^samples: the critic computed values, but these samples have no returns"
        ):
            trainer.train(list(batch))
        assert trainer.train(batch)["train/value_loss"] >= 0


def test_a_step_uses_its_values_up(tiny_model: Path, batches: list[list[Group]]) -> None:
    with Trainer(tiny_model, CONFIG) as trainer:
        batch = replace(value_samples(batches[0], trainer.values), places={})
        trainer.train(batch)
        with pytest.raises(
            ValueError, match=r"^samples: the critic has no values for \(.+\): a step uses up the latest values"
        ):
            trainer.train(batch)


def test_unused_values_can_be_discarded(tiny_model: Path, batches: list[list[Group]]) -> None:
    with Trainer(tiny_model, CONFIG) as trainer:
        value_samples(batches[0], trainer.values)
        plain = build_samples(batches[1])
        with pytest.raises(ValueError, match=r"or discard the values with `trainer\.values\(\[\]\)`$"):
            trainer.train(plain)
        assert trainer.values([]) == {}
        assert "train/value_loss" not in trainer.train(plain)


def test_an_invalid_value_function_is_refused_by_name(batches: list[list[Group]]) -> None:
    with pytest.raises(ValueError, match=r"^values_of: expected a function, such as trainer\.values, got"):
        value_samples(batches[0], object())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^how: must be an instance of GAEConfig, got 0\.5$"):
        value_samples(batches[0], lambda samples: {}, 0.5)  # type: ignore[arg-type]


def test_a_warning_raised_as_an_error_does_not_stop_the_critic_from_learning(
    tiny_model: Path, batches: list[list[Group]]
) -> None:
    with Trainer(tiny_model, CONFIG) as trainer:
        batch = value_samples(batches[0], trainer.values)
        before = trainer.snapshot().state["critic"]["weights"]["outer.bias"].clone()
        untrained = tuple(replace(sample, loss_mask=np.zeros_like(sample.loss_mask)) for sample in batch)
        with pytest.raises(RuntimeWarning, match="without an optimizer step"):
            trainer.train(replace(batch, samples=untrained))
        assert not torch.equal(trainer.snapshot().state["critic"]["weights"]["outer.bias"], before)


def test_a_group_without_turns_needs_no_values(tiny_model: Path) -> None:
    with Trainer(tiny_model, CONFIG) as trainer:
        assert trainer.values([]) == {}
        batch = value_samples([], trainer.values, GAEConfig(lam=0.5))
        assert (len(batch), dict(batch.returns)) == (0, {})


def test_the_value_loss_is_clipped_if_it_would_be_lower() -> None:
    values, old, targets = torch.tensor([3.0, 3.0, 1.1]), torch.ones(3), torch.tensor([3.0, 0.0, 2.0])
    assert value_loss(values, old, targets, clip=None).item() == pytest.approx(0 + 9 + 0.81)
    # The first may not count a move beyond 0.5, the second counts fully, the third is within bounds.
    assert value_loss(values, old, targets, clip=0.5).item() == pytest.approx(2.25 + 9 + 0.81)


def test_explained_variance_is_1_for_perfect_values_and_0_for_a_constant() -> None:
    returns = np.array([0.0, 1.0, 2.0])
    assert value_metrics(np.stack([returns, returns], 1))["train/explained_variance"] == 1
    assert value_metrics(np.stack([np.ones(3), returns], 1))["train/explained_variance"] == 0
    assert value_metrics(np.stack([-returns, returns], 1))["train/explained_variance"] == pytest.approx(-3)
    assert np.isnan(value_metrics(np.ones((3, 2)))["train/explained_variance"])


def test_the_value_loss_is_the_mean_squared_error_of_the_values() -> None:
    metrics = value_metrics(np.array([[1.0, 2.0], [4.0, 0.0]]))
    assert (metrics["train/value_loss"], metrics["train/value_mean"]) == ((1 + 16) / 2, 2.5)
