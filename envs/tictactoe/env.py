"""Tic-tac-toe: one policy plays both sides, each with a separate reward and baseline.

X is the rollout's first conversation, O is a sub-agent with the role "O" that stays open for the whole game.
"""

import random
import re
from contextlib import AsyncExitStack
from functools import cache
from typing import Annotated, Any, Literal

from pydantic import Field

import agentgym as ag
from agentgym.engines.scripted import Reply, ReplyPolicy, say

HELD_OUT = 1_000_000
"""Tasks from this index on are for evaluation only."""
LINES = ((0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6))
WON, DRAWN, LOST, ILLEGAL = 1.0, 0.5, 0.0, -1.0
BOARD = re.compile(r"^([XO1-9]) ([XO1-9]) ([XO1-9])(?=<|$)", re.MULTILINE)
"""A line of a board as a player sees it."""
RULES = "Tic-tac-toe: three in a row win. You are {mark}. Answer with the number of a free field alone.\n\n{board}"


class Game(ag.Task):
    """A board on which X moves first."""

    board: str = Field(pattern="^[XO.]{9}$")


def winner(board: str) -> str | None:
    """Return the mark that has three in a row, or None."""
    return next((board[a] for a, b, c in LINES if board[a] == board[b] == board[c] != "."), None)


def is_over(board: str) -> bool:
    """Return whether somebody has won or no field is free."""
    return winner(board) is not None or "." not in board


def free(board: str) -> list[int]:
    """Return the free fields, counted from 0."""
    return [place for place, mark in enumerate(board) if mark == "."]


def put(board: str, place: int, mark: str) -> str:
    """Return the board with this mark on the field."""
    return board[:place] + mark + board[place + 1 :]


def shown(board: str) -> str:
    """Return the board as a player sees it: three lines, with free fields shown by their numbers."""
    fields = [str(place + 1) if mark == "." else mark for place, mark in enumerate(board)]
    return "\n".join(" ".join(fields[row : row + 3]) for row in (0, 3, 6))


def last_shown(text: str) -> str:
    """Return the board that a conversation showed last."""
    return re.sub("[1-9]", ".", "".join("".join(row) for row in BOARD.findall(text)[-3:]))


def to_move(board: str) -> str:
    """Return the mark that moves next; X starts."""
    return "X" if board.count("X") == board.count("O") else "O"


@cache
def can_win(board: str) -> bool:
    """Return whether X wins if both sides play for it."""
    if is_over(board):
        return winner(board) == "X"
    return any(can_win(put(board, place, to_move(board))) for place in free(board))


@cache
def worth(board: str, mark: str) -> int:
    """Return 1, 0 or -1: the value of a board for the mark that moves next, if both play perfectly."""
    if is_over(board):
        return 0 if winner(board) is None else -1
    return max(-worth(put(board, place, mark), "XO"[mark == "X"]) for place in free(board))


def best(board: str, mark: str) -> int:
    """Return the first field that a perfect player could take."""
    return max(free(board), key=lambda place: -worth(put(board, place, mark), "XO"[mark == "X"]))


def says(text: str) -> ag.Message:
    """Return a message from the game to a side."""
    return ag.Message(role="user", content=text)


def make_task(index: int) -> Game:
    """Create the task of an index: up to four marks are on the board, and nobody has won.

    The same index always gives the same task.
    """
    rng = random.Random(index)
    board = "." * 9
    for mark in "XO" * rng.randint(0, 2):
        board = put(board, rng.choice(free(board)), mark)
    return Game(id=f"tictactoe-{index}", prompt=(says(RULES.format(mark="X", board=shown(board))),), board=board)


@ag.register("tictactoe")
class TicTacToe(ag.Env[Game]):
    """Reward 1 for a win, 0.5 for a draw, 0 for a loss, -1 for one answer too many that is not a free field."""

    limits = ag.Limits(turns=16, seconds=120, turn_tokens=16)
    opponent = ag.Parameter(
        "self",
        Literal["self", "frozen", "model", "random", "perfect"],
        doc="who plays O: the policy, trained or frozen, the model role opponent, or a program",
    )
    illegal_moves = ag.Parameter(
        3,
        Annotated[int, Field(ge=0)],
        doc="illegal answers that a side may give before one more forfeits the game",
    )

    def __init__(self, task: Game) -> None:
        super().__init__(task)
        self.board = task.board
        self.rewards = (ILLEGAL, DRAWN)
        """Rewards of X and O. These values apply if a limit ends the game, since X is then to move."""
        self.ended = ""
        """How the game ended; "" while it is running."""
        self.other: Any = None
        self.stack = AsyncExitStack()

    @classmethod
    def tasks(cls, split: ag.Split) -> ag.Procedural[Game]:
        """Return tasks whose ids differ between the splits; the boards are the same, since there are only a few."""
        start = 0 if split == "train" else HELD_OUT
        return ag.Procedural(make_task, range(start, start + HELD_OUT))

    @classmethod
    def oracle(cls, task: Game) -> ReplyPolicy:
        """Return a policy that makes X win if it also plays O, and otherwise plays X perfectly."""

        def reply(text: str) -> Reply:
            board = last_shown(text)
            if cls.opponent not in ("self", "frozen"):
                return say(str(best(board, "X") + 1))
            return say(str(next(at for at in free(board) if can_win(put(board, at, to_move(board)))) + 1))

        return reply

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[list[ag.Message], dict[str, Any]]:
        self.rng = random.Random(seed)
        return await super().reset(seed=seed, options=options)

    async def step(self, action: ag.Message) -> ag.StepResult:
        told = self._refused(action["content"], "X")
        if told is None and not self.ended:
            await self._others_move()
        if told is None:
            told = says(shown(self.board) + (f"\n\n{self.ended}" if self.ended else ""))
        return ag.StepResult([told], 0.0, bool(self.ended), False, {"stop_reason": "game over"} if self.ended else {})

    async def step_cut(self, action: ag.Message) -> None:
        """Leave a move out that is cut off, since the next token could change it."""

    def _refused(self, answer: str, mark: str) -> ag.Message | None:
        """Make a move, or return a message with the free fields if it is illegal."""
        number = re.fullmatch(r"\s*([1-9])\s*", answer)
        place = int(number[1]) - 1 if number else -1
        if place in free(self.board):
            self.board = put(self.board, place, mark)
            if is_over(self.board):
                self._end_with_the_board()
            return None
        self.metrics[f"illegal_{mark}"] = self.metrics.get(f"illegal_{mark}", 0.0) + 1
        left = self.illegal_moves - int(self.metrics[f"illegal_{mark}"])
        if left < 0:
            self._forfeit(mark)
        then = self.ended or f"after {left} more the next one forfeits the game"
        fields = ", ".join(str(place + 1) for place in free(self.board))
        return says(f"{answer!r:.40} is none of the free fields {fields}; {then}.\n\n{shown(self.board)}")

    def _end_with_the_board(self) -> None:
        won = winner(self.board)
        self.ended = "A draw" if won is None else f"{won} wins"
        self.rewards = (DRAWN, DRAWN) if won is None else (WON, LOST) if won == "X" else (LOST, WON)

    def _forfeit(self, mark: str) -> None:
        self.ended = f"{mark} forfeits the game"
        self.rewards = (ILLEGAL, DRAWN) if mark == "X" else (DRAWN, ILLEGAL)

    async def _others_move(self) -> None:
        """Let O move, or forfeit the game."""
        if self.opponent in ("random", "perfect"):
            place = self.rng.choice(free(self.board)) if self.opponent == "random" else best(self.board, "O")
            self._refused(str(place + 1), "O")
            return
        await self._show_other()
        while (answer := await self.other.turn()) is not None:
            told = self._refused(answer["content"], "O")
            if told is None:
                return
            self.other.reply([told])
            if self.ended:
                return
        self._forfeit("O")  # a limit prevented its move

    async def _show_other(self) -> None:
        """Show O the board, in the conversation that stays open for the whole game."""
        if self.other is not None:
            self.other.reply([says(shown(self.board))])
            return
        first = says(RULES.format(mark="O", board=shown(self.board)))
        engine = "opponent" if self.opponent == "model" else None
        train = False if self.opponent == "frozen" else None
        opening = self.fork("subagent", [first], role="O", engine=engine, train=train)
        self.other = await self.stack.enter_async_context(opening)

    async def score(self) -> dict[str, float]:
        if self.other is not None:
            self.role_rewards["O"] = self.rewards[1]
        return {"X": self.rewards[0]}

    async def close(self) -> None:
        await self.stack.aclose()
