"""GRPO on chase, asynchronously: the next batch is played while this one is trained on, at most one version behind.

`python -m recipes.chase_async`; `--staleness 2` lets batches run further ahead, `--train.correction none` leaves the
importance weights to the clipped ratio.
"""

from dataclasses import dataclass, field

import agentgym as ag
from recipes.chase_grpo import ChaseGRPO


@dataclass(frozen=True, kw_only=True)
class ChaseAsync(ChaseGRPO):
    """Follow pointers through a Python tool; generation and training overlap."""

    recipe: str = "chase_async"
    staleness: int = 1
    train: ag.TrainConfig = field(
        default_factory=lambda: ag.TrainConfig(
            lr=2e-3,
            decay_steps=20,
            temperature=0.7,
            normalise=2000.0,
            grad_clip=0.05,
            micro_tokens=4096,
            correction="token",  # a token counts by how much likelier it has become, at most twice
        )
    )


if __name__ == "__main__":
    ag.main(ChaseAsync)
