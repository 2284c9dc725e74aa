"""GRPO on chase with oversampling: ten groups run per batch of eight, and the slowest two carry over.

`python -m recipes.chase_oversample`; `--oversample.carry 0` drops them, `--oversample.replace 4` replaces groups
whose rollouts all have the same score.
"""

from dataclasses import replace

import agentgym as ag
from recipes import chase_grpo

RECIPE = replace(
    chase_grpo.RECIPE,
    recipe="chase_oversample",
    oversample=ag.OversampleConfig(extra_groups=2, stop="target", carry=3),
)


if __name__ == "__main__":
    ag.main(RECIPE)
