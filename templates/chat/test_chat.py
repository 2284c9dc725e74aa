"""Tests of the environment chat_template."""

import agentgym as ag
from agentgym.testing import Scripted, check_env, say

from .env import ChatTemplate, make_task, oracle

TASK = make_task(5)


async def test_the_intended_order_is_rewarded(no_leaks: None) -> None:
    rollout = await ag.rollout(ChatTemplate, TASK, Scripted(oracle(TASK)))
    assert (rollout.reward, rollout.stop_reason) == (1.0, "ordered"), rollout


async def test_an_order_without_a_question_is_not_rewarded() -> None:
    rollout = await ag.rollout(ChatTemplate, TASK, Scripted([say("ORDER: 1 tea")]))
    assert rollout.reward == 0.0, rollout


async def test_the_env_keeps_its_contract() -> None:
    await check_env(ChatTemplate, TASK, oracle=oracle(TASK))
