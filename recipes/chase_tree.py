"""GRPO on chase_tree: branches of one conversation, one reward for all of them."""

from dataclasses import dataclass, replace

import agentgym as ag
import envs.chase_tree.env  # noqa: F401  registers the env
from recipes.base import TRAIN, TinyGRPO


@dataclass(frozen=True, kw_only=True)
class ChaseTreeGRPO(TinyGRPO):
    """Fork where the store forks, from a base that never saw a fork."""

    recipe: str = "chase_tree"
    env: str = "chase_tree"
    train: ag.TrainConfig = replace(TRAIN, decay_steps=23, normalise=3000.0)


if __name__ == "__main__":
    ag.main(ChaseTreeGRPO)
