"""GRPO on chase_delegate: the same policy is root and sub-agent, and one reward trains both."""

from dataclasses import dataclass, replace

import agentgym as ag
import envs.chase_delegate.env  # noqa: F401  registers the env
from recipes.base import TRAIN, TinyGRPO


@dataclass(frozen=True, kw_only=True)
class ChaseDelegateGRPO(TinyGRPO):
    """Ask and be asked, from a base that never met a sub-agent."""

    recipe: str = "chase_delegate"
    env: str = "chase_delegate"
    train: ag.TrainConfig = replace(TRAIN, decay_steps=23, normalise=3000.0)


if __name__ == "__main__":
    ag.main(ChaseDelegateGRPO)
