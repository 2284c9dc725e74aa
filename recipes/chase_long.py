"""GRPO on chase_long: chains several contexts long, carried by the model's own summaries."""

from dataclasses import dataclass, replace
from pathlib import Path

import agentgym as ag
import envs.chase_long.env  # noqa: F401  registers the env
from recipes.base import CHECKPOINTS, TRAIN, TinyGRPO


@dataclass(frozen=True, kw_only=True)
class ChaseLongGRPO(TinyGRPO):
    """Follow chains of up to 12 keys with a context for three, from a base that mostly guesses."""

    recipe: str = "chase_long"
    env: str = "chase_long"
    model: Path | str = CHECKPOINTS / "chase_compaction"
    steps: int = 45
    # The constant lies between what 64 rollouts sample at first and at last.
    train: ag.TrainConfig = replace(TRAIN, decay_steps=40, normalise=3000.0)


if __name__ == "__main__":
    ag.main(ChaseLongGRPO)
