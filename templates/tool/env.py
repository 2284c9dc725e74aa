"""Find the value of a key: one tool, one reward."""

import agentgym as ag
from agentgym.testing import Reply, call, say

KEYS = {"train": range(10, 80), "test": range(80, 100)}
VALUES = {key: 37 * key % 90 + 10 for key in range(10, 100)}  # the model cannot see them


@ag.register("tool_template")
class ToolTemplate(ag.ToolEnv[ag.Task]):
    @classmethod
    def tasks(cls, split: ag.Split) -> list[ag.Task]:
        return [ag.Task(id=str(key), prompt=f"Start at key {key}. What is the value?") for key in KEYS[split]]

    @ag.tool
    def python(self, code: str) -> str:
        """Run get(key), which looks a key up."""
        return repr(f"value {VALUES[int(code.removeprefix('get(').removesuffix(')'))]}")

    @ag.reward
    def right(self) -> float:
        return float(str(self.answer).endswith(str(VALUES[int(self.task.id)])))


def oracle(task: ag.Task) -> list[Reply]:
    """Return replies that solve the task; `agentgym check` and the tests play them."""
    return [call("python", code=f"get({task.id})"), say(f"Answer: {VALUES[int(task.id)]}")]
