"""The training loop, on the real engine, the real trainer and the shipped checkpoint."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import agentgym as ag
from agentgym.engines import read_adapter
from agentgym.engines.scripted import Scripted, say
from agentgym.engines.transformers.engine import TransformersConfig, TransformersEngine
from agentgym.environments.env import Split
from agentgym.errors import AgentGymError, EngineError
from agentgym.run import peers
from agentgym.run.collector import Collector, DistributedScheduler
from agentgym.run.metrics_logger import MetricsLogger
from agentgym.samples import build_samples
from agentgym.sandboxes.fake.sandbox import FakeSandboxPool
from agentgym.scheduling.oversampling import OversampleConfig
from agentgym.scheduling.run_groups import play_groups
from agentgym.scheduling.schedule import Schedule
from agentgym.scheduling.scheduler import Scheduler
from agentgym.scheduling.task_sampler import Sharding, TaskSampler, batches
from agentgym.train.trainer import TrainConfig, Trainer
from agentgym.types.arrays import Floats
from agentgym.types.completion import Completion, Sampling
from agentgym.types.weights import Adapter
from agentgym.weight_sync.sync import WeightSync
from envs.chase.env import Chase, ChaseCompaction, ChaseTask

MODEL = Path(__file__).parents[2] / "recipes" / "checkpoints" / "chase_compaction"
SAMPLING = Sampling(temperature=0.7, max_tokens=40)


@pytest.fixture
async def play() -> AsyncIterator[Collector]:
    """Yield a collector of Chase with compaction on the tiny model: several turns and segments, 16 at once."""
    config = TrainConfig(temperature=0.7, lr=2e-3, device="cpu")
    async with Trainer(MODEL, config) as trainer, TransformersEngine(MODEL, TransformersConfig(slots=16)) as engine:
        yield Collector(ChaseCompaction, engine, trainer, FakeSandboxPool(), SAMPLING)


def trainer_of(play: Collector) -> Trainer:
    """Return the trainer whose processes collect together; here, there is only this one."""
    assert isinstance(play.peers, Trainer)
    return play.peers


def versions_of(rollout: ag.Rollout) -> set[int]:
    """Return the policy versions that the rollout's tokens were sampled under."""
    return {v.version for segment in rollout.segments for turn in segment.turns for v in turn.versions}


class Seven(Chase):
    """A data set so small that its tasks are repeated."""

    @classmethod
    def tasks(cls, split: Split) -> ag.Procedural[ChaseTask]:
        return Chase.tasks(split)[:7]


def largest_gap(trainer: Trainer, rollout: ag.Rollout) -> float:
    """Return the largest gap of engine and trainer log-probabilities over all sampled tokens, in nats."""
    gaps = []
    for segment in rollout.segments:
        scores: Floats = trainer.score(segment.token_ids.tolist(), sampling=SAMPLING)
        gaps.append(np.abs(scores - segment.logprobs[1:])[segment.sampled[1:]].max())
    return float(max(gaps))


async def test_engine_and_trainer_logprobs_agree_on_every_sampled_token(play: Collector) -> None:
    tasks = ChaseCompaction.tasks("train")[:8]
    before = await play.collect(list(tasks), Schedule(group_size=4, seed=0))
    assert any(len(r.segments) > 1 for r in before.rollouts)
    assert max(largest_gap(trainer_of(play), r) for r in before.rollouts) < 1e-4
    await trainer_of(play).step(build_samples(before))
    probe = before.rollouts[0].segments[0].token_ids.tolist()
    await WeightSync(trainer_of(play), play.engine, probe, SAMPLING, tolerance=1e-4)(1)
    after = await play.collect(list(tasks), Schedule(group_size=4, seed=1))
    assert max(largest_gap(trainer_of(play), r) for r in after.rollouts) < 1e-4
    assert all(versions_of(rollout) == {1} for rollout in after.rollouts)


async def test_the_same_seed_gives_the_same_rollouts(play: Collector) -> None:
    tasks = list(ChaseCompaction.tasks("train")[:4])
    first, again = [await play.collect(tasks, Schedule(group_size=4, seed=3)) for _ in range(2)]
    other = await play.collect(tasks, Schedule(group_size=4, seed=4))
    ids = [[s.token_ids.tolist() for r in groups.rollouts for s in r.segments] for groups in (first, again, other)]
    assert ids[0] == ids[1]
    assert ids[0] != ids[2]


async def test_merged_and_per_turn_samples_of_real_rollouts_train_equally(play: Collector) -> None:
    groups = await play.collect(list(ChaseCompaction.tasks("train")[:8]), Schedule(group_size=4, seed=0))
    norms = []
    for merge in (True, False):
        config = replace(trainer_of(play).config, loss_agg="rollout")
        with Trainer(MODEL, config) as trainer:
            norms.append(trainer.train(build_samples(groups, merge=merge))["train/grad_norm"])
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    assert norms[0] > 0


async def test_a_lost_adapter_is_an_error(play: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    async def lose(self: TransformersEngine, adapter: Adapter | None, *, version: int) -> None:
        """Accept the adapter without using it."""

    groups = await play.collect(list(ChaseCompaction.tasks("train")[:8]), Schedule(group_size=4, seed=0))
    await trainer_of(play).step(build_samples(groups))
    monkeypatch.setattr(TransformersEngine, "load_adapter", lose)
    with pytest.raises(EngineError, match="does not sample from the policy"):
        await WeightSync(trainer_of(play), play.engine, [1, 2, 3, 4], SAMPLING, tolerance=1e-4)(1)


async def test_a_saved_adapter_is_read_back_into_an_engine(play: Collector, tmp_path: Path) -> None:
    groups = await play.collect(list(ChaseCompaction.tasks("train")[:8]), Schedule(group_size=4, seed=0))
    await trainer_of(play).step(build_samples(groups))
    trainer_of(play).save(tmp_path / "adapter")
    await play.engine.load_adapter(read_adapter(tmp_path / "adapter"), version=1)
    ids = groups.rollouts[0].segments[0].token_ids.tolist()
    gap = trainer_of(play).score(ids, sampling=SAMPLING) - await play.engine.score(ids, sampling=SAMPLING)
    assert np.abs(gap).max() < 1e-4
    with pytest.raises(ValueError, match=r"^adapter: .* has no adapter_config\.json and no adapter_model\.safetensors"):
        read_adapter(tmp_path)


async def test_non_finite_log_probabilities_are_an_error(play: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    async def unknown(self: TransformersEngine, token_ids: list[int], *, sampling: Sampling) -> Floats:
        return np.full(len(token_ids) - 1, np.nan, np.float32)

    monkeypatch.setattr(TransformersEngine, "score", unknown)
    with pytest.raises(EngineError, match="up to nan nats off"):
        await WeightSync(trainer_of(play), play.engine, [1, 2, 3, 4], SAMPLING, tolerance=1e-4)(1)


async def test_weights_are_pushed_in_flight_and_no_group_exceeds_the_staleness_bound(play: Collector) -> None:
    versions: list[set[int]] = []
    sync = WeightSync(trainer_of(play), play.engine, list(range(20, 60)), SAMPLING, tolerance=1e-4)
    async with play.schedule(Schedule(prompts_per_step=4, group_size=4, max_staleness=1)) as rollouts:
        for step in range(5):
            groups = await rollouts.collect()
            versions.append(set[int]().union(*map(versions_of, groups.rollouts)))
            assert step - min(versions[-1]) == groups.metrics()["staleness/max"] <= 1
            await trainer_of(play).step(build_samples(groups))
            assert (await sync(step + 1))["sync/logprob_gap"] < 1e-4
            assert groups.metrics()["requests/dropped"] == groups.metrics()["rollouts/failed"] == 0
    assert any(min(seen) == step - 1 for step, seen in enumerate(versions))  # run while the step before was trained


async def test_an_interrupted_rollout_continues_under_the_next_adapter(play: Collector) -> None:
    next_adapter, held = asyncio.Event(), list[str]()

    class Held(ChaseCompaction):
        """The task of the first turn that ends is held until the next adapter is loaded."""

        async def step(self, action: ag.Message) -> ag.StepResult:
            held.append(self.task.id)
            if self.task.id == held[0]:
                await next_adapter.wait()
            return await super().step(action)

    found: dict[str, list[set[int]]] = {}
    settings = OversampleConfig(stop="target", extra_groups=2, carry=3)
    sync = WeightSync(trainer_of(play), play.engine, [1, 2, 3, 4], SAMPLING, tolerance=1e-4)
    collector = replace(play, env=Held)
    async with collector.schedule(Schedule(prompts_per_step=2, group_size=4, oversample=settings)) as rollouts:
        for step in range(5):
            groups = await rollouts.collect()
            for group in groups:
                found[group.group_id] = [versions_of(rollout) for rollout in group.rollouts]
                assert step - min(min(versions) for versions in found[group.group_id]) <= 3
            await trainer_of(play).step(build_samples(groups))
            await sync(step + 1)
            next_adapter.set()
    assert any(min(versions) == 0 < max(versions) for versions in found[held[0]])


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("max_staleness", {"max_staleness": -1}),
        (
            "oversample.carry",
            {"max_staleness": 1, "oversample": OversampleConfig(stop="target", extra_rollouts=1, carry=1)},
        ),
        ("oversample.replace", {"group_size": 1, "oversample": OversampleConfig(replace=1)}),
        ("group_size", {"group_size": 1}),
    ],
)
def test_a_run_refuses_settings_that_conflict(field: str, changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"^{field}: "):
        ag.RunConfig(recipe="r", env="chase", model=MODEL, **changes)


def test_batches_depend_on_the_seed_and_repeat_no_task() -> None:
    first, again, other = ([[t.id for t in b] for b in batches(Chase, 8, 5, seed=seed)] for seed in (1, 1, 2))
    assert first == again != other
    assert len(set(itertools.chain(*first))) == 40


def drawn_ids(env: type[Chase], count: int, sharding: Sharding) -> list[str]:
    sampler = TaskSampler.for_training(env, sharding, seed=1)
    drawn = [sampler.next() for _ in range(count)]
    return [sampled.task.id for sampled in drawn if sampled is not None]


def test_processes_share_each_batch_and_with_carried_groups_split_the_tasks() -> None:
    drawn = list(batches(Chase, 8, 4, seed=1))
    second = drawn_ids(Chase, 16, Sharding(prompts=8, rank=1, world=2))
    assert second == [t.id for batch in drawn for t in batch[1::2]]
    halves = [set(drawn_ids(Seven, 40, Sharding(prompts=3, rank=r, world=2, by_id=True))) for r in (0, 1)]
    assert halves[0] | halves[1] == {t.id for t in Seven.tasks("train")}
    assert not halves[0] & halves[1]


def test_a_small_data_set_is_repeated_but_not_within_a_batch() -> None:
    drawn = [[t.id for t in b] for b in batches(Seven, 3, 20, seed=0)]
    assert all(len(set(batch)) == 3 for batch in drawn)
    assert all(not set(drawn[i]) & set(drawn[i + 1]) for i in range(0, 20, 2))
    assert len(set(itertools.chain(*drawn))) == 7


def test_a_batch_larger_than_the_data_is_refused() -> None:
    with pytest.raises(ValueError, match="prompts"):
        next(batches(Chase, 2_000_000, 1, seed=0))


def test_a_step_is_on_disk_when_it_is_logged(tmp_path: Path) -> None:
    with MetricsLogger(tmp_path / "run", steps=2) as log:
        log(0, {"reward": 0.5, "rollouts/started": 4, "rollouts/finished": 3, "rollout/tool_calls": 2.0})
        assert '"step": 0' in (tmp_path / "run" / "metrics.jsonl").read_text()
    assert log.summary() == {"reward_first": 0.5, "reward_last": 0.5, "steps": 1, "rollouts": 4, "tool_calls": 6}


class Share:
    """The part of a trainer's interface that `Collector` needs, for two processes: this one's share and the other's."""

    rank, world = 0, 2

    def __init__(self, other: Any) -> None:
        self.other = other

    async def gather(self, mine: list[Any]) -> list[Any]:
        return [*mine, *self.other(mine)]


class Halves(ag.ToolEnv[ag.Task]):
    async def setup(self) -> None:
        if self.task.id != "sound":
            raise ValueError("broken")

    @ag.reward
    def one(self) -> float:
        return 1.0


def named(*names: str) -> list[ag.Task]:
    return [ag.Task(id=name, prompt=(ag.Message(role="user", content="Go."),)) for name in names]


@pytest.mark.parametrize("other", ["sound", "broken"])
async def test_all_rollouts_of_one_process_may_fail_but_not_of_the_whole_batch(other: str) -> None:
    theirs = await play_groups(Halves, named(other), Scripted([say("1")]), Schedule(group_size=2))
    trainer: Any = Share(lambda mine: [(theirs.groups, None)] if isinstance(mine[0], tuple) else list(theirs))
    play = Collector(Halves, Scripted([say("1")]), trainer, None, ag.Sampling())
    judged = nullcontext() if other == "sound" else pytest.raises(AgentGymError, match="all 4 rollouts failed")
    with judged:
        groups = await play.collect(named("bad", other), Schedule(group_size=2, seed=0))
        assert [len(group.scored) for group in groups] == [0, 2]
    async with Scheduler(Halves, named("bad"), Scripted([say("1")]), Schedule(group_size=2)) as scheduler:
        with nullcontext() if other == "sound" else pytest.raises(AgentGymError, match="all 4 rollouts failed"):
            await DistributedScheduler(scheduler, trainer, wanted=1).collect()


async def test_a_collector_fills_in_a_schedule_without_overriding_it() -> None:
    class Asked(Scripted):
        async def generate(self, token_ids: Sequence[int], **given: Any) -> Completion:
            asked.append((given["sampling"].temperature, together.parties))
            await together.wait()  # as many as run concurrently
            return await super().generate(token_ids, **given)

    class Sound(Halves):
        async def setup(self) -> None:
            pass

    asked: list[tuple[float, int]] = []
    play = Collector(Sound, Asked([say("1")]), peers.Share(), None, ag.Sampling(temperature=0.5), concurrency=2)
    together = asyncio.Barrier(2)
    await play.collect(named("a", "b"), Schedule(group_size=2))
    together = asyncio.Barrier(4)
    await play.collect(named("a", "b"), Schedule(group_size=2, sampling=ag.Sampling(temperature=0.25), concurrency=4))
    assert asked == [(0.5, 2)] * 4 + [(0.25, 4)] * 4
