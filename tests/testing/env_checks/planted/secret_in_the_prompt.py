"""The text of a hidden check in the first prompt."""

from typing import Any

import agentgym as ag
from tests.testing.env_checks.looking import Looking, LookTask

FOUND = r"secret: the task's 'check' \('python3 hidden_test\.py --all'\) is in the first prompt, which the model reads"


class CheckTask(LookTask):
    """A task with a check."""

    check: str


TASK = CheckTask(id="t", prompt=({"role": "user", "content": "Look."},), check="python3 hidden_test.py --all")


class Planted(Looking):
    async def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[list[ag.Message], dict[str, Any]]:
        return [ag.Message(role="user", content=f"What is it? {self.task!r}")], {}
