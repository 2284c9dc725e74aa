"""Rollouts that end with a plain tool."""

import pytest

import agentgym as ag
from agentgym.engines.scripted import Scripted, call

TASK = ag.Task(id="t", prompt=({"role": "user", "content": "End."},))


class Ender(ag.ToolEnv[ag.Task]):
    @ag.tool
    def end(self) -> ag.Stop:
        """End."""
        return ag.Stop("ended")


@pytest.mark.parametrize("number", range(300))
async def test_ends(number: int, no_leaks: None) -> None:
    assert (await ag.rollout(Ender, TASK, Scripted([call("end")]))).stop_reason == "ended"
