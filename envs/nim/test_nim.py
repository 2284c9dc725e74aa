"""Tests of nim, played by scripts."""

import pytest

import agentgym as ag
from agentgym.engines.scripted import Scripted, call, say
from agentgym.environments import GameTask
from agentgym.testing import check_env
from envs.nim.env import Nim, winning_take

PERFECT = Nim.configured(skill=1.0)


def winnable(seat: int) -> GameTask:
    """Return a game that a perfect player in this seat wins."""
    for task in PERFECT.tasks("train")[seat:400:2]:
        env = PERFECT(task)
        env.start(task.seed)
        if (winning_take(env.counters) is None) == (seat == 1):
            return task
    raise AssertionError


@pytest.mark.parametrize("seat", [0, 1])
async def test_nim_keeps_the_contract_of_an_env(seat: int) -> None:
    task = winnable(seat)
    await check_env(PERFECT, task, oracle=PERFECT.oracle(task), reward_range=(-1.0, 1.0))


def test_a_winning_take_leaves_heaps_whose_exclusive_or_is_zero() -> None:
    assert winning_take([1, 2, 3]) is None
    assert winning_take([1, 2, 5]) == (2, 2)
    assert winning_take([4]) == (0, 4)


async def test_the_random_opponent_loses_more_often_than_the_perfect_one() -> None:
    won = {}
    for skill in (0.0, 1.0):
        env = Nim.configured(skill=skill)
        tasks = env.tasks("test")[:20]
        won[skill] = sum(
            [(await ag.rollout(env, task, Scripted(env.oracle(task)), seed=7)).reward == 1.0 for task in tasks]
        )
    assert won[0.0] > won[1.0] > 0


@pytest.mark.parametrize(
    ("move", "why"), [("take two", "'take two' is no move"), ("A 9", "heap A has"), ("F 1", "heap F has 0")]
)
async def test_an_illegal_move_gets_a_message_with_what_to_do(move: str, why: str) -> None:
    rollout = await ag.rollout(Nim, Nim.tasks("train")[0], Scripted([call("move", action=move), say("?")]))
    assert f"error: illegal move: {why}" in str(rollout)
    assert (rollout.reward, rollout.metrics["illegal_moves"]) == (-1.0, 1.0)
