"""An async test without a mark."""

import asyncio


async def test_runs() -> None:
    await asyncio.sleep(0)
