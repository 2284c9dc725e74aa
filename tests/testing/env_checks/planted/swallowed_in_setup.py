"""A setup that keeps a cancellation to itself."""

import asyncio
import contextlib

from tests.testing.env_checks.looking import Looking

FOUND = r"cancel: reset\(\) or setup\(\) swallowed a cancellation"


class Planted(Looking):
    async def setup(self) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(0)
