"""Tests of guess_number, played by scripts."""

import agentgym as ag
from agentgym.engines.scripted import Scripted, say
from agentgym.testing import check_env
from envs.guess_number.env import LOWEST, SIZE, GuessNumber, GuessTask, is_held_out, oracle

TASK = GuessTask(id="t", prompt="My number is from 48 to 55.", low=48, secret=52)


async def play(*guesses: str) -> ag.Rollout:
    return await ag.rollout(GuessNumber, TASK, Scripted([say(guess) for guess in guesses]))


async def test_guess_number_keeps_the_contract_of_an_env() -> None:
    await check_env(GuessNumber, TASK, oracle=oracle(TASK))


async def test_each_guess_is_answered_by_a_hint() -> None:
    played = await play("51", "I say 53.", "52")
    assert [message["content"] for message in played.transcript()[0].messages if message["role"] == "user"] == [
        "My number is from 48 to 55.",
        "Higher.",
        "Lower.",
    ]
    assert (played.reward, played.stop_reason) == (1.0, "found")


async def test_four_wrong_guesses_end_the_game() -> None:
    played = await play("51", "no idea", "53", "-52")
    assert (played.reward, played.stop_reason) == (0.0, "out_of_guesses")
    assert "That is not a number." in str(played)


async def test_halving_the_range_finds_every_number() -> None:
    for secret in range(48, 48 + SIZE):
        task = TASK.model_copy(update={"secret": secret})
        assert (await ag.rollout(GuessNumber, task, Scripted(oracle(task)))).reward == 1.0


def test_no_range_is_in_both_splits_and_each_contains_its_secret() -> None:
    for split, held_out in (("train", False), ("test", True)):
        tasks = GuessNumber.tasks(split)[:300]  # type: ignore[arg-type]
        assert {is_held_out(task.low) for task in tasks} == {held_out}
        assert all(task.low <= task.secret < task.low + SIZE for task in tasks)
    assert sum(map(is_held_out, LOWEST)) == 14
