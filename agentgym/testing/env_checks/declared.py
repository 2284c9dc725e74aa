"""Checks of a class and its tasks that need no rollout."""

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

from agentgym.data.content import content, refuse_unkept
from agentgym.environments.env import Env, Split, has_group_reward
from agentgym.environments.rewards import rewards_of
from agentgym.environments.task_rows import compared, is_data, shared_ids, split_tasks
from agentgym.environments.tool_env import ToolEnv
from agentgym.testing.env_checks.findings import Finding
from agentgym.tools.tool import class_tools
from agentgym.types.task import Task


def check_class(cls: type[Env[Any]]) -> list[Finding]:
    """Return findings about the class: a tool without a schema, no reward, or an override without its decorator."""
    owner: type = cls
    try:
        class_tools(owner)
    except ValueError as error:
        return [Finding("tool", str(error), "fix the declaration, because the model's schema is made from it")]
    return [*_check_rewards(cls), *_check_overrides(cls)]


def _check_rewards(cls: type[Env[Any]]) -> Iterator[Finding]:
    owner: type = cls
    scores_itself = cls.score is not ToolEnv.score or cls.step is not ToolEnv.step or has_group_reward(cls)
    if issubclass(cls, ToolEnv) and not scores_itself and not rewards_of(owner):
        yield Finding(
            "reward",
            f"{cls.__name__} has no @ag.reward method",
            "put @ag.reward on the method that scores the rollout",
        )


def _check_overrides(cls: type[Env[Any]]) -> Iterator[Finding]:
    for base in cls.__mro__[1:]:
        for name in base.__dict__:
            given, now = inspect.getattr_static(base, name), inspect.getattr_static(cls, name)
            for mark, decorator in (("__agentgym_tool__", "tool"), ("__agentgym_reward__", "reward")):
                if hasattr(given, mark) and inspect.isfunction(now) and not hasattr(now, mark):
                    yield Finding(
                        decorator,
                        f"{cls.__name__}.{name} overrides an @ag.{decorator} of {base.__name__} without the decorator",
                        f"put @ag.{decorator} on it, otherwise the class loses this {decorator}",
                    )


def check_tasks(cls: type[Env[Any]]) -> list[Finding]:
    """Return findings about the splits, such as a task in both; an env without `tasks` has nothing to compare."""
    try:
        given = [split_tasks(cls, split) for split in _SPLITS]
        train, test = ([task for task in some if isinstance(task, Task)] for some in compared(*given))
        listed = all(map(is_data, given))
        if wrong := shared_ids(train, test, listed=listed):
            return [Finding("tasks", wrong, "remove test tasks from train; a held-out task must not be trained on")]
        return _check_kept([*train, *test]) or _check_contents(train, test, listed=listed)
    except NotImplementedError:
        return []
    except Exception as error:
        return [
            Finding(
                "tasks",
                f"{cls.__name__}.tasks raised {_said(error)}",
                "tasks(split) must return the tasks of both splits",
            )
        ]


def _check_kept(tasks: Sequence[Task]) -> list[Finding]:
    """Return a finding if a task's fields can't be stored."""
    try:
        refuse_unkept(tasks)
    except ValueError as error:
        return [
            Finding("tasks", str(error), "a run, and an evaluation with output_dir, would raise this at their start")
        ]
    return []


_SPLITS: tuple[Split, Split] = ("train", "test")


def _check_contents(train: Sequence[Task], test: Sequence[Task], *, listed: bool) -> list[Finding]:
    """Return a finding if tasks are in both splits under different ids.

    Args:
        train: The tasks of the split "train" that are compared.
        test: The tasks of the split "test" that are compared.
        listed: Whether the tasks are rows of data. If so, one task in both splits is enough for a finding. Otherwise,
            the tasks are made from their index and may be equal by chance, so there is only a finding if all the
            compared ones are equal.
    """
    columns = {type(task) for task in (*train, *test) if set(type(task).model_fields) > {"id", "prompt"}}
    pairs = list(zip(train, test, strict=False))
    if listed:
        known = {content(task): task for task in train}
        pairs = [(known[content(task)], task) for task in test if content(task) in known]
    elif not all(content(one) == content(other) for one, other in pairs):
        return []
    if not pairs or not columns:
        return []
    example = f"({pairs[0][0].id!r} and {pairs[0][1].id!r})"
    wrong = f"{len(pairs)} of {len(test)} test tasks are in train under another id {example}"
    if not listed:
        wrong = f"the first {len(pairs)} tasks of train and test are equal except for their ids {example}"
    return [Finding("tasks", wrong, "remove test tasks from train; a held-out task must not be trained on")]


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
