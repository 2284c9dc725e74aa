"""The command `agentgym rescore`: recomputes the rewards of stored rollouts."""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from agentgym.cli.envs.names import find
from agentgym.cli.evals.models import ModelFlags, opened_models
from agentgym.cli.evals.outcome import INCOMPLETE
from agentgym.cli.output import flush, say
from agentgym.cli.show import opened
from agentgym.environments.env import Env
from agentgym.errors import AgentGymError
from agentgym.files.names import drop_unused, new_folder, shown, whole_path
from agentgym.types.transcript import printable

if TYPE_CHECKING:
    from agentgym.evals.rescore import Change, Rescored


def rescore_run(
    run: tyro.conf.Positional[Path],
    env: str | None = None,
    output_dir: Path | None = None,
    phase: str | None = None,
    step: int | None = None,
    concurrency: int = 16,
    models: Annotated[Mapping[str, ModelFlags] | None, tyro.conf.Fixed, tyro.conf.Suppress] = None,
) -> int:
    """Score the rollouts of a run or an evaluation again with the env's current rewards, without running them.

    The rollouts are written with their new rewards to a folder inside the old one, whose own files don't change;
    `agentgym show`, `compare` and `export` read it. If they cannot be written, the scores are still printed, nothing is
    saved, and the exit status is 3. Rewards may read the task, the answer, the metrics and the attributes that the
    env's own `restore_played` sets. If a reward reads the sandbox, or an attribute that a tool has set, an error names
    the reward and what it reads.

    A judge or another model that the rewards query by name is given as in an evaluation: --models.judge.url URL/v1.

    For example:
    $ agentgym rescore runs/eval-pointers/first
    $ agentgym rescore runs/pointers/20260801-101500 --env my_env.py:Pointers --phase eval_after

    Args:
        run: The folder of a run or an evaluation, which contains rollouts.sqlite.
        env: A registered name, the folder of an env.py, module:Class, or path/env.py:Class; by default the run's own.
        output_dir: The folder for the rollouts; by default rescored-TIME in the run's folder.
        phase: Only the rollouts of this phase, such as train or eval_after; by default all phases.
        step: Only the rollouts of this step.
        concurrency: The maximum number of rollouts that are scored at once.
    """
    with opened(run) as store:
        if phase is not None and phase not in (there := store.phases()):
            raise AgentGymError(f"--phase: no rollout has the phase {phase!r}; the phases are: {', '.join(there)}")
    if concurrency < 1:
        raise AgentGymError(f"--concurrency: must be at least 1, got {concurrency}")
    folder = new_folder(run, "rescored-") if output_dir is None else whole_path(output_dir)
    try:
        cls = find(env) if env is not None else env_of(run)
        settings = {"phase": phase, "step": step, "concurrency": concurrency}
        done = asyncio.run(_rescored(run, cls, folder, models or {}, settings))
    except ValueError as error:
        raise AgentGymError(str(error)) from error
    finally:
        drop_unused(folder)  # if nothing was written
    _say_changes(done)
    flush()
    return INCOMPLETE if done.not_kept else 0


async def _rescored(
    run: Path, env: type[Env[Any]], output_dir: Path, models: Mapping[str, ModelFlags], settings: Mapping[str, Any]
) -> "Rescored":
    from agentgym.evals.rescore import rescore

    async with opened_models(models) as named:
        return await rescore(run, env, output_dir, models=named, **settings)


def env_of(run: Path) -> type[Env[Any]]:
    """Return the current version of the env with which a run or an evaluation was started.

    Raises:
        ValueError: If the run's settings don't name an env that can be found.
    """
    from agentgym.run.tasks.envs import open_envs
    from agentgym.store.run_settings import begun_env

    try:
        names, arguments = begun_env(run)
    except ValueError as error:
        raise ValueError(f"{error} with --env") from error
    for name in [names] if isinstance(names, str) else names:
        find(name)
    return open_envs(names, arguments, "auto")


def _say_changes(done: "Rescored") -> None:
    scored = len(done.reward.after)
    say(_line("reward", done.reward))
    for name, change in done.rewards.items():
        say(_line(f"  {printable(name)}", change))
    say(f"{'rollouts':<20}{done.rollouts}, {scored} of them rescored")
    if done.kept:
        say(f"{'':<20}{done.kept} had no reward, and still have none")
    if done.failures:
        say(f"{'':<20}{len(done.failures)} lost their reward; the first error: {printable(done.failures[0])}")
    not_kept = f"none: {done.not_kept} rollouts could not be written, so nothing was saved"
    say(f"{'folder':<20}{not_kept if done.not_kept else shown(done.output_dir)}")


def _line(name: str, change: "Change") -> str:
    many = len(change.after)
    if not many:
        return f"{name:<20}no rollouts"
    before, after = sum(change.before) / many, sum(change.after) / many
    return f"{name:<20}{before:.3f} before, {after:.3f} after, {change.changed} of {many} changed"
