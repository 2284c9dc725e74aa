"""Which samples share an optimizer step, a rank and a micro-batch."""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from agentgym.types import Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Micro:
    """One forward and backward: rows of the mini-batch, never none."""

    rows: tuple[int, ...]
    masked: bool = False
    """A padding row: computed with its loss mask off, so that this rank makes as many forwards as the others."""


def mini_batches(
    samples: Sequence[Sample], *, rollouts: int | None = None, groups: int | None = None
) -> list[list[int]]:
    """Row indices of each optimizer step: at most this many rollouts (or groups), with all of their samples.

    Steps are as even as can be: 9 rollouts by 8 are 5 and 4, not 8 and 1. Rollouts keep the order in which they
    first appear. With neither count, everything is one step. Every row is in exactly one step.
    """
    if rollouts is not None and groups is not None:
        raise ValueError("rollouts, groups: count mini-batches in one of them, not in both")
    size = groups if rollouts is None else rollouts
    if size is not None and size < 1:
        raise ValueError(f"rollouts, groups: a mini-batch needs at least 1, got {size}")
    units: dict[str, list[int]] = {}
    for i, row in enumerate(samples):
        units.setdefault(row.rollout_id if groups is None else row.group_id, []).append(i)
    if not units:
        return []
    steps = 1 if size is None else -(-len(units) // size)
    batches: list[list[int]] = [[] for _ in range(steps)]
    for place, rows in enumerate(units.values()):
        batches[place * steps // len(units)] += rows
    return batches


def shares(
    lengths: Sequence[int], *, ranks: int, micro_tokens: int | None = None, micro_rows: int | None = None
) -> list[list[Micro]]:
    """The micro-batches of each rank, equally many on every rank, each row in exactly one of them.

    `lengths` are tokens, prompt and response. Rows go longest first to the rank with the smallest sum of squared
    lengths, and are cut into micro-batches, longest first, of at most `micro_tokens` padded tokens
    (rows x longest) or of at most `micro_rows` rows. A row over the budget stands alone. A rank with fewer
    micro-batches halves its own, and where it has no row left to part, gets masked padding rows.
    """
    if micro_tokens is not None and micro_rows is not None:
        raise ValueError("micro_tokens, micro_rows: give one of them, not both")
    if not lengths or ranks < 1:
        raise ValueError(f"lengths, ranks: nothing to share out ({len(lengths)} rows, {ranks} ranks)")
    cut = [list(_cut(rows, lengths, micro_tokens, micro_rows)) for rows in _balance(lengths, ranks)]
    count = max(map(len, cut))
    spare = Micro(rows=(min(range(len(lengths)), key=lengths.__getitem__),), masked=True)
    plans = []
    for micros in cut:
        filled = [Micro(rows=tuple(rows)) for rows in _parted(micros, count)]
        plans.append(filled + [spare] * (count - len(filled)))
    return plans


def over_budget(lengths: Sequence[int], micro_tokens: int | None) -> int:
    """How many rows are longer than a micro-batch's token budget, and stand alone."""
    return 0 if micro_tokens is None else sum(length > micro_tokens for length in lengths)


def _balance(lengths: Sequence[int], ranks: int) -> list[list[int]]:
    """Rows of each rank, longest first; no rank is empty unless there are fewer rows than ranks."""
    loads = [(0, rank) for rank in range(ranks)]
    rows: list[list[int]] = [[] for _ in range(ranks)]
    for row in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        load, rank = loads[0]
        rows[rank].append(row)
        heapq.heapreplace(loads, (load + lengths[row] ** 2, rank))
    return rows


def _cut(
    rows: list[int], lengths: Sequence[int], micro_tokens: int | None, micro_rows: int | None
) -> Iterator[list[int]]:
    start = 0
    while start < len(rows):
        size = len(rows) if micro_rows is None else micro_rows
        if micro_tokens is not None:
            size = max(micro_tokens // lengths[rows[start]], 1)
        yield rows[start : start + size]
        start += size


def _parted(micros: list[list[int]], count: int) -> list[list[int]]:
    """The same rows in `count` micro-batches, or in as many as there are rows."""
    micros = list(micros)
    while len(micros) < count and (most := max(micros, key=len, default=[])) and len(most) > 1:
        at = micros.index(most)
        micros[at : at + 1] = [most[: len(most) // 2], most[len(most) // 2 :]]
    return micros
