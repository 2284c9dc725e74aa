"""GRPO on bisect: a tiny model learns to halve what is left, from a base that mostly guesses blindly."""

from dataclasses import dataclass, replace
from pathlib import Path

import agentgym as ag
import envs.bisect.env  # noqa: F401  registers the env
from recipes.base import CHECKPOINTS, TRAIN, TinyGRPO


@dataclass(frozen=True, kw_only=True)
class BisectGRPO(TinyGRPO):
    """Find a secret in four guesses, asked from Python."""

    recipe: str = "bisect_grpo"
    env: str = "bisect"
    model: Path | str = CHECKPOINTS / "bisect"
    steps: int = 50
    train: ag.TrainConfig = replace(TRAIN, decay_steps=45, normalise=2500.0)


if __name__ == "__main__":
    ag.main(BisectGRPO)
