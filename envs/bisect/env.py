"""Bisect: find a secret number with at most four guesses, made from Python.

The secret and the number of guesses stay in this process. Code in the sandbox reaches them only through `guess(n)`,
which runs here.
"""

import random
from functools import partial
from typing import Annotated

from pydantic import Field

import agentgym as ag
from agentgym.testing import Reply, call

HELD_OUT = 1_000_000
"""Tasks from this index on are for evaluation only."""
HIGHEST = 15
GUESSES = 4
"""The lowest number that suffices: four results distinguish 15 secrets only if every guess halves the range."""

PENALTY = -0.1
"""Cost of a malformed call."""
COST = -0.05
"""Cost of a guess in the long env."""


class BisectTask(ag.Task):
    """A secret number; the prompt is the same for all tasks."""

    secret: int = Field(ge=1, le=HIGHEST)


def make_task(index: int, guesses: int = GUESSES) -> BisectTask:
    """Create the task of an index; the same index always gives the same task."""
    content = f"Find the secret in 1..{HIGHEST} with at most {guesses} calls of guess(n)."
    prompt = ag.Message(role="user", content=content)
    secret = random.Random(index).randint(1, HIGHEST)
    return BisectTask(id=f"bisect-{index}", prompt=(prompt,), secret=secret)


@ag.register("bisect")
class Bisect(ag.ToolEnv[BisectTask]):
    """Reward 1 for guessing the secret, minus 0.1 for each malformed call."""

    sandbox_spec = ag.AnySandbox()
    limits = ag.Limits(turns=GUESSES, seconds=120)
    most = GUESSES
    """Number of guesses in a rollout."""

    def __init__(self, task: BisectTask) -> None:
        super().__init__(task)
        self.guesses = 0
        self.is_found = False

    @classmethod
    def tasks(cls, split: ag.Split) -> ag.Procedural[BisectTask]:
        """Return tasks whose ids differ between the splits, with secrets from all of 1..15 in both.

        No secret is held out. All tasks have the same prompt, so a model can't memorize a task's secret but only
        learn how to search. A model that never saw some of the secrets would rightly learn not to guess them.
        """
        start = 0 if split == "train" else HELD_OUT
        return ag.Procedural(make_task, range(start, start + HELD_OUT))

    @ag.tool(timeout_s=20)
    async def python(self, code: Annotated[str, Field(max_length=500)]) -> str | ag.Stop:
        """Run Python code; guess(n) answers higher, lower or correct."""
        result = await self.sandbox.python(code, functions={"guess": self._guess})
        text = result.text(limit=200)
        if self.is_found:
            return ag.Stop("found", text)
        return ag.Stop("out_of_guesses", text) if self.guesses >= self.most else text

    def _guess(self, n: object) -> str:
        if self.guesses >= self.most:
            return "no guesses left"
        # Count before returning anything: a result that costs nothing would be a free guess.
        self.guesses += 1
        if not isinstance(n, int | float):
            return "not a number"
        if n == self.task.secret:
            self.is_found = True
            return "correct"
        return "higher" if n < self.task.secret else "lower"

    @ag.reward
    def found(self) -> float:
        """Return whether one of the guesses was the secret."""
        return float(self.is_found)

    @ag.reward(weight=PENALTY)
    def malformed(self) -> float:
        """Return how many calls were malformed; without this cost, malformed calls would not be unlearned."""
        return self.metrics["malformed_calls"]


@ag.register("bisect_turns")
class BisectTurns(Bisect):
    """Bisect in which a malformed call costs its 0.1 at the turn that made it, for per-turn credit.

    The rollout's reward is the same as in Bisect; only the turns that pay for it differ.
    """

    def __init__(self, task: BisectTask) -> None:
        super().__init__(task)
        self.charged = 0.0
        """How many malformed calls earlier turns have paid for."""

    async def step(self, action: ag.Message) -> ag.StepResult:
        result = await super().step(action)
        if result.terminated:  # the outcome includes the cost not charged yet
            return result
        cost = PENALTY * self.malformed()
        self.charged = self.metrics["malformed_calls"]
        return result._replace(reward=cost)

    @ag.reward(weight=PENALTY)
    def malformed(self) -> float:
        return super().malformed() - self.charged


@ag.register("bisect_long")
class BisectLong(Bisect):
    """Bisect with up to 20 guesses, each of which costs 0.05 at the turn that made it."""

    limits = ag.Limits(turns=20, seconds=120)
    most = 20

    def __init__(self, task: BisectTask) -> None:
        super().__init__(task)
        self.paid = 0
        """How many guesses earlier turns have paid for."""

    @classmethod
    def tasks(cls, split: ag.Split) -> ag.Procedural[BisectTask]:
        start = 0 if split == "train" else HELD_OUT
        return ag.Procedural(partial(make_task, guesses=cls.most), range(start, start + HELD_OUT))

    async def step(self, action: ag.Message) -> ag.StepResult:
        result = await super().step(action)
        if result.terminated:  # the outcome includes the cost not paid yet
            return result
        cost = COST * self.spent()
        self.paid = self.guesses
        return result._replace(reward=cost)

    @ag.reward(weight=COST)
    def spent(self) -> float:
        """Return the number of guesses that no turn has paid for yet."""
        return float(self.guesses - self.paid)


def oracle(task: BisectTask) -> list[Reply]:
    """Return guesses that halve the remaining range until the secret; `agentgym check` and the tests play them."""
    low, high, guesses = 1, HIGHEST, list[Reply]()
    while True:
        middle = (low + high) // 2
        guesses.append(call("python", code=f"guess({middle})"))
        if middle == task.secret:
            return guesses
        low, high = (middle + 1, high) if middle < task.secret else (low, middle - 1)
