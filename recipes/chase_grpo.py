"""GRPO on chase: a tiny model learns to follow pointers through a Python tool instead of guessing.

`python -m recipes.chase_grpo` takes about a minute on one core; `--help` lists every setting. Under
`torchrun --nproc-per-node 2 -m recipes.chase_grpo` each process plays and trains its share.
"""

from dataclasses import dataclass, field
from pathlib import Path

import agentgym as ag
import envs.chase.env  # noqa: F401  registers the env


@dataclass(frozen=True, kw_only=True)
class ChaseGRPO(ag.RunConfig):
    """Follow pointers through a Python tool, from a base that mostly guesses."""

    recipe: str = "chase_grpo"
    env: str = "chase"
    model: Path | str = "tiny"
    steps: int = 20
    max_tokens: int | None = 40
    train: ag.TrainConfig = field(
        default_factory=lambda: ag.TrainConfig(
            lr=2e-3,
            decay_steps=20,
            temperature=0.7,
            normalise=2000.0,  # about what 64 rollouts sample: few groups with a signal then mean a small step
            grad_clip=0.05,  # a few times the usual norm, so that no single failure rules a step
            micro_tokens=4096,
        )
    )


if __name__ == "__main__":
    ag.main(ChaseGRPO)
