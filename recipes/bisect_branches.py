"""Bisect with credit by branches: each turn is compared with what other ways from the state before it came to.

After each turn one branch is played, and half as many rollouts.
"""

from dataclasses import replace

import agentgym as ag
from recipes import bisect_grpo

RECIPE = replace(
    bisect_grpo.RECIPE,
    recipe="bisect_branches",
    group_size=4,
    credit="branches",
    branching=ag.BranchingConfig(per_state=1),
)


if __name__ == "__main__":
    ag.main(RECIPE)
