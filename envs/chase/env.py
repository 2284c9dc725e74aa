"""Chase: follow a chain of pointers with a Python tool, then answer with the value at its end.

The store and the value stay in this process. Code in the sandbox reaches them only through `get(key)`, which runs
here.
"""

import random
import re
from itertools import pairwise
from typing import Annotated

from pydantic import Field

import agentgym as ag
from agentgym.testing import Reply, ReplyPolicy, call, say

HELD_OUT = 1_000_000
"""Tasks from this index on are for evaluation only."""


class ChaseTask(ag.Task):
    """A chain of 2 to 4 keys, the last of which has the value."""

    store: dict[str, str]
    value: int


def make_task(index: int) -> ChaseTask:
    """Create the task of an index; the same index always gives the same task."""
    rng = random.Random(index)
    keys = [str(key) for key in rng.sample(range(10, 100), rng.randint(2, 4))]
    value = rng.randint(10, 99)
    store = {key: f"see {following}" for key, following in pairwise(keys)}
    store[keys[-1]] = f"value {value}"
    prompt = ag.Message(role="user", content=f"Start at key {keys[0]}. What is the value?")
    return ChaseTask(id=f"chase-{index}", prompt=(prompt,), store=store, value=value)


@ag.register("chase")
class Chase(ag.ToolEnv[ChaseTask]):
    """Reward 1 for the right answer, minus 0.1 for each malformed call."""

    sandbox_spec = ag.AnySandbox()
    limits = ag.Limits(turns=6, seconds=120)

    @classmethod
    def tasks(cls, split: ag.Split) -> ag.Procedural[ChaseTask]:
        start = 0 if split == "train" else HELD_OUT
        return ag.Procedural(make_task, range(start, start + HELD_OUT))

    @ag.tool(timeout_s=20)
    async def python(self, code: Annotated[str, Field(max_length=500)]) -> str:
        """Run Python code; get(key) looks a key up."""
        result = await self.sandbox.python(code, functions={"get": self._get})
        return result.text(limit=200)

    def _get(self, key: object) -> str:
        return self.task.store.get(str(key), "no such key")

    @ag.reward
    def solved(self) -> float:
        """Return whether the answer is the value."""
        return float(self.answer == f"Answer: {self.task.value}")

    @ag.reward(weight=-0.1)
    def malformed(self) -> float:
        """Return how many calls were malformed; without this cost, malformed calls would not be unlearned."""
        return self.metrics["malformed_calls"]


@ag.register("chase_compaction")
class ChaseCompaction(Chase):
    """Chase with a context of two calls, after which the model has to continue from its own summary."""

    context = ag.Compact(at=None, turns=2, instruction="Summarise.")


_LAST = re.compile(r"(?:key:? |see )(\d+)|alue (?:is )?(\d+)")


def oracle(task: ag.Task) -> ReplyPolicy:
    """Return a policy that follows each pointer and summarizes when asked; `agentgym check` and the tests play it.

    It replies based on the last message of its conversation, so it plays every variant of chase, including sub-agents
    and forks.
    """

    def reply(text: str) -> Reply:
        key, value = _LAST.findall(text)[-1]
        if "Summarise." in text.rpartition("user\n")[2]:
            return say(f"The value is {value}." if value else f"Next key: {key}.")
        return say(f"Answer: {value}") if value else call("python", code=f"get({key})")

    return reply
