"""GRPO on chase_tree:  branches of one conversation, one reward for all of them."""

from dataclasses import dataclass, field
from pathlib import Path

import agentgym as ag
import envs.chase_tree.env  # noqa: F401  registers the env


@dataclass(frozen=True, kw_only=True)
class ChaseTreeGRPO(ag.RunConfig):
    """Fork where the store forks, from a base that never saw a fork."""

    recipe: str = "chase_tree"
    env: str = "chase_tree"
    model: Path | str = "tiny"
    steps: int = 25
    max_tokens: int | None = 40
    train: ag.TrainConfig = field(
        default_factory=lambda: ag.TrainConfig(
            lr=2e-3,
            decay_steps=23,
            temperature=0.7,
            normalise=3000.0,  # about what 64 rollouts sample: few groups with a signal then mean a small step
            grad_clip=0.05,  # a few times the usual norm, so that no single failure rules a step
            micro_tokens=4096,
        )
    )


if __name__ == "__main__":
    ag.main(ChaseTreeGRPO)
