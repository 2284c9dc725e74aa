"""The schedule of a run: the number and size of groups, the seed, and the oversampling."""

from agentgym.config_fields import Count, Positive, Seed, config
from agentgym.scheduling.oversampling import OversampleConfig
from agentgym.types.branching import BranchingConfig
from agentgym.types.completion import Sampling


@config(frozen=True, kw_only=True)
class Schedule:
    """The settings of a run's batches, which are the same in every process."""

    group_size: Positive
    """Number of scored rollouts in a group."""
    prompts_per_step: Positive = 8
    """Number of groups in a batch, over all processes."""
    oversample: OversampleConfig = OversampleConfig()
    """The number of extra rollouts, and what happens to them."""
    max_staleness: Count = 0
    """Maximum age, in policy versions, of a group's oldest token when the group is trained on.

    Above 0, later batches run while one is trained on.
    """
    rest_epochs: Count = 0
    """Number of times that a task is skipped after all its rollouts had the same reward."""
    solved: float = 1.0
    """The lowest reward that counts as solving a task.

    It is only used in metrics, which count the tasks that begin to rest as solved or unsolved.
    """
    seed: Seed = 0
    """The seed from which the order of tasks and the seeds of all groups are derived."""
    same_instance: bool = True
    """Whether the rollouts of a group share their env's seed; in an evaluation, each has a separate one."""
    by_turn: bool = False
    """Whether each turn is credited with the rewards after it; a group may then have a signal even if all of its
    rollouts have the same total reward.
    """
    branching: BranchingConfig | None = None
    """Settings of the branches that are run from states of each rollout; None runs no branches."""
    sampling: Sampling | None = None
    """The sampling settings; None uses those of the `Collector`, or the defaults of `Sampling`."""
    concurrency: Positive | None = None
    """Number of concurrent rollouts per process; None uses that of the `Collector`, or 64."""

    def __post_init__(self) -> None:
        self.oversample.fits(group_size=self.group_size, max_staleness=self.max_staleness)

    @property
    def rollouts(self) -> int:
        """Number of rollouts started in a group."""
        return self.group_size + self.oversample.extra_rollouts

    @property
    def by_id(self) -> bool:
        """Whether each task id is assigned to one process, as required if a process may exceed its share of a batch."""
        return self.max_staleness > 0 or self.rest_epochs > 0 or self.oversample.crosses_batches
