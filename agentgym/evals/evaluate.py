"""`ag.evaluate`: a model played on the tasks of an env."""

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from agentgym.asking.named import check_models
from agentgym.boxes import Boxes
from agentgym.engines.base import Engine
from agentgym.engines.token_bytes import bytes_by_model
from agentgym.environments.env import Env, Split
from agentgym.environments.registry import find_env
from agentgym.environments.resources import open_resources
from agentgym.environments.task_boxes import check_boxes, open_boxes
from agentgym.environments.task_rows import as_tasks
from agentgym.evals.evaluation import Evaluation
from agentgym.evals.kept import KeptRollouts, kept_in, settings_of
from agentgym.evals.opening import Model, name_of, open_engine
from agentgym.evals.progress import progress_bar
from agentgym.field_checks import nearest
from agentgym.rollouts.rollout import rollout
from agentgym.run.tasks.content import env_versions
from agentgym.scheduling.accounting import Groups, raise_if_all_failed, unique
from agentgym.scheduling.group_rewards import GroupRewards
from agentgym.tools.declarations import check_whole
from agentgym.tools.tool_threads import in_own_thread
from agentgym.types import Group, Rollout, Sampling, Task

_LOG = logging.getLogger(__name__)
TASKS = 128
"""Most tasks of an evaluation that does not say how many."""


async def evaluate(
    env: str | type[Env[Any]],
    model: Model,
    *,
    n: int | None = None,
    k: int = 1,
    seed: int = 0,
    tasks: Sequence[Any] | None = None,
    split: Split = "test",
    boxes: Boxes | None = None,
    concurrency: int = 64,
    sampling: Sampling | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    retry_failed: bool = False,
    progress: bool = False,
    models: Mapping[str, Engine] | None = None,
) -> Evaluation:
    """Play `k` rollouts of each of the first `n` tasks of the split, or of `tasks`, on any model; by default of 128.

    `model` is an open engine, the folder or hub name of a model, the folder of an adapter, or the URL of a chat
    endpoint. Where the env asks for a sandbox and no `boxes` are given, a pool is opened and closed. The same seed
    plays the same draws; fewer tasks than `n` are warned of. With `out`, each rollout is kept in that folder when it
    ends, in the store that training has; with `resume`, those that are there are not played again, but for failed ones
    with `retry_failed`; where the env has group rewards, all of a task are played again. `progress` shows a bar on
    stderr. `models` are open engines that the env asks by name, endpoints too. Raises ValueError where there is no
    task, TypeError for an argument of another type, AgentGymError where all rollouts failed.
    """
    _check_types(n=n, k=k, seed=seed, concurrency=concurrency, tasks=tasks, sampling=sampling)
    if k < 1 or (n is not None and n < 1):
        raise ValueError(f"n, k: must be at least 1, got {n} and {k}")
    if concurrency < 1:
        raise ValueError(f"concurrency: must be at least 1, got {concurrency}")
    if out is None and (resume or retry_failed):
        raise ValueError("resume, retry_failed: need the folder of the evaluation in `out`")
    check_boxes(boxes)
    named = check_models(models)
    cls = find_env(env)
    chosen = _chosen(cls, n, tasks, split)
    group_rewards = GroupRewards(cls, named)
    judged = {task.id for task in chosen if group_rewards.has(task)}
    settings = settings_of(
        env=cls,
        model=name_of(model),
        models={name: name_of(engine) for name, engine in named.items()},
        split=split if tasks is None else None,
        seed=seed,
        sampling=sampling,
        group_size=k if judged else None,
    )
    envs = await in_own_thread(lambda: env_versions(cls), name="agentgym-versions")
    async with AsyncExitStack() as stack:
        kept = None
        if out is not None:
            keeping = kept_in(Path(out), settings, envs, chosen, resume=resume, retry_failed=retry_failed)
            kept = stack.enter_context(keeping)
        ended = {} if kept is None else _usable(kept.played, chosen, k, judged)
        left = [(task, number) for task in chosen for number in range(k) if _id(task, number) not in ended]
        if left:
            engine = await stack.enter_async_context(open_engine(model))
            if kept is not None:
                kept.name_tokens(bytes_by_model(engine, named))
            if boxes is None:
                boxes = await stack.enter_async_context(open_boxes(cls, min(concurrency, len(left))))
            await stack.enter_async_context(open_resources(cls))
            told = stack.enter_context(progress_bar(len(chosen) * k, len(chosen) * k - len(left), shown=progress))
            player = _Player(cls, engine, named, boxes, sampling, seed, k, group_rewards, kept, told, ended)
            await player.play_all(left, concurrency)
            _warn_of_unasked(cls, named, [ended[_id(task, number)] for task, number in left])
        groups = [Group(group_id=t.id, rollouts=tuple(ended[_id(t, i)] for i in range(k)), task=t) for t in chosen]
        played = Evaluation(groups=Groups(groups), k=k, envs=envs)
        if kept is not None:
            await asyncio.to_thread(kept.finish, played)
    raise_if_all_failed(played.groups)
    return played


@dataclass(frozen=True, slots=True)
class _Player:
    """Plays the rollouts of an evaluation, and says and keeps each when it ends."""

    env: type[Env[Any]]
    engine: Engine
    models: Mapping[str, Engine]
    boxes: Boxes | None
    sampling: Sampling | None
    seed: int
    k: int
    group_rewards: GroupRewards[Any]
    kept: KeptRollouts | None
    told: Callable[[Rollout], None]
    ended: dict[str, Rollout]
    """Every rollout by its id."""

    async def play_all(self, left: Sequence[tuple[Task, int]], concurrency: int) -> None:
        """Play these rollouts, at most `concurrency` at once."""
        jobs = iter(left)
        async with asyncio.TaskGroup() as players:
            for _ in range(min(concurrency, len(left))):
                players.create_task(self._play_next(jobs))

    async def _play_next(self, jobs: Iterator[tuple[Task, int]]) -> None:
        """Play one rollout after the other, until none is left."""
        for task, number in jobs:
            done = await rollout(
                self.env,
                task,
                self.engine,
                boxes=self.boxes,
                sampling=self.sampling,
                seed=self.seed,
                rollout_id=_id(task, number),
                models=self.models,
            )
            self.ended[done.rollout_id] = done
            if not self.group_rewards.has(task):
                await self._end(task, [done])
            elif all(name in self.ended for name in _ids(task, self.k)):
                await self._end(task, await self._judged(task))

    async def _judged(self, task: Task) -> list[Rollout]:
        """Return all rollouts of a task, those that are scored with their group rewards."""
        played = [self.ended[name] for name in _ids(task, self.k)]
        scored = [done for done in played if done.reward is not None]
        added = await self.group_rewards.added(task, scored, seed=self.seed) if scored else []
        self.ended.update({done.rollout_id: done for done in added})
        return [self.ended[name] for name in _ids(task, self.k)]

    async def _end(self, task: Task, rollouts: Sequence[Rollout]) -> None:
        """Keep rollouts that have ended, and say so."""
        if self.kept is not None:
            await asyncio.to_thread(self.kept.add, task, rollouts)
        for done in rollouts:
            self.told(done)


def _warn_of_unasked(cls: type[Env[Any]], models: Mapping[str, Engine], played: Sequence[Rollout]) -> None:
    """Warn of named models that no rollout has asked: their names may be misspelt."""
    asked = {name.partition("/")[2] for rollout in played for name in rollout.metrics if name.startswith("model_")}
    asked |= {segment.model for rollout in played for segment in rollout.segments}
    for name in sorted(models.keys() - asked):
        like = nearest(name, cls.stand_ins) if cls.stand_ins else "the env may call it otherwise"
        _LOG.warning("%s: no rollout has asked the model %r; %s", cls.__name__, name, like)


def _check_types(*, tasks: Sequence[Any] | None, sampling: Sampling | None, **numbers: int | None) -> None:
    """Raise ValueError or TypeError, naming the argument, for one that is of another type."""
    for name, value in numbers.items():
        check_whole(name, value, may_be_none=name == "n")
    if isinstance(tasks, str):
        raise TypeError(f"tasks: must be a sequence of tasks, as `MyEnv.tasks('train')` returns it, got {tasks!r}")
    if sampling is not None and not isinstance(sampling, Sampling):
        raise TypeError(f"sampling: must be an ag.Sampling, such as ag.Sampling(temperature=0.7), got {sampling!r}")


def _chosen(cls: type[Env[Any]], n: int | None, tasks: Sequence[Any] | None, split: Split) -> list[Task]:
    """The tasks to play."""
    if split not in get_args(Split):
        raise ValueError(f"split: must be one of {', '.join(get_args(Split))}, got {split!r}")
    found = (cls.tasks(split) if tasks is None else tasks)[: TASKS if n is None else n]
    chosen: list[Task] = list(as_tasks(cls, list(found)))
    if not chosen:
        what = f'{cls.__name__}.tasks("{split}") has no task' if tasks is None else "the sequence is empty"
        raise ValueError(f"tasks: {what}; an evaluation needs at least one")
    if n is not None and len(chosen) < n:
        _LOG.warning("%s: n is %d, and there are %d tasks, all of which are played", cls.__name__, n, len(chosen))
    if n is None and tasks is not None and hasattr(tasks, "__len__") and len(tasks) > len(chosen):
        _LOG.warning(
            "%s: of the %d tasks that were given the first %d are played; n=%d plays all",
            cls.__name__,
            len(tasks),
            len(chosen),
            len(tasks),
        )
    unique([task.id for task in chosen])
    return chosen


def _usable(played: Mapping[str, Rollout], tasks: Sequence[Task], k: int, judged: Set[str]) -> dict[str, Rollout]:
    """Return the kept rollouts that are not played again: where a group is judged, those of whole groups."""
    names = {task.id: _ids(task, k) for task in tasks}
    whole = {name for name, ids in names.items() if name not in judged or all(one in played for one in ids)}
    return {name: done for name, done in played.items() if done.group_id in whole}


def _ids(task: Task, k: int) -> list[str]:
    return [_id(task, number) for number in range(k)]


def _id(task: Task, number: int) -> str:
    return f"{task.id}/{number}"
