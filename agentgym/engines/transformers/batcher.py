"""Continuous batching: chooses the turns that each forward pass computes, and reuses their KV (keys and values).

Each turn that is being sampled has a slot: a row of ids, with memory for their KV. A session keeps its slot between
turns. If its new prompt begins with the same ids as before, their KV is reused. A new session may share a prefix with
another slot. It then copies the KV of the prefix, or waits while the other slot computes it. Rows that decode together
read the KV of a shared prefix only once.
"""

import random
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter
from typing import TypeAlias

import numpy as np
from torch import Tensor

from agentgym.engines.stop_texts import StopTexts
from agentgym.engines.transformers.kv_slots import Donor, Slots
from agentgym.engines.transformers.lora import Merger
from agentgym.engines.transformers.model import InferenceModel, Part
from agentgym.errors import EngineError
from agentgym.types.arrays import Ints
from agentgym.types.completion import Completion, FinishReason, Sampling, Version
from agentgym.types.weights import Adapter, ModelWeights

Settle: TypeAlias = Callable[[object], None]
"""The callback of a request. It is called once, with a Completion or with the exception that ended the request."""

_SHARED = 16
"""Shortest prefix, in ids, that is shared between slots. Waiting for a shorter one costs more than computing it."""
_PATIENCE = 4
"""Maximum number of decode steps for which rows with prompts to compute (prefill) wait for more such rows to join them.
If they are at least a third as many as the decoding rows, they wait for one step only.
"""
_NARROW = 32
"""Number of ids per row up to which rows are prefilled together, even if some have far fewer ids to compute than
others. Padding them to the same width is then cheaper than a separate forward pass.
"""


@dataclass(slots=True)
class Stats:
    """Counters since the engine opened. Seconds are wall time in the engine's thread."""

    prefill_tokens: int = 0
    """Prompt ids that went through the model."""
    kept_tokens: int = 0
    """Prompt ids whose KV was still in the session's slot."""
    copied_tokens: int = 0
    """Prompt ids whose KV was copied from another slot."""
    decode_tokens: int = 0
    """Sampled ids that went through the model during their turn. Only a turn's last id doesn't."""
    sampled_tokens: int = 0
    prefill_steps: int = 0
    decode_steps: int = 0
    """Forward passes with one id per row."""
    prefill_s: float = 0.0
    decode_s: float = 0.0
    copy_s: float = 0.0
    sample_s: float = 0.0


@dataclass(slots=True, eq=False)
class Request:
    """One turn to sample: validated ids, and the callback that receives the result."""

    token_ids: Ints
    session: str
    max_tokens: int
    sampling: Sampling
    seed: int
    settle: Settle
    stops: StopTexts | None = None
    """Detects the texts that end the turn; None if there are none."""
    slot: int = -1
    """The request's slot; -1 while it waits for one."""
    donor: "Request | None" = None
    """The request that computes a prefix of this request's ids, while this one waits for it; None if it doesn't wait.
    """
    shared: int = 0
    """Length in ids of the prefix that `donor` computes."""
    versions: list[Version] = field(default_factory=list)


class Batcher:
    """Runs requests in batches, and settles each of them exactly once: with a completion or an exception.

    Only a request that is dropped by `cancel` isn't settled.

    It has no thread and no event loop. Its owner must call `step` as long as it is `busy`.
    """

    def __init__(self, policy: InferenceModel, *, slots: int, prefill_tokens: int, stop_ids: frozenset[int]) -> None:
        self.policy = policy
        self.stats = Stats()
        self.version = 0
        self._merger = Merger(policy.model)
        self._prefill_tokens = prefill_tokens
        self.stop_ids = stop_ids
        self._stop_ids = np.array(sorted(stop_ids), np.int64)
        self._slots = Slots(slots, policy.context)
        self._requests: list[Request | None] = [None] * slots
        self._bits: list[Callable[[int], int]] = [random.getrandbits] * slots
        self._sessions: dict[str, int] = {}
        self._idle: OrderedDict[int, str | None] = OrderedDict.fromkeys(range(slots))
        self._live: dict[str, Request] = {}
        self._queue: deque[Request] = deque()
        self._followers: list[Request] = []
        self._since_prefill = 0

    @property
    def busy(self) -> bool:
        """Whether any request isn't settled yet."""
        return bool(self._live)

    def submit(self, request: Request) -> None:
        """Queue a request, which a later step settles.

        Raises:
            ValueError: If the session's previous request is still generating.
        """
        if request.session in self._live:
            raise ValueError(f"session: {request.session!r} is still generating; wait for it, or use another session")
        self._live[request.session] = request
        slot = self._sessions.get(request.session)
        if slot is None:
            self._queue.append(request)
        else:
            del self._idle[slot]
            self._bind(request, slot)

    def cancel(self, request: Request) -> None:
        """Drop a request without settling it. From the next step on, its slot is free.

        The session can reuse its KV until the slot is given to another session.
        """
        if self._live.get(request.session) is request:
            self._leave(request)

    def release(self, session: str) -> None:
        """Forget a session. If it has a pending request, the request fails.

        The session's slot is the next one to be reassigned. Until then, other sessions can copy its KV.
        """
        request = self._live.get(session)
        if request is not None:
            self._leave(request)
            request.settle(EngineError(f"session {session!r} was released while it was generating"))
        slot = self._sessions.pop(session, None)
        if slot is not None:
            self._idle[slot] = None
            self._idle.move_to_end(slot, last=False)

    def load_adapter(self, adapter: Adapter | None, version: int) -> None:
        """Load an adapter. A turn that has already sampled ids continues with the KV that it has.

        All other KV is invalid from now on.
        """
        if self._merger.load(adapter):
            self.policy.reread()
        self._swap(version)

    def load_weights(self, weights: ModelWeights, version: int) -> None:
        """Replace the weights by others of the same shapes. KV is treated as in `load_adapter`."""
        self._merger.load_weights(weights)
        self.policy.reread()
        self._swap(version)

    def _swap(self, version: int) -> None:
        self.version = version
        self._slots.swap()
        self._followers.clear()
        running = [request for request in self._requests if request is not None]
        for request in sorted(running, key=lambda request: self._slots.order[request.slot]):
            sampled = int(self._slots.length[request.slot] - self._slots.prompt[request.slot])
            if not sampled:
                self._start(request)
            elif request.versions[-1].version != version:
                # A span is the ids sampled under one version. A version from which no id was sampled gets none.
                spans = [span for span in request.versions if span.start < sampled]
                request.versions = [*spans, Version(sampled, version)]

    def fail_all(self, reason: Callable[[], Exception]) -> None:
        """Settle every request with an exception. `reason` is called once per request to create it."""
        live = list(self._live.values())
        self._live.clear()
        for request in live:
            request.settle(reason())

    def step(self) -> None:
        """Give slots to the waiting requests, as long as there are slots, then run one forward pass."""
        self._serve_followers()
        while self._queue and self._idle:
            self._admit(self._queue.popleft())
        slots = self._slots
        todo = np.where(slots.runs, slots.length - slots.filled, 0)
        one, many = np.flatnonzero(todo == 1), np.flatnonzero(todo > 1)
        if len(many) and self._prefill_is_due(len(one), len(many)):
            self._since_prefill = 0
            self._advance(*self._prefill_rows(many, todo))
        elif len(one):
            self._since_prefill += 1
            self._advance(one, np.ones_like(one))

    def _prefill_is_due(self, decoding: int, prefilling: int) -> bool:
        """Return whether to compute prompts (prefill) in this step, instead of sampling (decoding).

        While some rows decode, no two consecutive steps prefill. If at least a third as many rows prefill as decode,
        they wait for one decode step. Fewer rows wait for up to `_PATIENCE` decode steps, so that others can join
        them.

        Args:
            decoding: Number of rows that are ready to decode.
            prefilling: Number of rows with prompts to compute.
        """
        if not decoding:
            return True
        waited = self._since_prefill
        return waited > 0 and (3 * prefilling >= decoding or waited >= _PATIENCE)

    def _prefill_rows(self, many: Ints, todo: Ints) -> tuple[Ints, Ints]:
        """Choose the rows to prefill in this step, and how many ids to compute of each.

        The rows are the one that has waited longest, and other rows that need little padding to be computed with it.

        Args:
            many: The slots with more than one id to compute.
            todo: For every slot, the number of ids to compute.

        Returns:
            The chosen rows in ascending order, and the number of ids to compute of each.
        """
        first_come = many[np.argsort(self._slots.order[many])]
        limit = min(max(int(todo[first_come[0]]), _NARROW), self._prefill_tokens)
        fits = first_come[(4 * todo[first_come] >= limit) | (limit <= _NARROW)]
        widest = min(int(todo[fits].max()), limit)
        rows = np.sort(fits[: max(1, self._prefill_tokens // widest)])
        return rows, np.minimum(todo[rows], limit)

    def _advance(self, rows: Ints, width: Ints) -> None:
        """Compute the next `width` ids of these rows. Then sample an id for each row that is completely computed."""
        began = perf_counter()
        slots = self._slots
        start = slots.filled[rows]
        columns = start[:, None] + np.arange(int(width.max()))
        ids = slots.ids[rows[:, None], np.minimum(columns, self.policy.context - 1)]
        groups = slots.groups(rows) if ids.shape[1] == 1 else None
        hidden = self.policy.forward(rows, ids, start, width, groups)
        slots.filled[rows] += width
        decoded = int((start >= slots.prompt[rows]).sum())
        self._count(int(width.sum()), decoded, narrow=ids.shape[1] == 1, seconds=perf_counter() - began)
        ready = np.flatnonzero(slots.filled[rows] == slots.length[rows])
        if len(ready):
            self._sample(rows[ready], hidden if len(ready) == len(rows) else hidden[ready.tolist()])

    def _count(self, computed: int, decoded: int, *, narrow: bool, seconds: float) -> None:
        stats = self.stats
        stats.decode_tokens += decoded
        stats.prefill_tokens += computed - decoded
        if narrow:
            stats.decode_steps += 1
            stats.decode_s += seconds
        else:
            stats.prefill_steps += 1
            stats.prefill_s += seconds

    def _sample(self, rows: Ints, hidden: Tensor) -> None:
        began = perf_counter()
        slots = self._slots
        # A random number of 24 bits is exact in float32 and stays below 1.
        uniform = np.array([self._bits[row](24) for row in rows.tolist()], np.float32) * np.float32(2.0**-24)
        part = None
        if not slots.whole[rows].all():
            part = Part(slots.top_p[rows], slots.top_k[rows], slots.min_p[rows])
        ids, logprobs = self.policy.draw(hidden, slots.temperature[rows], uniform, part)
        slots.append(rows, ids, logprobs)
        full = (slots.length[rows] == slots.end[rows]) | ~np.isfinite(logprobs)
        stopped = np.isin(ids, self._stop_ids)
        self.stats.sampled_tokens += len(rows)
        self.stats.sample_s += perf_counter() - began
        for i, row in enumerate(rows.tolist()):
            reason = "stop" if stopped[i] else self._stop_text(row) or ("length" if full[i] else None)
            if reason is not None:
                self._finish(row, reason)

    def _stop_text(self, slot: int) -> FinishReason | None:
        """Return the finish reason if the last id completes one of the request's stop texts, else None."""
        request = self._requests[slot]
        assert request is not None
        if request.stops is None:
            return None
        return request.stops.reason(self._slots.ids[slot, self._slots.prompt[slot] : self._slots.length[slot]])

    def _finish(self, slot: int, reason: FinishReason) -> None:
        request = self._requests[slot]
        assert request is not None
        span = slice(int(self._slots.prompt[slot]), int(self._slots.length[slot]))
        ids, logprobs = self._slots.ids[slot, span].copy(), self._slots.logprobs[slot, span].copy()
        self._leave(request)
        if not np.isfinite(logprobs[-1]):
            request.settle(
                EngineError(f"the model's log-probability of id {ids[-1]} must be finite, got {logprobs[-1]}")
            )
            return
        completion = Completion(
            token_ids=ids,
            logprobs=logprobs,
            finish_reason=reason,
            versions=tuple(request.versions),
        )
        request.settle(completion)

    def _leave(self, request: Request) -> None:
        """Remove a request that is settled or dropped. Its slot, if any, becomes idle but stays with its session."""
        del self._live[request.session]
        if request.slot < 0:
            self._queue.remove(request)
            return
        self._slots.active[request.slot] = self._slots.runs[request.slot] = False
        self._requests[request.slot] = None
        self._idle[request.slot] = request.session
        if request.donor is not None:
            self._followers.remove(request)

    def _admit(self, request: Request) -> None:
        """Give a new session a free slot or, if there is none, the slot that has been idle longest."""
        slot, evicted = self._idle.popitem(last=False)
        if evicted is not None:
            del self._sessions[evicted]
        self._sessions[request.session] = slot
        self._bind(request, slot)

    def _bind(self, request: Request, slot: int) -> None:
        request.slot = slot
        self._requests[slot] = request
        self._slots.end[slot] = len(request.token_ids) + request.max_tokens
        self._slots.sample_by(slot, request.sampling)
        self._bits[slot] = random.Random(request.seed).getrandbits
        self._start(request)

    def _start(self, request: Request, *, may_wait: bool = True) -> None:
        """Start a request with the longest prefix whose KV is in any slot, or let it wait for a longer one.

        It waits if another request (the donor) is about to compute the KV of a longer shared prefix. If `may_wait` is
        false, it always starts at once; this is for a request that has already waited.
        """
        kept = self._slots.begin(request.slot, request.token_ids)
        request.donor = None
        request.versions = [Version(0, self.version)]
        if may_wait:  # otherwise the request starts a second time, after a wait, and was already counted
            self.stats.kept_tokens += kept
        if len(request.token_ids) - 1 - kept < _SHARED:
            return
        has, will_have = self._slots.donors(request.slot)
        if may_wait and will_have.shared - max(kept, has.shared) >= _SHARED:
            self._follow(request, will_have)
        elif has.shared > kept:
            self._take(request, has)

    def _follow(self, request: Request, donor: Donor) -> None:
        request.donor, request.shared = self._requests[donor.slot], donor.shared
        self._slots.runs[request.slot] = False
        self._followers.append(request)

    def _serve_followers(self) -> None:
        """Copy KV to the waiting requests whose donor has computed enough.

        If the donor's turn has ended early, the waiting request starts with the KV that is available.
        """
        waiting, self._followers = self._followers, []
        for request in waiting:
            donor = request.donor
            assert donor is not None
            if self._requests[donor.slot] is not donor:
                # It must not wait again: it could wait for a later request that in turn waits for it.
                self._start(request, may_wait=False)
            elif self._slots.filled[donor.slot] >= request.shared:
                request.donor = None
                self._slots.runs[request.slot] = True
                self._take(request, Donor(donor.slot, request.shared))
            else:
                self._followers.append(request)

    def _take(self, request: Request, donor: Donor) -> None:
        """Copy the KV of the shared prefix from the donor's slot to the request's slot.

        KV that the request's slot already has isn't copied.
        """
        began = perf_counter()
        start = int(self._slots.filled[request.slot])
        self.policy.copy(donor.slot, request.slot, slice(start, donor.shared))
        self._slots.filled[request.slot] = donor.shared
        self.stats.copied_tokens += donor.shared - start
        self.stats.copy_s += perf_counter() - began
