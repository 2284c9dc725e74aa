"""Helpers for the tests of an env: no GPU, no model, no container. The fixtures are in `agentgym.pytest_plugin`.

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
    """Make a sample whose response tokens were all sampled, with log-probability -0.5 and advantage 1.

    `changes` replaces any field of `Sample`.
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
    """Assert what every env owes its users: `await check_env(MyEnv, TASK, oracle=[...])`.

    One AssertionError has a line for each finding: `kind: what is wrong: what to change`. An env that shows images is
    played as on an endpoint that sees, and the log says that it cannot be trained.

    The oracle reaches `threshold`, twice, with the same prompt, tool answers and rewards for the same seed; none of its
    tools fails or times out; no method holds up the event loop for `block_limit_s` seconds when it runs for the second
    time. The no-op stays below `threshold`. A malformed call is answered and the rollout goes on. A cancelled rollout
    ends, wherever the env waits, and closes once. Rewards are finite numbers. Nothing is left: no thread, process, open
    file, temporary folder or asyncio task. Tools have schemas, something scores the rollout, the train and test split
    have no task in common, and rollouts change nothing that belongs to the class. In a mixture, all this is of the
    task's own member.

    `oracle`: replies that solve the task, or a function of the text so far; each reply counts once.
    `threshold`: the reward that the oracle reaches and the no-op does not.
    `sandboxes`: an open pool to play in. Without it, an env that declares a sandbox is played in a real sandbox; where
    none can
        be had, in a FakeSandbox, with a warning that says why.
    `noop`: a script, whose last reply is repeated for as long as the env asks, or a function of the text.
    `idle_is_right`: doing nothing is the right answer to this task, so the no-op may reach the threshold.
    `repeatable=False`: a judge or the world itself never answers the same twice; two plays are not compared.
    `secrets`: texts that the model must not read before it wrote them itself. A `check` or `solution` of the task need
        not be named: it may be in no prompt and no tool's answer, and an `answer` in no exception of a tool.
    `shared`: attributes of the class that all rollouts are meant to change.
    `reward_range`: the lowest and the highest reward that a rollout may have.
    `block_limit_s`: the seconds for which a method may hold up the event loop.
    `models`: what the env asks by name, such as `{"judge": Scripted(answer)}` with a function of the text.

    :raises AssertionError: with every finding.
    :raises TypeError: where `oracle` or `noop` are no replies, or `noop` is empty.
    """
    from agentgym.testing.env_checks.check import (  # Rollouts are loaded for checks alone.
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
        raise TypeError("noop: must hold at least one reply, such as [say(...)], got none")
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
    """Assert what every sandbox owes its users, in real sandboxes of it: `await check_sandbox(MySandbox())`.

    Every method of `agentgym.sandboxes.protocol.Sandbox` is called, and what comes back is compared with what it
    promises: results, exit codes, statuses and limits of time and output, host functions, hidden tests, background
    programs, shells, files, archives, snapshots, branches, ports, resets. A pool never leases more than its size, its
    leases are clean, and what is used after its end raises ClosedError. Attacks are not among the checks: what a
    sandbox stops is its own promise.

    `timeout_s`: the seconds that each check may take; one that takes longer is broken.

    :raises AssertionError: with a line for each promise that is broken, which names the method.
    :raises SandboxError: where no sandbox can be had at all.
    """
    from agentgym.testing.sandbox_checks.check import check_sandbox as check

    found = await check(spec, timeout_s)
    assert not found, f"{type(spec).__name__} breaks what it owes:\n" + "\n".join(found)
