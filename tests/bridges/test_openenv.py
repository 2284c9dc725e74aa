"""The OpenEnv bridge against real servers from OpenEnv's own package; `make peers` installs it and runs these tests."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

import agentgym as ag
from agentgym.engines.scripted import Scripted, call, say

pytest.importorskip("openenv.core", reason="needs the extra agentgym-kit[openenv]; `make peers` installs it")

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation

from agentgym.bridges.openenv import OpenEnvTask, OpenEnvToolEnv

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


class Add(Action):  # type: ignore[misc]
    """Add to the sum."""

    number: int


class Sum(Observation):  # type: ignore[misc]
    sum: int = 0


class Adding(Environment):  # type: ignore[misc]
    """Adds up to ten; each step pays a tenth of the number that it added."""

    SUPPORTS_CONCURRENT_SESSIONS = True
    closed = 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, **others: Any) -> Sum:
        self.sum = seed or 0
        return Sum(sum=self.sum)

    def step(self, action: Add, timeout_s: float | None = None, **others: Any) -> Sum:
        if action.number < 0:
            raise ValueError("no negative numbers")
        self.sum += action.number
        return Sum(sum=self.sum, reward=action.number / 10, done=self.sum >= 10)

    @property
    def state(self) -> State:
        return State(step_count=0)

    def close(self) -> None:
        type(self).closed += 1


@asynccontextmanager
async def served(environment: Any, action: Any, observation: Any) -> AsyncIterator[str]:
    """Run an OpenEnv server for the test and yield its address."""
    listener = socket.create_server(("127.0.0.1", 0))
    app = create_fastapi_app(environment, action, observation, max_concurrent_envs=4)
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        with suppress(asyncio.CancelledError):
            await serving


def task(**reset: Any) -> OpenEnvTask:
    return OpenEnvTask(id="t", prompt="Add up to ten.", reset=reset)


def said(rollout: ag.Rollout) -> list[str]:
    messages = rollout.transcript()[0].messages
    return [str(message["content"]) for message in messages if message["role"] in ("user", "tool")]


async def test_an_openenv_environment_runs_to_its_end_for_its_summed_rewards() -> None:
    before = Adding.closed
    async with served(Adding, Add, Sum) as url:
        env = OpenEnvToolEnv.configured(url=url)
        rollout = await ag.rollout(env, task(seed=1), Scripted([call("act", number=4), call("act", number=5)]))
        assert said(rollout) == ['Add up to ten.\n\n{"sum": 1}', '{"sum": 5}', '{"sum": 10}'], rollout
        assert rollout.reward == pytest.approx(0.9)
        assert rollout.stop_reason == "done"
    assert Adding.closed > before, "the server closed the session's environment"


async def test_two_rollouts_have_two_sessions() -> None:
    async with served(Adding, Add, Sum) as url:
        env = OpenEnvToolEnv.configured(url=url)
        script = [call("act", number=2), say("I stop.")]
        rollout = await asyncio.gather(*(ag.rollout(env, task(seed=seed), Scripted(script)) for seed in (1, 5)))
        assert [said(one)[1] for one in rollout] == ['{"sum": 3}', '{"sum": 7}']


async def test_a_wrong_action_is_a_message_and_a_lost_server_a_failure() -> None:
    async with served(Adding, Add, Sum) as url:
        env = OpenEnvToolEnv.configured(url=url)
        script = [call("act", number="many"), call("act", number=-1), call("act", number=10)]
        rollout = await ag.rollout(env, task(), Scripted(script))
        assert rollout.failure is None, rollout.failure
        assert said(rollout)[1].startswith("error: wrong arguments for tool 'act': number")
        assert "no negative numbers" in said(rollout)[2]
        assert (rollout.reward, rollout.metrics["tool_errors"]) == (1.0, 2.0)
    lost = await ag.rollout(env, task(), Scripted([]))
    assert lost.reward is None
    assert lost.failure is not None
    assert lost.failure.type == "EnvError"


class Desk(MCPEnvironment):  # type: ignore[misc]
    """An environment with two MCP tools."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        from fastmcp import FastMCP

        server = FastMCP("desk")

        def double(number: int) -> int:
            """Double a number."""
            return 2 * number

        server.tool(double)
        super().__init__(server)

    def reset(self, seed: int | None = None, episode_id: str | None = None, **others: Any) -> Any:
        return Observation()

    def _step_impl(self, action: Any, timeout_s: float | None = None, **others: Any) -> Any:
        raise AssertionError(action)

    @property
    def state(self) -> State:
        return State(step_count=0)


async def test_the_model_has_the_mcp_tools_of_an_environment() -> None:
    async with served(Desk, CallToolAction, CallToolObservation) as url:
        env = OpenEnvToolEnv.configured(url=url)
        rollout = await ag.rollout(env, task(), Scripted([call("double", number=21), say("42")]))
        assert "42" in said(rollout)[1], rollout
        assert rollout.metrics["tool_errors"] == 0


async def test_an_env_without_an_address_is_refused() -> None:
    rollout = await ag.rollout(OpenEnvToolEnv, task(), Scripted([]))
    assert rollout.failure is not None
    assert "url: empty; set the server's address" in rollout.failure.message
