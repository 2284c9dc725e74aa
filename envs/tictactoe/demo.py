"""A sloppy demonstrator of tictactoe: a few moves are perfect, most take a random free field, and some are illegal."""

import random

from agentgym.engines.scripted import Reply, ReplyPolicy, say
from envs.tictactoe.env import Game, best, free, last_shown, to_move

PERFECT = 0.15
"""Share of moves that are perfect."""
ILLEGAL = 0.05
"""Share of moves to a random field, free or not."""


def demonstrate(task: Game, rng: random.Random) -> ReplyPolicy:
    """Return the policy of both sides of one rollout; each uses the board that it was last shown."""

    def reply(text: str) -> Reply:
        board = last_shown(text)
        chance = rng.random()
        if chance < ILLEGAL:
            return say(str(rng.randint(1, 9)))
        place = best(board, to_move(board)) if chance < ILLEGAL + PERFECT else rng.choice(free(board))
        return say(str(place + 1))

    return reply
