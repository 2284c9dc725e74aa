"""The result of an evaluation: its rollouts and their scores."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from agentgym.evals.statistics import Interval, interval_over_tasks, pass_at_k, pass_hat_k
from agentgym.scheduling.accounting import Groups
from agentgym.store.tool_counts import FailureCounts
from agentgym.types.env_version import EnvVersion
from agentgym.types.rollout import Group, Rollout

_COUNTS = (
    "prompt_tokens",
    "cached_tokens",
    "completion_tokens",
    "requests",
    "uncounted_requests",
    "unread_parts",
    "sent_again",
    "cost",
)
COUNTED = tuple(f"usage/{name}" for name in _COUNTS)
"""The metrics of a rollout that store an endpoint's usage counts."""
_OF_ROLES = ("model_cost/", "model_sent_again/")
CALLS = ("tool_calls", "tool_errors", "malformed_calls", "retries")
"""The metrics of a rollout that count its tool calls and its retries."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Evaluation:
    """The rollouts of an evaluation, and its scores. Failed rollouts have no reward and are counted separately."""

    groups: Groups
    k: int
    """Number of rollouts started per task."""
    envs: Mapping[str, EnvVersion] = field(default_factory=dict)
    """The version of the env, or of each member of a mixture, by name."""
    seed: int | None = None
    """Seed of the sampling and of the env's random draws; None if unknown."""
    solved: float = 1.0
    """Minimum reward of an attempt that solves its task."""
    resumed: int | None = None
    """Number of rollouts that the folder already contained and that weren't run again; None without `resume`."""
    not_kept: int = 0
    """Number of rollouts that couldn't be written to `output_dir`, for example because the disk is full; `resume`
    runs them again.
    """

    def __repr__(self) -> str:
        return f"Evaluation(reward={self.reward}, tasks={len(self.groups)}, k={self.k}, failed={self.failed})"

    @property
    def rollouts(self) -> list[Rollout]:
        """All rollouts, task by task, including failed ones."""
        return self.groups.rollouts

    @property
    def rewards(self) -> dict[str, tuple[float | None, ...]]:
        """The rewards of each task by its id; None for a failed rollout."""
        return {group.group_id: tuple(r.reward for r in group.rollouts) for group in self.groups}

    @property
    def reward(self) -> float:
        """The mean over the rollouts that have a reward; nan if none has."""
        scored = [r.reward for r in self.rollouts if r.reward is not None]
        return float(np.mean(scored)) if scored else float("nan")

    @property
    def failed(self) -> int:
        """Number of rollouts without a reward."""
        return sum(r.reward is None for r in self.rollouts)

    @property
    def failures(self) -> list[tuple[str, int]]:
        """The kinds of failures and how often each occurred, most frequent first.

        Failures of the same type at the same place in the code are one kind, even if their messages differ; the first
        message represents the kind.
        """
        counts = FailureCounts()
        counts.add(self.rollouts)
        return counts.most_common()

    def metrics(self) -> dict[str, float]:
        """Return the scores under the names that they have in logs."""
        passes = {f"eval/pass@{k}": self.pass_at(k) for k in sorted({1, self.k})}
        counts = {"eval/rollouts": float(len(self.rollouts)), "eval/failed": float(self.failed)}
        named = {f"eval/reward/{name}": value for name, value in self.named_rewards().items()}
        return {"eval/reward": round(self.reward, 4), **named, **passes, **counts}

    def named_rewards(self) -> dict[str, float]:
        """Return the mean of each named reward, before weighting, over the scored rollouts that have it."""
        means = self.groups.metrics()
        return {name.removeprefix("reward/"): of for name, of in means.items() if name.startswith("reward/")}

    def calls(self) -> dict[str, float]:
        """Return the mean number of tool calls, errors, malformed calls and retries per scored rollout."""
        means = self.groups.metrics()
        return {name: means.get(f"rollout/{name}", 0.0) for name in CALLS}

    def ids_solved(self, least: float, most: float, *, solved: float | None = None) -> list[str]:
        """Return the ids of the tasks whose share of solved rollouts is between `least` and `most`, inclusive.

        Only scored rollouts count, and tasks without any are left out. If the ids are written to a file, one per line,
        the file can be a run's `tasks_from`.

        Args:
            least: The smallest share, from 0 to 1.
            most: The largest share, from 0 to 1.
            solved: Minimum reward that solves a task; None uses the evaluation's.

        Raises:
            ValueError: If the shares aren't from 0 to 1, or `least` is greater than `most`.
        """
        if not 0 <= least <= most <= 1:
            raise ValueError(f"least, most: must be shares from 0 to 1, the smaller one first, got {least} and {most}")
        counts = {group.group_id: (self.solved_in(group, solved), len(group.scored)) for group in self.groups}
        shares = {name: count / scored for name, (count, scored) in counts.items() if scored}
        return [name for name, share in shares.items() if least <= share <= most]

    def pass_at(self, k: int, *, solved: float | None = None) -> float:
        """Estimate the probability, averaged over tasks, that at least one of `k` attempts solves the task.

        The estimate is unbiased; see `pass_at_k` for the formula (Chen et al., 2021). Tasks with fewer than k scored
        rollouts are left out.

        Args:
            k: Number of attempts, from 1 to the evaluation's `k`.
            solved: Minimum reward that solves a task; None uses the evaluation's.

        Returns:
            The estimate; nan if all tasks are left out.

        Raises:
            ValueError: If `k` is out of range.
        """
        return _mean(self._chances(pass_at_k, k, solved))

    def pass_hat(self, k: int, *, solved: float | None = None) -> float:
        """Estimate the probability, averaged over tasks, that all of `k` attempts solve the task.

        The estimate is unbiased; see `pass_hat_k` for the formula (tau-bench, 2024). Tasks with fewer than k scored
        rollouts are left out.

        Args:
            k: Number of attempts, from 1 to the evaluation's `k`.
            solved: Minimum reward that solves a task; None uses the evaluation's.

        Returns:
            The estimate; nan if all tasks are left out.

        Raises:
            ValueError: If `k` is out of range.
        """
        return _mean(self._chances(pass_hat_k, k, solved))

    def interval(self) -> Interval:
        """Return the 95 % interval of `reward`, over tasks.

        Rewards are assumed to be between 0 and 1; observed rewards outside widen that range.
        """
        means = [mean_reward(group) for group in self.groups if group.scored]
        rewards = [r.reward for r in self.rollouts if r.reward is not None]
        attempts = [len(group.scored) for group in self.groups if group.scored]
        return interval_over_tasks(means, attempts, least=min([0.0, *rewards]), most=max([1.0, *rewards]))

    def pass_at_interval(self, k: int, *, solved: float | None = None) -> Interval:
        """Return the 95 % interval of `pass_at`, over tasks.

        Args:
            k: Number of attempts, from 1 to the evaluation's `k`.
            solved: Minimum reward that solves a task; None uses the evaluation's.

        Raises:
            ValueError: If `k` is out of range.
        """
        return interval_over_tasks(self._chances(pass_at_k, k, solved))

    def pass_hat_interval(self, k: int, *, solved: float | None = None) -> Interval:
        """Return the 95 % interval of `pass_hat`, over tasks.

        Args:
            k: Number of attempts, from 1 to the evaluation's `k`.
            solved: Minimum reward that solves a task; None uses the evaluation's.

        Raises:
            ValueError: If `k` is out of range.
        """
        return interval_over_tasks(self._chances(pass_hat_k, k, solved))

    def account(self) -> dict[str, float]:
        """Return the sampled tokens of all rollouts, and an endpoint's counts of tokens, requests and cost.

        `cost` is the policy's cost, and `model_cost/NAME` that of a judge or another model role. `sent_again` and
        `model_sent_again/NAME` count the requests that were sent again after a failure, except those that a time limit
        then cut off. Attempts that the env's retries replaced aren't included.
        """
        counted = {
            name.removeprefix("usage/"): sum(r.metrics.get(name, 0.0) for r in self.rollouts) for name in COUNTED
        }
        sampled = {"sampled_tokens": float(sum(r.sampled_tokens for r in self.rollouts))}
        models = Counter[str]()
        for rollout in self.rollouts:
            models.update({name: count for name, count in rollout.metrics.items() if name.startswith(_OF_ROLES)})
        return sampled | {name: total for name, total in (counted | dict(models)).items() if total}

    def solved_in(self, group: Group, solved: float | None = None) -> int:
        """Return the number of a task's scored rollouts that solve it.

        Args:
            group: The task's rollouts.
            solved: Minimum reward that solves a task; None uses the evaluation's.
        """
        least = self.solved if solved is None else solved
        return sum(r.reward is not None and r.reward >= least for r in group.scored)

    def _chances(self, estimate: Callable[[int, int, int], float], k: int, solved: float | None) -> list[float]:
        """Return the estimate, such as pass@k, for each task that has at least `k` scored rollouts."""
        if not 1 <= k <= self.k:
            raise ValueError(f"k: must be from 1 to {self.k}, the number of rollouts per task, got {k}")
        counts = [(len(group.scored), self.solved_in(group, solved)) for group in self.groups]
        return [estimate(n, c, k) for n, c in counts if n >= k]


def mean_reward(group: Group) -> float:
    """Return the mean reward of a task's scored rollouts; nan if there are none."""
    return _mean([r.reward for r in group.scored if r.reward is not None])


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else float("nan")
