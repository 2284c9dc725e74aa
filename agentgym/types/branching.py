"""The settings of branches: from which states of a rollout they are played, and how many."""

from typing import Literal, TypeAlias

from agentgym.config_fields import Positive, config

BranchAfter: TypeAlias = Literal["turn", "tool_error", "unlikely_turn"]


@config(frozen=True, kw_only=True)
class BranchingConfig:
    """Says from which states of a rollout branches are played; each is known before its next turn is sampled."""

    per_state: Positive = 2
    """Branches from each chosen state."""
    every: Positive = 1
    """Choose every k-th of the states that `after` names."""
    after: BranchAfter = "turn"
    """turn: the states behind the turns of the rollout's own conversation; tool_error: those behind a call that failed;
    unlikely_turn: those behind a turn whose tokens were less likely than those of the turns before it, on average."""
    tokens: Positive | None = None
    """Choose no further state of a rollout once its branches have sampled so many tokens; None: always choose."""
    train: bool = True
    """Whether the branches are trained on, too; without it they only estimate."""
