"""Counts of the processes and rollouts that a run on a cluster has lost, and the errors for lost processes."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from agentgym.errors import AgentGymError

PREFIX = "cluster/"
"""Prefix of the names that these counts have in the metrics."""


class TrainerLost(AgentGymError):
    """A training process on a cluster terminated unexpectedly. The run continues from its last checkpoint."""


class WorkersLost(AgentGymError):
    """More workers on a cluster terminated unexpectedly than may be replaced."""


@dataclass(slots=True)
class Losses:
    """Counts of a run's lost processes (those that terminated unexpectedly), their replacements, and lost rollouts."""

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
        """Continue from the counts in `row`, a resumed run's last logged metrics, where those are higher."""
        for name, count in self.counts().items():
            setattr(self, name, max(count, int(row.get(f"{PREFIX}{name}") or 0)))

    def count(self, name: str) -> None:
        """Add 1 to the count of that name."""
        setattr(self, name, getattr(self, name) + 1)

    def counts(self) -> dict[str, int]:
        """Return all counts by name, including zeros."""
        return asdict(self)
