"""Chase in a tree: the rollout forks when the chain forks, and the answer is the largest value at the leaves.

Each fork continues from the same conversation and the same Python session, and reports the value at its own leaf.
"""

import asyncio
import random
import re
from typing import Annotated

from pydantic import Field

import agentgym as ag
from envs.chase.env import HELD_OUT, oracle as oracle

_REPORT = re.compile(r"Answer: (\d\d)")


class TreeTask(ag.Task):
    """A chain that forks once, with the entries of each key and the largest value at a leaf."""

    store: dict[str, tuple[str, ...]]
    value: int


def make_task(index: int) -> TreeTask:
    """Create the task of an index; the same index always gives the same task."""
    rng = random.Random(index)
    start, *keys = [str(key) for key in rng.sample(range(10, 100), rng.randint(4, 5))]
    store: dict[str, tuple[str, ...]] = {start: (f"see {keys[0]}", f"see {keys[1]}")}
    store |= {keys[0]: (f"see {keys[2]}",)}
    if len(keys) > 3:
        store |= {keys[1]: (f"see {keys[3]}",)}
    leaves = [key for key in keys if key not in store]
    values = rng.sample(range(10, 100), len(leaves))
    store |= {key: (f"value {value}",) for key, value in zip(leaves, values, strict=True)}
    prompt = ag.Message(role="user", content=f"Start at key {start}. What is the value?")
    return TreeTask(id=f"chase-tree-{index}", prompt=(prompt,), store=store, value=max(values))


@ag.register("chase_tree")
class ChaseTree(ag.ToolEnv[TreeTask]):
    """Reward 1 for the largest value in the tree, minus 0.1 for each malformed call."""

    sandbox_spec = ag.AnySandbox()
    limits = ag.Limits(turns=14, seconds=120)

    @classmethod
    def tasks(cls, split: ag.Split) -> ag.Procedural[TreeTask]:
        start = 0 if split == "train" else HELD_OUT
        return ag.Procedural(make_task, range(start, start + HELD_OUT))

    @ag.tool(timeout_s=60)
    async def python(self, code: Annotated[str, Field(max_length=500)]) -> str:
        """Run Python code; get(key) looks a key up."""
        self.found: tuple[str, ...] = ()
        result = await self.sandbox.python(code, functions={"get": self._get})
        if len(self.found) < 2:
            return result.text(limit=200)
        async with asyncio.TaskGroup() as both:
            branches = [both.create_task(self._follow(found)) for found in self.found]
        reports = [report for branch in branches if (report := branch.result()) is not None]
        return repr(f"value {max(reports)}" if reports else "no value")

    async def _follow(self, found: str) -> int | None:
        """Follow one fork that starts at this entry; return its value, or None if it reports none."""
        told = ag.Message(role="tool", content=repr(found), name="python")
        async with self.fork("fork", [told], sandbox=True, turns=4) as agent:
            report = _REPORT.fullmatch(await agent.run())
        return None if report is None else int(report[1])

    def _get(self, key: object) -> str:
        self.found = self.task.store.get(str(key), ("no such key",))
        return self.found[0]

    @ag.reward
    def solved(self) -> float:
        """Return whether the answer is the largest value."""
        return float(self.answer == f"Answer: {self.task.value}")

    @ag.reward(weight=-0.1)
    def malformed(self) -> float:
        """Return how many calls were malformed, in all forks."""
        return self.metrics["malformed_calls"]
