"""`ag.compare`: two evaluations beside each other, task by task."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from agentgym.data.content import same_fields
from agentgym.errors import AgentGymError
from agentgym.evals.evaluation import Evaluation, mean_reward
from agentgym.evals.kept import PHASE
from agentgym.evals.statistics import Interval, interval_over_tasks, sign_flip_p
from agentgym.store.reader import RolloutStore


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Holds the mean rewards of the tasks that two evaluations have in common, and says whether they differ."""

    rewards: Mapping[str, tuple[float, float]]
    """The mean reward of each task in the one and in the other, by its id."""
    left_out: int = 0
    """Tasks that have a scored rollout in one of the two alone."""

    def __repr__(self) -> str:
        one, other = self.means
        return (
            f"Comparison(tasks={len(self.rewards)}, reward={one:.4g} and {other:.4g}, "
            f"difference={self.difference:.4g} {self.interval}, p={self.p:.3g})"
        )

    @property
    def means(self) -> tuple[float, float]:
        """The mean over tasks of the one and of the other; each task counts alike."""
        pairs = np.array(list(self.rewards.values()))
        return float(pairs[:, 0].mean()), float(pairs[:, 1].mean())

    @property
    def differences(self) -> dict[str, float]:
        """How much more each task earned in the other than in the one."""
        return {name: other - one for name, (one, other) in self.rewards.items()}

    @property
    def difference(self) -> float:
        """The mean of `differences`."""
        return float(np.mean(list(self.differences.values())))

    @property
    def interval(self) -> Interval:
        """The 95 % bootstrap interval of `difference`, over tasks."""
        return interval_over_tasks(list(self.differences.values()))

    @property
    def p(self) -> float:
        """The two-sided p-value of the paired sign-flip test."""
        return sign_flip_p(list(self.differences.values()))


def compare(one: Evaluation | str | Path, other: Evaluation | str | Path) -> Comparison:
    """Compare two evaluations, or the folders that they were kept in, on the tasks that both have.

    Of a task that both folders hold, the fields must be the same. Raises ValueError where they are not, or where no
    task has a scored rollout in both; AgentGymError for a folder without an evaluation.
    """
    first, second = _Side.of(one), _Side.of(other)
    both = [name for name in first.rewards if name in second.rewards]
    if not both:
        raise ValueError("other: no task has a scored rollout in both evaluations")
    changed = [name for name in both if first.differs(second, name)]
    if changed:
        raise ValueError(f"other: task {changed[0]!r} is another one than in the first evaluation; play the same tasks")
    left_out = len(first.rewards.keys() ^ second.rewards.keys())
    return Comparison(rewards={n: (first.rewards[n], second.rewards[n]) for n in both}, left_out=left_out)


@dataclass(frozen=True, slots=True)
class _Side:
    """One of two evaluations: the mean reward of each task, and the tasks' fields where they are known."""

    rewards: Mapping[str, float]
    tasks: Mapping[str, Any]

    @classmethod
    def of(cls, given: Evaluation | str | Path) -> "_Side":
        if isinstance(given, Evaluation):
            return cls({g.group_id: mean_reward(g) for g in given.groups if g.scored}, {})
        return _read(Path(given))

    def differs(self, other: "_Side", name: str) -> bool:
        """Whether both know the task, and not as the same."""
        one, two = self.tasks.get(name), other.tasks.get(name)
        return one is not None and two is not None and not same_fields(one, two)


def _read(folder: Path) -> _Side:
    try:
        with RolloutStore(folder) as store:
            found: dict[str, dict[str, float | None]] = {}
            for row in store.summaries(phase=PHASE, order="written"):
                found.setdefault(row.group_id, {})[row.rollout_id] = row.reward  # of two with one id the later
            tasks = {name: task for name in found if (task := store.task(name)) is not None}
    except (FileNotFoundError, ValueError) as error:
        raise AgentGymError(f"run: {error}") from error
    if not found:
        raise AgentGymError(f"run: {folder} holds no evaluation; name the folder of one")
    scored = {name: [r for r in of.values() if r is not None] for name, of in found.items()}
    return _Side({name: _mean(of) for name, of in scored.items() if of}, tasks)


def _mean(rewards: Sequence[float]) -> float:
    return float(np.mean(rewards))
