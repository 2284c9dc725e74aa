"""What is played: how many groups of how many rollouts, from which seed, and what is started beyond them."""

from agentgym.config_fields import Count, Positive, Seed, config
from agentgym.scheduling.oversampling import OversampleConfig
from agentgym.types.branching import BranchingConfig
from agentgym.types.completion import Sampling


@config(frozen=True, kw_only=True)
class Schedule:
    """Says what every process of a run plays, batch after batch."""

    group_size: Positive
    """Scored rollouts in a group."""
    prompts_per_step: Positive = 8
    """Groups in a batch, of all processes together."""
    oversample: OversampleConfig = OversampleConfig()
    """What is started beyond that, and what becomes of it."""
    max_staleness: Count = 0
    """The most policy versions that a group's oldest token may be behind; above 0, later batches are played while one
    is trained on."""
    rest_epochs: Count = 0
    """How often a task is passed over after all its rollouts had the same reward."""
    solved: float = 1.0
    """The least reward that solves a task, where resting tasks are counted."""
    seed: Seed = 0
    """What the order of tasks and the seeds of all groups are derived from."""
    same_instance: bool = True
    """Whether the rollouts of a group share the seed that their env gets; in an evaluation each has its own."""
    by_turn: bool = False
    """Whether each turn is credited with what came after it: then turns may differ where totals are equal."""
    branching: BranchingConfig | None = None
    """The branches that are played from states of each rollout; None for none."""
    sampling: Sampling | None = None
    """How tokens are sampled; None: as the `Collector` says, or by the defaults of `Sampling`."""
    concurrency: Positive | None = None
    """Rollouts that one process plays at once; None: as the `Collector` says, or 64."""

    def __post_init__(self) -> None:
        self.oversample.fits(group_size=self.group_size, max_staleness=self.max_staleness)

    @property
    def rollouts(self) -> int:
        """How many rollouts are started in a group."""
        return self.group_size + self.oversample.extra_rollouts

    @property
    def by_id(self) -> bool:
        """Whether a task belongs to one process alone, as one may play more for a batch than its share of that."""
        return self.max_staleness > 0 or self.rest_epochs > 0 or self.oversample.crosses_batches
