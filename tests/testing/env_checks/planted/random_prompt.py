"""A first prompt that is drawn without the seed."""

import random
from typing import Any

import agentgym as ag
from tests.testing.env_checks.looking import Looking

FOUND = r"seed: the same seed gave a different first prompt \('It is 0\.\d+.*random\.Random\(seed\)"


class Planted(Looking):
    async def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[list[ag.Message], dict[str, Any]]:
        return [ag.Message(role="user", content=f"It is {random.random()}.")], {}
