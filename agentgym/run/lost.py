"""What a run on a cluster loses on its way: the count of it, and the loss that sends the run back to its checkpoint."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from agentgym.errors import AgentGymError

PREFIX = "cluster/"
"""What the names of the metrics begin with."""


class TrainerLost(AgentGymError):
    """A training process of a cluster has ended by itself: the run goes on from its last checkpoint."""


class WorkersLost(AgentGymError):
    """More workers of a cluster have ended by themselves than may be replaced."""


@dataclass(slots=True)
class Losses:
    """Counts the processes of a run that ended by themselves, those that took their places, and rollouts lost so."""

    workers_lost: int = 0
    workers_replaced: int = 0
    eval_workers_lost: int = 0
    eval_workers_replaced: int = 0
    servers_lost: int = 0
    servers_replaced: int = 0
    trainers_lost: int = 0
    trainers_replaced: int = 0
    """Times that all training processes started again from a checkpoint."""
    rollouts_lost: int = 0
    """Rollouts for training that were in play on a worker that was lost; they are played again."""

    def begin(self, row: Mapping[str, float]) -> None:
        """Go on from the metrics of the last step that a resumed run has kept, where those are higher."""
        for name, count in self.counts().items():
            setattr(self, name, max(count, int(row.get(f"{PREFIX}{name}") or 0)))

    def count(self, name: str) -> None:
        """Add 1 to the count of that name."""
        setattr(self, name, getattr(self, name) + 1)

    def counts(self) -> dict[str, int]:
        """Return all counts by name, those that are 0 too."""
        return asdict(self)
