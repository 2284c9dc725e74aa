"""Bisect with credit by turn: a malformed call is charged to the turn that made it, not to all of its rollout."""

from dataclasses import dataclass

import agentgym as ag
from agentgym.samples import AdvantageLevel
from recipes.bisect_grpo import BisectGRPO


@dataclass(frozen=True, kw_only=True)
class BisectTurns(BisectGRPO):
    """Find a secret in four guesses; each turn is trained with what came after it."""

    recipe: str = "bisect_turns"
    env: str = "bisect_turns"
    advantage_level: AdvantageLevel = "turn"


if __name__ == "__main__":
    ag.main(BisectTurns)
