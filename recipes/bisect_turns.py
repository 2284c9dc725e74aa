"""Bisect with turn credit: a malformed call is charged to the turn that made it, not to its whole rollout."""

from dataclasses import replace

import agentgym as ag
from recipes import bisect_grpo

RECIPE = replace(bisect_grpo.RECIPE, recipe="bisect_turns", env="bisect_turns", credit="turn")


if __name__ == "__main__":
    ag.main(RECIPE)
