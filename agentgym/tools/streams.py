"""Text of a tool while it runs: an async generator yields it piece by piece."""

import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from agentgym.messages import Image
from agentgym.tools.tool import Stop
from agentgym.transcript import one_line

log = logging.getLogger("agentgym.tools")


async def joined(stream: AsyncGenerator[Any, Any], said: list[str], where: str) -> str | Stop:
    """Return what a tool yields as one text, or as the text of the `ag.Stop` that it yields last.

    Each piece is put into `said`, and shown on the logger `agentgym.tools` at the level INFO, when it comes.

    :raises TypeError: where it yields anything else.
    """
    async with aclosing(stream):
        async for piece in stream:
            if isinstance(piece, Stop):
                return _stopped(piece, "".join(said))
            if not isinstance(piece, str):
                raise TypeError(f"it yielded {piece!r:.80}; yield text, or ag.Stop at the end")
            said.append(piece)
            if log.isEnabledFor(logging.INFO):
                log.info("%s: %s", where, one_line(piece.rstrip("\n")))
    return "".join(said)


def _stopped(stop: Stop, said: str) -> Stop:
    """The stop with what was said before it; behind that, an image stays one."""
    if isinstance(stop.content, str):
        return Stop(stop.reason, f"{said}{stop.content}")
    rest = [stop.content] if isinstance(stop.content, Image) else stop.content
    return Stop(stop.reason, [*filter(None, [said]), *rest])
