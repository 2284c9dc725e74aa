"""GRPO on chase with over-sampling: ten groups in play for eight, the slowest two go on under the next policy.

`python -m recipes.chase_oversample`; `--oversample.carry 0` drops them, `--oversample.replace 4` replaces groups whose
rollouts all score the same.
"""

from dataclasses import dataclass, field

import agentgym as ag
from recipes.chase_grpo import ChaseGRPO


@dataclass(frozen=True, kw_only=True)
class ChaseOversample(ChaseGRPO):
    """Follow pointers through a Python tool; no batch waits for its slowest rollouts."""

    recipe: str = "chase_oversample"
    oversample: ag.Oversample = field(default_factory=lambda: ag.Oversample(extra_groups=2, stop="target", carry=3))


if __name__ == "__main__":
    ag.main(ChaseOversample)
