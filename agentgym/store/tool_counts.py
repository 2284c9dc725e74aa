"""Counts over rollouts: tool calls and failed calls by tool, and failures by kind."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from agentgym.errors import Failure
from agentgym.types.messages import Message
from agentgym.types.rollout import Rollout

PER_TOOL = "tool_errors/"
"""Prefix of a rollout's metrics that count the failed calls of one tool; the name of the tool follows it."""
OTHERS = "(others)"
"""The name under which tools and kinds of failures beyond MOST are counted."""
MOST = 64
"""How many tool names or failure kinds are counted separately. A model can make up any number of names."""
_PLACE = re.compile(r"[^:\n]+:\d+ in \S+")
_NUMBER = re.compile(r"\b(?=[0-9a-fA-F-]*\d)[0-9a-fA-F-]{2,}\b|\d+")


@dataclass(frozen=True, slots=True)
class ToolCounts:
    """Tool calls and errors by tool, of one or more rollouts. No other code counts them."""

    calls: Counter[str] = field(default_factory=Counter)
    """How many calls the model made, by the tool name it wrote."""
    errors: Counter[str] = field(default_factory=Counter)
    """How many calls failed, by tool."""

    @classmethod
    def of(cls, rollouts: Iterable[Rollout]) -> "ToolCounts":
        """Return the counts of these rollouts, including failed ones."""
        counts = cls()
        for played in rollouts:
            for message in played.messages:
                counts.calls.update(map(_name_of, calls_in(message)))
            for name, count in played.metrics.items():
                if name.startswith(PER_TOOL):
                    counts.errors[name.removeprefix(PER_TOOL)] += int(count)
        return counts

    def add(self, other: "ToolCounts") -> None:
        """Add the counts of other rollouts. Beyond MOST names, the rarest are counted together."""
        self.calls.update(other.calls)
        self.errors.update(other.errors)
        names = {name for name, _ in self.calls.most_common(MOST)}
        _fold(self.calls, names)
        _fold(self.errors, names)

    def failing(self, *, least_calls: int = 1) -> dict[str, tuple[int, int]]:
        """Return the errors and calls of each tool that failed in more than half of its calls.

        Tools with fewer than `least_calls` calls are left out.
        """
        both = {name: (errors, self.calls[name]) for name, errors in self.errors.items() if name != OTHERS}
        return {name: (errors, calls) for name, (errors, calls) in both.items() if 2 * errors > calls >= least_calls}


class FailureCounts:
    """Counts failures by type and place. Their messages may all differ, so the first one of each kind is stored.

    A failure without a line in the user's code is counted by its message with the numbers removed. Beyond MOST kinds,
    new kinds are counted together.
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
        """Return each kind's first message and its count, the most frequent kind first."""
        return [(self._texts[kind], times) for kind, times in self._counts.most_common(most)]


def _kind(failure: Failure) -> tuple[str, str, str]:
    place = failure.message.rpartition(", at ")[2]
    at = place if _PLACE.fullmatch(place) else _NUMBER.sub("#", failure.message)
    return failure.type, failure.where, at


def _fold(counts: Counter[str], names: Set[str]) -> None:
    """Move the counts of all names except these to OTHERS."""
    for name in [name for name in counts if name not in names and name != OTHERS]:
        counts[OTHERS] += counts.pop(name)


def calls_in(message: Message) -> Sequence[Any]:
    """Return the tool calls of a message, or an empty tuple if an agent program put something else there."""
    calls = message.get("tool_calls")
    return calls if isinstance(calls, list | tuple) else ()


def _name_of(call: object) -> str:
    """Return the tool name in a call.

    Returns "" if an agent program wrote something else; its rollout is still worth storing.
    """
    function = call.get("function") if isinstance(call, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    return name if isinstance(name, str) else ""


def is_malformed(call: object) -> bool:
    """Return whether a call's arguments are text, because the model didn't write an object."""
    function = call.get("function") if isinstance(call, Mapping) else None
    return isinstance(function, Mapping) and isinstance(function.get("arguments"), str)


def call_counts(rollout: Rollout) -> tuple[int, int]:
    """Return how many tool calls the model of a rollout made, and how many of them failed."""
    calls = sum(len(calls_in(message)) for message in rollout.messages)
    total = rollout.metrics.get("tool_errors")
    if total is None:
        total = sum(count for name, count in rollout.metrics.items() if name.startswith(PER_TOOL))
    return calls, int(total)
