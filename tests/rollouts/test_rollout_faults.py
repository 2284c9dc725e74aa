"""Faults in env, tool, sandbox or engine: no score instead of a 0, and nothing left open."""

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import agentgym as ag
from agentgym.engines.scripted import Scripted, call, say
from agentgym.errors import SandboxError
from agentgym.sandboxes.fake.sandbox import FakeSandbox, FakeSandboxPool
from agentgym.sandboxes.protocol import Sandbox
from agentgym.scheduling import run_groups
from agentgym.types.completion import Completion
from tests.support.virtual_time import run_in_virtual_time

TASK = ag.Task(id="t", prompt=(ag.Message(role="user", content="Go."),))
SCRIPT = [call("look"), say("done")]


class Desk(ag.ToolEnv[ag.Task]):
    """An env that counts how often it was closed."""

    sandbox_spec = ag.AnySandbox()
    closed: list[ag.Task]

    def __init_subclass__(cls) -> None:
        cls.closed = []

    async def close(self) -> None:
        self.closed.append(self.task)

    @ag.tool
    async def look(self) -> str:
        """Look around."""
        return await self.see()

    async def see(self) -> str:
        return "nothing"

    @ag.reward
    def score_of_one(self) -> float:
        return 1.0


def desk(**parts: Any) -> type[Desk]:
    return type("Broken", (Desk,), parts)


def raising(kind: type[BaseException], text: str) -> Callable[..., Any]:
    async def fail(*args: Any, **kwargs: Any) -> Any:
        raise kind(text)

    return fail


def giving(value: Any) -> Callable[..., Any]:
    async def give(*args: Any, **kwargs: Any) -> Any:
        return value

    return give


def broken_init(self: Desk, task: ag.Task) -> None:
    raise KeyError("column")


async def forever(self: object, *args: Any, **kwargs: Any) -> Any:
    await asyncio.Event().wait()


class Undocumented(Desk):
    @ag.tool
    async def mystery(self) -> None: ...


OOPS = raising(RuntimeError, "oops")
DEAD = raising(SandboxError, "the sandbox died")
NONSENSE = ag.StepResult([{"role": "tool"}], 0.0, False, False, {})  # type: ignore[typeddict-item]
NO_NUMBER = ag.StepResult([], float("nan"), True, False, {})


@pytest.mark.parametrize(
    ("env", "error", "written"),
    [
        pytest.param(desk(__init__=broken_init), r"EnvError: Broken\(task\): KeyError: 'column'", 0, id="init"),
        pytest.param(desk(setup=OOPS), "EnvError: Broken.setup: RuntimeError: oops", 0, id="setup"),
        pytest.param(desk(step=OOPS), "EnvError: Broken.step: RuntimeError: oops", 1, id="step"),
        pytest.param(desk(step=raising(TimeoutError, "x")), "EnvError: Broken.step: TimeoutError: x", 1, id="timeout"),
        pytest.param(desk(see=DEAD), "SandboxError: the sandbox died", 1, id="sandbox"),
        pytest.param(desk(score=OOPS), "EnvError: Broken.score: RuntimeError: oops", 2, id="reward"),
        pytest.param(desk(close=OOPS), "EnvError: Broken.close: RuntimeError: oops", 2, id="close"),
        pytest.param(
            desk(reset=giving(None)), r"EnvError: Broken.reset: must return \(messages", 0, id="reset_gives_nothing"
        ),
        pytest.param(
            desk(step=giving(None)),
            r"EnvError: Broken.step: must return StepResult\(messages",
            1,
            id="step_gives_nothing",
        ),
        pytest.param(desk(step=giving(NONSENSE)), "EnvError: .*content", 1, id="a_message_without_content"),
        pytest.param(desk(step=giving(NO_NUMBER)), "EnvError: .*nan", 1, id="a_reward_that_is_no_number"),
        pytest.param(desk(score=giving({"x": float("inf")})), "EnvError: .*inf", 2, id="an_infinite_score"),
        pytest.param(Undocumented, "EnvError: .*needs a docstring", 0, id="a_tool_without_a_docstring"),
        pytest.param(
            desk(limits=ag.Limits(context_tokens=5)),
            "ContextOverflow: .* fills the 5 tokens of limits.context_tokens",
            0,
            id="prompt",
        ),
    ],
)
async def test_a_failing_env_gives_a_rollout_without_a_reward_that_keeps_its_segments(
    env: type[Desk], error: str, written: int, sandboxes: FakeSandboxPool
) -> None:
    rollout = await ag.rollout(env, TASK, Scripted(SCRIPT), sandboxes=sandboxes)
    assert (rollout.reward, rollout.stop_reason) == (None, "error")
    assert re.match(error, rollout.error or "")
    assert len(rollout.messages) == written
    assert sandboxes.leased == []


def test_a_score_that_never_arrives_gives_a_rollout_without_a_reward(
    sandboxes: FakeSandboxPool,
) -> None:
    env = desk(limits=ag.Limits(turns=1, seconds=10), score=forever)
    rollout = run_in_virtual_time(ag.rollout(env, TASK, Scripted(SCRIPT), sandboxes=sandboxes))
    assert (rollout.reward, rollout.stop_reason, len(rollout.messages)) == (None, "error", 1)
    assert (rollout.error or "").startswith("EnvError: Broken.score: TimeoutError")
    assert sandboxes.leased == []


async def test_a_failing_tool_is_an_answer_and_the_rollout_is_scored(sandboxes: FakeSandboxPool) -> None:
    rollout = await ag.rollout(desk(see=OOPS), TASK, Scripted(SCRIPT), sandboxes=sandboxes)
    assert (rollout.reward, rollout.stop_reason, rollout.metrics["tool_errors"]) == (1.0, "answer", 1)


class Faulty(Scripted):
    """An engine that plays one reply and then does what the test specified."""

    def __init__(self, then: Callable[..., Any], *, method: str = "generate") -> None:
        super().__init__(SCRIPT)
        self.then, self.method = then, method

    async def generate(self, token_ids: Sequence[int], **given: Any) -> Completion:
        if self.method == "generate" and b"nothing" in bytes(i % 256 for i in token_ids):
            await self.then()
            return Completion(token_ids=np.ones(1, np.int64), logprobs=np.zeros(0, np.float32), finish_reason="stop")
        return await super().generate(token_ids, **given)

    async def release(self, session: str) -> None:
        if self.method == "release":
            await self.then()
        await super().release(session)


class Loose(Scripted):
    """An engine whose answers have a Completion's fields but none of its invariants."""

    async def generate(self, token_ids: Sequence[int], **given: Any) -> Any:
        return SimpleNamespace(token_ids=[65], logprobs=[-1.0], finish_reason="stop", versions=())


class Aborting(Scripted):
    async def generate(self, token_ids: Sequence[int], **given: Any) -> Completion:
        whole = await super().generate(token_ids, **given)
        return Completion(token_ids=whole.token_ids[:2], logprobs=whole.logprobs[:2], finish_reason="abort")


@pytest.mark.parametrize(
    ("engine", "error", "written"),
    [
        pytest.param(Faulty(OOPS), "EngineError: generate: RuntimeError: oops", 1, id="raises"),
        pytest.param(
            Faulty(giving(None)), "EngineError: generate: ValueError: logprobs: got 0 for 1", 1, id="no_logprobs"
        ),
        pytest.param(
            Loose(SCRIPT),
            "EngineError: the engine must return an agentgym.types.Completion, got name",
            0,
            id="loose",
        ),
        pytest.param(Aborting(SCRIPT), "EngineError: the engine aborted the turn", 0, id="aborts_in_mid_turn"),
        pytest.param(Faulty(OOPS, method="release"), "EngineError: release: .*oops", 2, id="cannot_release"),
    ],
)
async def test_a_failing_engine_gives_no_reward_and_keeps_finished_turns(
    engine: Scripted, error: str, written: int, sandboxes: FakeSandboxPool
) -> None:
    env = desk()
    rollout = await ag.rollout(env, TASK, engine, sandboxes=sandboxes)
    assert (rollout.reward, len(rollout.messages)) == (None, written)
    assert re.match(error, rollout.error or "")
    assert (len(env.closed), sandboxes.leased) == (1, [])


@pytest.mark.parametrize(("kind", "named"), [(SandboxError, "SandboxError: none"), (OSError, "SandboxError: .*none")])
async def test_an_unavailable_sandbox_gives_a_rollout_without_a_reward(kind: type[Exception], named: str) -> None:
    def refuse() -> Sandbox:
        raise kind("none")

    rollout = await ag.rollout(desk(), TASK, Scripted(SCRIPT), sandboxes=FakeSandboxPool(refuse))
    assert (rollout.reward, rollout.segments) == (None, ())
    assert re.match(named, rollout.error or "")


async def test_a_tool_may_return_a_lone_surrogate(sandboxes: FakeSandboxPool) -> None:
    rollout = await ag.rollout(desk(see=giving("\ud83d")), TASK, Scripted(SCRIPT), sandboxes=sandboxes)
    assert rollout.reward == 1.0


class Watched(FakeSandboxPool):
    """A pool that signals when a rollout waits for a sandbox that is never returned."""

    def __init__(self, reached: asyncio.Event) -> None:
        super().__init__()
        self.reached = reached

    @asynccontextmanager
    async def lease(self) -> AsyncIterator[Sandbox]:
        self.reached.set()
        await asyncio.Event().wait()
        yield FakeSandbox()


@pytest.mark.parametrize("where", ["lease", "setup", "generate", "see", "score", "close"])
async def test_a_cancelled_rollout_closes_its_env_returns_its_sandbox_and_stays_cancelled(where: str) -> None:
    reached = asyncio.Event()

    async def wait(*args: Any, **kwargs: Any) -> Any:
        reached.set()
        await asyncio.Event().wait()

    env = desk(**({where: wait} if where not in ("lease", "generate") else {}))
    sandboxes = Watched(reached) if where == "lease" else FakeSandboxPool()
    engine = Faulty(wait) if where == "generate" else Scripted(SCRIPT)
    playing = asyncio.create_task(ag.rollout(env, TASK, engine, sandboxes=sandboxes))
    await reached.wait()
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await playing
    assert len(env.closed) == (0 if where == "close" else 1)
    assert sandboxes.leased == []
    assert engine._played == {}


async def test_a_close_that_fails_does_not_swallow_a_cancellation(sandboxes: FakeSandboxPool) -> None:
    reached = asyncio.Event()

    async def wait() -> None:
        reached.set()
        await asyncio.Event().wait()

    playing = asyncio.create_task(ag.rollout(desk(close=OOPS), TASK, Faulty(wait), sandboxes=sandboxes))
    await reached.wait()
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await playing
    assert sandboxes.leased == []


@pytest.mark.parametrize("kind", [GeneratorExit, SystemExit, type("Odd", (BaseException,), {})])
@pytest.mark.parametrize("where", ["setup", "reset", "step", "score", "close"])
async def test_a_base_exception_fails_only_its_rollout(kind: type[BaseException], where: str) -> None:
    sound = getattr(Desk, where)

    async def method(self: Desk, *args: Any, **given: Any) -> Any:
        if self.task.id == "bad":
            raise kind("odd")
        return await sound(self, *args, **given)

    tasks = [TASK.model_copy(update={"id": name}) for name in ("bad", "good")]
    groups = await run_groups(desk(**{where: method}), tasks, Scripted(SCRIPT), n=1, sandboxes=FakeSandboxPool())
    bad, good = groups.rollouts
    assert (bad.reward, good.reward) == (None, 1.0)
    assert (bad.error or "").startswith(f"EnvError: Broken.{where}: {kind.__name__}: odd, at test_rollout_faults.py:")
