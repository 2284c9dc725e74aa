"""GRPO on chase_long: chains several contexts long, carried by the model's own summaries.

Chains have up to 12 keys, and a context holds three.
"""

from dataclasses import replace

import agentgym as ag
import envs.chase_long.env  # noqa: F401  registers the env
from recipes.base import CHECKPOINTS, TINY, TRAIN

RECIPE = replace(
    TINY,
    recipe="chase_long",
    env="chase_long",
    model=CHECKPOINTS / "chase_compaction",
    max_steps=45,
    # The constant lies between what 64 rollouts sample at first and at last.
    train=replace(TRAIN, decay_steps=40, loss_agg=3000.0),
)


if __name__ == "__main__":
    ag.main(RECIPE)
