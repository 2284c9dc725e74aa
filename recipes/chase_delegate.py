"""GRPO on chase_delegate: the same policy is the root and the sub-agent, and one reward trains both."""

from dataclasses import replace

import agentgym as ag
import envs.chase_delegate.env  # noqa: F401  registers the env
from recipes.base import TINY, TRAIN

RECIPE = replace(
    TINY,
    recipe="chase_delegate",
    env="chase_delegate",
    train=replace(TRAIN, decay_steps=23, loss_agg=3000.0),
)


if __name__ == "__main__":
    ag.main(RECIPE)
