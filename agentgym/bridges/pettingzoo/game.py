"""A PettingZoo AEC env as a turn-based game."""

import random
from collections.abc import Mapping
from typing import Any

from gymnasium import spaces

from agentgym.environments.game import Game, IllegalMove


class PettingZooGame(Game):
    """A PettingZoo AEC env as a game: the model plays one seat, and `opponent` plays the others.

    By default, the opponent moves at random. A subclass returns the env in `make`, and sets `players` to the number of
    agents. `actions` may name the moves of a Discrete space in the order of their numbers; without names, the moves are
    the numbers. An action mask makes the other moves illegal. With a Text space, the model's text is the action. A
    seat's result is the sum of its rewards.
    """

    def make(self) -> Any:
        """Return a new AEC env, such as `connect_four_v3.env()`."""
        raise NotImplementedError(f"{type(self).__name__}.make()")

    def describe(self, observation: Any, agent: str) -> str:
        """Return an observation as the model reads it.

        This is the env's rendering if its render mode is "ansi", otherwise the observation's `str`.

        Args:
            observation: The observation, without its action mask.
            agent: The agent's name.
        """
        return str(self.aec.render() if getattr(self.aec, "render_mode", None) == "ansi" else observation)

    def start(self, seed: int) -> None:
        self.aec = self.make()
        self.aec.reset(seed=seed)
        self.agents = list(self.aec.possible_agents)
        if len(self.agents) != self.players:
            raise ValueError(f"players: got {self.players}, but {self.aec} has {len(self.agents)} agents")
        self.totals = dict.fromkeys(self.agents, 0.0)
        self._last_seen: dict[str, str] = {}
        self._pass_the_dead()

    def play(self, action: str, player: int) -> None:
        self.aec.step(self._action(action, self.agents[player]))
        for agent, earned in self.aec.rewards.items():
            self.totals[agent] += float(earned)
        self._pass_the_dead()

    def observe(self, player: int) -> str:
        agent = self.agents[player]
        if agent not in self.aec.agents:
            return self._last_seen[agent]
        seen = self._described(agent)
        return f"{seen}\n\nMoves: {', '.join(moves)}" if (moves := self.moves(player)) else seen

    def to_move(self) -> int | None:
        return None if self._is_over() else self.agents.index(self.aec.agent_selection)

    def returns(self) -> list[float]:
        return [self.totals[agent] for agent in self.agents]

    def opponent(self, observation: str, rng: random.Random) -> Any:
        player = self.agents.index(self.aec.agent_selection)
        if not (moves := self.moves(player)):
            raise NotImplementedError(
                f"{type(self).__name__}.opponent: a random move needs a Discrete space; override `opponent`"
            )
        return rng.choice(list(moves))

    def moves(self, player: int) -> dict[str, int]:
        """Return a player's legal moves by name; empty if it isn't the player's turn, or if moves are texts.

        Args:
            player: Index of the player.

        Raises:
            ValueError: If the action space is neither Discrete nor Text, or `actions` has the wrong length.
        """
        agent = self.agents[player]
        space = self.aec.action_space(agent)
        if self.to_move() != player or isinstance(space, spaces.Text):
            return {}
        if not isinstance(space, spaces.Discrete):
            raise ValueError(f"{self.aec}: expected a Discrete or Text action space, got {space}")
        names = self.actions or tuple(str(space.start + place) for place in range(space.n))
        if len(names) != space.n:
            raise ValueError(f"actions: got {len(names)} names for the {space.n} actions of {self.aec}")
        mask = self._mask(agent)
        return {name: int(space.start) + place for place, name in enumerate(names) if mask is None or mask[place]}

    def _described(self, agent: str) -> str:
        observation = self.aec.observe(agent)
        if isinstance(observation, Mapping) and "action_mask" in observation:
            observation = observation["observation"]
        return self.describe(observation, agent)

    def _mask(self, agent: str) -> Any:
        observation = self.aec.observe(agent)
        held = observation if isinstance(observation, Mapping) else self.aec.infos[agent]
        return held.get("action_mask")

    def _action(self, action: str, agent: str) -> Any:
        moves, space = self.moves(self.agents.index(agent)), self.aec.action_space(agent)
        if not moves and action in space:
            return action
        if action not in moves:
            raise IllegalMove(f"{action!r:.80} is not one of: {', '.join(moves) or space}")
        return moves[action]

    def _is_dead(self, agent: str) -> bool:
        return bool(self.aec.terminations[agent] or self.aec.truncations[agent])

    def _is_over(self) -> bool:
        return all(self._is_dead(agent) for agent in self.aec.agents)

    def _pass_the_dead(self) -> None:
        """Make the empty moves that PettingZoo requires of agents who are out of a game that continues."""
        while not self._is_over() and self._is_dead(agent := self.aec.agent_selection):
            self._last_seen[agent] = self._described(agent)
            self.aec.step(None)

    async def close(self) -> None:
        if hasattr(self, "aec"):
            self.aec.close()
