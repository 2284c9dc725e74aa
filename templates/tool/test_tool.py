"""Tests of the environment tool_template."""

import agentgym as ag
from agentgym.testing import Scripted, check_env, say

from .env import ToolTemplate, oracle

TASK = ToolTemplate.tasks("train")[0]


async def test_looking_the_value_up_is_rewarded(no_leaks: None) -> None:
    rollout = await ag.rollout(ToolTemplate, TASK, Scripted(oracle(TASK)))
    assert rollout.reward == 1.0, rollout


async def test_a_guess_is_not_rewarded() -> None:
    rollout = await ag.rollout(ToolTemplate, TASK, Scripted([say("Answer: 0")]))
    assert rollout.reward == 0.0, rollout


async def test_the_env_keeps_its_contract() -> None:
    await check_env(ToolTemplate, TASK, oracle=oracle(TASK))
