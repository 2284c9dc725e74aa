"""GRPO on bisect: a tiny model learns to halve the remaining range, from a base that mostly guesses blindly.

The model finds a secret in four guesses, which it makes from Python.
"""

from dataclasses import replace

import agentgym as ag
import envs.bisect.env  # noqa: F401  registers the env
from recipes.base import CHECKPOINTS, TINY, TRAIN

RECIPE = replace(
    TINY,
    recipe="bisect_grpo",
    env="bisect",
    model=CHECKPOINTS / "bisect",
    max_steps=50,
    train=replace(TRAIN, decay_steps=45, loss_agg=2500.0),
)


if __name__ == "__main__":
    ag.main(RECIPE)
