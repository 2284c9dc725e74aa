"""The ends of rollouts: the reasons, and those of the branches that were played from one of their states."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from agentgym.errors import Failure
from agentgym.frozen import require


class StopReason(StrEnum):
    """The reasons for which rollouts end; a tool that returns `Stop("word")` adds its own word."""

    ANSWER = "answer"
    DONE = "done"
    TURNS = "turns"
    SECONDS = "seconds"
    TOKENS = "tokens"
    CONTEXT = "context"
    LENGTH = "length"
    ERROR = "error"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class RolloutBranch:
    """The end of one branch: the rollout played on from one of its states, beside the way that it went itself."""

    turn: int
    """The number of turns of the rollout that were sampled before the state; its first own turn has this number."""
    reward: float | None
    """The reward of the whole way, what the rollout had in the state included; None where the branch failed."""
    stop_reason: str
    rewards: Mapping[str, float] = field(default_factory=dict)
    """The rewards by name, without their weights."""
    role_rewards: Mapping[str, float] = field(default_factory=dict)
    """The rewards of the roles that have one of their own."""
    failure: Failure | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    """The env's numbers at its end, and what the branch used: its own `turns`, `tokens` and `seconds`."""

    def __post_init__(self) -> None:
        require(self.turn > 0, f"turn: a branch begins after a turn, got {self.turn}")
        require(bool(self.stop_reason), "stop_reason: empty")
        require((self.reward is None) == (self.failure is not None), "reward: None exactly when failure says why")
        require(self.reward is None or math.isfinite(self.reward), f"reward: {self.reward} is not finite")

    def __repr__(self) -> str:
        return f"<RolloutBranch {self}>"

    def __str__(self) -> str:
        worth = "failed" if self.reward is None else f"reward {self.reward:g}"
        return f"from turn {self.turn}, {worth}, stopped by {self.stop_reason}"

    def reward_of(self, role: str) -> float | None:
        """Return the reward of a role, "" for the branch's own; None where it has none."""
        return self.reward if self.reward is None or not role else self.role_rewards.get(role)


def require_roles(played: Iterable[str], rewards: Mapping[str, float], where: str) -> None:
    """Raise ValueError where a role's reward has no name or is not finite, or a role with turns to train has none."""
    for role, value in rewards.items():
        require(bool(role) and math.isfinite(value), f"{where}: {role!r} is {value}; name it, and be finite")
    without = sorted(set(filter(None, played)) - rewards.keys())
    require(not without, f"{where}: none of {', '.join(without)}, whose turns are to be trained")
