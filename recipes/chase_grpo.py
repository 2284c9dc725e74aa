"""GRPO on chase: a tiny model learns to follow pointers through a Python tool instead of guessing.

`python -m recipes.chase_grpo` takes about a minute on one core; `--help` lists every setting. Under
`torchrun --nproc-per-node 2 -m recipes.chase_grpo` each process plays and trains its share.
"""

from dataclasses import dataclass

import agentgym as ag
import envs.chase.env  # noqa: F401  registers the env
from recipes.base import TinyGRPO


@dataclass(frozen=True, kw_only=True)
class ChaseGRPO(TinyGRPO):
    """Follow pointers through a Python tool, from a base that mostly guesses."""

    recipe: str = "chase_grpo"
    env: str = "chase"
    steps: int = 20


if __name__ == "__main__":
    ag.main(ChaseGRPO)
