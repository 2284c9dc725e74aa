"""GRPO on chase, asynchronously: the next batch is played while this one is trained on, at most one version behind.

`python -m recipes.chase_async`; `--max-staleness 2` lets batches run further ahead, `--train.importance-sampling none`
leaves the importance weights to the clipped ratio.
"""

from dataclasses import replace

import agentgym as ag
from recipes import chase_grpo
from recipes.base import TRAIN

RECIPE = replace(
    chase_grpo.RECIPE,
    recipe="chase_async",
    max_staleness=1,
    train=replace(
        TRAIN, importance_sampling="token"
    ),  # a token counts by how much likelier it has become, at most twice
)


if __name__ == "__main__":
    ag.main(RECIPE)
