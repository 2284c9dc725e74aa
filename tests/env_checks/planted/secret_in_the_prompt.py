"""A hidden field of the task in the first prompt."""

from typing import Any

import agentgym as ag
from tests.env_checks.looking import Looking

FOUND = r"secret: the task's 'answer' \('42'\) is in the first prompt"


class Planted(Looking):
    async def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[list[ag.Message], dict[str, Any]]:
        return [ag.Message(role="user", content=f"What is it? {self.task!r}")], {}
