"""Processes and rollouts that a run on a cluster loses: their counts, and the errors that a loss raises."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from agentgym.errors import AgentGymError

PREFIX = "cluster/"
"""Prefix of the metrics' names."""


class TrainerLost(AgentGymError):
    """A training process of a cluster ended by itself; the run continues from its last checkpoint."""


class WorkersLost(AgentGymError):
    """More workers of a cluster ended by themselves than may be replaced."""


@dataclass(slots=True)
class Losses:
    """Counts of a run's lost processes (those that ended by themselves), replacements, and lost rollouts."""

    workers_lost: int = 0
    workers_replaced: int = 0
    eval_workers_lost: int = 0
    eval_workers_replaced: int = 0
    servers_lost: int = 0
    servers_replaced: int = 0
    trainers_lost: int = 0
    trainers_replaced: int = 0
    """How often all training processes were restarted from a checkpoint."""
    rollouts_lost: int = 0
    """Training rollouts that were running on a lost worker; they are run again."""

    def begin(self, row: Mapping[str, float]) -> None:
        """Continue from the counts in the metrics of a resumed run's last logged step, if those are higher."""
        for name, count in self.counts().items():
            setattr(self, name, max(count, int(row.get(f"{PREFIX}{name}") or 0)))

    def count(self, name: str) -> None:
        """Add 1 to the count of that name."""
        setattr(self, name, getattr(self, name) + 1)

    def counts(self) -> dict[str, int]:
        """Return all counts by name, including zeros."""
        return asdict(self)
