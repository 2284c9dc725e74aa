"""GRPO on bisect_long: up to 20 guesses, each with a cost, from a base that mostly guesses blindly."""

from dataclasses import replace

import agentgym as ag
from recipes import bisect_grpo
from recipes.base import TRAIN

RECIPE = replace(
    bisect_grpo.RECIPE,
    recipe="bisect_long",
    env="bisect_long",
    train=replace(TRAIN, decay_steps=45, loss_agg=4000.0),
)


if __name__ == "__main__":
    ag.main(RECIPE)
