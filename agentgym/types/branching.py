"""The settings of branches: from which states of a rollout they are played, and how many."""

from dataclasses import fields
from typing import Any, Literal, Self, TypeAlias

from agentgym.config_fields import Positive, config
from agentgym.types.arrays import require

BranchAfter: TypeAlias = Literal["turn", "tool_error", "unlikely_turn", "learned_turn"]
FIRST_EXPLORED = 1 / 8
"""The chance of each state before anything was learned of where branches pay."""


@config(frozen=True, kw_only=True)
class Branching:
    """Says from which states of a rollout branches are played; each is known before its next turn is sampled."""

    per_state: Positive = 2
    """Branches from each chosen state."""
    every: Positive = 1
    """Choose every k-th of the states that `after` names."""
    after: BranchAfter = "turn"
    """turn: the states behind the turns of the rollout's own conversation; tool_error: those behind a call that failed;
    unlikely_turn: those behind a turn whose tokens were less likely than those of the turns before it, on average;
    learned_turn: the state behind the number of turns where, by earlier batches, branches take most noise from the
    gradient for their tokens, and a few drawn at random, from which that is learned."""
    tokens: Positive | None = None
    """Choose no further state of a rollout once its branches have sampled so many tokens; None: always choose."""
    train: bool = True
    """Whether the branches are trained on, too; without it they only estimate."""

    def __post_init__(self) -> None:
        if self.after == "learned_turn":
            require(self.tokens is not None, "tokens: learned_turn chooses what a budget is spent on; set it")
            require(
                self.every == 1,
                f"every: learned_turn chooses the numbers of turns itself; leave it at 1, got {self.every}",
            )


@config(frozen=True, kw_only=True)
class PlannedBranching(Branching):
    """Says for after="learned_turn" what earlier batches have taught; the rollouts of a batch have one plan."""

    turn: int = 0
    """The number of turns behind which the state is always chosen; 0 where it pays behind none."""
    explored: float = FIRST_EXPLORED
    """The chance of each other state."""
    signal: float = 1.0
    """The signal of the gradient that branches behind `turn` are expected to give, at equal tokens, without them 1."""

    @classmethod
    def of(cls, branching: Branching, **plan: Any) -> Self:
        """Return these settings with a plan; without one, they explore."""
        return cls(**{each.name: getattr(branching, each.name) for each in fields(Branching)}, **plan)
