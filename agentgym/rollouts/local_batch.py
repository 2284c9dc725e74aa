"""Continuous batching over slots of KV: which rows the next forward computes, and what it may leave out.

A slot's KV is a fact about ids and weights, whoever asked for it. One row of the books::

    ids      s s s s u u a a e u u u . . .      s system and tools, u user or tool, a sampled, e stop
    filled   ^^^^^^^^^^^^^^^^                   KV is there up to here
    length   ^^^^^^^^^^^^^^^^^^^^^^             known ids; the forwards compute filled..length

A row with one id to compute is decoding, one with more is prefilling; the last sampled id's KV is left to the
next turn. A session keeps its slot between turns and keeps the common prefix of its new ids; a new session takes
over the prefix it shares with any other slot, or waits while another slot computes it.
"""

import math
import random
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter
from typing import TypeAlias

import numpy as np
from torch import Tensor

from agentgym.errors import EngineError
from agentgym.rollouts.local_adapter import Merger
from agentgym.rollouts.local_model import Policy
from agentgym.types import Adapter, Completion, Ints, Sampling, Version

Settle: TypeAlias = Callable[[object], None]
"""Called once with a request's Completion, or with the exception that ended it."""

_SHARED = 16
"""Fewer ids in common than this are computed again: waiting for them costs more."""
_PATIENCE = 4
"""Decode steps that a few prefilling rows wait for company; many do not wait."""
_NARROW = 32
"""Padding a row up to this width is cheaper than a forward of its own."""


@dataclass(slots=True)
class Stats:
    """What the engine has done since it opened; seconds are wall time in its thread."""

    prefill_tokens: int = 0
    """Prompt ids that went through the model."""
    kept_tokens: int = 0
    """Prompt ids whose KV the session's slot still held."""
    copied_tokens: int = 0
    """Prompt ids whose KV was copied from another slot."""
    decode_tokens: int = 0
    """Sampled ids that went through the model; a turn's last one is not among them."""
    sampled_tokens: int = 0
    prefill_steps: int = 0
    decode_steps: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    copy_s: float = 0.0
    sample_s: float = 0.0


@dataclass(slots=True, eq=False)
class Request:
    """One turn to sample: validated ids, and who to tell."""

    token_ids: Ints
    session: str
    max_tokens: int
    sampling: Sampling
    seed: int
    settle: Settle
    slot: int = -1
    """-1: it waits for a slot."""
    donor: "Request | None" = None
    """The request whose slot is computing a prefix of this one; this one waits for it."""
    shared: int = 0
    """How long that prefix is."""
    versions: list[Version] = field(default_factory=list)


class Batcher:
    """Answers every submitted request once; no thread and no event loop of its own: `step` while it is `busy`."""

    def __init__(self, policy: Policy, *, slots: int, prefill_tokens: int, stop_ids: frozenset[int]) -> None:
        context = policy.context
        self.stats = Stats()
        self.version = 0
        self.policy = policy
        self._merger = Merger(policy.model)
        self._prefill_tokens = prefill_tokens
        self._stop_ids = np.array(sorted(stop_ids), np.int64)
        self._ids = np.zeros((slots, context), np.int64)
        self._logprobs = np.zeros((slots, context), np.float32)
        self._length, self._filled, self._prompt, self._end, self._order = np.zeros((5, slots), np.int64)
        self._temperature = np.ones(slots, np.float32)
        self._runs = np.zeros(slots, np.bool_)
        # Weights get a number of their own at every swap: two swaps may carry one policy version.
        self._weights = 0
        self._slot_weights = np.full(slots, -1, np.int64)
        self._requests: list[Request | None] = [None] * slots
        self._uniforms: list[Callable[[], float]] = [random.random] * slots
        self._sessions: dict[str, int] = {}
        self._idle: OrderedDict[int, str | None] = OrderedDict.fromkeys(range(slots))
        self._live: dict[str, Request] = {}
        self._queue: deque[Request] = deque()
        self._followers: list[Request] = []
        self._started = 0
        self._since_prefill = 0

    @property
    def busy(self) -> bool:
        """Whether a request is unanswered."""
        return bool(self._live)

    def submit(self, request: Request) -> None:
        """Answer the request at some later step; a session's requests come one after the other."""
        if request.session in self._live:
            raise ValueError(f"session: {request.session!r} is still generating")
        self._live[request.session] = request
        slot = self._sessions.get(request.session)
        if slot is None:
            self._queue.append(request)
        else:
            del self._idle[slot]
            self._bind(request, slot)

    def cancel(self, request: Request) -> None:
        """Forget a request; its slot is free from the next step on and its session keeps the KV."""
        if self._live.get(request.session) is request:
            self._leave(request)

    def release(self, session: str) -> None:
        """Forget a session; its slot is the next to be given away, its KV is there for others until then."""
        request = self._live.get(session)
        if request is not None:
            self._leave(request)
            request.settle(EngineError(f"session {session!r} was released while it was generating"))
        slot = self._sessions.pop(session, None)
        if slot is not None:
            self._idle[slot] = None
            self._idle.move_to_end(slot, last=False)

    def load_adapter(self, adapter: Adapter | None, version: int) -> None:
        """Change the weights: a turn with sampled ids goes on with its KV, all other KV is of no use any more."""
        self._merger.load(adapter)
        self.version = version
        self._weights += 1
        running = sorted((r for r in self._requests if r is not None), key=lambda r: self._order[r.slot])
        self._followers.clear()
        for request in running:
            sampled = int(self._length[request.slot] - self._prompt[request.slot])
            if not sampled:
                self._start(request)
            elif request.versions[-1].version != version:
                request.versions.append(Version(sampled, version))

    def fail_all(self, reason: Callable[[], Exception]) -> None:
        """Answer every request with an exception of its own."""
        live = list(self._live.values())
        self._live.clear()
        for request in live:
            request.settle(reason())

    def step(self) -> None:
        """Admit what fits, then one forward."""
        self._serve_followers()
        while self._queue and self._idle:
            self._admit(self._queue.popleft())
        todo = np.where(self._runs, self._length - self._filled, 0)
        one, many = np.flatnonzero(todo == 1), np.flatnonzero(todo > 1)
        if len(many) and self._prefill_is_due(len(one), len(many)):
            self._since_prefill = 0
            rows, width = self._prefill_rows(many, todo)
            self._advance(rows, width)
        elif len(one):
            self._since_prefill += 1
            self._advance(one, np.ones_like(one))

    def _prefill_is_due(self, decoding: int, prefilling: int) -> bool:
        """Never twice in a row while others decode; at once for many, after a little patience for few."""
        if not decoding:
            return True
        waited = self._since_prefill
        return waited > 0 and (3 * prefilling >= decoding or waited >= _PATIENCE)

    def _prefill_rows(self, many: Ints, todo: Ints) -> tuple[Ints, Ints]:
        """The longest-waiting row and those whose padding costs little beside it, within the budget."""
        first_come = many[np.argsort(self._order[many])]
        limit = min(max(int(todo[first_come[0]]), _NARROW), self._prefill_tokens)
        fits = first_come[(4 * todo[first_come] >= limit) | (limit <= _NARROW)]
        rows = np.sort(fits[: max(1, self._prefill_tokens // limit)])
        return rows, np.minimum(todo[rows], limit)

    def _advance(self, rows: Ints, width: Ints) -> None:
        """Compute these rows' next ids, and sample where a row has no more to compute."""
        began = perf_counter()
        start = self._filled[rows]
        columns = start[:, None] + np.arange(int(width.max()))
        ids = self._ids[rows[:, None], np.minimum(columns, self.policy.context - 1)]
        hidden = self.policy.forward(rows, ids, start, width)
        self._filled[rows] += width
        decoded = int((start >= self._prompt[rows]).sum())
        stats, seconds = self.stats, perf_counter() - began
        stats.decode_tokens += decoded
        stats.prefill_tokens += int(width.sum()) - decoded
        if len(width) == width.sum():
            stats.decode_steps, stats.decode_s = stats.decode_steps + 1, stats.decode_s + seconds
        else:
            stats.prefill_steps, stats.prefill_s = stats.prefill_steps + 1, stats.prefill_s + seconds
        ready = np.flatnonzero(self._filled[rows] == self._length[rows])
        if len(ready):
            self._sample(rows[ready], hidden if len(ready) == len(rows) else hidden[ready.tolist()])

    def _sample(self, rows: Ints, hidden: Tensor) -> None:
        began = perf_counter()
        uniform = np.array([self._uniforms[row]() for row in rows], np.float32)
        ids, logprobs = self.policy.draw(hidden, self._temperature[rows], uniform)
        at = self._length[rows]
        self._ids[rows, at], self._logprobs[rows, at] = ids, logprobs
        self._length[rows] = at + 1
        self.stats.sampled_tokens += len(rows)
        stop = np.isin(ids, self._stop_ids)
        over = stop | (at + 1 == self._end[rows]) | ~np.isfinite(logprobs)
        for i in np.flatnonzero(over):
            self._finish(int(rows[i]), stopped=bool(stop[i]))
        self.stats.sample_s += perf_counter() - began

    def _finish(self, slot: int, *, stopped: bool) -> None:
        request = self._requests[slot]
        assert request is not None
        span = slice(int(self._prompt[slot]), int(self._length[slot]))
        ids, logprobs = self._ids[slot, span].copy(), self._logprobs[slot, span].copy()
        self._leave(request)
        if not math.isfinite(logprobs[-1]):
            request.settle(EngineError(f"the model's log-probability of id {ids[-1]} is {logprobs[-1]}"))
            return
        reason = "stop" if stopped else "length"
        versions = tuple(request.versions)
        request.settle(Completion(token_ids=ids, logprobs=logprobs, finish_reason=reason, versions=versions))

    def _leave(self, request: Request) -> None:
        """The request is no longer live; its slot, where it has one, is idle and still its session's."""
        del self._live[request.session]
        if request.slot < 0:
            self._queue.remove(request)
            return
        self._runs[request.slot] = False
        self._requests[request.slot] = None
        self._idle[request.slot] = request.session
        if request in self._followers:
            self._followers.remove(request)

    def _admit(self, request: Request) -> None:
        """A new session takes a free slot, or else the one that was idle for longest."""
        slot, evicted = self._idle.popitem(last=False)
        if evicted is not None:
            del self._sessions[evicted]
        self._sessions[request.session] = slot
        self._bind(request, slot)

    def _bind(self, request: Request, slot: int) -> None:
        request.slot = slot
        self._requests[slot] = request
        self._end[slot] = len(request.token_ids) + request.max_tokens
        self._prompt[slot] = len(request.token_ids)
        self._temperature[slot] = request.sampling.temperature
        # 24 bits: such a uniform is exact in float32 and stays below 1.
        draw = random.Random(request.seed).getrandbits
        self._uniforms[slot] = lambda: draw(24) * 2.0**-24
        self._start(request)

    def _start(self, request: Request, *, may_wait: bool = True) -> None:
        """Begin the prompt with as much KV of the current weights as there is, in its own slot or another."""
        slot, ids = request.slot, request.token_ids
        # The last prompt id is computed in any case: its hidden state is what the first id is sampled from.
        most = len(ids) - 1
        fresh = self._slot_weights == self._weights
        own = _common(self._ids[slot : slot + 1], ids[:most])[0]
        kept = int(min(own, self._filled[slot])) if fresh[slot] else 0
        ready = planned = np.zeros(len(fresh), np.int64)
        if most - kept >= _SHARED:
            common = np.where(fresh, _common(self._ids, ids[:most]), 0)
            ready = np.minimum(common, self._filled)
            planned = np.where([r is not None for r in self._requests], np.minimum(common, self._length), 0)
            planned[slot] = 0
        self._ids[slot, : len(ids)] = ids
        self._length[slot], self._filled[slot], self._slot_weights[slot] = len(ids), kept, self._weights
        self._started += 1
        self._order[slot] = self._started
        self._runs[slot] = True
        request.versions = [Version(0, self.version)]
        request.donor = None
        if may_wait:
            self.stats.kept_tokens += kept
        best, donor = int(ready.argmax()), int(planned.argmax())
        if may_wait and planned[donor] - max(kept, int(ready[best])) >= _SHARED:
            self._follow(request, donor, int(planned[donor]))
        elif ready[best] > kept:
            self._take(request, best, int(ready[best]))

    def _follow(self, request: Request, donor: int, shared: int) -> None:
        request.donor, request.shared = self._requests[donor], shared
        self._runs[request.slot] = False
        self._followers.append(request)

    def _serve_followers(self) -> None:
        """Copy where the donor has come far enough; where it left early, go on with what there is."""
        waiting = self._followers
        self._followers = []
        for request in waiting:
            donor = request.donor
            assert donor is not None
            if self._requests[donor.slot] is not donor:
                # Without waiting again: a request that began later may be waiting for this one.
                self._start(request, may_wait=False)
            elif self._filled[donor.slot] >= request.shared:
                request.donor = None
                self._runs[request.slot] = True
                self._take(request, donor.slot, request.shared)
            else:
                self._followers.append(request)

    def _take(self, request: Request, source: int, upto: int) -> None:
        """Copy another slot's KV from where this row's ends."""
        began = perf_counter()
        slot = request.slot
        start = int(self._filled[slot])
        self.policy.copy(source, slot, slice(start, upto))
        self._filled[slot] = upto
        self.stats.copied_tokens += upto - start
        self.stats.copy_s += perf_counter() - began


def _common(rows: Ints, ids: Ints) -> Ints:
    """How many leading ids each row shares with `ids`."""
    differs = rows[:, : len(ids)] != ids
    first = differs.argmax(axis=1) if len(ids) else np.zeros(len(rows), np.int64)
    return np.where(differs.any(axis=1), first, len(ids))
