"""Tests of chain_sum, answered by scripts."""

import pytest

import agentgym as ag
from agentgym.engines.scripted import Scripted, say
from agentgym.testing import check_env
from envs.chain_sum.env import ChainSum, SumTask, is_held_out, oracle

SPLITS: tuple[ag.Split, ...] = ("train", "test")
TASK = SumTask(id="t", prompt="43 - 26 =", result="17")


async def reward_of(answer: str) -> float | None:
    return (await ag.rollout(ChainSum, TASK, Scripted([say(answer)]))).reward


async def test_chain_sum_keeps_the_contract_of_an_env() -> None:
    pytest.importorskip("reasoning_gym", reason="agentgym-kit[reasoning] is not installed")
    task = ChainSum.tasks("test")[0]
    await check_env(ChainSum, task, oracle=oracle(task))


async def test_the_last_number_is_the_answer() -> None:
    assert await reward_of("43 - 26 = 17") == 1.0
    assert await reward_of("17") == 1.0
    assert await reward_of("17 or 18") == 0.0
    assert await reward_of("-17") == 0.0
    assert await reward_of("seventeen") == 0.0


def test_no_question_is_in_both_splits() -> None:
    pytest.importorskip("reasoning_gym", reason="agentgym-kit[reasoning] is not installed")
    questions = {split: {str(task.prompt[-1]["content"]) for task in ChainSum.tasks(split)[:500]} for split in SPLITS}
    assert not questions["train"] & questions["test"]
    assert len(questions["test"]) > 200


def test_one_question_in_eight_is_held_out() -> None:
    held_out = sum(is_held_out(f"{a} + {b} =") for a in range(100) for b in range(100))
    assert 1100 < held_out < 1400
