"""A background task that nobody ends."""

import asyncio

from tests.testing.env_checks.looking import Looking

FOUND = r"leak: after its rollouts the asyncio task 'beat' \(Planted\._beat\) is still running.*: end it in close\(\)"


class Planted(Looking):
    async def setup(self) -> None:
        self.beating = asyncio.create_task(self._beat(), name="beat")

    async def _beat(self) -> None:
        await asyncio.Event().wait()
