"""GRPO on chase with over-sampling: ten groups in play for eight, the slowest two go on under the next policy.

`python -m recipes.chase_oversample`; `--oversample.carry 0` drops them, `--oversample.replace 4` replaces groups whose
rollouts all score the same.
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
