"""Helpers for testing envs without a GPU, model or container. The fixtures are in `agentgym.pytest_plugin`.

::

    async def test_solves(no_leaks):
        r = await ag.rollout(Bugfix, TASK, Scripted([call("bash", cmd="..."), call("submit")]))
        assert r.reward == 1.0 and r.stop_reason == "submitted"
"""

from collections.abc import Coroutine, Mapping, Sequence
from typing import Any

import numpy as np

from agentgym.engines.base import Engine
from agentgym.engines.scripted import (
    ByteTokenizer,
    Reply,
    ReplyPolicy,
    Scripted,
    Seeing,
    call,
    calls,
    check_replies,
    raw,
    say,
)
from agentgym.environments.env import Env, TaskT
from agentgym.environments.mixture import member_of
from agentgym.environments.registry import find_env
from agentgym.environments.task_rows import as_task
from agentgym.judges.model_roles import check_models
from agentgym.sandboxes.fake.sandbox import FakeSandbox, FakeSandboxPool, Shell
from agentgym.sandboxes.protocol import SandboxPool, SandboxSpec
from agentgym.types.sample import Sample

__all__ = [
    "NOOP",
    "ByteTokenizer",
    "FakeSandbox",
    "FakeSandboxPool",
    "Reply",
    "ReplyPolicy",
    "Scripted",
    "Seeing",
    "Shell",
    "call",
    "calls",
    "check_env",
    "check_sandbox",
    "raw",
    "sample",
    "say",
]

NOOP: tuple[Reply, ...] = (say("I do not know."),)
"""The replies of a model that does nothing useful."""


def sample(prompt_ids: Sequence[int] = (1,), response_ids: Sequence[int] = (2, 3), **changes: Any) -> Sample:
    """Create a sample whose response tokens were all sampled, with log-probability -0.5 and advantage 1.

    Args:
        prompt_ids: The token ids of the prompt.
        response_ids: The token ids of the response.
        changes: Values that replace any fields of `Sample`.
    """
    n = len(response_ids)
    fields: dict[str, Any] = {
        "group_id": "group",
        "rollout_id": "group/0",
        "segment": 0,
        "step": 0,
        "prompt_ids": prompt_ids,
        "response_ids": response_ids,
        "loss_mask": np.ones(n, np.bool_),
        "logprobs": np.full(n, -0.5, np.float32),
        "advantages": np.ones(n, np.float32),
        "weight": 1.0,
    }
    return Sample(**(fields | changes))


def check_env(
    env: type[Env[TaskT]],
    task: TaskT,
    *,
    oracle: Sequence[Reply] | ReplyPolicy,
    noop: Sequence[Reply] | ReplyPolicy = NOOP,
    sandboxes: SandboxPool | None = None,
    threshold: float = 1.0,
    idle_is_right: bool = False,
    repeatable: bool = True,
    secrets: Sequence[str] = (),
    shared: Sequence[str] = (),
    reward_range: tuple[float, float] | None = None,
    block_limit_s: float = 0.5,
    models: Mapping[str, Engine] | None = None,
) -> Coroutine[Any, Any, None]:
    """Check that an env meets its contract: `await check_env(MyEnv, TASK, oracle=[...])`.

    Anything that it finds is listed in one AssertionError, a line each: `kind: what is wrong: what to change`. An env
    that shows images is run as on an endpoint with vision, and the log says that it can't be trained.

    The check asserts that:

    - The oracle reaches `threshold`, twice, with the same prompt, tool results and rewards for the same seed. None of
      its tools fails or times out. No method blocks the event loop for `block_limit_s` seconds in the second run.
    - The no-op stays below `threshold`.
    - A malformed call gets a response, and the rollout continues.
    - A cancelled rollout ends, wherever the env waits, and closes once.
    - Rewards are finite numbers.
    - Nothing is left behind: no thread, process, open file, temporary folder or asyncio task.
    - Tools have schemas, something scores the rollout, the train and test splits have no task in common, and rollouts
      don't change anything that belongs to the class.

    In a mixture, all this applies to the task's own member.

    Args:
        env: The env class.
        task: The task to play, or a dict of its fields.
        oracle: Replies that solve the task, or a function of the text so far; each reply is used once.
        noop: Replies of a model that does nothing useful, or a function of the text so far. The last reply is repeated
            for as long as the env continues.
        sandboxes: An open pool to run in. Without one, an env that declares a sandbox runs in a real one. If none can
            be started, it runs in a FakeSandbox, with a warning that says why.
        threshold: The reward that the oracle reaches and the no-op doesn't.
        idle_is_right: Whether doing nothing is the right answer to this task, so that the no-op may reach the
            threshold.
        repeatable: Whether to compare two runs with the same seed. Set it to False if a judge or the world itself never
            gives the same answer twice.
        secrets: Texts that the model must not read unless it has written them itself. Some fields of the task needn't
            be listed: a `check` or `solution` must never be in a prompt or tool result, and an `answer` must never be
            in a tool's exception.
        shared: Names of class attributes that all rollouts may change.
        reward_range: The lowest and the highest reward that a rollout may have.
        block_limit_s: The seconds for which a method may block the event loop.
        models: The models that the env uses by name, such as `{"judge": Scripted(answer)}` with a function of the text.

    Raises:
        AssertionError: If there are findings; the message lists all of them.
        TypeError: If `oracle` or `noop` are not replies, or `noop` is empty.
    """
    from agentgym.testing.env_checks.check import (  # Only checks need the imports of rollouts.
        EnvCheck,
        Settings,
        run_checks,
    )

    cls = find_env(env)
    task = as_task(cls, task)
    cls = member_of(cls, task)
    check_replies("oracle", oracle)
    check_replies("noop", noop)
    if not callable(noop) and not noop:
        raise TypeError("noop: must have at least one reply, such as [say(...)], got none")
    settings = Settings(
        cls=cls,
        task=task,
        oracle=oracle,
        noop=noop,
        sandboxes=sandboxes,
        threshold=threshold,
        idle_is_right=idle_is_right,
        repeatable=repeatable,
        secrets=secrets,
        shared=shared,
        reward_range=reward_range,
        block_limit_s=block_limit_s,
        models=check_models(models),
    )
    return EnvCheck(run_checks(settings), cls.__name__)


async def check_sandbox(spec: SandboxSpec, *, timeout_s: float = 120.0) -> None:
    """Check that a kind of sandbox meets the contract of sandboxes: `await check_sandbox(MySandbox())`.

    The checks run in real sandboxes of the spec. They call every method of `agentgym.sandboxes.protocol.Sandbox` and
    compare its behavior with the contract. They cover results, exit codes, statuses, limits of time and output, host
    functions, hidden tests, background programs, shells, files, archives, snapshots, branches, ports and resets. They
    also check that a pool never leases more sandboxes than its size, that each lease is clean, and that everything
    raises ClosedError after its end. The checks contain no attacks, because each kind of sandbox makes its own promises
    about security.

    Args:
        spec: The sandbox to check.
        timeout_s: Maximum seconds of each check; a check that takes longer fails.

    Raises:
        AssertionError: If checks fail; the message has a line for each, which names the method.
        SandboxError: If no sandbox can be started at all.
    """
    from agentgym.testing.sandbox_checks.check import check_sandbox as check

    found = await check(spec, timeout_s)
    assert not found, f"{type(spec).__name__} fails check_sandbox:\n" + "\n".join(found)
