"""`ag.compare`: a comparison of two evaluations, task by task."""

from collections.abc import Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from agentgym.data.content import same_fields, task_fields
from agentgym.errors import AgentGymError
from agentgym.evals.evaluation import Evaluation
from agentgym.evals.kept import PHASE
from agentgym.evals.statistics import Interval, interval_over_tasks, least_p, sign_flip_p
from agentgym.store.reader import RolloutStore
from agentgym.store.run_settings import begun_eval_seed
from agentgym.types.task import Task

BEFORE, AFTER = "before", "after"
"""The names of a run's evaluations before and after training."""
_EVALUATIONS = "SELECT DISTINCT phase, step FROM rollouts WHERE phase GLOB 'eval*' ORDER BY step, phase = 'eval_after'"
"""SQL for the phase and step of each evaluation. If two have the same step, the one after training comes last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The mean rewards of the tasks that two evaluations have in common, and statistics of their difference."""

    rewards: Mapping[str, tuple[float, float]]
    """Each task's mean reward in the first and in the second evaluation, by task id."""
    left_out: int = 0
    """Number of tasks that are left out because at most one side has a scored rollout of them."""
    attempts_left_out: int = 0
    """Number of scored attempts that are left out because the other side has fewer attempts at their task."""
    seeds: tuple[int | None, int | None] = (None, None)
    """The seeds of the first and the second evaluation; None if unknown."""
    sides: tuple[str, str] = ("", "")
    """The name of each side within its training run, such as "before training"; empty for a separate evaluation."""
    bounds: tuple[float, float] = (0.0, 1.0)
    """The smallest and largest possible reward, as far as known."""

    def __repr__(self) -> str:
        one, other = self.means
        return (
            f"Comparison(tasks={len(self.rewards)}, reward={one:.4g} and {other:.4g}, "
            f"difference={self.difference:.4g} {self.interval}, p={self.p:.3g}, {self.luck})"
        )

    @property
    def luck(self) -> str:
        """A description of the seeds. With the same seed, the env's random draws are the same in both evaluations."""
        one, other = ("unknown" if seed is None else str(seed) for seed in self.seeds)
        if one == other != "unknown":
            return f"seed {one} in both"
        return f"seeds {one} and {other}: tasks are paired, but random draws are not"

    @property
    def means(self) -> tuple[float, float]:
        """The mean rewards of the first and the second evaluation. Each task has the same weight."""
        pairs = np.array(list(self.rewards.values()))
        return float(pairs[:, 0].mean()), float(pairs[:, 1].mean())

    @property
    def differences(self) -> dict[str, float]:
        """Each task's mean reward in the second evaluation minus that in the first."""
        return {name: other - one for name, (one, other) in self.rewards.items()}

    @property
    def difference(self) -> float:
        """The mean of `differences`."""
        return float(np.mean(list(self.differences.values())))

    @property
    def interval(self) -> Interval:
        """The 95 % interval of `difference`, over tasks."""
        span = self.bounds[1] - self.bounds[0]
        return interval_over_tasks(list(self.differences.values()), least=-span, most=span)

    @property
    def p(self) -> float:
        """The two-sided p-value of the paired sign-flip test."""
        return sign_flip_p(list(self.differences.values()))

    @property
    def least_p(self) -> float:
        """The smallest p that these tasks could have: the p if all differing tasks differed in the same direction."""
        return least_p(list(self.differences.values()))


def compare(
    one: Evaluation | str | Path,
    other: Evaluation | str | Path,
    *,
    phase: str | Sequence[str] = AFTER,
    common: bool = False,
) -> Comparison:
    """Compare two evaluations, or the folders in which they are stored.

    The seeds may differ; `Comparison.luck` describes them.

    Args:
        one: The first evaluation, its folder, or a training run's folder.
        other: The second evaluation, in the same forms.
        phase: Which evaluation of a training run to use: `after` training, `before` it, or a number of steps; or two
            of these, for the first and the second.
        common: Whether to compare only the tasks that both have, instead of raising an error if their tasks differ.

    Returns:
        The mean rewards by task, their difference with its interval, and p.

    Raises:
        ValueError: If the tasks aren't the same, a task's fields differ, or no task has a scored rollout in both.
        AgentGymError: If a folder contains no such evaluation.
    """
    phases = (phase, phase) if isinstance(phase, str) else tuple(phase)
    if len(phases) not in (1, 2):
        raise ValueError(f"phase: expected one phase, or one for each evaluation, got {phase!r}")
    first, second = _Side.of("one", one, phases[0]), _Side.of("other", other, phases[-1])
    if not common:
        _refuse_other_tasks(first, second)
    both = [name for name in first.attempts if name in second.attempts]
    if not both:
        raise ValueError("other: no task has a scored rollout in both evaluations")
    changed = [name for name in both if first.differs(second, name)]
    if changed:
        raise ValueError(
            f"other: task {changed[0]!r} differs from the one in the first evaluation; evaluate the same tasks"
        )
    left_out = len(first.played ^ second.played) if common else 0
    left_out += len((first.played & second.played) - set(both))
    paired = {name: _as_many(first.attempts[name], second.attempts[name]) for name in both}
    rewards = {name: (float(np.mean(one)), float(np.mean(other))) for name, (one, other) in paired.items()}
    scored = sum(len(side.attempts[name]) for side in (first, second) for name in both)
    return Comparison(
        rewards=rewards,
        left_out=left_out,
        attempts_left_out=scored - sum(2 * len(one) for one, _ in paired.values()),
        seeds=(first.seed, second.seed),
        sides=(first.what, second.what),
        bounds=(min(first.bounds[0], second.bounds[0]), max(first.bounds[1], second.bounds[1])),
    )


def _as_many(one: Mapping[int, float], other: Mapping[int, float]) -> tuple[list[float], list[float]]:
    """Return the rewards of equally many attempts from each side, preferring attempt numbers that both have.

    A mean over more attempts varies less. With unequal numbers of attempts, the differences between two equal
    models wouldn't be symmetric around 0, as the sign-flip test assumes.
    """
    shared = [number for number in one if number in other]
    many = min(len(one), len(other))
    numbers = [[*shared, *(number for number in side if number not in shared)][:many] for side in (one, other)]
    return [one[number] for number in numbers[0]], [other[number] for number in numbers[1]]


def _refuse_other_tasks(first: "_Side", second: "_Side") -> None:
    """Raise ValueError if the two evaluations don't have the same tasks."""
    if not first.played ^ second.played or not first.played & second.played:
        return
    alone = [sorted(a - b) for a, b in ((first.played, second.played), (second.played, first.played))]
    named = ", ".join(repr(name) for name in [*alone[0][:1], *alone[1][:1]])
    raise ValueError(
        f"other: the evaluations have different tasks: {len(alone[0])} are only in the first and {len(alone[1])} only "
        f"in the second, such as {named}; evaluate the same tasks, or compare the "
        f"{len(first.played & second.played)} that both have with common=True (--common)"
    )


@dataclass(frozen=True, slots=True)
class _Side:
    """One of two evaluations: the rewards of each task, and the tasks' fields if known."""

    attempts: Mapping[str, Mapping[int, float]]
    """The rewards of each task's scored attempts, by attempt number. Tasks without scored attempts are omitted."""
    played: Set[str]
    """All evaluated tasks, including those without a scored rollout."""
    bounds: tuple[float, float]
    tasks: Mapping[str, Any] = field(default_factory=dict)
    seed: int | None = None
    what: str = ""

    @classmethod
    def of(cls, field: str, given: Evaluation | str | Path, phase: str) -> "_Side":
        """Return the side that an argument of `compare` gives; `field` is the argument's name, for messages."""
        if isinstance(given, Evaluation):
            tasks = {group.group_id: _fields(group.task) for group in given.groups if group.task is not None}
            numbered = {name: dict(enumerate(of)) for name, of in given.rewards.items()}
            return cls.holding(numbered, tasks=tasks, seed=given.seed)
        return _read(field, Path(given), phase)

    @classmethod
    def holding(cls, found: Mapping[str, Mapping[int, float | None]], **known: Any) -> "_Side":
        """Create a side from the reward of each attempt, which is None for a failed one.

        Args:
            found: The rewards by task id and attempt number.
            **known: Other fields of the side, such as `seed`.
        """
        scored = {name: {n: r for n, r in sorted(of.items()) if r is not None} for name, of in found.items()}
        rewards = [reward for of in scored.values() for reward in of.values()]
        attempts = {name: of for name, of in scored.items() if of}
        return cls(attempts, set(found), (min([0.0, *rewards]), max([1.0, *rewards])), **known)

    def differs(self, other: "_Side", name: str) -> bool:
        """Return whether both sides know the fields of this task and the fields differ."""
        one, two = self.tasks.get(name), other.tasks.get(name)
        return one is not None and two is not None and not same_fields(one, two)


def _fields(task: Task) -> Mapping[str, Any] | None:
    """Return a task's fields, or None if they can't be stored."""
    try:
        return task_fields(task)
    except ValueError:
        return None


def _read(field: str, folder: Path, phase: str) -> _Side:
    try:
        with RolloutStore(folder, one_read=True) as store:
            if not (held := store.query(_EVALUATIONS)):
                raise AgentGymError(f"{field}: {folder} contains no evaluation; pass the folder of one")
            of_phase, step, what = _chosen(folder, held, phase, trained="train" in store.phases())
            found: dict[str, dict[int, float | None]] = {}
            for row in store.summaries(phase=of_phase, step=step, order="written"):
                of = found.setdefault(row.group_id, {})
                of[_number(row.rollout_id, len(of))] = row.reward  # of two with the same number, the later one counts
            tasks = {name: task for name in found if (task := store.task(name)) is not None}
    except (FileNotFoundError, ValueError) as error:
        raise AgentGymError(f"{field}: {error}") from error
    return _Side.holding(found, tasks=tasks, seed=begun_eval_seed(folder), what=what)


def _number(rollout_id: str, otherwise: int) -> int:
    """Return an attempt's number from the end of its rollout's id, or `otherwise` if the id has another form."""
    last = rollout_id.rpartition("/")[2]
    return int(last) if last.isdecimal() and len(last) < 19 else otherwise


def _chosen(folder: Path, held: Sequence[tuple[str, int]], phase: str, *, trained: bool) -> tuple[str, int | None, str]:
    """Return the requested evaluation's phase, step and name; the name of a separate evaluation is "".

    Args:
        folder: The folder, for messages.
        held: The phase and step of each evaluation in the folder, at least one.
        phase: The requested one of a run's evaluations, as for `compare`.
        trained: Whether the folder has training rollouts.

    Raises:
        AgentGymError: If the folder contains no such evaluation.
    """
    if not trained and [of for of, _ in held] == [PHASE]:
        return PHASE, None, ""
    names = _by_name(held)
    if phase not in names:
        raise AgentGymError(
            f"phase: {folder} is a training run's folder and has no evaluation {phase!r}; it has {', '.join(names)}; "
            "choose one with phase= (--phase)"
        )
    of_phase, step = names[phase]
    return of_phase, step, f"{phase} training" if phase == BEFORE else f"after {step} steps of training"


def evaluations_in(folder: Path) -> dict[str, tuple[str, int]]:
    """Return the phase and step of each evaluation of a run by its names, or an empty dict if they can't be read."""
    with suppress(FileNotFoundError, ValueError), RolloutStore(folder, one_read=True) as store:
        return _by_name(store.query(_EVALUATIONS))
    return {}


def _by_name(held: Sequence[tuple[str, int]]) -> dict[str, tuple[str, int]]:
    """Return the phase and step of each evaluation of a run by the names by which it can be requested."""
    words = {"eval_before": [BEFORE], "eval_after": [AFTER]}
    return {name: (phase, step) for phase, step in held for name in (*words.get(phase, ()), str(step))}
