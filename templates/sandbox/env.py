"""Write a function in a sandbox, where hidden cases test it."""

from typing import Annotated

from pydantic import Field

import agentgym as ag
from agentgym.testing import Reply, call, say


class SandboxTask(ag.Task):
    """One row of data: the function is `times * x + plus`."""

    times: int
    plus: int


def make_task(index: int) -> SandboxTask:
    """Return the task of an index, always the same."""
    times, plus = divmod(index, 10)
    prompt = (
        f"Write solution.py with a function f(x) that returns {times} times x plus {plus}. Say done when it is there."
    )
    return SandboxTask(id=str(index), prompt=prompt, times=times, plus=plus)


@ag.register("sandbox_template")
class SandboxTemplate(ag.ToolEnv[SandboxTask]):
    """The reward is the fraction of hidden cases that the function gets right."""

    sandbox_spec = ag.AnySandbox()  # Docker, or else bubblewrap: each attempt has its own sandbox, self.sandbox
    limits = ag.Limits(turns=6, seconds=120)

    @classmethod
    def tasks(cls, split: ag.Split) -> ag.Procedural[SandboxTask]:
        return ag.Procedural(make_task, range(800) if split == "train" else range(800, 1000))

    @ag.tool
    async def write(self, source: Annotated[str, Field(max_length=4000)]) -> str:
        """Write solution.py."""
        await self.sandbox.write({"solution.py": source})
        return "written"

    @ag.tool(timeout_s=30)
    async def python(self, code: Annotated[str, Field(max_length=4000)]) -> str:
        """Run Python in the folder of solution.py; names persist."""
        return (await self.sandbox.python(code)).text(limit=2000)

    @ag.reward
    async def right(self) -> float:
        cases = {f"f({x})": self.task.times * x + self.task.plus for x in (0, 1, -3, 250)}
        return (await self.sandbox.verify(code="from solution import f", expect=cases)).fraction


def oracle(task: SandboxTask) -> list[Reply]:
    """Return replies that solve the task; `agentgym check` and the tests play them."""
    source = f"def f(x):\n    return {task.times} * x + {task.plus}\n"
    return [call("write", source=source), say("done")]
