"""`ag.train_policy`: a complete training run."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from agentgym.config_fields import require_instance
from agentgym.engines.base import Engine, check_engine
from agentgym.engines.messages import refuse_in_training
from agentgym.errors.extras import needs_extra
from agentgym.files.folder_lock import LockedFolder
from agentgym.files.names import drop_unused, whole_path
from agentgym.run.callbacks import Callback, checked_callbacks
from agentgym.run.cluster_config import OFF
from agentgym.run.config import RunConfig
from agentgym.run.follow_model import with_begun
from agentgym.run.loop import is_first, new_folder, run_loop
from agentgym.run.lost import Losses, TrainerLost
from agentgym.run.parts import LocalParts, Parts
from agentgym.run.preflight import hold_checked
from agentgym.run.tasks.chosen import only_tasks
from agentgym.run.tasks.envs import open_envs
from agentgym.train.config import with_rate

_LOG = logging.getLogger(__name__)
T = TypeVar("T")


async def train_policy(
    run: RunConfig, *, callbacks: Iterable[Callback] = (), engine: Engine | None = None
) -> dict[str, Any]:
    """Train an adapter or a full model on an env, and return the run's summary.

    The run's folder contains settings.json from the start. During the run, it gets metrics.jsonl, rollouts.sqlite
    (every rollout with its task and the task's answers; `agentgym show FOLDER` prints them) and a checkpoint every
    `save_every` steps and at the end. At the end, it gets the adapter in PEFT's format in `adapter/`, or the full
    model in `model/`, and summary.json. If the run is cancelled or fails, at any moment, the folder contains the
    checkpoint and the adapter or model of the last finished step, and every collected rollout.

    Args:
        run: The settings.
        callbacks: Called with rollouts, steps and evaluations, on the run's first process.
        engine: An open engine that samples instead of the one in the settings, and stays open. None opens the engine
            in the settings.

    Returns:
        The summary, which is also written to summary.json.

    Raises:
        ValueError: If a setting doesn't fit the other settings, the env, the machine or the folder.
        AgentGymError: If another process uses the folder, or if the run fails, for instance because all rollouts of a
            batch failed.
    """
    heard = checked_callbacks(callbacks)
    require_instance("run", run, RunConfig)
    if engine is not None:
        refuse_in_training(engine)
        check_engine(engine)
    run = with_begun(run)
    run = replace(run, train=with_rate(run.train, run.model))
    env = await asyncio.to_thread(only_tasks, open_envs(run.env, run.env_args, run.sandbox), run.tasks_from)
    named = run.resume or run.output_dir
    made = new_folder(run.name) if named is None and is_first() else None
    folder = whole_path(named) if named is not None else made
    try:
        with hold_checked(run, env, folder) as held:
            play = partial(run_loop, opened_parts=open_parts, env=env, held=held, callbacks=heard, engine=engine)
            return await with_restarts(run, held, play)
    except asyncio.CancelledError as stopped:  # the traceback of the interrupted code doesn't help the user
        raise stopped.with_traceback(None) from None
    finally:
        if made is not None:
            drop_unused(made)  # still empty if the run was refused


@asynccontextmanager
async def open_parts(run: RunConfig, losses: Losses) -> AsyncIterator[Parts]:
    """Yield the run's `Parts`, which open its trainer and its collectors.

    If `ray` isn't off, the parts are on a Ray cluster. This function joins the cluster, or starts one on this machine.
    Processes and rollouts that are lost on the cluster are counted in `losses`.
    """
    if run.ray == OFF:
        yield LocalParts(run)
        return
    with needs_extra():
        from agentgym.cluster.on_ray import joined_cluster
    async with joined_cluster(run, losses) as cluster:
        yield cluster


async def with_restarts(
    run: RunConfig, held: LockedFolder | None, play: Callable[[RunConfig, Losses], Awaitable[T]]
) -> T:
    """Run `play`. If a trainer on Ray is lost, continue from the last checkpoint, up to `cluster.restarts` times."""
    losses = Losses()
    for _ in range(run.cluster.restarts if run.ray != OFF else 0):
        try:
            return await play(run, losses)
        except TrainerLost as lost:
            _LOG.warning("%s; the run continues from its last checkpoint", lost)
            losses.trainers_lost += 1
            losses.trainers_replaced += 1
            run = replace(run, resume=None if held is None else held.path, output_dir=None)
    return await play(run, losses)
