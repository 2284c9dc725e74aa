"""The attempts of one request: which servers failed it, and how long it waits for one that can take it."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from time import monotonic

from agentgym.errors import EngineError
from agentgym.rollouts.sglang_server import Busy, Server, Unavailable

_TRIES = 2
"""Broken connections to one server, within one request, before that server is not asked any more."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 2.0


class Attempts:
    """Kept for one request; a request that no server can take now waits `wait_s` seconds in all, and then fails."""

    def __init__(self, what: str, servers: Sequence[Server], *, wait_s: float) -> None:
        self._what, self._servers, self._wait_s = what, servers, wait_s
        self._failures: Counter[Server] = Counter()
        self._busy: set[Server] = set()
        self._last: Exception | None = None
        self._until: float | None = None
        self._pause_s = _FIRST_PAUSE_S

    @property
    def avoid(self) -> list[Server]:
        """The servers that are not to be asked now: they failed this request, or said that they are busy."""
        return [server for server in self._servers if server in self._busy or self._gave_up(server)]

    def failed(self, server: Server, error: ConnectionError | Unavailable) -> None:
        """A server did not answer: a busy one is asked again after a pause, another one once more or not at all."""
        self._last = error
        if isinstance(error, Busy):
            self._busy.add(server)
        else:
            self._failures[server] += _TRIES if isinstance(error, Unavailable) else 1

    async def wait(self, nobody: EngineError, ended: asyncio.Event | None = None) -> None:
        """Pause, until `ended` at most, before the servers are looked at again; each pause is longer than the last.

        Raises an EngineError with both reasons where no server can come back, or the time to wait is over.
        """
        now = monotonic()
        if self._until is None:
            self._until = now + self._wait_s
        if not self._may_wait() or now >= self._until:
            raise EngineError(self._reason(nobody)) from (self._last or nobody)
        self._busy.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(min(self._pause_s, self._until - now)):
                await (ended or asyncio.Event()).wait()
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)

    def _gave_up(self, server: Server) -> bool:
        return self._failures[server] >= _TRIES

    def _may_wait(self) -> bool:
        return any(not (server.ended or self._gave_up(server)) for server in self._servers)

    def _reason(self, nobody: EngineError) -> str:
        waited = f" (server_wait_s: waited for {self._wait_s:g} s)" if self._may_wait() else ""
        return f"{self._what}: {f'{self._last}; ' if self._last else ''}{nobody}{waited}"
