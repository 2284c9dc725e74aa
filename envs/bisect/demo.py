"""A sloppy demonstrator of bisect that knows the format: some of its rollouts bisect, most guess blindly.

Reinforcement learning then has to find what remains to be learned: always halve the remaining range.
"""

import random
import re
from dataclasses import dataclass

from agentgym.engines.scripted import Reply, ReplyPolicy, call, raw, say
from envs.bisect.env import HIGHEST, BisectTask

_GUESS = re.compile(r'"guess\((\d+)\)"')
_ANSWER = re.compile(r"'(higher|lower)'")


@dataclass(frozen=True, kw_only=True)
class Sloppiness:
    """Probability of each style, per rollout (the rest guesses consistently), and of each fault, per turn."""

    bisects: float = 0.25
    blind: float = 0.6
    malformed: float = 0.05
    gives_up: float = 0.05


def demonstrate(task: BisectTask, rng: random.Random, sloppiness: Sloppiness | None = None) -> ReplyPolicy:
    """Return the policy of one rollout, which keeps the same style throughout."""
    chances = sloppiness or Sloppiness()
    style = rng.random()

    def guess(low: int, high: int) -> int:
        if style < chances.bisects:
            return (low + high) // 2
        if style < chances.bisects + chances.blind:
            return rng.randint(1, HIGHEST)
        return rng.randint(low, high)

    def reply(text: str) -> Reply:
        fault = rng.random()
        if fault < chances.gives_up:
            return say("I give up.")
        if fault < chances.gives_up + chances.malformed:
            return raw(f"<tool_call>\nguess({rng.randint(1, HIGHEST)})\n</tool_call>")
        return call("python", code=f"guess({guess(*_what_is_left(text))})")

    return reply


def _what_is_left(text: str) -> tuple[int, int]:
    """Return the lowest and highest number that the results so far allow."""
    low, high = 1, HIGHEST
    for guessed, answer in zip(_GUESS.findall(text), _ANSWER.findall(text), strict=True):
        if answer == "higher":
            low = max(low, int(guessed) + 1)
        else:
            high = min(high, int(guessed) - 1)
    return low, high
