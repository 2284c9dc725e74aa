"""One call of `generate`: its requests, the ids that they sampled so far, and their failed attempts."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from agentgym.engines.sglang.prompts import Prompt
from agentgym.engines.sglang.server import Busy, Server, Unavailable
from agentgym.errors import EngineError
from agentgym.machine.time_limits import off_the_clock
from agentgym.types.completion import Completion, FinishReason, Sampling, Version


@dataclass(slots=True, eq=False)
class Piece:
    """One request in flight: a turn, or what is left of it."""

    rid: str
    server: Server
    done: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(slots=True, eq=False, kw_only=True)
class Generation:
    """One call of `generate`: a prompt, what was sampled behind it, and under which versions.

    ::

        ids       a a a a | b b b e        two requests: the weights changed after four ids
        versions  (0, 6)  | (4, 7)
    """

    prompt: Prompt
    session: str
    max_tokens: int
    sampling: Sampling
    seed: int
    sampled: tuple[Completion, ...] = ()
    """What the requests before the one in flight sampled, none of them empty."""
    piece: Piece | None = None
    overtaken: bool = False
    """Whether the request in flight was ended for other weights; the turn goes on."""
    ending: Literal["keep", "drop"] | None = None
    """Set by an abort: whether the sampled ids are kept or dropped."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    """An event that is set together with `ending`; a turn that waits for a server waits for it too."""

    def end(self, how: Literal["keep", "drop"]) -> None:
        """End the turn; the sampled ids are kept or dropped."""
        self.ending = how
        self.ended.set()

    @property
    def context(self) -> Prompt:
        """The prompt of the next request."""
        if not self.sampled:
            return self.prompt
        return self.prompt.then([token_id for part in self.sampled for token_id in part.token_ids.tolist()])

    @property
    def room(self) -> int:
        """Ids that the turn may still sample."""
        return self.max_tokens - sum([len(part.token_ids) for part in self.sampled])

    def take(self, piece: Completion) -> None:
        """Append the ids that a request sampled."""
        if len(piece.token_ids):
            self.sampled += (piece,)

    def completion(self, finish_reason: FinishReason, version: int) -> Completion:
        """Return all sampled ids, or none where they are dropped; `version` is that of an empty completion."""
        if self.ending == "drop" or not self.sampled:
            return empty(version)
        return Completion(
            token_ids=np.concatenate([part.token_ids for part in self.sampled]),
            logprobs=np.concatenate([part.logprobs for part in self.sampled]),
            finish_reason=finish_reason,
            versions=self._versions(),
        )

    def _versions(self) -> tuple[Version, ...]:
        """The versions of all that was sampled; one that goes on is listed once."""
        versions, before = list[Version](), 0
        for part in self.sampled:
            for start, version in part.versions:
                if not versions or versions[-1].version != version:
                    versions.append(Version(before + start, version))
            before += len(part.token_ids)
        return tuple(versions)


def empty(version: int) -> Completion:
    """Return the completion of a turn that was aborted before it sampled an id."""
    return Completion(
        token_ids=np.zeros(0, np.int64),
        logprobs=np.zeros(0, np.float32),
        finish_reason="abort",
        versions=(Version(0, version),),
    )


_TRIES = 2
"""Broken connections to one server after which a request does not try that server again."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 2.0
"""Seconds between two attempts; each pause is twice the last one."""


class Attempts:
    """The failed attempts of one request; while no server can take it, it waits `wait_s` seconds in all, then fails."""

    def __init__(self, what: str, servers: Sequence[Server], *, wait_s: float) -> None:
        self._what, self._servers, self._wait_s = what, servers, wait_s
        self._failures = Counter[Server]()
        self._busy: set[Server] = set()
        self._last: Exception | None = None
        self._until: float | None = None
        self._pause_s = _FIRST_PAUSE_S

    @property
    def avoid(self) -> list[Server]:
        """The servers not to ask now: they failed this request, or reported that they are busy."""
        if self._last is None:
            return []
        return [server for server in self._servers if server in self._busy or self._gave_up(server)]

    def failed(self, server: Server, error: ConnectionError | Unavailable) -> None:
        """Note a failure: a busy server is asked again after a pause, another one once more or not at all."""
        self._last = error
        if isinstance(error, Busy):
            self._busy.add(server)
        else:
            self._failures[server] += _TRIES if isinstance(error, Unavailable) else 1

    async def wait(self, nobody: EngineError, ended: asyncio.Event | None = None) -> None:
        """Pause before the next attempt, or until `ended` is set; each pause is longer than the last one.

        The time limits of a rollout stand still meanwhile: what it waits for is no work of its own.
        Raises EngineError with both reasons where no server can come back, or the time to wait is over.
        """
        now = asyncio.get_running_loop().time()
        if self._until is None:
            self._until = now + self._wait_s
        if not self._may_wait() or now >= self._until:
            waited = f" (server_wait_s: waited for {self._wait_s:g} s)" if self._may_wait() else ""
            last = f"{self._last}; " if self._last else ""
            raise EngineError(f"{self._what}: {last}{nobody}{waited}") from (self._last or nobody)
        self._busy.clear()
        with off_the_clock(), suppress(TimeoutError):
            async with asyncio.timeout(min(self._pause_s, self._until - now)):
                await (ended or asyncio.Event()).wait()
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)

    def _gave_up(self, server: Server) -> bool:
        return self._failures[server] >= _TRIES

    def _may_wait(self) -> bool:
        return any(not (server.ended or self._gave_up(server)) for server in self._servers)
