"""A sloppy demonstrator of chase: it knows the format, follows most pointers, and often gives up and guesses.

Reinforcement learning then has to find what remains to be learned: don't guess, don't write malformed calls, don't
mistype keys, and write true summaries.
"""

import random
import re
from dataclasses import dataclass

from agentgym.engines.scripted import Reply, ReplyPolicy, call, raw, say
from envs.chase.env import Chase, ChaseTask

_FOUND = re.compile(r"see (\d+)|value (\d+)|Start at key (\d+)|Next key: (\d+)|The value is (\d+)")


@dataclass(frozen=True, kw_only=True)
class Sloppiness:
    """Probability of each fault, per turn."""

    guess: float = 0.45
    malformed: float = 0.05
    wrong_key: float = 0.05
    wrong_summary: float = 0.4


def demonstrate(task: ChaseTask, rng: random.Random, sloppiness: Sloppiness | None = None) -> ReplyPolicy:
    """Return the policy of one rollout, which replies based on the text so far and by chance."""
    chances = sloppiness or Sloppiness()
    turns_left = Chase.limits.turns

    def number() -> str:
        return str(rng.randint(10, 99))

    def summary(key: str | None, value: str | None) -> Reply:
        wrong = rng.random() < chances.wrong_summary
        if value is not None:
            return say(f"The value is {number() if wrong else value}.")
        return say(f"Next key: {number() if wrong else key}.")

    def reply(text: str) -> Reply:
        nonlocal turns_left
        key, value = _last_found(text)
        if "Summarise." in text.rpartition("user\n")[2]:
            return summary(key, value)
        turns_left -= 1
        if value is not None:
            return say(f"Answer: {value}")
        if turns_left == 0 or rng.random() < chances.guess:
            return say(f"Answer: {number()}")
        if rng.random() < chances.malformed:
            return raw(f"<tool_call>\nget({key})\n</tool_call>")
        return call("python", code=f"get({number() if rng.random() < chances.wrong_key else key})")

    return reply


def _last_found(text: str) -> tuple[str | None, str | None]:
    """Return the last key that was found and, if it was already seen, the value."""
    key = value = None
    for see, value_of, start, following, summarised in _FOUND.findall(text):
        key = see or start or following or key
        value = value_of or summarised or None
    return key, value
