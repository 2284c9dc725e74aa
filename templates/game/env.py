"""A text game: find a number, with hints whether a guess is too small or too large."""

import random
import re

import agentgym as ag
from agentgym.testing import Reply, say


class GameTask(ag.Task):
    """One row of data: the number to find."""

    number: int


def make_task(index: int) -> GameTask:
    """Return the task of an index, always the same."""
    number = random.Random(index).randint(1, 15)
    return GameTask(id=str(index), prompt="I think of a number from 1 to 15. Which is it?", number=number)


@ag.register("game_template")
class GameTemplate(ag.Env[GameTask]):
    """Reward 1 for finding the number in four guesses, minus 0.1 for each message without a guess."""

    limits = ag.Limits(turns=4, seconds=60)

    @classmethod
    def tasks(cls, split: ag.Split) -> ag.Procedural[GameTask]:
        return ag.Procedural(make_task, range(10_000) if split == "train" else range(10_000, 10_500))

    async def step(self, action: ag.Message) -> ag.StepResult:
        numbers = re.findall(r"\d+", action["content"])
        guess = int(numbers[-1]) if numbers and len(numbers[-1]) <= 2 else None
        if guess == self.task.number:
            return ag.StepResult([], 1.0, True, False, {"stop_reason": "found"})
        answer = "Say a number." if guess is None else "Too small." if guess < self.task.number else "Too large."
        messages = [ag.Message(role="user", content=answer)]
        return ag.StepResult(messages, -0.1 if guess is None else 0.0, False, False, {})


def oracle(task: GameTask) -> list[Reply]:
    """Return replies that solve the task by bisection; `agentgym check` and the tests play them."""
    low, high = 1, 15
    guesses: list[int] = []
    while not guesses or guesses[-1] != task.number:
        guesses.append((low + high) // 2)
        low, high = (guesses[-1] + 1, high) if guesses[-1] < task.number else (low, guesses[-1] - 1)
    return [say(f"Answer: {guess}") for guess in guesses]
