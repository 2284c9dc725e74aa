"""Computes the rewards of stored rollouts again, with the env's current reward functions, without running the env."""

import asyncio
import json
import logging
import math
import os
import shutil
from collections import defaultdict
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from agentgym.data.content import task_fields, task_of
from agentgym.engines.base import Engine
from agentgym.environments.env import Env, threads_ended
from agentgym.environments.env_version import env_versions
from agentgym.environments.mixture import Mixture, member_of
from agentgym.environments.resources import open_resources
from agentgym.environments.rewards import rewards_of, total
from agentgym.environments.task_rows import task_type
from agentgym.environments.tool_env import ToolEnv
from agentgym.errors import AgentGymError, EngineError, EnvError, Failure, boundary
from agentgym.evals.unplayed import UnplayedError, reads_of, unplayed
from agentgym.files.disk import Refusals, write_whole
from agentgym.files.foreign.content import read_object
from agentgym.files.names import remove, whole_path
from agentgym.judges.model_roles import ModelRoles, check_models
from agentgym.rollouts.at_exit import within_limit
from agentgym.rollouts.step_result import read_rewards
from agentgym.scheduling.group_rewards import NAME, GroupRewards
from agentgym.seeds import seed_for
from agentgym.store.reader import RolloutStore
from agentgym.store.run_settings import SETTINGS, begun_seed, versions
from agentgym.store.writer import RolloutWriter
from agentgym.types.env_version import as_json
from agentgym.types.rollout import Group, Rollout, StopReason

_LOG = logging.getLogger(__name__)


@dataclass(slots=True)
class Change:
    """The values of a reward before and after a rescore, for the rollouts that were scored both times."""

    before: list[float] = field(default_factory=list)
    after: list[float] = field(default_factory=list)

    @property
    def changed(self) -> int:
        """Number of rollouts whose value has changed."""
        return sum(a != b for a, b in zip(self.before, self.after, strict=True))


@dataclass(slots=True)
class Rescored:
    """The result of a rescore: how the rewards changed. The rollouts with their new rewards are in `output_dir`."""

    output_dir: Path
    rollouts: int = 0
    kept: int = 0
    """Number of rollouts without a reward, which stay without one."""
    not_kept: int = 0
    """Number of rollouts that couldn't be written. If one couldn't, nothing is saved, and this is the number of all
    rollouts.
    """
    failures: list[str] = field(default_factory=list)
    """The errors of rollouts that had a reward before but have none after."""
    reward: Change = field(default_factory=Change)
    rewards: dict[str, Change] = field(default_factory=lambda: defaultdict(Change))
    """Changes of the named rewards, before weighting, by name. A rollout without a reward of that name counts as 0."""

    def add(self, before: Rollout, after: Rollout) -> None:
        """Count a rollout that had a reward."""
        if before.reward is None or after.reward is None:
            self.failures.append(str(after.error))
            return
        self.reward.before.append(before.reward)
        self.reward.after.append(after.reward)
        for name in {**before.rewards, **after.rewards}:
            self.rewards[name].before.append(before.rewards.get(name, 0.0))
            self.rewards[name].after.append(after.rewards.get(name, 0.0))


async def rescore(
    run: str | Path,
    env: type[Env[Any]],
    output_dir: str | Path,
    *,
    models: Mapping[str, Engine] | None = None,
    phase: str | None = None,
    step: int | None = None,
    concurrency: int = 16,
) -> Rescored:
    """Score the rollouts of a run or an evaluation again, and write them with their new rewards to a folder.

    Conversations, metrics and the rewards of steps stay the same, and so do rollouts without a reward. The old
    folder is only read.

    Args:
        run: The folder of the run or the evaluation.
        env: The env whose rewards are computed.
        output_dir: The folder to write to, which must be new or empty.
        models: Engines of the model roles that the rewards use, by name.
        phase: Phase of the rollouts to score; None scores the rollouts of all phases.
        step: Step of the rollouts to score; None scores the rollouts of all steps.
        concurrency: Maximum number of rollouts that are scored at once.

    Returns:
        The rewards before and after.

    Raises:
        ValueError: If `output_dir` isn't new or empty, if no rollouts match, or if a task isn't stored or doesn't fit
            the env.
        EnvError: If a reward needs more than the task, the answer and the attributes that `restore_played` sets. The
            message names the reward and the attribute that it reads.
        AgentGymError: If no rollout could be scored.
    """
    run, output_dir, named = whole_path(run), whole_path(output_dir), check_models(models)
    _refuse_taken(output_dir)
    done = Rescored(output_dir)
    part = output_dir.with_name(f"{output_dir.name}.part")
    remove(part)  # left by a killed rescore, or a link that somebody else has put there
    try:
        await _write(run, env, part, done, named, phase, step, concurrency)
        if not done.not_kept:
            part.replace(output_dir)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return done


def _refuse_taken(output_dir: Path) -> None:
    """Raise ValueError if this path exists, even as a dangling link, and isn't an empty folder."""
    if os.path.lexists(output_dir) and (
        output_dir.is_symlink() or not output_dir.is_dir() or any(output_dir.iterdir())
    ):
        raise ValueError(f"output_dir: {output_dir} already exists; use another folder")


async def _write(
    run: Path,
    env: type[Env[Any]],
    part: Path,
    done: Rescored,
    models: Mapping[str, Engine],
    phase: str | None,
    step: int | None,
    concurrency: int,
) -> None:
    """Score the rollouts again, and write their store and their settings to the folder `part`.

    The results are counted in `done`.
    """
    with RolloutStore(run, one_read=True) as store:
        batches = sorted({(row.phase, row.step) for row in store.summaries(phase=phase, step=step, order="written")})
        if not batches:
            raise ValueError("run: there are no rollouts of this phase and step; choose another phase or step")
        seed = begun_seed(run)
        async with open_resources(env) as resources:
            scorer = _Scorer(env, models, resources, asyncio.Semaphore(concurrency))
            known = partial(_bytes_kept_in, run)
            with RolloutWriter(part, done=1 + max(of for _, of in batches), token_bytes=known) as writer:
                for of_phase, of_step in batches:
                    found = {s.rollout.rollout_id: s.rollout for s in store.find(phase=of_phase, step=of_step)}
                    groups = await _rescored(
                        store, scorer, list(found.values()), done, seed_for("rescore", seed, of_phase, of_step)
                    )
                    writer.add(groups, phase=of_phase, step=of_step)
    if done.failures and not done.reward.after:
        raise AgentGymError(f"all {len(done.failures)} rollouts failed; the first one: {done.failures[0]}")
    disk = Refusals(_LOG.warning)
    write = partial(_write_settings, run, part, env)
    if writer.lost or not disk.attempt(SETTINGS, write, then="the new rewards are returned, but not stored"):
        done.not_kept = done.rollouts


def _bytes_kept_in(run: Path, model: str, ids: Sequence[int]) -> dict[int, bytes]:
    """Return the bytes of these token ids of `model`, as the run stored them. Runs in the writer's thread."""
    with RolloutStore(run) as store:
        return store.token_bytes(model, ids)


async def _rescored(
    store: RolloutStore, scorer: "_Scorer", rollouts: Sequence[Rollout], done: Rescored, seed: int
) -> list[Group]:
    """Return the rollouts of one batch with their new rewards, by task, and count them in `done`."""
    by_task: dict[str, list[Rollout]] = defaultdict(list)
    for rollout in rollouts:
        by_task[rollout.group_id].append(rollout)
    tasks = {name: scorer.task(name, store.task(name)) for name in by_task}
    jobs = [scorer.group(tasks[name], of, seed) for name, of in by_task.items()]
    made: dict[str, Rollout] = {}
    for scored in await _gathered(jobs):
        made.update({rollout.rollout_id: rollout for rollout in scored})
    for rollout in rollouts:
        done.rollouts += 1
        if rollout.reward is None:
            done.kept += 1
        else:
            done.add(rollout, made[rollout.rollout_id])
    return [
        Group(group_id=name, rollouts=tuple(made.get(r.rollout_id, r) for r in of), task=tasks[name])
        for name, of in by_task.items()
    ]


async def _gathered(jobs: Sequence[Coroutine[Any, Any, list[Rollout]]]) -> list[list[Rollout]]:
    """Return the results of all jobs.

    The first error cancels the other jobs, and is raised as it is, not in an exception group.
    """
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(job) for job in jobs]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


@dataclass(frozen=True, slots=True)
class _Scorer:
    """Scores stored rollouts without running the env."""

    env: type[Env[Any]]
    models: Mapping[str, Engine]
    resources: Any
    places: asyncio.Semaphore

    def task(self, name: str, fields: Mapping[str, Any] | None) -> Any:
        """Return a stored task as an instance of the env's task class.

        Raises:
            ValueError: If the task wasn't stored, or doesn't fit the env.
        """
        if fields is None:
            raise ValueError(f"run: the task {name!r}, from which the rewards are computed, isn't stored")
        cls = self.env
        if issubclass(cls, Mixture):
            cls = cls.members[name.partition("/")[0]].env
        try:
            task_fields(task := task_of(task_type(cls), fields))  # raises for fields that were stored as stars
            return task
        except ValueError as error:
            raise ValueError(f"env: the run's task {name!r} isn't a task of {cls.__name__}: {error}") from error

    async def group(self, task: Any, rollouts: Sequence[Rollout], seed: int) -> list[Rollout]:
        """Return a task's scored rollouts with their new rewards. `seed` is the seed of their batch."""
        scored = [await self._scored(task, rollout, seed) for rollout in rollouts if rollout.reward is not None]
        judge = GroupRewards(self.env, self.models)
        again = [rollout for rollout in scored if rollout.reward is not None]
        if not judge.has(task) or not again:
            return scored
        judged = {r.rollout_id: r for r in await judge.added(task, again, seed=seed)}
        return [judged.get(rollout.rollout_id, rollout) for rollout in scored]

    async def _scored(self, task: Any, rollout: Rollout, seed: int) -> Rollout:
        cls = member_of(self.env, task)
        _check_scores(cls)
        async with self.places:
            try:
                return await self._asked(cls, task, rollout, seed)
            except UnplayedError:
                raise
            except AgentGymError as error:
                failure = Failure.of(error)
                return replace(rollout, reward=None, rewards={}, failure=failure, stop_reason=StopReason.ERROR)

    async def _asked(self, cls: type[Env[Any]], task: Any, rollout: Rollout, seed: int) -> Rollout:
        """Call the `score` of a new env instance, and return the rollout with its new rewards."""
        name = cls.__name__
        with boundary(EnvError, f"{name}(task), or its restore_played"):
            env = unplayed(cls, task, rollout)
        found = self.resources.get(task.id.partition("/")[0]) if issubclass(self.env, Mixture) else self.resources
        if found is not None:
            env.resources = found
        session = f"{rollout.rollout_id}/rescore"
        models = ModelRoles(self.models, cls.fallback_models, owner=name, session=session, seed=seed, metrics={})
        env._models = models
        try:
            given = await within_limit(f"{name}.score", cls.limits.seconds, env.score)
            scores = read_rewards(given, f"{name}.score")
        finally:
            if (read := reads_of(env)) is not None:
                raise read
            await threads_ended(env)
            with boundary(EngineError, "release"):
                await models.release()
        _check_given(cls, rollout, scores)
        reward = 0.0
        for turn in sorted(
            (t for s in rollout.segments if s.branch is None for t in s.turns), key=lambda turn: turn.number
        ):
            reward += turn.reward
        reward += total(cls, scores)
        if not math.isfinite(reward):
            raise EnvError(f"{name}: the total reward must be finite, got {reward}; the env's scores are {scores}")
        roles = read_rewards(env.role_rewards, f"{name}.role_rewards")
        return replace(rollout, reward=reward, rewards=scores, role_rewards=roles)


def _check_scores(cls: type[Env[Any]]) -> None:
    """Raise UnplayedError if all of the env's rewards come from its steps."""
    owner: type = cls
    if not rewards_of(owner) and cls.score in (Env.score, ToolEnv.score):
        raise UnplayedError(
            f"{cls.__name__}: can't be rescored, since all of its rewards come from its steps; run the tasks again "
            "with agentgym eval"
        )


def _check_given(cls: type[Env[Any]], rollout: Rollout, scores: Mapping[str, float]) -> None:
    """Raise UnplayedError if a stored reward isn't among `scores`, which `score` has just returned.

    A step may have given that reward, and `score` may then not have been called in the rollout. Group rewards, and
    envs that don't override `step`, are not refused.
    """
    given = [name for name in rollout.rewards if name not in scores and name != NAME]
    if given and cls.step is not ToolEnv.step:
        raise UnplayedError(
            f"{cls.__name__}: can't be rescored: `score` returned no reward {given[0]!r}, so a step may have given it; "
            "run the tasks again with agentgym eval"
        )


def _write_settings(run: Path, output_dir: Path, env: type[Env[Any]]) -> None:
    """Write the run's settings, with the version of the env that computed the new rewards."""
    try:
        begun = read_object(run / SETTINGS, within=run)
    except (OSError, ValueError):
        begun = {}
    begun |= {"versions": versions(), "envs": as_json(env_versions(env)), "rescored": str(run)}
    write_whole(output_dir / SETTINGS, json.dumps(begun, indent=2) + "\n")
