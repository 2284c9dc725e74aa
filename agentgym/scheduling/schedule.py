"""What is played: how many groups of how many rollouts, from which seed, and what is started beyond them."""

from dataclasses import dataclass, field

from agentgym.config_fields import require_instance
from agentgym.scheduling.oversampling import OversampleConfig
from agentgym.types.branching import BranchingConfig
from agentgym.types.completion import Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Says what every process of a run plays, batch after batch."""

    group_size: int
    """Scored rollouts in a group."""
    prompts_per_step: int = 8
    """Groups in a batch, of all processes together."""
    oversample: OversampleConfig = field(default_factory=OversampleConfig)
    """What is started beyond that, and what becomes of it."""
    max_staleness: int = 0
    """The most policy versions that a group's oldest token may be behind; above 0, later batches are played while one
    is trained on."""
    rest_epochs: int = 0
    """How often a task is passed over after all its rollouts had the same reward."""
    solved: float = 1.0
    """The least reward that solves a task, where resting tasks are counted."""
    seed: int = 0
    """What the order of tasks and the seeds of all groups are derived from."""
    same_instance: bool = True
    """Whether the rollouts of a group share the seed that their env gets; in an evaluation each has its own."""
    by_turn: bool = False
    """Whether each turn is credited with what came after it: then turns may differ where totals are equal."""
    branching: BranchingConfig | None = None
    """The branches that are played from states of each rollout; None for none."""
    sampling: Sampling | None = None
    """How tokens are sampled; None: as the `Collector` says, or by the defaults of `Sampling`."""
    concurrency: int | None = None
    """Rollouts that one process plays at once; None: as the `Collector` says, or 64."""

    def __post_init__(self) -> None:
        for name in ("group_size", "prompts_per_step", "concurrency"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name}: must be at least 1, got {value}")
        if self.branching is not None:
            require_instance("branching", self.branching, BranchingConfig)
        self.oversample.fits(group_size=self.group_size, max_staleness=self.max_staleness)

    @property
    def rollouts(self) -> int:
        """How many rollouts are started in a group."""
        return self.group_size + self.oversample.extra_rollouts

    @property
    def by_id(self) -> bool:
        """Whether a task belongs to one process alone, as one may play more for a batch than its share of that."""
        return self.max_staleness > 0 or self.rest_epochs > 0 or self.oversample.crosses_batches
