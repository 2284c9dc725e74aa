"""GRPO on chase, asynchronously: the next batch is played while this one is trained on, at most one version behind.

`python -m recipes.chase_async`; `--staleness 2` lets batches run further ahead, `--train.correction none` leaves the
importance weights to the clipped ratio.
"""

from dataclasses import dataclass, replace

import agentgym as ag
from recipes.base import TRAIN
from recipes.chase_grpo import ChaseGRPO


@dataclass(frozen=True, kw_only=True)
class ChaseAsync(ChaseGRPO):
    """Follow pointers through a Python tool; generation and training overlap."""

    recipe: str = "chase_async"
    staleness: int = 1
    # A token counts by how much likelier it has become, at most twice.
    train: ag.TrainConfig = replace(TRAIN, correction="token")


if __name__ == "__main__":
    ag.main(ChaseAsync)
