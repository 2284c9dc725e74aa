"""Tests of the environment game_template."""

import pytest

import agentgym as ag
from agentgym.testing import Scripted, check_env, say

from .env import GameTask, GameTemplate, oracle

TASK = GameTask(id="eight", prompt="Which number?", number=8)


async def test_a_message_without_a_guess_costs_a_tenth_in_its_turn(no_leaks: None) -> None:
    rollout = await ag.rollout(GameTemplate, TASK, Scripted([say("Hm."), say("9"), say("8")]))
    assert (rollout.reward, rollout.stop_reason) == (0.9, "found"), rollout
    assert [turn.reward for turn in rollout.segments[0].turns] == [-0.1, 0.0, 1.0]


async def test_four_wrong_guesses_end_the_game() -> None:
    rollout = await ag.rollout(GameTemplate, TASK, Scripted([say("7")] * 5))
    assert (rollout.reward, rollout.stop_reason) == (0.0, "turns"), rollout


@pytest.mark.parametrize("number", range(1, 16))
async def test_halving_finds_every_number_in_four_guesses(number: int) -> None:
    task = TASK.model_copy(update={"number": number})
    rollout = await ag.rollout(GameTemplate, task, Scripted(oracle(task)))
    assert rollout.reward == 1.0, rollout


async def test_the_env_keeps_its_contract() -> None:
    await check_env(GameTemplate, TASK, oracle=oracle(TASK))
