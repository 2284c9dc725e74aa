"""The gate in front of an engine, which is closed between batches and counts all requests."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from agentgym.chat.tokenizer import ChatTokenizer
from agentgym.engines.base import Engine, own_model_name
from agentgym.engines.messages import MessageCompletion, MessageEngine
from agentgym.errors import EngineError
from agentgym.machine.time_limits import Standstill, at_the_gate, off_the_clock
from agentgym.scheduling.accounting import LifecycleCounts
from agentgym.types.arrays import Floats
from agentgym.types.completion import Completion, Sampling
from agentgym.types.messages import Message
from agentgym.types.weights import Adapter


@dataclass(slots=True, eq=False)
class RolloutUsage:
    """The engine usage of one rollout, including its branches and sub-agents."""

    tokens: int = 0
    """Tokens sampled so far, in finished turns."""
    oldest: int | None = None
    """The policy version at the rollout's first request; no token of the rollout is older."""
    running: int = 0
    """Number of requests in progress."""
    dropped: bool = False
    """Whether the rollout is being cancelled; its requests are then already counted as dropped."""
    began: float | None = None
    """The event loop's time when the rollout started to run; None while it waits for a free slot."""
    stopped: float | None = None
    """The event loop's time when the rollout ended or was dropped; None before."""
    held: Standstill = field(default_factory=Standstill)
    """The time that the rollout waited at the closed gate; requests that wait at the same time count once."""

    @property
    def seconds(self) -> float:
        """Seconds that the rollout has run, without its waits at the closed gate; up to now if it has not ended."""
        if self.began is None:
            return 0.0
        end = asyncio.get_running_loop().time() if self.stopped is None else self.stopped
        return max(0.0, end - self.began - self.held.until(end))


current_usage: ContextVar[RolloutUsage] = ContextVar("current_usage")
"""The usage record of the rollout that this code belongs to; asyncio tasks started by a rollout inherit it."""


@dataclass(slots=True)
class _Request:
    tokens: int = 0
    outcome: str = "finished"


class EngineGate:
    """A wrapper of an engine that can be closed: turns in progress then finish, and later ones wait until it opens.

    A waiting rollout retains its env, its sandbox and its session, and its time limits are paused.

    Args:
        engine: The engine behind the gate.
        seen: Counts of requests by outcome to start from, such as those of a stopped run; None starts at 0.
    """

    def __init__(self, engine: Engine, seen: Mapping[str, int] | None = None) -> None:
        self.engine = engine
        self._open = asyncio.Event()
        self._seen: Counter[str] = Counter(seen or {})

    def open(self) -> None:
        """Let turns through."""
        self._open.set()

    def shut(self) -> None:
        """Make turns wait from now on."""
        self._open.clear()

    def drop(self, usage: RolloutUsage) -> None:
        """Count the requests of a rollout that is being cancelled, before the cancellation takes effect."""
        usage.dropped, usage.stopped = True, asyncio.get_running_loop().time()
        self._seen["dropped"] += usage.running

    def counts(self) -> LifecycleCounts:
        """Return the counts of requests since the last call; those in progress are carried to the next call."""
        carried = self._in_flight()
        seen, self._seen = self._seen, Counter(resumed=carried)
        return LifecycleCounts(**seen, carried=carried)

    def _in_flight(self) -> int:
        seen = self._seen
        return seen["started"] + seen["resumed"] - seen["finished"] - seen["dropped"] - seen["failed"]

    def counts_if_stopped(self) -> dict[str, int]:
        """Return the counts as if the process stopped now and lost every request in progress."""
        return dict(self._seen + Counter(dropped=self._in_flight()))

    @property
    def tokenizer(self) -> ChatTokenizer:
        return self.engine.tokenizer

    @property
    def context_tokens(self) -> int:
        return self.engine.context_tokens

    @property
    def version(self) -> int:
        return self.engine.version

    @property
    def model_name(self) -> str:
        return own_model_name(self.engine)

    async def generate(
        self, token_ids: Sequence[int], *, session: str, max_tokens: int, sampling: Sampling, seed: int
    ) -> Completion:
        async with self._request() as request:
            done = await self.engine.generate(
                token_ids, session=session, max_tokens=max_tokens, sampling=sampling, seed=seed
            )
            request.tokens = len(done.token_ids)
            request.outcome = "failed" if done.finish_reason == "abort" else "finished"
        return done

    @asynccontextmanager
    async def _request(self) -> AsyncIterator[_Request]:
        """Wait until the gate is open, then run the `async with` body, and count it as one request by its outcome."""
        usage, request = current_usage.get(), _Request()
        if usage.dropped or not self._open.is_set():
            await self._pass(usage)
        if usage.oldest is None:
            usage.oldest = self.engine.version
        self._seen["started"] += 1
        usage.running += 1
        try:
            yield request
        except BaseException as error:
            request.outcome = "dropped" if isinstance(error, asyncio.CancelledError) else "failed"
            raise
        finally:
            usage.running -= 1
            usage.tokens += request.tokens
            if not usage.dropped:  # otherwise it was counted when the rollout was dropped
                self._seen[request.outcome] += 1

    async def _pass(self, usage: RolloutUsage) -> None:
        """Wait until the gate is open; raise EngineError if the rollout is dropped."""
        attempt = at_the_gate.get()
        while not (self._open.is_set() or usage.dropped):
            with off_the_clock(), usage.held.block(), nullcontext() if attempt is None else attempt.block():
                await self._open.wait()
        if usage.dropped:  # The rollout continued although it was cancelled.
            raise EngineError("the rollout was dropped")

    async def release(self, session: str) -> None:
        await self.engine.release(session)

    async def load_adapter(self, adapter: Adapter | None, *, version: int) -> None:
        await self.engine.load_adapter(adapter, version=version)

    async def score(self, token_ids: Sequence[int], *, sampling: Sampling) -> Floats:
        return await self.engine.score(token_ids, sampling=sampling)


class MessageGate(EngineGate):
    """An `EngineGate` in front of an engine that takes messages, and itself a `MessageEngine`."""

    async def generate_message(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]],
        *,
        session: str,
        max_tokens: int,
        sampling: Sampling,
        seed: int,
    ) -> MessageCompletion:
        """Call the engine's `generate_message` once the gate is open."""
        assert isinstance(self.engine, MessageEngine)
        async with self._request() as request:
            done = await self.engine.generate_message(
                messages, tools, session=session, max_tokens=max_tokens, sampling=sampling, seed=seed
            )
            request.tokens = done.usage.completion_tokens
        return done


def gate_of(engine: Engine, seen: Mapping[str, int] | None = None) -> EngineGate:
    """Return a gate for the engine: a `MessageGate` if the engine takes messages, otherwise an `EngineGate`."""
    return (MessageGate if isinstance(engine, MessageEngine) else EngineGate)(engine, seen)
