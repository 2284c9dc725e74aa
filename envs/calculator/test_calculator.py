"""Tests of calculator, played by scripts."""

import pytest

import agentgym as ag
from agentgym.engines.scripted import Reply, Scripted, call, say
from agentgym.testing import check_env
from envs.calculator.env import Calculator, calculated, oracle

TASK = Calculator.tasks("train")[0]
SPLITS: tuple[ag.Split, ...] = ("train", "test")


async def play(*script: Reply) -> ag.Rollout:
    return await ag.rollout(Calculator, TASK, Scripted(script))


async def test_calculator_keeps_the_contract_of_an_env() -> None:
    await check_env(Calculator, TASK, oracle=oracle(TASK))


@pytest.mark.parametrize(
    ("expression", "value"), [("12 * 15", 180), ("64-27", 37), ("(2 + 3) * -4", -20), (" 7 ", 7), ("2 + 3 * 4", 14)]
)
def test_integers_are_calculated_by_the_usual_rules(expression: str, value: int) -> None:
    assert calculated(expression) == value


@pytest.mark.parametrize(
    "text", ["", "12 *", "2 ** 9", "1 / 2", "x + 1", "2.5 + 1", "'a' * 9", "9 if 1 else 2", "True", "(" * 30]
)
async def test_anything_else_is_an_error_that_the_model_reads(text: str) -> None:
    with pytest.raises(ValueError, match=r"not an expression|only integers"):
        calculated(text)
    rollout = await play(call("calculate", expression=text), say("0"))
    assert (rollout.metrics["tool_errors"], rollout.reward) == (1.0, 0.0)


async def test_the_right_answer_counts_with_or_without_the_tool() -> None:
    assert (await play(say(f"It is {TASK.result}"))).reward == 1.0
    assert (await play(call("calculate", expression=TASK.expression), say("0"))).reward == 0.0


def test_no_expression_is_in_both_splits_or_among_the_examples() -> None:
    asked = {split: {task.expression for task in Calculator.tasks(split)[:500]} for split in SPLITS}
    assert not asked["train"] & asked["test"]
    assert len(asked["test"]) > 400
