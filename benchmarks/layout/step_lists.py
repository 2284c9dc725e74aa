"""Step samples of a workload as Python lists, and joins of those that continue each other; needs no training kit."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any


@dataclass(slots=True)
class Stretch:
    """Samples of one rollout, in which each prompt begins with the prompt and response of the sample before it."""

    group: int
    rollout: int
    segment: int
    ids: list[int]
    """The prompt and the response of the last sample."""
    rows: list[int] = field(default_factory=list)
    """The samples' positions in the workload."""
    starts: list[int] = field(default_factory=list)
    """Number of prompt ids of each sample."""


def stretches(batch: Any) -> Iterator[Stretch]:
    """Yield the samples of a workload in order, joined while they continue each other."""
    names = zip(batch.group.tolist(), batch.traj.tolist(), batch.segment.tolist(), strict=True)
    last: Stretch | None = None
    for i, ((group, rollout, segment), prompt) in enumerate(zip(names, batch.prompts, strict=True)):
        if last is not None and last.rollout == rollout and _continues(prompt, last.ids):
            last.ids += prompt[len(last.ids) :]
        else:
            if last is not None:
                yield last
            last = Stretch(group, rollout, segment, prompt.copy())
        last.rows.append(i)
        last.starts.append(len(prompt))
        last.ids += batch.responses[i]
    if last is not None:
        yield last


def _continues(prompt: list[int], ids: list[int]) -> bool:
    """Return whether a prompt begins with these ids; a prompt that has no more ids is compared without a copy."""
    return prompt == ids if len(prompt) <= len(ids) else prompt[: len(ids)] == ids


def joined(batch: Any, stretch: Stretch, column: list[list[Any]]) -> list[Any]:
    """Return a column's numbers for the ids after a stretch's first prompt, with 0 for ids that are in no response."""
    parts, at = [], stretch.starts[0]
    for row, start in zip(stretch.rows, stretch.starts, strict=True):
        if start > at:
            parts.append([0] * (start - at))
        parts.append(column[row])
        at = start + len(column[row])
    return list(chain.from_iterable(parts))
