"""Tests of bisect without a model or a container."""

from typing import Any

import pytest

import agentgym as ag
from agentgym.engines.scripted import Reply, Scripted, call, raw, say
from agentgym.sandboxes.fake.sandbox import FakeSandbox, FakeSandboxPool
from agentgym.testing import check_env
from envs.bisect.env import Bisect, BisectLong, BisectTask, BisectTurns, make_task

TASK = BisectTask(id="t", prompt=make_task(0).prompt, secret=11)
BISECTION = """
low, high, said = 1, 15, ""
while said in ("", "higher", "lower"):
    middle = (low + high) // 2
    said = guess(middle)
    low, high = (middle + 1, high) if said == "higher" else (low, middle - 1)
"""


def guessing(*numbers: int) -> list[Reply]:
    return [call("python", code=f"guess({n})") for n in numbers]


async def play(sandboxes: FakeSandboxPool, *script: Reply, task: BisectTask = TASK) -> ag.Rollout:
    return await ag.rollout(Bisect, task, Scripted(script), sandboxes=sandboxes)


def namespace(sandboxes: FakeSandboxPool) -> dict[str, Any]:
    """Return the variables that the code left in the last sandbox."""
    sandbox = sandboxes.made[-1]
    assert isinstance(sandbox, FakeSandbox)
    return sandbox.namespace


async def test_bisect_keeps_the_contract_of_an_env(sandboxes: FakeSandboxPool, no_leaks: None) -> None:
    await check_env(Bisect, TASK, oracle=guessing(8, 12, 10, 11), sandboxes=sandboxes)


async def test_the_right_guess_ends_the_rollout(sandboxes: FakeSandboxPool) -> None:
    rollout = await play(sandboxes, *guessing(8, 12, 11), say("never asked for"))
    assert (rollout.reward, rollout.stop_reason) == (1.0, "found")
    assert rollout.metrics["turns"] == 3


async def test_bisection_finds_every_secret(sandboxes: FakeSandboxPool) -> None:
    for secret in range(1, 16):
        task = TASK.model_copy(update={"secret": secret})
        rollout = await play(sandboxes, call("python", code=BISECTION), task=task)
        assert (rollout.reward, rollout.stop_reason) == (1.0, "found"), secret


async def test_four_wrong_guesses_end_the_rollout(sandboxes: FakeSandboxPool) -> None:
    rollout = await play(sandboxes, call("python", code="for n in (1, 2, 3, 4): guess(n)"), say("never asked for"))
    assert (rollout.reward, rollout.stop_reason) == (0.0, "out_of_guesses")
    assert rollout.metrics["turns"] == 1


async def test_a_fifth_guess_gets_no_hint_and_is_not_counted(sandboxes: FakeSandboxPool) -> None:
    rollout = await play(sandboxes, call("python", code="said = [guess(n) for n in (1, 15, 1, 15, 11)]"))
    assert namespace(sandboxes)["said"] == ["higher", "lower", "higher", "lower", "no guesses left"]
    assert rollout.reward == 0.0


async def test_a_guess_that_is_not_a_number_still_counts(sandboxes: FakeSandboxPool) -> None:
    strange = "said = [guess(n) for n in ('11', None, [11], float('nan'))]"
    rollout = await play(sandboxes, call("python", code=strange))
    assert namespace(sandboxes)["said"] == ["not a number", "not a number", "not a number", "lower"]
    assert (rollout.reward, rollout.stop_reason) == (0.0, "out_of_guesses")


async def test_four_turns_without_a_guess_end_the_rollout(sandboxes: FakeSandboxPool) -> None:
    rollout = await play(sandboxes, *[call("python", code="1")] * 4)
    assert (rollout.reward, rollout.stop_reason) == (0.0, "turns")


async def test_naming_the_secret_in_the_answer_earns_nothing(sandboxes: FakeSandboxPool) -> None:
    rollout = await play(sandboxes, say("11"))
    assert (rollout.reward, rollout.stop_reason) == (0.0, "answer")


async def test_a_malformed_call_costs_a_tenth(sandboxes: FakeSandboxPool) -> None:
    rollout = await play(sandboxes, raw("<tool_call>\nguess(8)\n</tool_call>"), *guessing(11))
    assert rollout.rewards == {"found": 1.0, "malformed": 1.0}


async def test_charged_per_turn_the_total_reward_is_the_same(sandboxes: FakeSandboxPool) -> None:
    wrong = raw("<tool_call>\nguess(8)\n</tool_call>")
    for script, by_turn in (
        ([wrong, *guessing(8), wrong, *guessing(11)], [-0.1, 0.0, -0.1, 0.0]),
        ([*guessing(8), wrong, say("?")], [0.0, -0.1, 0.0]),
        ([wrong] * 4, [-0.1] * 4),
    ):
        rollout = await ag.rollout(BisectTurns, TASK, Scripted(script), sandboxes=sandboxes)
        assert [turn.reward for segment in rollout.segments for turn in segment.turns] == by_turn
        assert rollout.reward == (await play(sandboxes, *script)).reward


async def test_the_long_env_charges_each_guess_in_its_turn(sandboxes: FakeSandboxPool) -> None:
    for script, by_turn, worth in (
        (guessing(*[1] * 7, 11), [-0.05] * 7 + [0.0], 1 - 8 * 0.05),  # the last guess is charged in the outcome
        (guessing(*[1] * 20), [-0.05] * 19 + [0.0], -20 * 0.05),
        ([*guessing(1), say("?")], [-0.05, 0.0], -0.05),
    ):
        rollout = await ag.rollout(BisectLong, TASK, Scripted(script), sandboxes=sandboxes)
        rewards = [turn.reward for segment in rollout.segments for turn in segment.turns]
        assert rewards == pytest.approx(by_turn)
        assert rollout.reward == pytest.approx(worth)


def test_the_long_env_names_the_number_of_guesses() -> None:
    assert "at most 20 calls" in str(BisectLong.tasks("train")[0].prompt[0]["content"])


async def test_code_that_forges_guess_earns_nothing(sandboxes: FakeSandboxPool) -> None:
    forged = "guesses, is_found = -99, True\nguess = lambda n: 'correct'\nguess(11)"
    rollout = await play(sandboxes, call("python", code=forged), say("found it"))
    assert rollout.reward == 0.0


async def test_the_secret_and_the_count_are_not_in_the_sandbox(sandboxes: FakeSandboxPool) -> None:
    await play(sandboxes, *guessing(8), say("?"))
    names = {name for name in namespace(sandboxes) if not name.startswith("__")}
    assert names == {"guess", "print"}


def test_exactly_the_secrets_in_range_are_drawn() -> None:
    assert {task.secret for task in Bisect.tasks("train")[:300]} == set(range(1, 16))


def test_train_and_test_tasks_have_different_ids() -> None:
    train, test = Bisect.tasks("train"), Bisect.tasks("test")
    assert train[len(train) - 1].id != test[0].id
    assert train.indices.stop <= test.indices.start


def test_the_same_index_gives_the_same_task() -> None:
    assert Bisect.tasks("train")[7] == Bisect.tasks("train")[7]
