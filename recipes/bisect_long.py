"""GRPO on bisect_long: up to 20 guesses, each of which costs, from a base that mostly guesses blindly."""

from dataclasses import dataclass, replace

import agentgym as ag
from recipes.base import TRAIN
from recipes.bisect_grpo import BisectGRPO


@dataclass(frozen=True, kw_only=True)
class BisectLongGRPO(BisectGRPO):
    """Find a secret in as few of 20 guesses as can be, asked from Python."""

    recipe: str = "bisect_long"
    env: str = "bisect_long"
    train: ag.TrainConfig = replace(TRAIN, decay_steps=45, normalise=4000.0)


if __name__ == "__main__":
    ag.main(BisectLongGRPO)
