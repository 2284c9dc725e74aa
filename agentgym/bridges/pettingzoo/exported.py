"""A turn-based game as a PettingZoo AEC env."""

import random
from inspect import getattr_static
from typing import Any

import numpy as np
from gymnasium import spaces
from pettingzoo import AECEnv

from agentgym.bridges.gymnasium.texts import CHARSET, fitted
from agentgym.environments.game import HELD_OUT, Game, GameTask, IllegalMove
from agentgym.environments.registry import find_env


class _Text(str):
    """A text with a `dtype`, which PettingZoo's api_test reads from each observation."""

    __slots__ = ()
    dtype = np.dtype(str)


class ExportedGame(AECEnv):  # type: ignore[misc]
    """An `ag.Game` as an AEC env, whose agents `player_0`, `player_1` and so on are the game's seats.

    An observation is text: a character outside of `CHARSET` becomes "?", and text beyond `max_length` characters loses
    its middle. An action is the index of one of the game's `actions`, or text if the game has none. After an illegal
    move the player moves again, and the player's `infos` have the reason under "illegal_move". One illegal move more
    than the game's `illegal_moves` ends the game: the player gets `forfeit`, and the others get nothing. Otherwise, the
    players get the rewards of `returns` at the end.

    Args:
        game: The game, as a class or a name.
        max_length: Maximum characters of an observation, and of a text action.

    Raises:
        ValueError: If the game needs something besides its five functions, such as a sandbox.
    """

    def __init__(self, game: str | type[Game], *, max_length: int = 16_384) -> None:
        super().__init__()
        cls: Any = find_env(game)
        _check(cls)
        self.cls, self.max_length, self.render_mode = cls, max_length, None
        self.metadata = {"name": cls.__name__, "rules": cls.rules, "render_modes": [], "is_parallelizable": False}
        self.possible_agents = [f"player_{seat}" for seat in range(cls.players)]
        self.agents: list[str] = []
        text = {"min_length": 0, "charset": CHARSET}
        self.observation_spaces = {agent: spaces.Text(max_length, **text) for agent in self.possible_agents}
        self.action_spaces = {
            agent: spaces.Discrete(len(cls.actions)) if cls.actions else spaces.Text(max_length, **text)
            for agent in self.possible_agents
        }
        self._seeds = random.Random()

    def observation_space(self, agent: str) -> Any:
        """Return the space of texts, which is the same for each agent."""
        return self.observation_spaces[agent]

    def action_space(self, agent: str) -> Any:
        """Return the space of indexes into `actions`, or of texts if the game has no `actions`."""
        return self.action_spaces[agent]

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> None:
        """Start the game that the seed determines.

        Args:
            seed: The seed; None starts a different game each time.
            options: Ignored.
        """
        seed = self._seeds.randrange(HELD_OUT) if seed is None else seed
        self.game = self.cls(GameTask(id=seed, prompt=self.cls.rules, seed=seed))
        self.game.start(seed)
        self.agents = list(self.possible_agents)
        self.rewards = dict.fromkeys(self.agents, 0.0)
        self._cumulative_rewards = dict.fromkeys(self.agents, 0.0)
        self.terminations = dict.fromkeys(self.agents, False)
        self.truncations = dict.fromkeys(self.agents, False)
        self.infos: dict[str, dict[str, Any]] = {agent: {} for agent in self.agents}
        self._illegal = dict.fromkeys(self.agents, 0)
        self._select()

    def observe(self, agent: str) -> str:
        """Return the agent's view of the game."""
        return _Text(fitted(self.game.observe(self.possible_agents.index(agent)), self.max_length))

    def step(self, action: Any) -> None:
        """Make the move of the agent whose turn it is; the action is None if the agent's game has ended."""
        agent = self.agent_selection
        if self.terminations[agent]:
            self._was_dead_step(action)
            return
        self._clear_rewards()
        self._cumulative_rewards[agent] = 0.0
        self.infos[agent] = {}
        try:
            self.game.play(self._move(action), self.possible_agents.index(agent))
            self._select()
        except IllegalMove as illegal:
            self._refuse(agent, str(illegal))
        self._accumulate_rewards()

    def _move(self, action: Any) -> str:
        return self.cls.actions[int(action)] if self.cls.actions else str(action)

    def _select(self) -> None:
        """Give the turn to the next player, or end the game."""
        player = self.game.to_move()
        if player is not None:
            self.agent_selection = self.possible_agents[player]
            return
        self._end(dict(zip(self.possible_agents, map(float, self.game.returns()), strict=True)))

    def _refuse(self, agent: str, why: str) -> None:
        self.infos[agent]["illegal_move"] = why
        self._illegal[agent] += 1
        if self._illegal[agent] > self.cls.illegal_moves:
            self._end({agent: self.cls.forfeit})

    def _end(self, earned: dict[str, float]) -> None:
        self.terminations = dict.fromkeys(self.agents, True)
        self.rewards = dict.fromkeys(self.agents, 0.0) | earned


def _check(cls: type[Game]) -> None:
    if not issubclass(cls, Game):
        raise ValueError(f"game: {cls.__name__} is not an ag.Game")
    for name in ("sandbox_spec", "sandbox_for", "open_resources", "setup", "close"):
        if getattr_static(cls, name) is not getattr_static(Game, name):
            raise ValueError(
                f"{cls.__name__}.{name}: an exported game can have only its five functions (start, play, observe, "
                "to_move and returns); remove it"
            )
