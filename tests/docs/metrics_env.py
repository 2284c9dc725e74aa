"""Two small envs without a sandbox: one whose tool fails for odd keys, and one whose rollouts fail sometimes."""

import agentgym as ag
from agentgym.data.endless import Procedural

VALUES = {key: key * 7 % 90 + 10 for key in range(10, 99)}


def make_task(index: int) -> ag.Task:
    """Make a task whose id is its key."""
    return ag.Task(id=str(index), prompt=f"Start at key {index}. What is the value?")


class Look(ag.ToolEnv[ag.Task]):
    """A key is looked up in this process."""

    limits = ag.Limits(turns=4, seconds=60)

    @classmethod
    def tasks(cls, split: ag.Split) -> Procedural[ag.Task]:
        return ag.Procedural(make_task, range(10, 80) if split == "train" else range(80, 99))

    @ag.tool
    async def python(self, code: str) -> str:
        """Run get(key), which looks a key up."""
        key = int(code.removeprefix("get(").removesuffix(")"))
        if key % 2:
            raise KeyError(key)
        return f"value {VALUES[key]}"

    @ag.reward
    def right(self) -> float:
        return float(str(self.answer).endswith(str(VALUES[int(self.task.id)])))


class Fails(Look):
    """The same, with a reward that raises if the answer ends in 0 or 2."""

    @ag.reward
    def right(self) -> float:
        if str(self.answer)[-1:] in "02":
            raise ValueError("an answer that ends so")
        return float(str(self.answer)[-1:] in "56789")
