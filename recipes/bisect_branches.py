"""Bisect with credit by branches: each turn is compared with what other ways from the state before it came to."""

from dataclasses import dataclass, field

import agentgym as ag
from agentgym.samples import AdvantageLevel
from recipes.bisect_grpo import BisectGRPO


@dataclass(frozen=True, kw_only=True)
class BisectBranches(BisectGRPO):
    """Find a secret in four guesses; behind each turn one branch is played, and half as many rollouts."""

    recipe: str = "bisect_branches"
    group_size: int = 4
    advantage_level: AdvantageLevel = "branches"
    branching: ag.Branching = field(default_factory=lambda: ag.Branching(per_state=1))


if __name__ == "__main__":
    ag.main(BisectBranches)
