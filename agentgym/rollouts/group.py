"""Many rollouts: the groups of a batch of tasks, bounded and counted."""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any, overload

import numpy as np

from agentgym.env import Env, TaskT, find_env
from agentgym.errors import AgentGymError
from agentgym.rollouts.engine import Engine
from agentgym.rollouts.episode import rollout
from agentgym.types import Boxes, Group, Rollout, Sampling


def _unique(ids: Sequence[str]) -> None:
    twice = [name for name, count in Counter(ids).items() if count > 1]
    if twice:
        raise ValueError(f"groups: {twice} appear twice; the tasks of one batch need ids of their own")


class Groups(Sequence[Group]):
    """Finished groups in the order of their tasks, and what they came to in numbers."""

    def __init__(self, groups: Sequence[Group]) -> None:
        self.groups = tuple(groups)
        _unique([group.group_id for group in self.groups])

    def __len__(self) -> int:
        return len(self.groups)

    @overload
    def __getitem__(self, index: int) -> Group: ...
    @overload
    def __getitem__(self, index: slice) -> "Groups": ...
    def __getitem__(self, index: int | slice) -> "Group | Groups":
        return Groups(self.groups[index]) if isinstance(index, slice) else self.groups[index]

    @property
    def rollouts(self) -> list[Rollout]:
        """Every rollout, failed ones too."""
        return [r for group in self.groups for r in group.rollouts]

    def metrics(self) -> dict[str, float]:
        """Counts (started = finished + failed) and means over the finished rollouts."""
        rollouts = self.rollouts
        scored = [r for r in rollouts if r.reward is not None]
        counts = {"started": len(rollouts), "finished": len(scored), "failed": len(rollouts) - len(scored)}
        numbers = {f"rollouts/{name}": float(count) for name, count in counts.items()}
        if scored:
            numbers |= _means(scored)
        return numbers


def _means(scored: Sequence[Rollout]) -> dict[str, float]:
    means = {
        "reward": float(np.mean([r.reward for r in scored])),
        "tokens/sampled": float(np.mean([r.sampled_tokens for r in scored])),
        "tokens/total": float(np.mean([sum(len(s.token_ids) for s in r.segments) for r in scored])),
        "segments": float(np.mean([len(r.segments) for r in scored])),
    }
    for prefix, pick in _mappings:
        names = dict.fromkeys(name for r in scored for name in pick(r))
        means |= {f"{prefix}/{name}": float(np.mean([pick(r).get(name, 0.0) for r in scored])) for name in names}
    stops = Counter(r.stop_reason for r in scored)
    return means | {f"stop/{reason}": count / len(scored) for reason, count in sorted(stops.items())}


_mappings: list[tuple[str, Callable[[Rollout], Any]]] = [
    ("reward", lambda r: r.rewards),
    ("rollout", lambda r: r.metrics),
]


async def run_groups(
    env: str | type[Env[TaskT]],
    tasks: Sequence[TaskT],
    engine: Engine,
    *,
    n: int,
    boxes: Boxes | None = None,
    concurrency: int = 64,
    sampling: Sampling | None = None,
    seed: int = 0,
    on_rollout: Callable[[Rollout], None] | None = None,
) -> Groups:
    """`n` rollouts of every task, at most `concurrency` at once; every one started is in the result.

    A rollout that fails is kept without a reward. Where all of them failed the first one's error is
    raised: nothing could be learned from going on. Cancelling cancels them all.
    """
    if n < 1 or concurrency < 1:
        raise ValueError(f"{'n' if n < 1 else 'concurrency'}: must be at least 1")
    _unique([task.id for task in tasks])
    cls = find_env(env)
    gate = asyncio.Semaphore(concurrency)

    async def one(task: TaskT, index: int) -> Rollout:
        async with gate:
            name = f"{task.id}/{index}"
            done = await rollout(cls, task, engine, boxes=boxes, sampling=sampling, seed=seed, rollout_id=name)
        if on_rollout is not None:
            on_rollout(done)
        return done

    async with AsyncExitStack() as stack:
        if boxes is None and cls.sandbox is not None:
            boxes = await stack.enter_async_context(cls.sandbox.open(min(concurrency, n * len(tasks))))
        async with asyncio.TaskGroup() as running:
            jobs = [[running.create_task(one(task, index)) for index in range(n)] for task in tasks]
    groups = Groups(
        [
            Group(group_id=task.id, rollouts=tuple(job.result() for job in row))
            for task, row in zip(tasks, jobs, strict=True)
        ]
    )
    _raise_if_all_failed(groups)
    return groups


def _raise_if_all_failed(groups: Groups) -> None:
    rollouts = groups.rollouts
    if rollouts and all(r.reward is None for r in rollouts):
        raise AgentGymError(f"all {len(rollouts)} rollouts failed; the first one: {rollouts[0].error}")
