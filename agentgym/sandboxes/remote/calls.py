"""The base of all sandbox calls, which sends a call for a session and awaits the answer."""

import asyncio
from collections.abc import Mapping

from agentgym.sandboxes.protocol import HostFunction, Lifetime
from agentgym.sandboxes.protocol.arguments import check_timeout
from agentgym.sandboxes.protocol.content import LateContent, WrongContent
from agentgym.sandboxes.remote.link import TRUNK, Carry, Link
from agentgym.sandboxes.remote.wire import Frame

MARGIN_S = 20.0
"""Seconds beyond a call's own time limit after which the host gives up on the sandbox."""
MAX_CODE = 1 << 20


class Calls:
    """The connection and the session that all calls of a sandbox share.

    A sandbox handles one call at a time, including those of its branches; other calls wait.
    """

    def __init__(self, link: Link, session: int = TRUNK, lifetime: Lifetime | None = None) -> None:
        self.link = link
        self.lifetime = lifetime or Lifetime("the sandbox")
        """The period during which calls can be made: a lease, or the life of a branch."""
        self._session = session

    async def _call(
        self,
        op: str,
        body: bytes,
        timeout_s: float,
        serve: Mapping[str, HostFunction] | None = None,
        carry: Carry | None = None,
        **fields: object,
    ) -> Frame:
        check_timeout(timeout_s)
        if self._session != TRUNK:
            fields["session"] = self._session
        with self.lifetime.call():
            return await self.link.call(op, body, timeout_s + MARGIN_S, serve, carry, timeout_s=timeout_s, **fields)


def deadline_in(timeout_s: float) -> float:
    """Return the time on the event loop's clock that is `timeout_s` seconds from now."""
    return asyncio.get_running_loop().time() + timeout_s


def left_until(deadline: float) -> float:
    """Return the seconds left until the deadline.

    Raises:
        LateContent: If the deadline has passed; the error is also a TimeoutError.
    """
    left = deadline - asyncio.get_running_loop().time()
    if left <= 0:
        raise LateContent("not all files could be copied within the call's timeout_s")
    return left


def encoded(text: str, field: str) -> bytes:
    """Return the bytes of code or a command.

    Raises:
        ValueError: If it is too long.
    """
    body = text.encode("utf-8", "surrogatepass")
    if len(body) > MAX_CODE:
        raise WrongContent(f"{field}: the text has {len(body)} bytes, but the limit is {MAX_CODE}")
    return body
