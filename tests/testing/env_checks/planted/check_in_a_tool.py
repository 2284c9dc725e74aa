"""The text of a hidden check, shown by a tool."""

import agentgym as ag
from tests.testing.env_checks.looking import Looking, LookTask

FOUND = r"secret: the task's 'check' \('python3 hidden_test\.py --all'\) is in a result of tool 'look'"


class CheckTask(LookTask):
    check: str


TASK = CheckTask(id="t", prompt=({"role": "user", "content": "Look."},), check="python3 hidden_test.py --all")


class Planted(Looking):
    task: CheckTask

    @ag.tool
    async def look(self) -> str:
        """Look."""
        return f"would run: {self.task.check}"
