"""The state of the KV slots: each slot's row of ids, how many of the ids have KV, and under which weights.

KV depends only on ids and weights, so any session may reuse it::

    ids      s s s s u u a a e u u u . . .      s system and tools, u user or tool, a sampled, e stop
    filled   ^^^^^^^^^^^^^^^^                   KV is computed up to here
    length   ^^^^^^^^^^^^^^^^^^^^^^^            known ids; the next forward passes compute filled..length

If exactly one id of a row is to be computed, the row decodes. If more ids are to be computed, it prefills. The KV of a
turn's last id is computed in the next turn.
"""

from typing import NamedTuple

import numpy as np

from agentgym.engines.transformers.shared_prefix import RowGroups, groups
from agentgym.types.arrays import Floats, Ints
from agentgym.types.completion import Sampling

ALL = 1 << 40
"""The value of `top_k` for rows without a `top_k`: a number greater than the size of any vocabulary."""


class Donor(NamedTuple):
    """Another slot, and how many of its first ids are also the first ids of the given row."""

    slot: int
    shared: int


class Slots:
    """The row of ids of each slot, and what is known about the KV of these ids.

    A row is `active` while it has a request. An active row `runs` unless its request waits for a donor.
    """

    def __init__(self, slots: int, context: int) -> None:
        self.ids = np.zeros((slots, context), np.int64)
        self.logprobs = np.zeros((slots, context), np.float32)
        self.length, self.filled, self.prompt, self.end, self.order = np.zeros((5, slots), np.int64)
        self.temperature = np.ones(slots, np.float32)
        self.top_p, self.min_p = np.ones(slots, np.float32), np.zeros(slots, np.float32)
        self.top_k = np.full(slots, ALL, np.int64)
        self.whole = np.ones(slots, np.bool_)
        self.active, self.runs = np.zeros((2, slots), np.bool_)
        # Each change of the weights gets a new number, because two changes may have the same policy version.
        self._weights = 0
        self._weights_of = np.full(slots, -1, np.int64)
        self._begun = 0
        self._grouped: tuple[int, bytes] = (0, b"")
        self._groups: RowGroups | None = None

    def swap(self) -> None:
        """Record that the weights have changed, so that the present KV is neither reused nor copied from now on."""
        self._weights += 1

    def begin(self, slot: int, ids: Ints) -> int:
        """Write a request's ids into a row, and return how many of them already have KV. The others must be computed.

        The last id is always computed, because the first sample is drawn from its hidden state.
        """
        kept = 0
        if self._weights_of[slot] == self._weights:
            kept = min(int(_common(self.ids[slot : slot + 1], ids[:-1])[0]), int(self.filled[slot]))
        self.ids[slot, : len(ids)] = ids
        self.length[slot] = self.prompt[slot] = len(ids)
        self.filled[slot], self._weights_of[slot] = kept, self._weights
        self._begun += 1
        self.order[slot] = self._begun
        self.active[slot] = self.runs[slot] = True
        return kept

    def donors(self, slot: int) -> tuple[Donor, Donor]:
        """Return two slots whose ids begin like this row's.

        The first one has the longest shared prefix whose KV is already computed. The second one is active, and has the
        longest shared prefix whose KV its request is going to compute.
        """
        common = _common(self.ids, self.ids[slot, : self.length[slot] - 1])
        common[self._weights_of != self._weights] = 0
        ready = np.minimum(common, self.filled)
        planned = np.where(self.active, np.minimum(common, self.length), 0)
        planned[slot] = 0
        has, will_have = int(ready.argmax()), int(planned.argmax())
        return Donor(has, int(ready[has])), Donor(will_have, int(planned[will_have]))

    def groups(self, rows: Ints) -> RowGroups | None:
        """Group these decoding rows by a shared prefix of their prompts, or return None if that saves too little."""
        grouped = self._begun, rows.tobytes()
        if grouped != self._grouped:
            # A prompt's last id is left out, because this same step may compute its KV.
            limit = int(self.prompt[rows].min()) - 1
            self._groups = groups(self.ids[rows, :limit], self._weights_of[rows])
            self._grouped = grouped
        return self._groups

    def sample_by(self, slot: int, sampling: Sampling) -> None:
        """Set the parameters that a row's ids are sampled with."""
        self.temperature[slot] = sampling.temperature
        self.top_p[slot], self.min_p[slot] = sampling.top_p, sampling.min_p
        self.top_k[slot] = ALL if sampling.top_k is None else sampling.top_k
        self.whole[slot] = sampling.whole

    def append(self, rows: Ints, ids: Ints, logprobs: Floats) -> None:
        """Append one sampled id to each of these rows."""
        at = self.length[rows]
        self.ids[rows, at], self.logprobs[rows, at] = ids, logprobs
        self.length[rows] = at + 1


def _common(rows: Ints, ids: Ints) -> Ints:
    """Return the number of leading ids that each row shares with `ids`."""
    if not len(ids):
        return np.zeros(len(rows), np.int64)
    differs = rows[:, : len(ids)] != ids
    return np.where(differs.any(axis=1), differs.argmax(axis=1), len(ids))
