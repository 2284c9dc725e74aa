"""Samples the turns of an engine: each by a sequence of requests, to any server that can respond."""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any
from uuid import uuid4

from agentgym.engines.sglang.answers import require_possible
from agentgym.engines.sglang.fleet import Fleet
from agentgym.engines.sglang.generation import Attempts, Generation, Piece, empty
from agentgym.engines.sglang.model_info import ModelFacts
from agentgym.engines.sglang.policies.payloads import PolicyVersion
from agentgym.engines.sglang.server import Ask, NoServer, Server, Unavailable
from agentgym.engines.stop_texts import StopTexts
from agentgym.errors import EngineError
from agentgym.types.completion import Completion

_AGAIN_S = 0.2
"""Seconds before the abort of a request is repeated. An abort has no effect if it reaches the server before its
request.
"""


class Turns:
    """The turns that are being sampled.

    If a request is aborted for new weights or to release GPU memory, another request continues its turn.
    """

    def __init__(self, fleet: Fleet, opened: Callable[[], ModelFacts]) -> None:
        self._fleet, self._opened = fleet, opened
        self._turns: dict[str, Generation] = {}
        self._name = uuid4().hex
        """Prefix of this engine's request ids, which sets them apart from those of other engines on the same server."""
        self._background: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._turns)

    def __contains__(self, session: str) -> bool:
        return session in self._turns

    async def sample(self, turn: Generation) -> Completion:
        """Send requests until the turn ends on its own or is aborted."""
        self._turns[turn.session] = turn
        self._fleet.counts.turns += 1
        try:
            while True:
                policy, turn.overtaken = self._fleet.policy, False
                piece = await self._piece(turn, policy)
                overtaken = piece.finish_reason == "abort" and (turn.overtaken or policy is not self._fleet.policy)
                if not (overtaken or turn.sampled or turn.ending):
                    return piece
                turn.take(piece)
                if turn.ending or not overtaken:
                    return turn.completion(piece.finish_reason, policy.version)
                if turn.room == 0:
                    return turn.completion("length", policy.version)
                self._fleet.counts.continued += 1
        finally:
            del self._turns[turn.session]

    async def abort(self, session: str, *, keep: bool) -> None:
        """Abort a session's turn, if it has one, and either keep or drop the ids sampled so far."""
        turn = self._turns.get(session)
        if turn is None:
            return
        turn.end("keep" if keep else "drop")
        if turn.piece is not None:
            await self._end(turn.piece)

    def overtake(self) -> list[Piece]:
        """Abort the requests in flight. New requests then continue their turns.

        Returns:
            The aborted requests, for callers that wait until they have ended.
        """
        overtaken = []
        for turn in self._turns.values():
            if turn.piece is not None:
                turn.overtaken = True
                overtaken.append(turn.piece)
                self.spawn(self._end(turn.piece))
        return overtaken

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine in the background. `close` cancels it if it is still running."""
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def close(self) -> None:
        """Cancel all background work, and let turns stop waiting."""
        for turn in self._turns.values():
            turn.ended.set()
        tasks = list(self._background)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _piece(self, turn: Generation, policy: PolicyVersion) -> Completion:
        """Send one request of a turn and return its completion.

        If a server fails, the request is sent again, to the same server or to another one. The completion is empty if
        the turn is aborted or the policy changes before an attempt succeeds.
        """
        attempts: Attempts | None = None  # None until an attempt fails
        while turn.ending is None and policy is self._fleet.policy:
            facts = self._opened()
            if not self._fleet.open.is_set():
                await _first(self._fleet.open, turn.ended)
                continue
            try:
                server = self._fleet.place(turn.session, turn.prompt, avoid=attempts.avoid if attempts else ())
                completion = await server.generate(self._begun(turn, policy, server, facts))
            except (ConnectionError, Unavailable) as error:
                self._over(turn)
                attempts = attempts or self._fleet.attempts("generate")
                attempts.failed(server, error)
                self._fleet.counts.retried += 1
                self._opened()
                await self._fleet.check(server)
            except NoServer as nobody:
                attempts = attempts or self._fleet.attempts("generate")
                await attempts.wait(nobody, turn.ended)
            except asyncio.CancelledError:
                if turn.piece is not None:
                    self.spawn(self._end(turn.piece))
                raise
            else:
                require_possible(completion, server, turn.room, facts.vocabulary)
                return completion
            finally:
                self._over(turn)
        return empty(policy.version)

    def _begun(self, turn: Generation, policy: PolicyVersion, server: Server, facts: ModelFacts) -> Ask:
        """Create the next request of a turn. While the request is in flight, `turn.piece` refers to it."""
        # All request ids have the same length, because a server aborts every request whose id starts with the given
        # one.
        turn.piece = Piece(f"{self._name}-{self._fleet.counts.requests:012d}", server)
        self._fleet.counts.requests += 1
        sampling, stop_ids = turn.sampling, facts.stop_ids
        if sampling.stop:
            stop_ids += StopTexts.special_tokens(facts.tokenizer, sampling)
            sampling = StopTexts.plain(facts.tokenizer, sampling)
        return Ask(turn.context, turn.piece.rid, turn.room, sampling, turn.seed, stop_ids, policy)

    def _over(self, turn: Generation) -> None:
        """Record that the turn's request is no longer in flight."""
        if turn.piece is not None:
            turn.piece.done.set()
            turn.piece = None

    async def _end(self, piece: Piece) -> None:
        """Abort a request, repeatedly if necessary, and return when it has ended."""
        while True:
            with suppress(ConnectionError, EngineError):
                await piece.server.abort(piece.rid)
            with suppress(TimeoutError):
                async with asyncio.timeout(_AGAIN_S):
                    await piece.done.wait()
            if piece.done.is_set():
                return


async def _first(*events: asyncio.Event) -> None:
    """Wait until one of the events is set."""
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
