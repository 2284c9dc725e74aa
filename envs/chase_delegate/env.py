"""Chase with sub-agents: some keys are delegated to a sub-agent, which follows its own chain and reports back.

The root looks up a delegated key like any other. The tool then starts a sub-agent with a separate conversation and
returns what it reports. Sub-agents have the same tool, so they can start sub-agents too.
"""

import random
import re
from itertools import pairwise
from typing import Annotated

from pydantic import Field

import agentgym as ag
from envs.chase.env import HELD_OUT, oracle as oracle

_REPORT = re.compile(r"Answer: (\d\d)")


class DelegateTask(ag.Task):
    """A chain of keys; `owned` are the keys that sub-agents follow."""

    store: dict[str, str]
    owned: tuple[str, ...]
    value: int


def make_task(index: int) -> DelegateTask:
    """Create the task of an index; the same index always gives the same task."""
    rng = random.Random(index)
    keys = [str(key) for key in rng.sample(range(10, 100), rng.randint(3, 5))]
    value = rng.randint(10, 99)
    store = {key: f"see {following}" for key, following in pairwise(keys)}
    store[keys[-1]] = f"value {value}"
    owned = rng.sample(keys[1:-1], rng.randint(1, min(2, len(keys) - 2)))
    prompt = ag.Message(role="user", content=f"Start at key {keys[0]}. What is the value?")
    return DelegateTask(id=f"chase-delegate-{index}", prompt=(prompt,), store=store, owned=tuple(owned), value=value)


@ag.register("chase_delegate")
class ChaseDelegate(ag.ToolEnv[DelegateTask]):
    """Reward 1 for the right answer, minus 0.1 for each malformed call, including those of sub-agents."""

    sandbox_spec = ag.AnySandbox()
    limits = ag.Limits(turns=14, seconds=120, tokens=400)

    @classmethod
    def tasks(cls, split: ag.Split) -> ag.Procedural[DelegateTask]:
        start = 0 if split == "train" else HELD_OUT
        return ag.Procedural(make_task, range(start, start + HELD_OUT))

    @ag.tool(timeout_s=60)
    async def python(self, code: Annotated[str, Field(max_length=500)]) -> str:
        """Run Python code; get(key) looks a key up."""
        self.asked: str | None = None
        result = await self.sandbox.python(code, functions={"get": self._get})
        if self.asked is None:
            return result.text(limit=200)
        return await self._delegate(self.asked)

    async def _delegate(self, key: str) -> str:
        """Start a sub-agent at the key after this one, and return its report."""
        question = ag.Message(role="user", content=f"Start at key {self._next(key)}. What is the value?")
        async with self.fork("subagent", [question], tools=[self.python], turns=6) as agent:
            report = _REPORT.fullmatch(await agent.run())
        return repr(f"value {report[1]}" if report else "no value")

    def _next(self, key: str) -> str:
        return self.task.store[key].removeprefix("see ")

    def _get(self, key: object) -> str:
        if str(key) in self.task.owned:
            self.asked = str(key)
        return self.task.store.get(str(key), "no such key")

    @ag.reward
    def solved(self) -> float:
        """Return whether the answer is the value."""
        return float(self.answer == f"Answer: {self.task.value}")

    @ag.reward(weight=-0.1)
    def malformed(self) -> float:
        """Return how many calls were malformed; without this cost, malformed calls would not be unlearned."""
        return self.metrics["malformed_calls"]
