"""Guess the number: four guesses in a range of eight numbers, each answered with "Higher." or "Lower."."""

import random
import re
from functools import partial

from pydantic import Field

import agentgym as ag
from agentgym.testing import Reply, say

COUNT = 1_000_000
"""Number of tasks per split."""
SIZE = 8
"""How many numbers a range has."""
GUESSES = 4
"""How many guesses are allowed. They suffice: three hints halve the range to one of eight numbers."""
LOWEST = range(10, 92)
"""The numbers with which a range may begin, so that all of its numbers have two digits."""
RULES = "Guess my number. Answer with a number only."
EXAMPLES = ((21, (24, 26, 25)), (51, (54, 52)))
"""The lowest number of each example's range, and its guesses; the last one is right."""


class GuessTask(ag.Task):
    """The lowest number of a range, and the secret in it."""

    low: int = Field(ge=LOWEST.start, lt=LOWEST.stop)
    secret: int


def opening(low: int) -> str:
    """Return the message that opens a game."""
    return f"My number is from {low} to {low + SIZE - 1}."


def hint(guess: int, secret: int) -> str:
    """Return the answer to a guess."""
    return "Right!" if guess == secret else "Higher." if guess < secret else "Lower."


def make_task(split: ag.Split, index: int) -> GuessTask:
    """Create the task of an index; the same arguments always give the same task."""
    rng = random.Random(index)
    low = rng.choice([low for low in LOWEST if is_held_out(low) == (split == "test")])
    secret = rng.randrange(low, low + SIZE)
    told: list[ag.Message] = []
    said = ""
    for first, guesses in EXAMPLES:
        said += opening(first)
        for guess in guesses:
            told += [ag.Message(role="user", content=said), ag.Message(role="assistant", content=str(guess))]
            said = hint(guess, guesses[-1])
        said += " "
    prompt = (*told, ag.Message(role="user", content=said + opening(low)))
    return GuessTask(id=f"guess-number-{split}-{index}", prompt=prompt, low=low, secret=secret)


def is_held_out(low: int) -> bool:
    """Return whether ranges from this number on are for evaluation only; one in six is."""
    return low % 6 == 0


@ag.register("guess_number")
class GuessNumber(ag.Env[GuessTask]):
    """Reward 1 for the right number within four guesses."""

    system = RULES
    limits = ag.Limits(turns=GUESSES, turn_tokens=16)

    def __init__(self, task: GuessTask) -> None:
        super().__init__(task)
        self.guesses = 0
        self.is_found = False

    @classmethod
    def tasks(cls, split: ag.Split) -> ag.Procedural[GuessTask]:
        return ag.Procedural(partial(make_task, split), range(COUNT))

    async def step(self, action: ag.Message) -> ag.StepResult:
        self.guesses += 1
        number = re.search(r"-?\d{1,9}", str(action["content"]))
        guess = int(number[0]) if number else None
        self.is_found = guess == self.task.secret
        if self.is_found or self.guesses == GUESSES:
            return ag.StepResult([], 0.0, True, False, {"stop_reason": "found" if self.is_found else "out_of_guesses"})
        told = hint(guess, self.task.secret) if guess is not None else "That is not a number."
        return ag.StepResult([ag.Message(role="user", content=told)], 0.0, False, False, {})

    async def score(self) -> dict[str, float]:
        return {"found": float(self.is_found)}


def oracle(task: GuessTask) -> list[Reply]:
    """Return the guesses that halve the range until the secret is found; `agentgym check` and the tests play them."""
    low, high = task.low, task.low + SIZE - 1
    guesses: list[int] = []
    while not guesses or guesses[-1] != task.secret:
        guesses.append((low + high) // 2)
        low, high = (guesses[-1] + 1, high) if guesses[-1] < task.secret else (low, guesses[-1] - 1)
    return [say(str(guess)) for guess in guesses]
