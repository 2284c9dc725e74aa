"""The PettingZoo bridge in both directions, checked with PettingZoo's own api_test and wrappers."""

import random
from collections.abc import Sequence
from contextlib import asynccontextmanager
from typing import Any, ClassVar

import pytest

import agentgym as ag
from agentgym.engines.scripted import Scripted, call, say
from agentgym.environments import GameTask, IllegalMove
from agentgym.testing import check_env

pytest.importorskip("pettingzoo", reason="needs the extra agentgym-kit[pettingzoo]")

import numpy as np
from gymnasium import spaces
from pettingzoo import AECEnv
from pettingzoo.test import api_test
from pettingzoo.utils import wrappers

from agentgym.bridges.pettingzoo import ExportedGame, PettingZooGame

CLOSED: list[object] = []


class Tally(AECEnv):  # type: ignore[misc]
    """Players take 1 or 2 stones in turn, for 1 point each turn; a mask forbids taking 2 of the last one."""

    metadata = {"render_modes": ["ansi"], "name": "tally_v0"}  # noqa: RUF012

    def __init__(self, players: int = 2, space: Any = None, render_mode: str | None = None) -> None:
        super().__init__()
        self.possible_agents = [f"player_{number}" for number in range(players)]
        self.render_mode = render_mode
        self.space = space or spaces.Discrete(2, start=1)

    def observation_space(self, agent: str) -> Any:
        mask = spaces.Box(0, 1, (2,), np.int8)
        return spaces.Dict({"observation": spaces.Box(0, 9, (1,), np.int8), "action_mask": mask})

    def action_space(self, agent: str) -> Any:
        return self.space

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> None:
        self.stones = 7 + (seed or 0) % 2
        self.agents = list(self.possible_agents)
        self.agent_selection = self.agents[0]
        self.rewards, self._cumulative_rewards = dict.fromkeys(self.agents, 0.0), dict.fromkeys(self.agents, 0.0)
        self.terminations, self.truncations = dict.fromkeys(self.agents, False), dict.fromkeys(self.agents, False)
        self.infos: dict[str, Any] = {agent: {} for agent in self.agents}

    def observe(self, agent: str) -> Any:
        mask = np.array([1, self.stones > 1], np.int8)
        return {"observation": np.array([self.stones], np.int8), "action_mask": mask}

    def step(self, action: Any) -> None:
        agent = self.agent_selection
        if self.terminations[agent]:
            self._was_dead_step(action)
            return
        taken = int(action)
        self._clear_rewards()
        self._cumulative_rewards[agent] = 0.0
        self.rewards[agent] = float(taken)
        self.stones -= taken
        after = self.possible_agents.index(agent) + 1
        order = self.possible_agents[after:] + self.possible_agents[:after]
        self.agent_selection = next(other for other in order if other in self.agents and not self.terminations[other])
        if self.stones < 1:
            self.terminations = dict.fromkeys(self.agents, True)
        self._accumulate_rewards()
        self._deads_step_first()

    def render(self) -> str:
        return "o" * self.stones

    def close(self) -> None:
        CLOSED.append(self)


class Stones(PettingZooGame):
    rules = "Take one or two stones."
    actions = ("one", "two")

    def make(self) -> Any:
        return wrappers.OrderEnforcingWrapper(Tally())

    def opponent(self, observation: str, rng: random.Random) -> str:
        return "one"


def game(seat: int = 0, seed: int = 0) -> GameTask:
    return GameTask(id="g", prompt="Take one or two stones.", seed=seed, seat=seat)


def moves(*actions: str) -> Scripted:
    return Scripted([*(call("move", action=action) for action in actions), say("I stop.")])


def shown(rollout: ag.Rollout) -> list[str]:
    said = rollout.transcript()[0].messages
    return [str(message["content"]) for message in said if message["role"] in ("user", "tool")]


# -------------------------------------------------------------------- import


async def test_the_model_plays_a_seat_of_a_pettingzoo_env_for_its_summed_rewards(no_leaks: None) -> None:
    CLOSED.clear()
    rollout = await ag.rollout(Stones, game(), moves("two", "two", "one"))
    assert shown(rollout)[0] == "Take one or two stones.\n\n[7]\n\nMoves: one, two"
    assert shown(rollout)[1:] == ["[4]\n\nMoves: one, two", "[1]\n\nMoves: one", "[0]"]
    assert (rollout.reward, rollout.stop_reason, rollout.metrics["moves"]) == (5.0, "over", 3.0)
    assert len(CLOSED) == 1


async def test_if_the_model_is_second_the_others_have_already_moved() -> None:
    rollout = await ag.rollout(Stones, game(seat=1, seed=1), moves("two", "two", "one"))
    assert shown(rollout)[0].endswith("[7]\n\nMoves: one, two"), "eight stones, of which the opponent took one"
    assert rollout.reward == 5.0


async def test_a_masked_move_is_illegal_and_the_model_moves_again() -> None:
    rollout = await ag.rollout(Stones, game(), moves("two", "two", "two", "one"))
    assert shown(rollout)[3].startswith("error: illegal move: 'two' is not one of: one; illegal moves left: 2")
    assert (rollout.reward, rollout.metrics["illegal_moves"]) == (5.0, 1.0)


async def test_a_game_of_pettingzoo_keeps_the_contract_of_an_env() -> None:
    await check_env(Stones, game(), oracle=[call("move", action=action) for action in ("two", "two", "one")])


class Unnamed(PettingZooGame):
    def make(self) -> Any:
        return Tally(render_mode="ansi")


async def test_without_names_moves_are_numbers_and_others_move_at_random_by_seed() -> None:
    rollouts = [await ag.rollout(Unnamed, game(), moves(*"1111111"), seed=seed) for seed in (1, 1, 2, 3, 4, 5)]
    assert shown(rollouts[0])[0].endswith("\n\nooooooo\n\nMoves: 1, 2"), "an ansi env is shown as it is rendered"
    assert shown(rollouts[0]) == shown(rollouts[1])
    assert len({tuple(shown(one)) for one in rollouts}) > 1
    assert all(one.stop_reason == "over" for one in rollouts)


class Three(Unnamed):
    players = 3

    def make(self) -> Any:
        return Tally(3)

    def opponent(self, observation: str, rng: random.Random) -> str:
        return "1"


async def test_a_player_who_is_out_makes_no_more_moves_and_keeps_its_reward() -> None:
    class Out(Tally):
        def step(self, action: Any) -> None:
            super().step(action)
            if action == 2 and "player_0" in self.agents:
                self.terminations["player_0"] = True
                self._deads_step_first()

    class Goes(Three):
        def make(self) -> Any:
            return Out(3)

    rollout = await ag.rollout(Goes, game(), moves("2", "1"))
    assert shown(rollout)[1:] == ["[5]"], "the last observation before it was out"
    assert (rollout.reward, rollout.stop_reason, rollout.metrics["moves"]) == (2.0, "over", 1.0)


async def test_text_actions_are_the_models_text() -> None:
    class Written(PettingZooGame):
        players = 1

        def make(self) -> Any:
            return Tally(1, spaces.Text(1, min_length=1, charset="12"))

    rollout = await ag.rollout(Written, game(), moves("three", *"22222"))
    assert "error: illegal move: 'three' is not one of: Text(1, 1" in shown(rollout)[1]
    assert rollout.reward == 8.0


@pytest.mark.parametrize(
    ("made", "settings", "why"),
    [
        (lambda: Tally(3), {}, r"players: got 2, but tally_v0 has 3 agents"),
        (lambda: Tally(), {"actions": ("one",)}, r"actions: got 1 names for the 2 actions of tally_v0"),
        (lambda: Tally(space=spaces.Box(0, 1)), {}, r"tally_v0: expected a Discrete or Text action space"),
    ],
)
async def test_an_env_that_is_not_a_turn_based_game_is_refused_by_name(
    made: Any, settings: dict[str, Any], why: str
) -> None:
    other = type("Other", (PettingZooGame,), {"make": lambda self: made(), **settings})
    rollout = await ag.rollout(other, game(), moves("1"))
    assert rollout.failure is not None
    with pytest.raises(AssertionError, match=why):
        raise AssertionError(rollout.failure.message)


# ------------------------------------------------------------------- export


class Race(ag.Game):
    """Players add 1 or 2 in turn; the player that reaches `last` wins."""

    rules = "Add 1 or 2. Whoever reaches the end wins."
    actions: ClassVar[tuple[str, ...]] = ("1", "2", "pass")
    forfeit = -2.0
    illegal_moves = 1

    def start(self, seed: int) -> None:
        self.sum, self.turn = seed % 2, 0

    def play(self, action: str, player: int) -> None:
        if action not in ("1", "2"):
            raise IllegalMove(f"{action} is neither 1 nor 2")
        self.sum, self.turn = self.sum + int(action), 1 - player

    def observe(self, player: int) -> str:
        return f"{self.sum} for {player} Ω"

    def to_move(self) -> int | None:
        return self.turn if self.sum < 4 else None

    def returns(self) -> Sequence[float]:
        return [-1.0, 1.0] if self.turn == 0 else [1.0, -1.0]


class Free(Race):
    actions: ClassVar[tuple[str, ...]] = ()


@pytest.mark.filterwarnings("ignore::UserWarning:pettingzoo")
@pytest.mark.parametrize("cls", [Race, Free])
def test_an_exported_game_passes_pettingzoos_api_test(cls: type[ag.Game]) -> None:
    api_test(ExportedGame(cls), num_cycles=100)


def test_both_seats_of_an_exported_game_play_and_get_rewards() -> None:
    env = ExportedGame(Race)
    env.reset(seed=0)
    assert env.metadata["rules"] == Race.rules
    assert env.last()[:2] == ("0 for 0 ?", 0.0)
    for action in (1, 0, 0):
        env.step(action)
    assert [env.rewards, env.agents] == [{"player_0": 1.0, "player_1": -1.0}, ["player_0", "player_1"]]
    assert all(env.terminations.values())
    paid = {}
    for agent in env.agent_iter():
        paid[agent] = env.last()[1]
        env.step(None)
    assert paid == {"player_0": 1.0, "player_1": -1.0}
    assert env.agents == []


def test_an_illegal_move_does_not_end_the_turn_and_too_many_forfeit_the_game() -> None:
    env = ExportedGame(Race)
    env.reset(seed=0)
    env.step(2)
    assert (env.agent_selection, env.last()[4]) == ("player_0", {"illegal_move": "pass is neither 1 nor 2"})
    env.step(0)
    assert env.infos["player_0"] == {}
    env.step(0)
    env.step(2)
    assert env.rewards == {"player_0": -2.0, "player_1": 0.0}
    assert all(env.terminations.values())


def test_without_a_seed_each_game_is_different() -> None:
    env = ExportedGame(Race)
    starts = set()
    for _ in range(20):
        env.reset()
        starts.add(env.last()[0])
    assert len(starts) == 2


async def test_an_exported_game_can_be_imported_again() -> None:
    class Again(PettingZooGame):
        def make(self) -> Any:
            return ExportedGame(Race)

        def opponent(self, observation: str, rng: random.Random) -> str:
            return "0"

    rollout = await ag.rollout(Again, game(), moves("1", "0"))
    assert (rollout.reward, rollout.rewards) == (1.0, {"outcome": 1.0})


def test_a_game_with_more_than_its_five_functions_is_refused() -> None:
    class Served(Race):
        @classmethod
        @asynccontextmanager
        async def open_resources(cls) -> Any:
            yield 1

    class NoGame(ag.ToolEnv[ag.Task]):
        @ag.reward
        def nothing(self) -> float:
            return 0.0

    with pytest.raises(ValueError, match=r"Served\.open_resources: an exported game can have only its five functions"):
        ExportedGame(Served)
    with pytest.raises(ValueError, match=r"game: NoGame is not an ag\.Game"):
        ExportedGame(NoGame)  # type: ignore[arg-type]
