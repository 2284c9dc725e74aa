"""One call of `generate`: its requests, the ids that they sampled, and their failed attempts."""

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
    """One request in flight. It samples a whole turn, or what is left of a turn after earlier requests were aborted."""

    rid: str
    server: Server
    done: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(slots=True, eq=False, kw_only=True)
class Generation:
    """One call of `generate`: a prompt, the ids sampled after it, and their policy versions.

    ::

        ids       a a a a | b b b e        two requests: the weights changed after four ids
        versions  (0, 6)  | (4, 7)         index of the first id, and its policy version
    """

    prompt: Prompt
    session: str
    max_tokens: int
    sampling: Sampling
    seed: int
    sampled: tuple[Completion, ...] = ()
    """The ids sampled so far: one nonempty completion for each finished request."""
    piece: Piece | None = None
    overtaken: bool = False
    """Whether the request in flight was aborted for new weights or to release GPU memory. Another request then
    continues the turn.
    """
    ending: Literal["keep", "drop"] | None = None
    """Whether the ids sampled so far are kept or dropped, once `end` has aborted the turn; None before."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    """Set together with `ending`, so that a turn that waits for a server can stop waiting."""

    def end(self, how: Literal["keep", "drop"]) -> None:
        """Abort the turn, and either keep or drop the sampled ids."""
        self.ending = how
        self.ended.set()

    @property
    def context(self) -> Prompt:
        """The prompt of the next request: the turn's prompt, followed by the ids sampled so far."""
        if not self.sampled:
            return self.prompt
        return self.prompt.then([token_id for part in self.sampled for token_id in part.token_ids.tolist()])

    @property
    def room(self) -> int:
        """Number of ids that the turn may still sample."""
        return self.max_tokens - sum([len(part.token_ids) for part in self.sampled])

    def take(self, piece: Completion) -> None:
        """Append the ids that a request sampled."""
        if len(piece.token_ids):
            self.sampled += (piece,)

    def completion(self, finish_reason: FinishReason, version: int) -> Completion:
        """Return all sampled ids as one completion.

        If there are none, or if they are dropped, the completion is empty and has the policy version `version`.
        """
        if self.ending == "drop" or not self.sampled:
            return empty(version)
        return Completion(
            token_ids=np.concatenate([part.token_ids for part in self.sampled]),
            logprobs=np.concatenate([part.logprobs for part in self.sampled]),
            finish_reason=finish_reason,
            versions=self._versions(),
        )

    def _versions(self) -> tuple[Version, ...]:
        """Return the versions of all sampled ids. A version that continues in the next request is listed once."""
        versions, before = list[Version](), 0
        for part in self.sampled:
            for start, version in part.versions:
                if not versions or versions[-1].version != version:
                    versions.append(Version(before + start, version))
            before += len(part.token_ids)
        return tuple(versions)


def empty(version: int) -> Completion:
    """Return the completion of a turn that was aborted before it sampled any id."""
    return Completion(
        token_ids=np.zeros(0, np.int64),
        logprobs=np.zeros(0, np.float32),
        finish_reason="abort",
        versions=(Version(0, version),),
    )


_TRIES = 2
"""Number of failed connections to a server after which a request no longer tries it."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 2.0
"""The first and the longest pause between two attempts, in seconds. In between, each pause is twice as long as the
previous one.
"""


class Attempts:
    """The failed attempts of one request, which decide which servers it may try next and how long it waits.

    While no server accepts the request, it waits for at most `wait_s` seconds in total, and then fails.
    """

    def __init__(self, what: str, servers: Sequence[Server], *, wait_s: float) -> None:
        self._what, self._servers, self._wait_s = what, servers, wait_s
        self._failures = Counter[Server]()
        self._busy: set[Server] = set()
        self._last: Exception | None = None
        self._until: float | None = None
        self._pause_s = _FIRST_PAUSE_S

    @property
    def avoid(self) -> list[Server]:
        """Servers to skip now, because they failed this request or reported that they are busy."""
        if self._last is None:
            return []
        return [server for server in self._servers if server in self._busy or self._gave_up(server)]

    def failed(self, server: Server, error: ConnectionError | Unavailable) -> None:
        """Record that a server failed the request.

        A busy server is tried again after a pause. If the connection failed, the server is tried once more. If the
        server responded with a failure, it isn't tried again.
        """
        self._last = error
        if isinstance(error, Busy):
            self._busy.add(server)
        else:
            self._failures[server] += _TRIES if isinstance(error, Unavailable) else 1

    async def wait(self, nobody: EngineError, ended: asyncio.Event | None = None) -> None:
        """Pause before the next attempt. The pause ends early if `ended` is set.

        Each pause is twice as long as the one before, up to `_LONGEST_PAUSE_S`. Meanwhile, the rollout's time limits
        are suspended, because the rollout isn't at fault for the wait.

        Args:
            nobody: The error that says why no server can be tried now.
            ended: Ends the pause early if it is set.

        Raises:
            EngineError: If no server can come back, or the time is up. The message also contains the last failure, if
                any.
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
