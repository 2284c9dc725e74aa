"""The teacher of a distillation run: a separate engine that scores the tokens that the policy sampled."""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from agentgym.engines.base import Engine
from agentgym.engines.messages import refuse_in_training
from agentgym.engines.teacher import divergence, teacher_advantages
from agentgym.run.collector import Collector
from agentgym.run.config import RunConfig
from agentgym.run.open_collector import open_model, without_adapters
from agentgym.run.peers import Peers
from agentgym.samples import SampleBatch, teacher_samples
from agentgym.types.rollout import Group


@asynccontextmanager
async def open_teacher(run: RunConfig, peers: Peers, progress: Callable[[str], None]) -> AsyncIterator[Engine | None]:
    """Open the engine of the run's teacher; yield None if the run has no teacher."""
    if run.teacher is None:
        yield None
        return
    engine = without_adapters(run.teacher_engine)
    async with open_model(run, run.teacher, engine, peers, progress) as teacher:
        refuse_in_training(teacher)
        yield teacher


async def taught_samples(
    run: RunConfig, groups: Sequence[Group], teacher: Engine, collector: Collector
) -> tuple[SampleBatch, dict[str, float]]:
    """Return a batch's samples, with advantages from the teacher, and the teacher's metrics.

    Every training process must call it with the whole batch. Each one requests its share of the scores and receives all
    scores.
    """
    peers, rollouts = collector.peers, [rollout for group in groups for rollout in group.rollouts]
    scored = [rollout for rollout in rollouts if rollout.reward is not None]
    mine = await teacher_advantages(
        scored[peers.rank :: peers.world],
        teacher,
        collector.engine,
        sampling=run.sampling,
        concurrency=run.teacher_engine.slots,
    )
    advantages = dict(await peers.gather(list(mine.items())))
    batch = teacher_samples(groups, advantages, merge=run.merge)
    return batch, {"teacher/divergence": divergence(scored, advantages)}
