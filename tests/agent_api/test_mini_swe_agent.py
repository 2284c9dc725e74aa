"""Unmodified mini-swe-agent from PyPI: its trajectories are trained exactly as they were sampled."""

import asyncio
import random
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

import agentgym as ag
from agentgym.engines.scripted import Scripted, call, say
from agentgym.types.messages import Message
from tests.agent_api.drawing import KEY, Drawing, Played, check_exact, serving

pytestmark = pytest.mark.filterwarnings("ignore")  # litellm's own warnings
SETTINGS = {
    "MSWEA_SILENT_STARTUP": "1",
    "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "1",
    "MSWEA_COST_TRACKING": "ignore_errors",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
}
DONE = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"


@pytest.fixture(autouse=True)
def settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Set the variables that mini-swe-agent reads when it is imported."""
    for name, value in {**SETTINGS, "MSWEA_GLOBAL_CONFIG_DIR": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)


class Shell(Drawing):
    """Draws commands, sometimes text without a call, and finally the command that ends the task."""

    def reply(self, draw: random.Random) -> Message:
        kind = draw.random()
        if kind < 0.2:
            return say("I think.")
        return call("bash", command=DONE if kind < 0.4 else f"echo {draw.random()}")


def run_agent(url: str, folder: Path, task: str) -> str:
    """Run one task with the default agent and return how it ended."""
    agents = pytest.importorskip("minisweagent.agents.default", reason="mini-swe-agent is not installed")
    models = pytest.importorskip("minisweagent.models.litellm_model")
    environments = pytest.importorskip("minisweagent.environments.local")
    asked = {"api_base": f"{url}/v1", "api_key": KEY, "temperature": 0.0}
    model = models.LitellmModel(model_name="openai/policy", model_kwargs=asked, cost_tracking="ignore_errors")
    templates = {"system_template": "You use a shell.", "instance_template": "{{task}}"}
    shell = environments.LocalEnvironment(cwd=str(folder))
    agent = agents.DefaultAgent(model, shell, **templates, step_limit=8, max_consecutive_format_errors=3)
    ended: dict[str, Any] = agent.run(task)
    return str(ended["exit_status"])


async def trajectories(count: int, folder: Path) -> None:
    pytest.importorskip("minisweagent.models.litellm_model", reason="mini-swe-agent is not installed")
    engine, rollouts, ends = Shell(), [], set()
    for number in range(count):
        played = Played(engine, rollout_id=f"t/{number}")
        async with serving(played) as url:
            ends.add(await asyncio.to_thread(run_agent, url, folder, f"task {number}"))
        rollouts.append(played.rollout())
    assert "Submitted" in ends
    assert max(len(rollout.segments[0].turns) for rollout in rollouts) > 2
    check_exact(engine, rollouts)


async def test_trajectories_of_mini_swe_agent_are_trained_once_as_sampled(tmp_path: Path) -> None:
    await trajectories(3, tmp_path)


@pytest.mark.slow
@pytest.mark.proof
async def test_50_trajectories_of_mini_swe_agent_are_trained_once_as_sampled(
    tmp_path: Path,
) -> None:
    await trajectories(50, tmp_path)


class Mini(ag.AgentEnv[ag.Task]):
    """The mini-swe-agent command as a user starts it."""

    sandbox_spec = ag.Process(unsafe=True, memory_mb=4096)
    limits = ag.Limits(turns=5, context_tokens=1 << 16)

    def agent_command(self) -> list[str]:
        mini = str(Path(sys.executable).with_name("mini"))
        asked = ["--model", "openai/policy", "--yolo", "--exit-immediately", "--output", "trajectory.json"]
        return [mini, *asked, "--task", str(self.task.prompt[-1]["content"])]

    def agent_variables(self) -> dict[str, str]:
        return {**SETTINGS, "MSWEA_GLOBAL_CONFIG_DIR": "config", "MSWEA_CONFIGURED": "true"}

    @ag.reward
    async def wrote(self) -> float:
        return float(await self.sandbox.read("out.txt") == b"hello\n")


@pytest.mark.slow
async def test_the_mini_swe_agent_command_runs_in_a_sandbox() -> None:
    if shutil.which("mini", path=str(Path(sys.executable).parent)) is None:
        pytest.skip("mini-swe-agent is not installed")
    script = [call("bash", command="echo hello > out.txt"), call("bash", command=DONE)]
    played = await ag.rollout(Mini, ag.Task(id="t", prompt="Write hello to out.txt."), Scripted(script))
    assert (played.error, played.reward, played.stop_reason) == (None, 1.0, "done"), played
    assert [len(segment.turns) for segment in played.segments] == [2]
