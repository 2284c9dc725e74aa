"""Games of turns: the model has one seat, and code plays the others."""

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
"""Seeds from this one on are those of held-out games."""
TEST_GAMES = 10_000


class GameTask(Task):
    """One game: how it begins, and the model's seat in it."""

    seed: int
    """What `start` gets."""
    seat: Annotated[int, Field(ge=0)] = 0
    """The player that the model is; the others are `opponent`."""


class IllegalMove(ValueError):
    """Raised in `play` for a move that the rules do not allow; the model reads its text and moves again."""


class Game(ToolEnv[GameTask]):
    """A game of turns, whose rules a subclass writes; the model moves by the tool `move`.

    A subclass has `start`, `play`, `observe`, `to_move` and `returns`, and `opponent` where there is more than one
    player. They are plain functions of the game's state in `self`. What raises in them, IllegalMove in `play` for the
    model's own move excepted, is a failure of the env: the rollout has no reward.
    """

    players: ClassVar[int] = 2
    """How many players there are, the model included."""
    rules: ClassVar[str] = ""
    """The prompt of the tasks that `tasks` makes; what the model's seat observes follows it."""
    actions: ClassVar[tuple[str, ...]] = ()
    """The moves that the model is told of and may make; () for any text, which `play` reads."""
    illegal_moves: ClassVar[int] = 3
    """The illegal moves that the model may make in one game; one more ends it."""
    forfeit: ClassVar[float] = 0.0
    """What a game is worth to the model that did not come to its end: by illegal moves, an answer or a limit."""
    opponent_timeout_s: ClassVar[float] = 30.0
    """The seconds that one move of an opponent may take."""

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
            schemas = deepcopy(schemas)  # A class has one schema of each tool.
            move = next(schema["function"] for schema in schemas if schema["function"]["name"] == "move")
            move["parameters"]["properties"]["action"]["enum"] = list(self.actions)
        return schemas

    @classmethod
    def tasks(cls, split: Split) -> Sequence[GameTask]:
        """Return games of each seed, the model in each seat in turn; those of the two splits have other seeds."""
        start, count = (0, HELD_OUT) if split == "train" else (HELD_OUT, TEST_GAMES)
        return Procedural(cls._game, range(start, start + count))

    @classmethod
    def _game(cls, seed: int) -> GameTask:
        return GameTask(id=seed, prompt=cls.rules, seed=seed, seat=seed % cls.players)

    def start(self, seed: int) -> None:
        """Begin the game; the same seed must begin it the same way. Draw later chance from `luck`."""
        raise NotImplementedError(f"{type(self).__name__}.start(seed)")

    def play(self, action: str, player: int) -> None:
        """Make the player's move; IllegalMove, with what to do instead, if the rules do not allow it."""
        raise NotImplementedError(f"{type(self).__name__}.play(action, player)")

    def observe(self, player: int) -> str:
        """Return what the player sees of the game."""
        raise NotImplementedError(f"{type(self).__name__}.observe(player)")

    def to_move(self) -> int | None:
        """Return the player whose turn it is, counted from 0; None when the game has ended."""
        raise NotImplementedError(f"{type(self).__name__}.to_move()")

    def returns(self) -> Sequence[float]:
        """Return what the ended game is worth to each player; the model's own is its reward."""
        raise NotImplementedError(f"{type(self).__name__}.returns()")

    def opponent(self, observation: str, rng: random.Random) -> Any:
        """Return the move of the player whose turn it is, from what that player observes.

        It runs in a thread of its own; an `async def` is awaited instead. `rng` follows from the seeds of the game and
        of `reset`, so the same moves are answered the same way.
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

    # Longer than a game: an opponent has a limit of its own, and it is no mistake of the model's where one is late.
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
            return Stop("illegal_moves", f"error: illegal move: {refused}; the game is forfeited")
        raise ToolError(f"illegal move: {refused}; after {left} more the next one forfeits the game")

    @reward
    async def outcome(self) -> float:
        """Return the reward of the game for the model's seat."""
        return self.forfeit if self.to_move() is not None else self.returns()[self.task.seat]

    def _begin_luck(self, seed: int | None) -> None:
        self.luck = random.Random(seed_for("game", self.task.seed, str(seed)))
        """The generator for chance during the game, such as dice: the same draws in one group, others for each attempt
        of an evaluation."""
        self._rng = random.Random(seed_for("opponent", self.task.seed, str(seed)))

    def _refused(self, action: str) -> str | None:
        """Make the model's move; return why the rules do not allow it."""
        try:
            if self.actions and action not in self.actions:
                raise IllegalMove(f"{action!r:.80} is none of {', '.join(self.actions)}")
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
                raise EnvError(f"{name}.to_move returned {player!r}; it must be None or below {self.players}")
            observation, limit = self.observe(player), TimeLimit(self.opponent_timeout_s)
            with boundary(EnvError, f"{name}.opponent"):
                asked = partial(self.opponent, observation, self._rng)
                action = await limit.bound(call_method(asked, {}, name=f"{name}.opponent", threads=self._threads))
            with boundary(EnvError, f"{name}.opponent moved {action!r:.80}"):
                self.play(action, player)
