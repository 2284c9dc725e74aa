"""Micro-batches from samples that arrive one by one, as soon as they are well filled."""

from typing import Literal

import numpy as np

from agentgym.train.bins import Cost, Limit, filled_bins
from agentgym.train.plan import LENGTH, Micro, deal, shares

WELL_FILLED = 0.95
"""Share of the budget: rows that hold less wait for more samples, where any micro-batch can do without them."""


class StreamPlanner:
    """Every sample in exactly one micro-batch, every micro-batch with a row for each rank; none waits after `flush`.

    ::

        put(900) put(300) ...  -> []                    samples gather, `depth` micro-batches of them
        put(5000)              -> [[Micro, Micro]]      the best filled rows leave, one for each of 2 ranks
        flush()                -> [[Micro, Micro], ..]  the rest, masked rows where there are too few samples

    Rows are numbers of arrival, from 0. Ranks that see the same arrivals make the same plan. One optimizer step is all
    that lies between two flushes: put whole rollouts, and divide the loss by what is known before they arrive, a
    constant or the number of rollouts. `depth` trades waiting for evenness.
    """

    def __init__(
        self,
        *,
        ranks: int,
        micro_tokens: int | None = None,
        micro_rows: int | None = None,
        layout: Literal["padded", "packed"] = "padded",
        cost: Cost = LENGTH,
        depth: int = 2,
    ) -> None:
        self._limit = Limit(tokens=micro_tokens, rows=micro_rows)
        if micro_tokens is None and micro_rows is None:
            raise ValueError("micro_tokens, micro_rows: a stream needs one of them, to know when a row is full")
        if ranks < 1 or depth < 1:
            raise ValueError(f"ranks, depth: must be at least 1, got {ranks} and {depth}")
        self._ranks, self._layout, self._cost, self._depth = ranks, layout, cost, depth
        size = ranks * (micro_tokens or micro_rows or 0)
        self._enough = depth * size
        """Waiting tokens, or rows, of which a micro-batch is made."""
        self._arrived = 0
        self._waiting: dict[int, int] = {}
        """Lengths by number of arrival."""
        self._tokens = 0

    @property
    def waiting(self) -> int:
        """Samples that are in no micro-batch yet."""
        return len(self._waiting)

    def put(self, length: int) -> list[list[Micro]]:
        """Take a sample of so many tokens; the micro-batches that are ready now, a Micro for each rank."""
        if length < 1:
            raise ValueError(f"length: sample {self._arrived} has no token; leave it out")
        self._waiting[self._arrived] = length
        self._tokens += length
        self._arrived += 1
        if self._limit.tokens is None:
            return self.flush() if self.waiting >= self._enough else []
        return self._filled() if self._tokens >= self._enough else []

    def flush(self) -> list[list[Micro]]:
        """Everything that waits, in even micro-batches; none where nothing waits."""
        if not self._waiting:
            return []
        plans = shares(
            list(self._waiting.values()),
            ranks=self._ranks,
            micro_tokens=self._limit.tokens,
            micro_rows=self._limit.rows,
            layout=self._layout,
            cost=self._cost,
        )
        return self._sent(plans)

    def _filled(self) -> list[list[Micro]]:
        """The best filled rows of all that waits: the micro-batches that are full, and at least one."""
        lengths = np.array(list(self._waiting.values()))
        bins = filled_bins(lengths, self._limit, self._layout)
        if len(bins) < self._ranks:
            return []  # a few samples over the budget
        costs, tokens = self._cost.of(lengths, lengths**2), self._limit.tokens or 1
        padded = self._layout == "padded"
        held = [len(part) * int(lengths[part].max()) if padded else int(lengths[part].sum()) for part in bins]
        fullest = sorted(range(len(bins)), key=lambda i: -held[i])
        full = sum(tokens_held >= WELL_FILLED * tokens for tokens_held in held) // self._ranks
        chosen = [bins[i] for i in fullest[: max(full, 1) * self._ranks]]
        load = [len(part) * float(costs[part].max()) if padded else float(costs[part].sum()) for part in chosen]
        return self._sent(deal(chosen, load, ranks=self._ranks, spare=0))

    def _sent(self, plans: list[list[Micro]]) -> list[list[Micro]]:
        """The same by micro-batch, in numbers of arrival; what is in it waits no longer."""
        number = list(self._waiting)
        out = [
            [Micro(rows=tuple(number[row] for row in micro.rows), masked=micro.masked) for micro in micros]
            for micros in zip(*plans, strict=True)
        ]
        for row in {row for micros in out for micro in micros for row in micro.rows}:
            self._tokens -= self._waiting.pop(row)
        return out
