"""Counts rewards that raised an error or became 0.0, by reward and line, and reports them if they are frequent."""

from collections import Counter
from collections.abc import Iterator, Sequence

from agentgym.environments.rewards import ZERO
from agentgym.errors import EnvError
from agentgym.scheduling.group_rewards import NAME
from agentgym.types.rollout import Rollout
from agentgym.types.transcript import printable

SHARE = 0.01
"""The share of rollouts above which failing rewards are reported."""


class RewardFailures:
    """Counts rewards that raised or returned no number, and rewards that are 0.0 because of content from the policy."""

    def __init__(self) -> None:
        self.rollouts = 0
        self._raised: Counter[str] = Counter()
        self._zero: Counter[str] = Counter()
        self._said = {"raised": 0, "zero": 0}
        """The counts at the last report."""

    def add(self, rollouts: Sequence[Rollout]) -> list[str]:
        """Count ended rollouts, and return the messages that are due now.

        A message is due once it concerns more than 1 % of the rollouts, and again each time its count has doubled. Each
        message names the reward and the line that it concerns most often.
        """
        self.rollouts += len(rollouts)
        for rollout in rollouts:
            if (line := _line_of_failure(rollout)) is not None:
                self._raised[line] += 1
            if (zero := next(_lines_of_zeros(rollout), None)) is not None:
                self._zero[zero] += 1
        said = []
        if self._is_due("raised", self._raised):
            said.append(
                f"{self._count(self._raised)} have no reward because a reward raised an error or did not return a "
                f"number; {_most(self._raised)}. Score whatever the policy left behind; otherwise it learns to escape "
                "low rewards this way. `agentgym check` finds such lines, where the reward should return 0.0."
            )
        if self._is_due("zero", self._zero):
            said.append(
                f"{self._count(self._zero)} have a reward of 0.0 because of content that the policy wrote or left in "
                f"its sandbox; {_most(self._zero)}."
            )
        return said

    def _is_due(self, kind: str, counts: Counter[str]) -> bool:
        count = counts.total()
        if count <= SHARE * self.rollouts or count < 2 * self._said[kind]:
            return False
        self._said[kind] = count
        return count > 0

    def _count(self, counts: Counter[str]) -> str:
        share = 100 * counts.total() / self.rollouts
        return f"{counts.total()} of {self.rollouts} rollouts ({share:.1f} %)"


def _line_of_failure(rollout: Rollout) -> str | None:
    """Return the name and line of the reward that failed in a rollout, or None if no reward failed in it."""
    failure = rollout.failure
    if failure is None or failure.type != EnvError.__name__:
        return None
    named = failure.where.endswith((".score", f".{NAME}")) or ": reward " in failure.where
    if not named:
        return None
    place = failure.message.partition("; ")[0].rpartition(", at ")[2] if ", at " in failure.message else ""
    return f"{failure.where}, at {place}" if place else failure.where


def _lines_of_zeros(rollout: Rollout) -> Iterator[str]:
    """Yield each reward of a rollout that is 0.0 because of content from the policy, and the line that detected it."""
    for name, why in rollout.failed_cases.items():
        if why.startswith(ZERO):
            yield f"{name}, at {why.rpartition(', at ')[2]}"


def _most(counts: Counter[str]) -> str:
    (line, times) = counts.most_common(1)[0]
    return f"most often ({times} times) it was {printable(line)}"
