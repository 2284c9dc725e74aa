"""A reward that keeps a cancellation to itself."""

import asyncio
import contextlib

import agentgym as ag
from tests.testing.env_checks.looking import Looking

FOUND = r"cancel: reward 'right' swallowed a cancellation"


class Planted(Looking):
    @ag.reward
    async def right(self) -> float:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(0)
        return float(self.answer == self.task.answer)
