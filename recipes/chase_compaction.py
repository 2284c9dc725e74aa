"""GRPO on chase with a memory of two calls: the model must write summaries from which it can continue.

The summaries are sampled and trained like every other turn, by the one reward at the end. The base mostly
guesses, and often summarizes wrongly.
"""

from dataclasses import replace

import agentgym as ag
import envs.chase.env  # noqa: F401  registers the env
from recipes.base import CHECKPOINTS, TINY, TRAIN

RECIPE = replace(
    TINY,
    recipe="chase_compaction",
    env="chase_compaction",
    model=CHECKPOINTS / "chase_compaction",
    train=replace(TRAIN, loss_agg=2500.0),
)


if __name__ == "__main__":
    ag.main(RECIPE)
