"""Bisect with branch credit: each turn is compared with alternative continuations from the state before it.

One branch is run after each turn, and there are half as many rollouts.
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
