"""The command `agentgym check`: checks that an environment keeps its contract, and reports what to change."""

import asyncio
import sys
import warnings
from collections.abc import Callable
from typing import Any

import tyro

from agentgym.cli.envs.names import NONE, Parameters, find, own_name, place, task_of
from agentgym.cli.output import say
from agentgym.engines.scripted import check_replies
from agentgym.environments.env import Env, Split
from agentgym.environments.mixture import member_of
from agentgym.errors import EnvError, boundary
from agentgym.testing import NOOP
from agentgym.types.task import Task

NO_ORACLE = (
    "not checked: whether the task can be solved, and how the tools and rewards behave then; add to the env's file a "
    "`def oracle(task)` that returns replies that solve the task, such as [call(...), say(...)] from agentgym.testing"
)


def check(
    env: tyro.conf.Positional[str],
    split: Split = "train",
    number: int = 0,
    task: str | None = None,
    threshold: float = 1.0,
    idle_is_right: bool = False,
    repeatable: bool = True,
    parameters: Parameters = NONE,
) -> int:
    """Check that an environment keeps its contract, and print what to change.

    The exit code is 1 if there are findings. The env's `oracle(task)`, a function in its file or a method of its class,
    returns replies that solve a task. They are played twice, followed by a no-op, a malformed call and cancellations.
    docs/testing.md lists all findings.
    --env.NAME VALUE sets a parameter of the environment.

    For example:
    $ agentgym check hello
    $ agentgym check my_package.my_env:MyEnv --task 17
    $ agentgym check envs/shop/env.py:Shop --threshold 0.9

    Args:
        env: A registered name, the folder of an env.py, module:Class, or path/env.py:Class.
        split: The split that the task is from.
        number: The task's number in the split, starting at 0.
        task: The task's id, instead of its number.
        threshold: The reward that the oracle must reach and the no-op must not.
        idle_is_right: Accept doing nothing as the right answer to this task.
        repeatable: Require two plays to have the same result; use --no-repeatable if a judge or the world varies.
    """
    from agentgym.testing.env_checks.check import Settings, find_mistakes
    from agentgym.testing.env_checks.findings import counted

    cls = find(env, parameters)
    chosen = task_of(cls, split, number, task)
    cls = member_of(cls, chosen)
    oracle = oracle_of(cls)
    settings = Settings(
        cls=cls,
        task=chosen,
        oracle=None if oracle is None else _replies(cls, oracle, chosen),
        noop=NOOP,
        threshold=threshold,
        idle_is_right=idle_is_right,
        repeatable=repeatable,
    )
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", UserWarning)
        found = asyncio.run(find_mistakes(settings))
    for warning in said:
        sys.stderr.write(f"agentgym: {warning.message}\n")
    for finding in found:
        say(f"{finding.kind}: {finding.wrong}\n    -> {finding.change}")
    if oracle is None:
        say(NO_ORACLE)
    with_ = "" if oracle is None else " with its oracle"
    result = counted(found) if found else "nothing is wrong"
    say(f"{own_name(cls)} ({place(cls)}), task {chosen.id!r}{with_}: {result}")
    return 1 if found else 0


def oracle_of(cls: type[Env[Any]]) -> Callable[[Task], Any] | None:
    """Return the `oracle` of the env's class, or else that of its module, or None if neither has one."""
    made = getattr(cls, "oracle", None) or getattr(sys.modules[cls.__module__], "oracle", None)
    return made if callable(made) else None


def _replies(cls: type[Env[Any]], oracle: Callable[[Task], Any], task: Task) -> Any:
    """Return the oracle's replies to a task.

    Raises:
        EnvError: If the oracle raises, or returns something other than replies.
    """
    with boundary(EnvError, f"{cls.__name__}: oracle(task)"):
        replies = oracle(task)
        check_replies("oracle", replies)
    return replies
