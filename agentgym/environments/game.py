"""Turn-based games: the model plays one seat, and code plays the others."""

import random
from collections.abc import Sequence
from copy import deepcopy
from functools import partial
from typing import Annotated, Any, ClassVar

from pydantic import Field

from agentgym.data.endless import Procedural
from agentgym.environments.env import Split
from agentgym.environments.rewards import reward
from agentgym.environments.tool_env import ToolEnv
from agentgym.errors import EnvError, ToolError, boundary
from agentgym.machine.time_limits import TimeLimit
from agentgym.seeds import seed_for
from agentgym.tools.tool import Stop, tool
from agentgym.tools.tool_threads import call_method
from agentgym.types.messages import Message, joined
from agentgym.types.task import Task

HELD_OUT = 1_000_000
"""The first seed of held-out games."""
TEST_GAMES = 10_000


class GameTask(Task):
    """One game: its start, and the model's seat in it."""

    seed: int
    """The seed that `start` gets."""
    seat: Annotated[int, Field(ge=0)] = 0
    """The player that the model plays, counted from 0; `opponent` plays the others."""


class IllegalMove(ValueError):
    """Raised in `play` for a move that the rules don't allow; the model reads its text and moves again."""


class Game(ToolEnv[GameTask]):
    """A turn-based game, whose rules a subclass implements; the model moves with the tool `move`.

    A subclass defines `start`, `play`, `observe`, `to_move` and `returns`, and `opponent` if there is more than one
    player. They are plain methods that read and change the game's state in `self`. If one of them raises, the env has
    failed, and the rollout has no reward. The only exception is an IllegalMove that `play` raises for the model's own
    move.
    """

    players: ClassVar[int] = 2
    """Number of players, including the model."""
    rules: ClassVar[str] = ""
    """The prompt of the tasks that `tasks` creates; it is followed by the model's first observation."""
    actions: ClassVar[tuple[str, ...]] = ()
    """The moves that the model is told about and may make; () allows any text, which `play` parses."""
    illegal_moves: ClassVar[int] = 3
    """Number of illegal moves that the model may make in one game; one more ends it."""
    forfeit: ClassVar[float] = 0.0
    """The model's reward for an unfinished game: after too many illegal moves, an answer without a move, or a limit."""
    opponent_timeout_s: ClassVar[float] = 30.0
    """Maximum seconds of one move by an opponent."""

    def __init__(self, task: GameTask) -> None:
        super().__init__(task)
        if task.seat >= self.players:
            raise ValueError(f"seat: must be below {self.players}, the number of players, got {task.seat}")
        self.metrics |= {"moves": 0.0, "illegal_moves": 0.0}
        self._begin_luck(None)

    @property
    def tools(self) -> list[dict[str, Any]]:
        schemas = super().tools
        if self.actions:
            schemas = deepcopy(schemas)  # The class shares one schema per tool.
            move = next(schema["function"] for schema in schemas if schema["function"]["name"] == "move")
            move["parameters"]["properties"]["action"]["enum"] = list(self.actions)
        return schemas

    @classmethod
    def tasks(cls, split: Split) -> Sequence[GameTask]:
        """Return one game for each seed, with the model in each seat in turn; the two splits have different seeds.

        Args:
            split: "train" or "test".
        """
        start, count = (0, HELD_OUT) if split == "train" else (HELD_OUT, TEST_GAMES)
        return Procedural(cls._game, range(start, start + count))

    @classmethod
    def _game(cls, seed: int) -> GameTask:
        return GameTask(id=seed, prompt=cls.rules, seed=seed, seat=seed % cls.players)

    def start(self, seed: int) -> None:
        """Start the game; the same seed must give the same start. For chance later in the game, use `self.luck`.

        Args:
            seed: The task's seed.
        """
        raise NotImplementedError(f"{type(self).__name__}.start(seed)")

    def play(self, action: str, player: int) -> None:
        """Make the player's move.

        Args:
            action: The move.
            player: The player who moves, counted from 0.

        Raises:
            IllegalMove: If the rules don't allow the move; the message says what to do instead.
        """
        raise NotImplementedError(f"{type(self).__name__}.play(action, player)")

    def observe(self, player: int) -> str:
        """Return what the player can see of the game.

        Args:
            player: The player, counted from 0.
        """
        raise NotImplementedError(f"{type(self).__name__}.observe(player)")

    def to_move(self) -> int | None:
        """Return the player whose turn it is, counted from 0, or None if the game has ended."""
        raise NotImplementedError(f"{type(self).__name__}.to_move()")

    def returns(self) -> Sequence[float]:
        """Return each player's reward in the finished game; the model gets the reward of its seat."""
        raise NotImplementedError(f"{type(self).__name__}.returns()")

    def opponent(self, observation: str, rng: random.Random) -> Any:
        """Return the move of the player whose turn it is.

        It runs in a separate thread; an `async def` is awaited instead.

        Args:
            observation: What that player observes.
            rng: A generator seeded with the game's seed and that of `reset`, so the same moves get the same responses.
        """
        raise NotImplementedError(f"{type(self).__name__}.opponent(observation, rng)")

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[list[Message], dict[str, Any]]:
        messages, info = await super().reset(seed=seed, options=options)
        self._begin_luck(seed)
        self.start(self.task.seed)
        await self._others()
        said = [messages[-1]["content"], self.observe(self.task.seat)]
        messages[-1]["content"] = joined(said, "\n\n")
        return messages, info

    # Longer than any game: opponents have their own time limit, and a slow opponent isn't the model's mistake.
    @tool(timeout_s=3600)
    async def move(self, action: str) -> str | Stop:
        """Make your move. The answer is the game as it is when it is your turn again, or at its end."""
        with boundary(EnvError, f"{type(self).__name__}.move"):
            refused = self._refused(action)
            if refused is None:
                await self._others()
                seen = self.observe(self.task.seat)
                return Stop("over", seen) if self.to_move() is None else seen
        self.metrics["illegal_moves"] = illegal = self.metrics.get("illegal_moves", 0.0) + 1
        left = self.illegal_moves - int(illegal)
        if left < 0:
            return Stop("illegal_moves", f"error: illegal move: {refused}; you forfeit the game")
        raise ToolError(f"illegal move: {refused}; illegal moves left: {left}; one more than that forfeits the game")

    @reward
    async def outcome(self) -> float:
        """Return the reward of the game for the model's seat."""
        return self.forfeit if self.to_move() is not None else self.returns()[self.task.seat]

    def _begin_luck(self, seed: int | None) -> None:
        self.luck = random.Random(seed_for("game", self.task.seed, str(seed)))
        """The random generator for chance during the game, such as dice.

        The draws are the same within a group, and different for each attempt of an evaluation.
        """
        self._rng = random.Random(seed_for("opponent", self.task.seed, str(seed)))

    def _refused(self, action: str) -> str | None:
        """Make the model's move; return why the rules don't allow it, or None if they do."""
        try:
            if self.actions and action not in self.actions:
                raise IllegalMove(f"{action!r:.80} is not one of {', '.join(self.actions)}")
            self.play(action, self.task.seat)
        except IllegalMove as illegal:
            return str(illegal)
        self.metrics["moves"] = self.metrics.get("moves", 0.0) + 1
        return None

    async def _others(self) -> None:
        """Let the others move until it is the model's turn, or the game has ended."""
        name = type(self).__name__
        while (player := self.to_move()) is not None and player != self.task.seat:
            if player not in range(self.players):
                raise EnvError(
                    f"{name}.to_move returned {player!r}; it must return None or a player below {self.players}"
                )
            observation, limit = self.observe(player), TimeLimit(self.opponent_timeout_s)
            with boundary(EnvError, f"{name}.opponent"):
                asked = partial(self.opponent, observation, self._rng)
                action = await limit.bound(call_method(asked, {}, name=f"{name}.opponent", threads=self._threads))
            with boundary(EnvError, f"{name}.opponent moved {action!r:.80}"):
                self.play(action, player)
