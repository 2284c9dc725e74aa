"""Counts over rollouts: tool calls and those that failed, by tool, and failures, by kind."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from agentgym.errors import Failure
from agentgym.types.messages import Message
from agentgym.types.rollout import Rollout

PER_TOOL = "tool_errors/"
"""In front of a tool's name in a rollout's metrics: how many of its calls failed."""
OTHERS = "(others)"
"""The name of all that is counted together."""
MOST = 64
"""Names, or kinds of failures, that are counted apart: a model can make up names without end."""
_PLACE = re.compile(r"[^:\n]+:\d+ in \S+")
_NUMBER = re.compile(r"\b(?=[0-9a-fA-F-]*\d)[0-9a-fA-F-]{2,}\b|\d+")


@dataclass(frozen=True, slots=True)
class ToolCounts:
    """Counts calls and errors by tool, of one rollout or of many; the only place that does."""

    calls: Counter[str] = field(default_factory=Counter)
    """Calls that the model made, by the name that it wrote."""
    errors: Counter[str] = field(default_factory=Counter)
    """Calls that failed, by tool."""

    @classmethod
    def of(cls, rollouts: Iterable[Rollout]) -> "ToolCounts":
        """Return the counts of these rollouts, failed ones included."""
        counts = cls()
        for played in rollouts:
            for message in played.messages:
                counts.calls.update(map(_name_of, calls_in(message)))
            for name, count in played.metrics.items():
                if name.startswith(PER_TOOL):
                    counts.errors[name.removeprefix(PER_TOOL)] += int(count)
        return counts

    def add(self, other: "ToolCounts") -> None:
        """Add the counts of other rollouts to these; beyond a bound the rarest names are counted together."""
        self.calls.update(other.calls)
        self.errors.update(other.errors)
        names = {name for name, _ in self.calls.most_common(MOST)}
        _fold(self.calls, names)
        _fold(self.errors, names)

    def failing(self, *, least_calls: int = 1) -> dict[str, tuple[int, int]]:
        """Return errors and calls of each tool that failed in more than half of at least so many calls."""
        both = {name: (errors, self.calls[name]) for name, errors in self.errors.items() if name != OTHERS}
        return {name: (errors, calls) for name, (errors, calls) in both.items() if 2 * errors > calls >= least_calls}


class FailureCounts:
    """Counts failures by type and place, not by their texts, which may differ in each: the first one stands for all.

    A failure at no line of the user's code is counted by its text without the numbers in it. Beyond a bound new kinds
    are counted together.
    """

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, str, str] | None] = Counter()
        self._texts: dict[tuple[str, str, str] | None, str] = {}

    def add(self, rollouts: Iterable[Rollout]) -> None:
        """Count the failures of these rollouts."""
        for failure in (rollout.failure for rollout in rollouts):
            if failure is not None:
                found = _kind(failure)
                kind = found if found in self._texts or len(self._texts) < MOST else None
                self._texts.setdefault(kind, OTHERS if kind is None else str(failure))
                self._counts[kind] += 1

    def __len__(self) -> int:
        return len(self._counts)

    def total(self) -> int:
        """Return how many failures were counted."""
        return self._counts.total()

    def most_common(self, most: int | None = None) -> list[tuple[str, int]]:
        """Return the first text of each kind and how often the kind came, the most frequent first."""
        return [(self._texts[kind], times) for kind, times in self._counts.most_common(most)]


def _kind(failure: Failure) -> tuple[str, str, str]:
    place = failure.message.rpartition(", at ")[2]
    at = place if _PLACE.fullmatch(place) else _NUMBER.sub("#", failure.message)
    return failure.type, failure.where, at


def _fold(counts: Counter[str], names: Set[str]) -> None:
    """Count all but these names together."""
    for name in [name for name in counts if name not in names and name != OTHERS]:
        counts[OTHERS] += counts.pop(name)


def calls_in(message: Message) -> Sequence[Any]:
    """Return the tool calls of a message; none for what an agent program wrote in the place of a list of them."""
    calls = message.get("tool_calls")
    return calls if isinstance(calls, list | tuple) else ()


def _name_of(call: object) -> str:
    """The name in a call; "" for what an agent program wrote in the place of one, as its rollout is worth keeping."""
    function = call.get("function") if isinstance(call, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    return name if isinstance(name, str) else ""


def call_counts(rollout: Rollout) -> tuple[int, int]:
    """Return how many tools the model of a rollout has called, and how many of these calls failed."""
    calls = sum(len(calls_in(message)) for message in rollout.messages)
    total = rollout.metrics.get("tool_errors")
    if total is None:
        total = sum(count for name, count in rollout.metrics.items() if name.startswith(PER_TOOL))
    return calls, int(total)
