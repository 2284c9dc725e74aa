"""Tests of tictactoe without a model."""

import random
import re
from typing import Any

import pytest

import agentgym as ag
from agentgym.samples import build_samples
from agentgym.scheduling import run_groups
from agentgym.testing import Scripted, check_env, say
from envs.tictactoe.demo import demonstrate
from envs.tictactoe.env import RULES, Game, TicTacToe, best, free, is_over, put, shown, winner, worth

EMPTY = Game(id="t", prompt=RULES.format(mark="X", board=shown("." * 9)), board="." * 9)
X_WINS = [say(move) for move in "14253"]
"""The moves of both players in turn."""


def board_of(text: str) -> str:
    """Return the board that was shown last, as nine letters."""
    rows = re.findall(r"^([1-9XO]) ([1-9XO]) ([1-9XO])(?:<|$)", text, re.MULTILINE)[-3:]
    return "".join(field if field in "XO" else "." for row in rows for field in row)


def perfect(text: str) -> ag.Message:
    """Return a policy that plays both sides perfectly."""
    board = board_of(text)
    return say(str(best(board, "X" if board.count("X") == board.count("O") else "O") + 1))


def against(opponent: str) -> type[TicTacToe]:
    return TicTacToe.configured(opponent=opponent)


async def play(*moves: str, env: type[TicTacToe] = TicTacToe, **given: Any) -> ag.Rollout:
    return await ag.rollout(env, EMPTY, Scripted([say(move) for move in moves]), **given)


async def test_tictactoe_keeps_the_contract_of_an_env(no_leaks: None) -> None:
    await check_env(TicTacToe, EMPTY, oracle=X_WINS, reward_range=(-1.0, 1.0))


@pytest.mark.parametrize(("opponent", "least"), [("self", 1.0), ("frozen", 1.0), ("perfect", 0.0), ("random", 0.0)])
async def test_the_oracle_wins_self_play_and_otherwise_gets_what_the_board_allows(opponent: str, least: float) -> None:
    env = against(opponent)
    for task in env.tasks("train")[:20]:
        rollout = await ag.rollout(env, task, Scripted(env.oracle(task)))
        assert rollout.reward is not None
        assert rollout.reward >= max(least, (worth(task.board, "X") + 1) / 2), task


async def test_each_side_has_a_separate_reward() -> None:
    for moves, x, o in (("14253", 1.0, 0.0), ("142596", 0.0, 1.0), ("159287364", 0.5, 0.5)):
        rollout = await play(*moves)
        assert (rollout.reward, rollout.role_rewards, rollout.stop_reason) == (x, {"O": o}, "game over"), moves


@pytest.mark.parametrize("wrong", ["1", "0", "10", "two", ""])
async def test_an_answer_that_is_not_a_free_field_gets_a_message_with_the_free_ones(wrong: str) -> None:
    rollout = await play("two", "1", wrong, "4", "2", "5", "3")
    assert (rollout.reward, rollout.role_rewards) == (1.0, {"O": 0.0})
    assert (rollout.metrics["illegal_X"], rollout.metrics["illegal_O"]) == (1, 1)
    x, o = ([m["content"] for turn in s.turns for m in turn.env_messages] for s in rollout.segments)
    told = "is none of the free fields {}; after 2 more the next one forfeits the game.\n\n{} 2 3\n4 5 6\n7 8 9"
    assert x[0].endswith(told.format("1, 2, 3, 4, 5, 6, 7, 8, 9", 1))
    assert o[0] == f"{wrong!r} " + told.format("2, 3, 4, 5, 6, 7, 8, 9", "X")
    assert x[-1] == "X X X\nO O 6\n7 8 9\n\nX wins"


@pytest.mark.parametrize("wrong", ["1", "0", "10", "two", ""])
async def test_too_many_answers_that_are_not_free_fields_forfeit_the_game(wrong: str) -> None:
    for env, times in ((TicTacToe.configured(illegal_moves=0), 1), (TicTacToe, 4)):
        rollout = await play("1", *[wrong] * times, env=env)
        assert (rollout.reward, rollout.role_rewards, rollout.stop_reason) == (0.5, {"O": -1.0}, "game over")
        assert rollout.metrics["illegal_O"] == times
        assert "; O forfeits the game." in rollout.segments[1].turns[-1].env_messages[0]["content"]
        assert rollout.segments[0].turns[-1].env_messages[0]["content"].endswith("\n\nO forfeits the game")
        rollout = await play("1", "2", *[wrong] * times, env=env)
        assert (rollout.reward, rollout.role_rewards) == (-1.0, {"O": 0.5})
        assert "; X forfeits the game." in rollout.segments[0].turns[-1].env_messages[0]["content"]


async def test_a_too_long_answer_does_not_count() -> None:
    assert (await play("1" * 99)).reward == -1.0
    rollout = await play("1", "2" * 99)
    assert (rollout.reward, rollout.role_rewards) == (0.5, {"O": -1.0})


async def test_o_continues_in_one_conversation_and_is_trained_on_its_own_reward() -> None:
    games = {"0": "14253", "1": "142596"}

    class Both(Scripted):
        def _next(self, token_ids: Any, session: str) -> ag.Message:
            moves, o = games[session.split("/")[1]], "." in session
            board = board_of(self.tokenizer.decode(token_ids))
            return say(moves[2 * board.count("O") + o])

    groups = await run_groups(TicTacToe, [EMPTY], Both([]), n=2)
    assert [rollout.reward for rollout in groups.rollouts] == [1.0, 0.0]
    assert [[(s.role, len(s.turns)) for s in rollout.segments] for rollout in groups.rollouts] == [
        [("", 3), ("O", 2)],
        [("", 3), ("O", 3)],
    ]
    found = {
        (sample.rollout_id, sample.segment): set(sample.advantages[sample.loss_mask].tolist())
        for sample in build_samples(groups)
    }
    assert found == {("t/0", 0): {0.5}, ("t/0", 1): {-0.5}, ("t/1", 0): {-0.5}, ("t/1", 1): {0.5}}


async def test_the_other_side_may_be_frozen_another_model_or_a_program() -> None:
    rollout = await ag.rollout(against("frozen"), EMPTY, Scripted(perfect))
    assert (rollout.reward, [s.trained for s in rollout.segments]) == (0.5, [True, False])
    models = {"opponent": Scripted(perfect)}
    rollout = await ag.rollout(against("model"), EMPTY, Scripted(perfect), models=models)
    assert (rollout.reward, [s.model for s in rollout.segments]) == (0.5, ["", "opponent"])
    rollout = await ag.rollout(against("perfect"), EMPTY, Scripted(perfect))
    assert (rollout.reward, len(rollout.segments), rollout.role_rewards) == (0.5, 1, {})
    rewards = [(await ag.rollout(against("random"), EMPTY, Scripted(perfect), seed=seed)).reward for seed in range(8)]
    assert set(rewards) <= {0.5, 1.0}
    assert 1.0 in rewards


def test_a_perfect_player_never_loses() -> None:
    def games(board: str, mark: str) -> None:
        if is_over(board):
            assert winner(board) != "X"
            return
        for place in [best(board, "O")] if mark == "O" else free(board):
            games(put(board, place, mark), "XO"[mark == "X"])

    assert worth("." * 9, "X") == 0
    games("." * 9, "X")


def test_tasks_are_unfinished_games_with_x_to_move() -> None:
    train, test = TicTacToe.tasks("train"), TicTacToe.tasks("test")
    for task in train[:200]:
        assert not is_over(task.board)
        assert task.board.count("X") == task.board.count("O")
    assert train[7] == TicTacToe.tasks("train")[7]
    assert train.indices.stop <= test.indices.start


async def test_the_demonstrator_plays_both_sides_and_mostly_picks_free_fields() -> None:
    tasks = TicTacToe.tasks("train")[:40]
    policy = [Scripted(demonstrate(task, random.Random(task.id))) for task in tasks]
    env = TicTacToe.configured(illegal_moves=0)
    rollouts = [await ag.rollout(env, task, player) for task, player in zip(tasks, policy, strict=True)]
    illegal = sum(one.metrics.get("illegal_X", 0) + one.metrics.get("illegal_O", 0) for one in rollouts)
    assert {one.stop_reason for one in rollouts} == {"game over"}
    assert 0 < illegal < 15
    assert {1.0, 0.0, -1.0} <= {one.reward for one in rollouts}
