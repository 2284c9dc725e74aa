"""Counts of tool calls and of those that failed, by tool."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from agentgym.types import Rollout

PER_TOOL = "tool_errors/"
"""In front of a tool's name in a rollout's metrics: how many of its calls failed."""


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
                counts.calls.update(map(_name_of, message.get("tool_calls") or ()))
            for name, count in played.metrics.items():
                if name.startswith(PER_TOOL):
                    counts.errors[name.removeprefix(PER_TOOL)] += int(count)
        return counts

    def add(self, other: "ToolCounts") -> None:
        """Add the counts of other rollouts to these."""
        self.calls.update(other.calls)
        self.errors.update(other.errors)

    def failing(self, *, least_calls: int = 1) -> dict[str, tuple[int, int]]:
        """Return errors and calls of each tool that failed in more than half of at least so many calls."""
        both = {name: (errors, self.calls[name]) for name, errors in self.errors.items()}
        return {name: (errors, calls) for name, (errors, calls) in both.items() if 2 * errors > calls >= least_calls}


def _name_of(call: object) -> str:
    """The name in a call; "" for what an agent program wrote in the place of one, as its rollout is worth keeping."""
    function = call.get("function") if isinstance(call, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    return name if isinstance(name, str) else ""


def call_counts(rollout: Rollout) -> tuple[int, int]:
    """Return how many tools the model of a rollout has called, and how many of these calls failed."""
    calls = sum(len(message.get("tool_calls") or ()) for message in rollout.messages)
    total = rollout.metrics.get("tool_errors")
    if total is None:
        total = sum(count for name, count in rollout.metrics.items() if name.startswith(PER_TOOL))
    return calls, int(total)
