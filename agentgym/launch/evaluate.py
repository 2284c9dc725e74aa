"""`ag.evaluate`, which evaluates a model on an env's tasks."""

import asyncio
import logging
import math
from collections.abc import Mapping, Sequence, Set
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from agentgym.chat.template import template_text, template_variables
from agentgym.chat.template_input import ToolsIn
from agentgym.environments.env import Env, Split, has_group_reward
from agentgym.environments.env_version import env_versions
from agentgym.environments.mixture import member_of
from agentgym.environments.registry import find_env
from agentgym.environments.task_rows import as_task, as_tasks, first_tasks, split_tasks
from agentgym.environments.task_sandboxes import check_sandboxes
from agentgym.errors.extras import needs_extra
from agentgym.evals.evaluation import Evaluation
from agentgym.evals.fingerprints import fingerprints, fingerprints_now
from agentgym.evals.kept import kept_in, settings_of
from agentgym.evals.opening import ChatSettings, Model, name_of, opened_name, refuse_images
from agentgym.evals.player import EvaluationPlayer, rollout_id, rollout_ids
from agentgym.evals.playing import Playing, open_playing
from agentgym.evals.progress import progress_bar
from agentgym.files.held import place_now
from agentgym.files.names import command, whole_path
from agentgym.judges.model_roles import check_models, unasked
from agentgym.rollouts.rollout_warnings import ToolUse
from agentgym.run.cluster_config import OFF
from agentgym.sandboxes.protocol import SandboxPool
from agentgym.scheduling.accounting import Groups, raise_if_all_failed, unique
from agentgym.tools.declarations import check_whole
from agentgym.tools.tool_threads import in_own_thread
from agentgym.types.completion import Sampling
from agentgym.types.rollout import Group, Rollout
from agentgym.types.task import Task

_LOG = logging.getLogger(__name__)
TASKS = 128
"""Default number of tasks of an evaluation."""


async def evaluate(
    env: str | type[Env[Any]],
    model: Model,
    *,
    n: int | None = None,
    k: int = 1,
    seed: int = 0,
    solved: float = 1.0,
    tasks: Sequence[Any] | None = None,
    split: Split = "test",
    sandboxes: SandboxPool | None = None,
    concurrency: int = 64,
    sampling: Sampling | None = None,
    output_dir: str | Path | None = None,
    resume: bool = False,
    retry_failed: bool = False,
    progress: bool = False,
    models: Mapping[str, Model] | None = None,
    chat_template: str | Path | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    tools: ToolsIn = "auto",
    ray: str = OFF,
    workers: int | None = None,
) -> Evaluation:
    """Run `k` rollouts of each task on any model, and return them with their scores.

    Args:
        env: The env's class, its registered name, or its location, such as `"my_env:Pointers"`.
        model: An open engine, a model's folder or hub name, an adapter's folder, or the URL of a chat endpoint.
        n: Number of tasks to run, from the start of the split or of `tasks`. None runs the first 128, or all if there
            are fewer. If `n` is larger than the number of tasks, a warning is logged.
        k: Number of attempts per task.
        seed: Seed of all random draws. Each attempt at a task has different draws. The same seed repeats them.
        solved: Minimum reward of an attempt that solves its task.
        tasks: Tasks to run instead of the split's.
        split: The split to take the tasks from.
        sandboxes: An open sandbox pool. If None and the env needs a sandbox, a pool is opened for this evaluation
            and closed at its end.
        concurrency: Maximum number of concurrent rollouts.
        sampling: Sampling settings; None uses the defaults.
        output_dir: Folder in which each rollout is stored when it ends, in the same format as training. None stores
            nothing.
        resume: Whether to skip rollouts that the folder already has. With group rewards, all attempts at a task are
            run again unless the folder has all of them.
        retry_failed: Whether to run the folder's failed rollouts again.
        progress: Whether to show a progress bar on stderr.
        models: Models that the env uses by name, each given like `model`.
        chat_template: Chat template that replaces the model's, as a Jinja file or its text. None uses the template in
            the adapter's folder, if the model is an adapter that has one, or else the model's.
        chat_template_kwargs: Variables passed to the chat template, such as {"enable_thinking": False}.
        tools: What describes the env's tools to the model: the chat template (template) or text in the system prompt
            (prompt). auto uses the template if it shows tools and the format of its calls is known, otherwise the
            prompt; refuse raises an error instead.
        ray: Ray cluster to run on. `auto` joins a running cluster, or starts one on this machine. HOST:PORT joins that
            cluster. `off` runs in this process. Each worker opens the model itself, so `model` must be a name, a
            folder, an endpoint, or an engine on servers. If a worker is lost, it is replaced and its rollouts are run
            again.
        workers: Number of worker processes on the cluster. None starts one per node, or one per unit of the Ray
            resource "sandbox" if the cluster has any.

    Returns:
        The rollouts and their scores.

    Raises:
        ValueError: If there are no tasks, if an argument is invalid, or if the folder can't store this evaluation.
        TypeError: If an argument has the wrong type.
        AgentGymError: If all rollouts failed.
    """
    _check_types(n=n, k=k, seed=seed, concurrency=concurrency, tasks=tasks, sampling=sampling)
    k, seed, concurrency = int(k), int(seed), int(concurrency)  # NumPy integers aren't JSON
    if k < 1 or (n is not None and n < 1):
        raise ValueError(f"n, k: must be at least 1, got {n} and {k}")
    if isinstance(solved, bool) or not isinstance(solved, int | float) or not math.isfinite(solved):
        raise ValueError(f"solved: must be a finite number, the minimum reward of a solved task, got {solved!r}")
    if not 0 <= seed < 2**63:
        raise ValueError(f"seed: must be from 0 to 2^63 - 1, got {seed}")
    if not isinstance(ray, str):
        raise TypeError(f"ray: must be 'off', 'auto' or 'HOST:PORT', got {ray!r}")
    if output_dir is not None and (not isinstance(output_dir, str | Path) or not str(output_dir).strip()):
        raise TypeError(f"output_dir: must be a path, got {output_dir!r}")
    if concurrency < 1:
        raise ValueError(f"concurrency: must be at least 1, got {concurrency}")
    if output_dir is None and (resume or retry_failed):
        raise ValueError("resume, retry_failed: need the folder of the evaluation; set output_dir to it")
    if retry_failed and not resume:
        raise ValueError("retry_failed: only a resumed evaluation has failed rollouts to retry; set `resume` too")
    check_sandboxes(sandboxes)
    asked = _checked_models(models)
    if ray == OFF and workers is not None:
        raise ValueError("workers: only an evaluation on Ray has workers; set ray, or leave workers out")
    chat = ChatSettings(
        template=None if chat_template is None else template_text(chat_template),
        variables=template_variables(chat_template_kwargs or {}),
        tools=tools,
    )
    chat.refuse_for(model)
    cls = find_env(env)
    chosen = _chosen(cls, n, tasks, split)
    refuse_images(model, cls, chosen)
    judged = {task.id for task in chosen if has_group_reward(member_of(cls, task))}
    settings = settings_of(
        env=cls,
        model=name_of(model),
        models={name: opened_name(each) for name, each in asked.items()},
        split=split if tasks is None else None,
        seed=seed,
        sampling=sampling,
        group_size=k if judged else None,
        chat=chat,
    )
    envs = await in_own_thread(lambda: env_versions(cls), name="agentgym-versions")
    folder = whole_path(output_dir or "")
    async with AsyncExitStack() as stack:
        kept = None
        if output_dir is not None:
            known = await fingerprints({"": model, **asked})
            keeping = kept_in(folder, settings, envs, chosen, known, k=k, resume=resume, retry_failed=retry_failed)
            kept = stack.enter_context(keeping)
        ended = {} if kept is None else _usable(kept.played, chosen, k, judged)
        left = [(task, number) for task in chosen for number in range(k) if rollout_id(task, number) not in ended]
        if left:
            given = cls, model, asked, sandboxes, sampling, seed
            at_once = min(concurrency, len(left))
            if ray == OFF:
                playing: Playing = await stack.enter_async_context(open_playing(*given, at_once=at_once, chat=chat))
            else:
                with needs_extra():
                    from agentgym.cluster.evaluation import open_playing_on_ray
                opening = open_playing_on_ray(*given, at_once=at_once, chat=chat, address=ray, workers=workers)
                playing = await stack.enter_async_context(opening)
            if kept is not None:
                kept.hold_models(await fingerprints_now({"": model, **asked}, playing))
                kept.name_tokens(playing.token_bytes())
            told = stack.enter_context(progress_bar(len(chosen) * k, len(chosen) * k - len(left), shown=progress))
            await EvaluationPlayer(playing, k, judged, kept, told, ended, set(ended)).play_all(left, concurrency)
            for said in unasked(asked, [ended[rollout_id(task, number)] for task, number in left], [cls]):
                _LOG.warning("%s: %s", cls.__name__, said)
        groups = [
            Group(group_id=t.id, rollouts=tuple(ended[rollout_id(t, i)] for i in range(k)), task=t) for t in chosen
        ]
        resumed = len(chosen) * k - len(left) if resume else None
        played = Evaluation(groups=Groups(groups), k=k, envs=envs, seed=seed, solved=float(solved), resumed=resumed)
        if kept is not None:
            await asyncio.to_thread(kept.finish, played)
    if kept is not None and kept.lost:
        played = replace(played, not_kept=kept.lost)
        _LOG.warning(
            "output_dir: %d rollouts are not stored in %s; `resume` runs them again", kept.lost, place_now(folder)
        )
    shows = "" if kept is None else f"; `{command('show', place_now(folder), '--failed')}` shows them"
    raise_if_all_failed(played.groups, then=shows)
    if (unused := _unused_tools(played)) is not None:
        _LOG.warning("%s: %s", cls.__name__, unused)
    return played


def _unused_tools(played: Evaluation) -> str | None:
    """Return a sentence if no rollout called a tool and most tasks are unsolved; solved ones don't need the tools."""
    rewards = [r.reward for r in played.rollouts if r.reward is not None]
    if 2 * sum(reward >= played.solved for reward in rewards) >= len(rewards):
        return None
    use = ToolUse()
    use.add(played.rollouts)
    return use.warning()


def _checked_models(models: Mapping[str, Model] | None) -> dict[str, Model]:
    """Return the model roles. Raise TypeError or ValueError, naming the entry, for an invalid one."""
    if not isinstance(models, Mapping | None):
        return dict(check_models(models))  # raises
    opened = check_models({name: each for name, each in (models or {}).items() if not isinstance(each, str | Path)})
    return {name: opened.get(name, each) for name, each in (models or {}).items()}


def _check_types(*, tasks: Sequence[Any] | None, sampling: Sampling | None, **numbers: int | None) -> None:
    """Raise ValueError or TypeError, naming the argument, if an argument has the wrong type."""
    for name, value in numbers.items():
        check_whole(name, value, may_be_none=name == "n")
    if isinstance(tasks, str):
        raise TypeError(f"tasks: must be a sequence of tasks, such as `MyEnv.tasks('train')`, got {tasks!r}")
    if sampling is not None and not isinstance(sampling, Sampling):
        raise TypeError(f"sampling: must be an ag.Sampling, such as ag.Sampling(temperature=0.7), got {sampling!r}")


def _chosen(cls: type[Env[Any]], n: int | None, tasks: Sequence[Any] | None, split: Split) -> list[Task]:
    """Return the tasks to run."""
    if split not in get_args(Split):
        raise ValueError(f"split: must be one of {', '.join(get_args(Split))}, got {split!r}")
    found = split_tasks(cls, split) if tasks is None else as_tasks(cls, tasks)
    chosen: list[Task] = [as_task(cls, row) for row in first_tasks(found, TASKS if n is None else n)]
    if not chosen:
        what = f'{cls.__name__}.tasks("{split}") has no tasks' if tasks is None else "the sequence is empty"
        raise ValueError(f"tasks: {what}; an evaluation needs at least one")
    if n is not None and len(chosen) < n:
        _LOG.warning("%s: n is %d, but there are only %d tasks; running all of them", cls.__name__, n, len(chosen))
    if n is None and tasks is not None and len(found) > len(chosen):
        _LOG.warning(
            "%s: of %d given tasks, only the first %d are run; n=%d runs all",
            cls.__name__,
            len(found),
            len(chosen),
            len(found),
        )
    unique([task.id for task in chosen])
    return chosen


def _usable(played: Mapping[str, Rollout], tasks: Sequence[Task], k: int, judged: Set[str]) -> dict[str, Rollout]:
    """Return the stored rollouts that needn't be run again.

    `judged` has the ids of the tasks with group rewards, of which only complete groups count.
    """
    names = {task.id: rollout_ids(task, k) for task in tasks}
    whole = {name for name, ids in names.items() if name not in judged or all(one in played for one in ids)}
    return {name: done for name, done in played.items() if done.group_id in whole}
