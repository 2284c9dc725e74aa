"""Text that a tool streams: an async generator yields it piece by piece."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from agentgym.tools.tool import Stop
from agentgym.types.messages import Image
from agentgym.types.transcript import one_line

log = logging.getLogger("agentgym.tools")

SLICE_S = 0.005
"""Seconds for which a stream may yield pieces before the event loop gets a turn."""


async def joined(stream: AsyncGenerator[Any, Any], said: list[str], where: str) -> str | Stop:
    """Return everything a tool yields as one text, or as the text of the `ag.Stop` that it yields last.

    Each piece is appended to `said` and logged by `agentgym.tools` at the level INFO as soon as it arrives. A tool that
    awaits nothing between its pieces doesn't block the event loop, and its time limit still applies.

    Raises:
        TypeError: If the tool yields anything else.
    """
    task = asyncio.current_task()
    assert task is not None
    before = task.cancelling()
    turned = time.perf_counter()
    async with _closing(stream, where):
        async for piece in stream:
            if task.cancelling() > before:  # The tool caught a cancellation and kept running.
                raise asyncio.CancelledError
            if time.perf_counter() - turned > SLICE_S:
                await asyncio.sleep(0)
                turned = time.perf_counter()
            if isinstance(piece, Stop):
                return _stopped(piece, "".join(said))
            if not isinstance(piece, str):
                raise TypeError(f"the tool yielded {piece!r:.80}; yield text, and ag.Stop only at the end")
            said.append(piece)
            if log.isEnabledFor(logging.INFO):
                log.info("%s: %s", where, one_line(piece.rstrip("\n")))
    return "".join(said)


@asynccontextmanager
async def _closing(stream: AsyncGenerator[Any, Any], where: str) -> AsyncIterator[None]:
    """Close the stream after the block; a cancellation is still raised, whatever the stream does when it is closed."""
    try:
        yield
    except asyncio.CancelledError:
        try:
            await stream.aclose()
        except Exception as error:
            log.warning("%s could not be closed after it was cut off: %s: %s", where, type(error).__name__, error)
        raise
    except BaseException:
        await stream.aclose()
        raise
    await stream.aclose()


def _stopped(stop: Stop, said: str) -> Stop:
    """Return the stop with the earlier text in front of its content; an image stays an image."""
    if isinstance(stop.content, str):
        return Stop(stop.reason, f"{said}{stop.content}")
    rest = [stop.content] if isinstance(stop.content, Image) else stop.content
    return Stop(stop.reason, [*filter(None, [said]), *rest])
