"""The settings of branches: from which states of a rollout they are run, and how many."""

from typing import Literal, TypeAlias

from agentgym.config_fields import Positive, config

BranchAfter: TypeAlias = Literal["turn", "tool_error", "unlikely_turn"]


@config(frozen=True, kw_only=True)
class BranchingConfig:
    """Selects the states of a rollout from which branches are run; each is selected before its next turn is sampled."""

    per_state: Positive = 2
    """Number of branches from each selected state."""
    every: Positive = 1
    """Select every n-th of the states that `after` names, where n is this number; 1 selects all of them."""
    after: BranchAfter = "turn"
    """turn: the states after turns of the rollout's main conversation. tool_error: the states after a failed call.
    unlikely_turn: the states after a turn whose tokens were less likely, on average, than those of the turns before
    it.
    """
    tokens: Positive | None = None
    """Select no more states of a rollout once its branches have sampled this many tokens; None means no limit."""
    train: bool = True
    """Whether the branches are also used for training; otherwise they only estimate values."""
