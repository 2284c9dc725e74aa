"""GRPO on chase_tree: branches of one conversation, with one reward for all of them."""

from dataclasses import replace

import agentgym as ag
import envs.chase_tree.env  # noqa: F401  registers the env
from recipes.base import TINY, TRAIN

RECIPE = replace(
    TINY,
    recipe="chase_tree",
    env="chase_tree",
    train=replace(TRAIN, decay_steps=23, loss_agg=3000.0),
)


if __name__ == "__main__":
    ag.main(RECIPE)
