"""The trainer on one process."""

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agentgym.errors import AgentGymError
from agentgym.samples import build_samples
from agentgym.train.config import learning_rate
from agentgym.train.policy.adapter_io import write_adapter
from agentgym.train.trainer import TrainConfig, Trainer
from agentgym.types.completion import Sampling
from agentgym.types.rollout import Group
from agentgym.types.sample import Sample

Groups = Callable[..., list[Group]]


@pytest.fixture
def config() -> TrainConfig:
    return TrainConfig(lora_rank=4, lora_alpha=8, lr=1e-2, warmup_steps=0, device="cpu")


@pytest.fixture
def rows(tiny_model: Path, config: TrainConfig, groups_of: Groups) -> list[Sample]:
    """Return samples with the base model's own log-probabilities."""
    with Trainer(tiny_model, config) as trainer:
        return on_policy(trainer, list(build_samples(groups_of(1))))


def on_policy(trainer: Trainer, rows: list[Sample]) -> list[Sample]:
    fresh = []
    for row in rows:
        ids = np.concatenate([row.prompt_ids, row.response_ids])
        scores = trainer.score(ids.tolist(), sampling=Sampling())[-len(row.response_ids) :]
        fresh.append(replace(row, logprobs=np.where(row.loss_mask, scores, 0)))
    return fresh


def running() -> list[str]:
    """Return the names of living trainer threads."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("trainer")]


def weights_of(trainer: Trainer) -> dict[str, Any]:
    return dict(trainer.adapter().tensors)


def same(one: dict[str, Any], other: dict[str, Any], *, atol: float = 0.0) -> bool:
    return one.keys() == other.keys() and all(torch.allclose(one[k], other[k], rtol=0, atol=atol) for k in one)


def test_on_policy_the_ratio_is_one_and_the_first_loss_is_the_mean_advantage(
    tiny_model: Path, config: TrainConfig, rows: list[Sample]
) -> None:
    with Trainer(tiny_model, config) as trainer:
        stats = trainer.train(rows)
    worth = np.concatenate([row.advantages[row.loss_mask] for row in rows])
    assert stats["train/loss"] == pytest.approx(-worth.mean(), abs=1e-5)
    assert stats["train/logprob_gap"] < 1e-5
    assert stats["train/kl"] < 1e-9
    assert stats["train/clip_fraction"] == 0
    assert 0 < stats["train/entropy"] <= np.log(48)
    assert stats["train/trained_tokens"] == len(worth)


def test_good_tokens_become_more_likely_and_bad_ones_less_likely(
    tiny_model: Path, config: TrainConfig, rows: list[Sample]
) -> None:
    def worth(trainer: Trainer) -> float:
        return sum(float((row.logprobs * row.advantages).sum()) for row in on_policy(trainer, rows))

    with Trainer(tiny_model, config) as trainer:
        before = worth(trainer)
        for _ in range(3):
            trainer.train(rows)
        assert worth(trainer) > before + 1


async def test_a_step_leaves_the_event_loop_free(tiny_model: Path, config: TrainConfig, rows: list[Sample]) -> None:
    async with Trainer(tiny_model, config) as trainer:
        inside, release = threading.Event(), threading.Event()

        def wait(*_: object) -> None:
            inside.set()
            assert release.wait(30)

        trainer._open_now.learner.policy.register_forward_pre_hook(wait)
        step = asyncio.create_task(trainer.step(rows))
        await asyncio.to_thread(inside.wait, 30)
        assert not step.done()  # this line runs while the forward waits
        release.set()
        assert (await step)["train/optimizer_steps"] == 1


@pytest.mark.parametrize(("rollouts", "steps"), [(None, 1), (9, 1), (4, 3), (1, 9)])
def test_a_mini_batch_of_rollouts_is_one_optimizer_step(
    tiny_model: Path, config: TrainConfig, groups_of: Groups, rollouts: int | None, steps: int
) -> None:
    for merged in (True, False):  # however many samples they became
        with Trainer(tiny_model, replace(config, rollouts_per_minibatch=rollouts)) as trainer:
            stats = trainer.train(build_samples(groups_of(1), merge=merged))
            assert stats["train/optimizer_steps"] == trainer.optimizer_steps == steps


def test_the_gap_to_the_engine_is_measured_on_the_first_mini_batch(
    tiny_model: Path, config: TrainConfig, rows: list[Sample]
) -> None:
    with Trainer(tiny_model, replace(config, rollouts_per_minibatch=3)) as trainer:
        stats = trainer.train(rows)
    assert stats["train/logprob_gap"] < 1e-5 < stats["train/kl"]


@pytest.mark.parametrize("loss_agg", ["token", "rollout", 64.0])
def test_micro_batches_and_merging_do_not_change_the_step(
    tiny_model: Path, config: TrainConfig, groups_of: Groups, loss_agg: Any
) -> None:
    adapters, losses = [], []
    cuts: list[tuple[int | None, bool, Any]] = [(None, True, "flops"), (1, True, "square"), (60, False, "length")]
    for max_tokens_per_microbatch, merged, balance in cuts:
        cut = replace(
            config,
            loss_agg=loss_agg,
            max_tokens_per_microbatch=max_tokens_per_microbatch,
            balance=balance,
            grad_clip=1e-3,
        )
        with Trainer(tiny_model, cut) as trainer:
            # Small steps: Adam divides by the gradient's size and amplifies noise in zeros.
            losses.append(trainer.train(build_samples(groups_of(2), merge=merged)))
            adapters.append(trainer.adapter().tensors)
    for stats in losses[1:]:
        assert stats["train/loss"] == pytest.approx(losses[0]["train/loss"], rel=1e-5)
        assert stats["train/grad_norm"] == pytest.approx(losses[0]["train/grad_norm"], rel=1e-5)
    assert losses[1]["train/micro_batches"] == losses[1]["train/samples"]


def test_corrected_steps_do_not_depend_on_their_split_into_micro_batches(
    tiny_model: Path, config: TrainConfig, rows: list[Sample]
) -> None:
    stale = [replace(row, logprobs=np.where(row.loss_mask, row.logprobs - 0.5, 0)) for row in rows]
    for importance_sampling in ("token", "sequence"):
        adapters = []
        for max_tokens_per_microbatch in (None, 40):
            changed = replace(
                config,
                importance_sampling=importance_sampling,
                is_cap=1.5,
                max_tokens_per_microbatch=max_tokens_per_microbatch,
            )
            with Trainer(tiny_model, changed) as trainer:
                stats = trainer.train(stale)
                adapters.append(weights_of(trainer))
        assert same(*adapters, atol=1e-4)
        assert stats["train/is_fraction"] > 0
        assert stats["train/clip_fraction"] == 0


def test_no_samples_cause_no_step(tiny_model: Path, config: TrainConfig) -> None:
    with Trainer(tiny_model, config) as trainer:
        before = weights_of(trainer)
        stats = trainer.train(build_samples([]))
        assert (stats["train/optimizer_steps"], stats["train/samples"]) == (0, 0)
        assert same(before, weights_of(trainer))


def test_a_nonfinite_gradient_is_not_applied_and_is_counted(
    tiny_model: Path, config: TrainConfig, rows: list[Sample]
) -> None:
    broken = [replace(rows[0], advantages=np.where(rows[0].loss_mask, 3e38, 0)), *rows[1:]]
    with Trainer(tiny_model, config) as trainer:
        before = weights_of(trainer)
        with pytest.warns(RuntimeWarning, match=f"skipped: .*{rows[0].rollout_id}"):
            stats = trainer.train(broken)
        assert (stats["train/skipped_steps"], stats["train/optimizer_steps"]) == (1, 0)
        assert same(before, weights_of(trainer))
        assert trainer.train(rows)["train/optimizer_steps"] == 1


def test_the_learning_rate_rises_then_falls_to_a_tenth() -> None:
    config = TrainConfig(lr=1.0, warmup_steps=2, decay_steps=4)
    rates = [learning_rate(config, taken) for taken in range(8)]
    assert rates == pytest.approx([0.5, 1.0, 1.0, 0.775, 0.55, 0.325, 0.1, 0.1])


def test_the_adapter_starts_at_zero_and_the_same_in_every_run(tiny_model: Path, config: TrainConfig) -> None:
    torch.manual_seed(99)
    with Trainer(tiny_model, config) as trainer:
        first = weights_of(trainer)
    torch.rand(5)
    with Trainer(tiny_model, config) as trainer:
        assert same(first, weights_of(trainer))
    with Trainer(tiny_model, config, seed=1) as trainer:
        assert not same(first, weights_of(trainer))
    assert all(not tensor.any() for name, tensor in first.items() if "lora_B" in name)


def test_opening_a_trainer_leaves_the_global_random_state_alone(tiny_model: Path, config: TrainConfig) -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    with Trainer(tiny_model, config):
        assert torch.equal(torch.rand(3), expected)


def test_an_adapter_is_a_snapshot(tiny_model: Path, config: TrainConfig, rows: list[Sample]) -> None:
    with Trainer(tiny_model, config) as trainer:
        adapter = trainer.adapter()
        kept = {name: tensor.clone() for name, tensor in adapter.tensors.items()}
        trainer.train(rows)
        assert same(dict(adapter.tensors), kept)
        assert not same(weights_of(trainer), kept)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT's own
def test_a_saved_adapter_reloads_with_the_same_logits(
    tiny_model: Path, config: TrainConfig, rows: list[Sample], tmp_path: Path
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    ids = [3, 1, 4, 1, 5, 9]
    with Trainer(tiny_model, config) as trainer:
        base = trainer.score(ids, sampling=Sampling())
        trainer.train(rows)
        trainer.save(tmp_path / "runs" / "adapter")
        scores = trainer.score(ids, sampling=Sampling())
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny_model), tmp_path / "runs" / "adapter")
    with torch.no_grad():
        log = model(input_ids=torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    expected = log.gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]
    np.testing.assert_allclose(scores, expected, atol=1e-5)
    assert np.abs(scores - base).max() > 1e-3


def test_saving_twice_replaces_the_adapter_and_leaves_nothing_else(
    tiny_model: Path, config: TrainConfig, rows: list[Sample], tmp_path: Path
) -> None:
    with Trainer(tiny_model, config) as trainer:
        trainer.save(tmp_path / "adapter")
        first = (tmp_path / "adapter" / "adapter_model.safetensors").read_bytes()
        trainer.train(rows)
        trainer.save(tmp_path / "adapter")
        adapter = trainer.adapter()
    assert (tmp_path / "adapter" / "adapter_model.safetensors").read_bytes() != first
    with pytest.raises(
        TypeError, match="not JSON serializable"
    ):  # an adapter that cannot be written leaves the old one in place
        write_adapter(replace(adapter, config={"r": object()}), tmp_path / "adapter")
    assert [path.name for path in tmp_path.iterdir()] == ["adapter"]
    assert sorted(path.name for path in (tmp_path / "adapter").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]


def test_scores_use_the_sampling_temperature(tiny_model: Path, config: TrainConfig) -> None:
    with Trainer(tiny_model, config) as trainer:
        at = {t: trainer.score([3, 1, 4], sampling=Sampling(temperature=t)) for t in (0.0, 1.0, 0.5)}
        np.testing.assert_array_equal(at[0.0], at[1.0])
        assert not np.allclose(at[1.0], at[0.5])
        assert at[1.0].shape == (2,)
        with pytest.raises(ValueError, match="at least 2"):
            trainer.score([3], sampling=Sampling())


def test_the_learning_rate_warms_up(tiny_model: Path, config: TrainConfig, rows: list[Sample]) -> None:
    with Trainer(tiny_model, replace(config, warmup_steps=4, lr=0.4)) as trainer:
        rates = [trainer.train(rows)["train/lr"] for _ in range(6)]
    assert rates == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4, 0.4])


async def test_on_one_process_gathering_is_the_identity(tiny_model: Path, config: TrainConfig) -> None:
    async with Trainer(tiny_model, config) as trainer:
        assert await trainer.gather(["a", {"b": 1}]) == ["a", {"b": 1}]
        assert (trainer.rank, trainer.world) == (0, 1)


async def test_a_trainer_closes_everything_even_after_an_error(tiny_model: Path, config: TrainConfig) -> None:
    threads = torch.get_num_threads()

    async def fail() -> None:
        async with Trainer(tiny_model, replace(config, shard=True, threads=2)):
            assert torch.distributed.is_initialized()
            raise ValueError("stop")

    with pytest.raises(ValueError, match="stop"):
        await fail()
    assert not torch.distributed.is_initialized()
    assert torch.get_num_threads() == threads
    assert not running()


async def test_a_trainer_that_is_cancelled_while_opening_is_closed(tiny_model: Path, config: TrainConfig) -> None:
    async def opened() -> None:
        async with Trainer(tiny_model, replace(config, shard=True)):
            raise AssertionError("it was cancelled before it was open")

    task = asyncio.create_task(opened())
    while not running():  # noqa: ASYNC110 -- a thread sets no asyncio.Event
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not torch.distributed.is_initialized()
    assert not running()


def test_a_model_that_cannot_be_loaded_leaves_nothing_open(config: TrainConfig, tmp_path: Path) -> None:
    with pytest.raises((OSError, ValueError)), Trainer(tmp_path, replace(config, shard=True)):
        pass
    assert not torch.distributed.is_initialized()


def test_a_closed_trainer_raises_an_error(tiny_model: Path, config: TrainConfig) -> None:
    trainer = Trainer(tiny_model, config)
    for call in (trainer.adapter, lambda: trainer.rank, lambda: trainer.train([])):
        with pytest.raises(RuntimeError, match="not open"):
            call()


def test_a_failure_on_the_first_rank_is_one_line_on_the_others(tiny_model: Path, config: TrainConfig) -> None:
    class Second(Trainer):
        """The second of two ranks, after the first one has reported why it failed."""

        world = 2
        rank = 1

        def _call(self, work: Callable[[Any], Any]) -> Any:
            return None, "OSError: [Errno 28] No space left on device"

    with pytest.raises(AgentGymError, match=r"^rank 0: OSError: \[Errno 28\] No space left on device"):
        Second(tiny_model, config).first(lambda: None)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sharding_on_one_process_changes_nothing(
    tiny_model: Path, config: TrainConfig, rows: list[Sample], dtype: Any
) -> None:
    metrics = []
    for sharded in (False, True):
        with Trainer(tiny_model, replace(config, shard=sharded, dtype=dtype)) as trainer:
            metrics.append([trainer.train(rows)["train/loss"] for _ in range(2)])
            assert all(t.dtype == torch.float32 for t in trainer.adapter().tensors.values())
    # In bfloat16 the shards' adapter is computed in bfloat16 too, and a single model's in float32.
    assert metrics[0] == pytest.approx(metrics[1], rel=1e-5 if dtype == "float32" else 1e-2)


@pytest.mark.parametrize("first", ["score of the base", "divergence from the base"])
def test_bfloat16_shards_are_trained_after_a_forward_of_the_base_model(
    tiny_model: Path, config: TrainConfig, rows: list[Sample], first: str
) -> None:
    coarse = replace(config, dtype="bfloat16", kl_coef=0.1 if "divergence" in first else 0.0)
    losses = []
    for sharded in (False, True):
        with Trainer(tiny_model, replace(coarse, shard=sharded)) as trainer:
            if "score" in first:
                trainer.score([3, 1, 4, 1, 5], sampling=Sampling(), base=True)
            losses.append([trainer.train(rows)["train/loss"] for _ in range(2)])
            assert all(tensor.dtype == torch.float32 for tensor in trainer.adapter().tensors.values())
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)
