"""Rewards: a plain one never blocks the event loop, and one that doesn't return a number is refused by name."""

import asyncio
import threading
from typing import Any

import numpy as np
import pytest

import agentgym as ag
from agentgym.engines.scripted import Scripted, say
from agentgym.errors import EnvError, SandboxError, tracebacks as failures

TASK = ag.Task.model_validate({"id": "t", "prompt": "Go."})


def env(method: Any, **parts: Any) -> type[ag.ToolEnv[ag.Task]]:
    return type("Quiz", (ag.ToolEnv,), {"fixed": ag.reward(method), **parts})


@pytest.fixture(autouse=True)
def _nothing_logged_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failures, "_said", set())


async def test_a_plain_reward_never_blocks_the_event_loop() -> None:
    free = threading.Event()

    def wait(self: object) -> float:
        return float(free.wait(timeout=30))

    async def set_free() -> None:
        free.set()

    async with asyncio.TaskGroup() as running:
        scoring = running.create_task(env(wait)(TASK).score())
        running.create_task(set_free())
    assert scoring.result() == {"fixed": 1.0}


async def test_a_reward_is_logged_unweighted_and_counts_by_its_weight() -> None:
    logged = {"tests": ag.reward(weight=0.0)(lambda self: 3.0), "long": ag.reward(weight=-0.5)(lambda self: 4.0)}
    rollout = await ag.rollout(env(lambda self: 1.0, **logged), TASK, Scripted([say("done")]))
    assert rollout.reward == 1.0 - 0.5 * 4.0
    assert rollout.rewards == {"fixed": 1.0, "tests": 3.0, "long": 4.0}
    assert "tests 3" in str(rollout)


async def test_a_plain_reward_that_computes_forever_is_stopped_by_the_rollouts_limit(no_leaks: None) -> None:
    def spin(self: object) -> float:
        while True:
            pass

    rollout = await ag.rollout(env(spin, limits=ag.Limits(seconds=0.2)), TASK, Scripted([say("done")]))
    assert rollout.reward is None


async def test_an_async_reward_inside_a_plain_decorator_is_awaited() -> None:
    async def slow() -> float:
        await asyncio.sleep(0)
        return 0.5

    assert await env(lambda self: slow())(TASK).score() == {"fixed": 0.5}


@pytest.mark.parametrize("value", [True, 1, 1.0, np.float32(1), np.int64(1), np.bool_(True)])
async def test_a_reward_can_be_any_number_type(value: Any) -> None:
    scores = await env(lambda self: value)(TASK).score()
    assert scores == {"fixed": 1.0}
    assert type(scores["fixed"]) is float


@pytest.mark.parametrize("value", ["1.0", b"1", None, (1.0,), [1.0], np.array([1.0]), {}, 1j])
async def test_a_reward_that_is_not_a_number_is_refused_by_name_and_type(value: Any) -> None:
    with pytest.raises(EnvError) as refused:
        await env(lambda self: value)(TASK).score()
    said = str(refused.value)
    assert said == f"Quiz: reward 'fixed' returned {value!r} ({type(value).__name__}): return a number"


@pytest.mark.parametrize("raised", [KeyError("judge"), SystemExit(3), GeneratorExit("judge")])
async def test_a_reward_that_raises_is_named_with_its_line_and_logged_once(
    raised: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(self: object) -> float:
        raise raised

    made, line = env(fail), fail.__code__.co_firstlineno + 1
    for _ in range(2):
        with pytest.raises(
            EnvError, match=rf"^Quiz: reward 'fixed' raised \w+: .*, at test_rewards\.py:{line} in fail$"
        ):
            await made(TASK).score()
    assert len(caplog.records) == 1
    assert "Quiz: reward 'fixed' raised " in caplog.records[0].getMessage()
    assert caplog.records[0].exc_info


async def test_a_dead_sandbox_in_a_reward_is_reported_as_a_dead_sandbox() -> None:
    async def fail(self: object) -> float:
        raise SandboxError("the sandbox died")

    with pytest.raises(SandboxError, match="the sandbox died"):
        await env(fail)(TASK).score()
