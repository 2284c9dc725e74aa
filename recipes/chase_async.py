"""Asynchronous GRPO on chase: the next batch is collected during training, at most one version behind.

`python -m recipes.chase_async`; `--max-staleness 2` lets batches run further ahead, `--train.importance-sampling
none` leaves the importance weights to the clipped ratio.
"""

from dataclasses import replace

import agentgym as ag
from recipes import chase_grpo
from recipes.base import TRAIN

RECIPE = replace(
    chase_grpo.RECIPE,
    recipe="chase_async",
    max_staleness=1,
    # A token is weighted by how much likelier it has become, at most by 2.
    train=replace(TRAIN, importance_sampling="token"),
)


if __name__ == "__main__":
    ag.main(RECIPE)
