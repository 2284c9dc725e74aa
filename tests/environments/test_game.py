"""Turn-based games: seats, opponents, illegal moves, forfeits, and whose fault a failure is."""

import asyncio
import random
from typing import Any

import pytest
from pydantic import ValidationError

import agentgym as ag
from agentgym.engines.scripted import Reply, Scripted, call, say
from agentgym.environments import GameTask, IllegalMove
from agentgym.testing import check_env


class Count(ag.Game):
    """Players add 1 or 2 in turn; the player who reaches `last` wins."""

    rules = "Add 1 or 2."
    forfeit = -1.0
    last = 4

    def start(self, seed: int) -> None:
        self.total, self.turn, self.said = 0, 0, ""

    def play(self, action: str, player: int) -> None:
        if action not in ("1", "2"):
            raise IllegalMove(f"{action} is neither 1 nor 2")
        self.said += f" {player}+{action}"
        self.total, self.turn = self.total + int(action), 1 - player

    def observe(self, player: int) -> str:
        return f"{self.total} for {player}:{self.said}"

    def to_move(self) -> int | None:
        return self.turn if self.total < self.last else None

    def returns(self) -> list[float]:
        return [-1.0, 1.0] if self.turn == 0 else [1.0, -1.0]

    def opponent(self, observation: str, rng: random.Random) -> Any:
        assert observation.startswith(f"{self.total} for {self.turn}:")
        return "1"


def game(seat: int = 0, seed: int = 3) -> GameTask:
    return GameTask(id="g", prompt="Add 1 or 2.", seed=seed, seat=seat)


def moves(*actions: str) -> Scripted:
    return Scripted([*(call("move", action=action) for action in actions), say("I stop.")])


def shown(rollout: ag.Rollout) -> list[str]:
    return [
        str(message["content"]) for message in rollout.transcript()[0].messages if message["role"] in ("user", "tool")
    ]


async def test_the_model_sees_the_game_after_each_opponents_move_and_earns_its_return() -> None:
    rollout = await ag.rollout(Count, game(), moves("1", "2"))
    assert shown(rollout) == ["Add 1 or 2.\n\n0 for 0:", "2 for 0: 0+1 1+1", "4 for 0: 0+1 1+1 0+2"]
    assert (rollout.reward, rollout.rewards, rollout.stop_reason) == (1.0, {"outcome": 1.0}, "over")
    assert (rollout.metrics["moves"], rollout.metrics["illegal_moves"]) == (2.0, 0.0)


async def test_if_the_model_is_second_the_opponent_has_already_moved() -> None:
    rollout = await ag.rollout(Count, game(seat=1), moves("1", "1"))
    assert shown(rollout) == ["Add 1 or 2.\n\n1 for 1: 0+1", "3 for 1: 0+1 1+1 0+1", "4 for 1: 0+1 1+1 0+1 1+1"]
    assert rollout.reward == 1.0
    assert (await ag.rollout(Count, game(seat=1), moves("2"))).reward == -1.0


async def test_illegal_moves_get_a_message_and_are_counted_and_too_many_forfeit_the_game() -> None:
    rollout = await ag.rollout(Count, game(), moves("3", "1", "2"))
    assert shown(rollout)[1] == (
        "error: illegal move: 3 is neither 1 nor 2; illegal moves left: 2; one more than that forfeits the game"
    )
    assert (rollout.reward, rollout.metrics["illegal_moves"]) == (1.0, 1.0)
    lost = await ag.rollout(Count, game(), moves(*"3456"))
    assert shown(lost)[-1] == "error: illegal move: 6 is neither 1 nor 2; you forfeit the game"
    assert (lost.reward, lost.stop_reason, lost.metrics["illegal_moves"]) == (-1.0, "illegal_moves", 4.0)


@pytest.mark.parametrize("script", [[say("I resign.")], [call("move", action="1"), say("I resign.")]])
async def test_an_answer_before_the_end_forfeits_the_game(script: list[Reply]) -> None:
    assert (await ag.rollout(Count, game(), Scripted(script))).reward == -1.0


class Broken(Count):
    """Raises, hangs or makes an illegal move in the method that the parameter names."""

    where = ag.Parameter("play")
    opponent_timeout_s = 0.05

    def play(self, action: str, player: int) -> None:
        if self.where == "play":
            raise KeyError("board")
        super().play(action, player)

    def to_move(self) -> int | None:
        return 7 if self.where == "to_move" and self.total else super().to_move()

    async def opponent(self, observation: str, rng: random.Random) -> Any:
        if self.where == "opponent":
            raise RuntimeError("no move")
        if self.where == "late":
            await asyncio.Event().wait()
        return "9"


@pytest.mark.parametrize(
    ("where", "why"),
    [
        ("play", r"Broken\.move: KeyError: 'board'"),
        ("opponent", r"Broken\.opponent: RuntimeError: no move"),
        ("late", r"Broken\.opponent: TimeoutError"),
        ("illegal", r"Broken\.opponent moved '9': IllegalMove: 9 is neither 1 nor 2"),
        ("to_move", r"Broken\.to_move returned 7; it must return None or a player below 2"),
    ],
)
async def test_a_failure_of_the_game_or_its_opponent_is_not_blamed_on_the_model(where: str, why: str) -> None:
    rollout = await ag.rollout(Broken.configured(where=where), game(), moves("1"))
    assert rollout.reward is None
    assert rollout.failure is not None
    assert rollout.failure.type == "EnvError"
    with pytest.raises(AssertionError, match=why):
        raise AssertionError(str(rollout.error))


async def test_the_opponents_randomness_depends_on_the_games_and_the_rollouts_seeds() -> None:
    drawn: list[float] = []

    class Chance(Count):
        def opponent(self, observation: str, rng: random.Random) -> str:
            drawn.append(rng.random())
            return "1"

    for seed, rollout_seed in ((3, 0), (3, 0), (3, 1), (4, 0)):
        await ag.rollout(Chance, game(seed=seed), moves("1"), seed=rollout_seed)
    assert drawn[0] == drawn[1]
    assert len(set(drawn)) == 3


async def test_any_callable_can_be_an_opponent() -> None:
    class Other(Count):
        opponent = staticmethod(lambda observation, rng: "2")

    assert shown(await ag.rollout(Other, game(), moves("1")))[1] == "3 for 0: 0+1 1+2"


def test_tasks_alternate_seats_and_no_seed_is_in_both_splits() -> None:
    train, test = Count.tasks("train"), Count.tasks("test")
    assert [(task.id, task.seed, task.seat) for task in train[:3]] == [("0", 0, 0), ("1", 1, 1), ("2", 2, 0)]
    assert (train[-1].seed, test[0].seed) == (999_999, 1_000_000)
    assert (len(test), len({task.seed for task in test[:99]})) == (10_000, 99)
    assert train[0].prompt == ({"role": "user", "content": "Add 1 or 2."},)


def test_a_game_without_settings_has_the_defaults_of_the_guide() -> None:
    assert (ag.Game.players, ag.Game.actions) == (2, ())
    assert (ag.Game.illegal_moves, ag.Game.forfeit, ag.Game.opponent_timeout_s) == (3, 0.0, 30.0)
    assert GameTask(id="g", prompt="Go.", seed=3).seat == 0


async def test_a_seat_that_the_game_lacks_is_refused() -> None:
    assert "seat: must be below 2, the number of players, got 2" in str(
        (await ag.rollout(Count, game(seat=2), moves("1"))).error
    )
    with pytest.raises(ValidationError, match="seat"):
        game(seat=-1)


async def test_a_game_keeps_the_contract_of_an_env() -> None:
    await check_env(Count, game(), oracle=[call("move", action="1"), call("move", action="2")], reward_range=(-1, 1))


async def test_the_model_is_told_the_legal_moves_and_can_make_no_others() -> None:
    class Named(Count):
        actions = ("1", "2")

    told = Named(game()).tools[0]["function"]["parameters"]["properties"]["action"]
    assert told == {"type": "string", "enum": ["1", "2"]}
    assert Count(game()).tools[0]["function"]["parameters"]["properties"]["action"] == {"type": "string"}
    assert "illegal move: 'x' is not one of 1, 2" in shown(await ag.rollout(Named, game(), moves("x")))[1]
