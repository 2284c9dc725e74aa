"""GRPO on chase_long: chains that are several contexts long, continued through the model's own summaries.

Chains have up to 12 keys, and three fit in a context.
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
    # The constant is between the numbers of tokens that 64 rollouts sample at the start and at the end.
    train=replace(TRAIN, decay_steps=40, loss_agg=3000.0),
)


if __name__ == "__main__":
    ag.main(RECIPE)
