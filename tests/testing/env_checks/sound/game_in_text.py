"""A game in plain text that lasts for all of its turns, with a world drawn from the seed."""

import random
from itertools import pairwise
from typing import Any

import agentgym as ag
from agentgym.engines.scripted import Reply, say

TASK = ag.Task(id="t", prompt=({"role": "user", "content": "Guess my number, from 1 to 50."},))


def ORACLE(text: str) -> Reply:
    lines = text.split("<|im_end|>")
    low, high = 1, 50
    for said, answer in pairwise(lines):
        guess = said.rpartition("\n")[2]
        if guess.isdigit():
            low, high = (int(guess) + 1, high) if "higher" in answer else (low, int(guess) - 1)
    return say(str((low + high) // 2))


class Sound(ag.Env[ag.Task]):
    limits = ag.Limits(turns=12)

    async def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[list[ag.Message], dict[str, Any]]:
        self.number = random.Random(seed).randint(1, 50)
        return await super().reset(seed=seed)

    async def step(self, action: ag.Message) -> ag.StepResult:
        said = action["content"]
        guess = int(said) if said.isdecimal() and len(said) < 4 else 0
        if guess == self.number:
            return ag.StepResult([], 1.0, True, False, {})
        hint = "higher" if guess < self.number else "lower"
        return ag.StepResult([ag.Message(role="user", content=hint)], 0.0, False, False, {})
