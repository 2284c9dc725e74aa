"""GRPO on chase with a memory of two calls: the model must write summaries that it can go on from.

The summaries are sampled and trained like every other turn, by the one reward at the end.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import agentgym as ag
import envs.chase.env  # noqa: F401  registers the env
from recipes.base import CHECKPOINTS, TRAIN, TinyGRPO


@dataclass(frozen=True, kw_only=True)
class ChaseCompactionGRPO(TinyGRPO):
    """Follow pointers and summarise, from a base that mostly guesses and often summarises wrongly."""

    recipe: str = "chase_compaction"
    env: str = "chase_compaction"
    model: Path | str = CHECKPOINTS / "chase_compaction"
    train: ag.TrainConfig = replace(TRAIN, normalise=2500.0)


if __name__ == "__main__":
    ag.main(ChaseCompactionGRPO)
