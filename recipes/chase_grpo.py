"""GRPO on chase: a tiny model learns to follow pointers through a Python tool instead of guessing.

`python -m recipes.chase_grpo` takes about a minute on one core; `--help` lists every setting. Under
`torchrun --nproc-per-node 2 -m recipes.chase_grpo` each process plays and trains its share.
"""

from dataclasses import dataclass, field
from pathlib import Path

import agentgym as ag
import envs.chase.env  # noqa: F401  registers the env
from recipes.run import main

CHECKPOINT = Path(__file__).parent / "checkpoints" / "chase"


@dataclass(frozen=True, kw_only=True)
class ChaseGRPO(ag.Run):
    """GRPO without dividing by the group's standard deviation: one late failure then does not rule a step."""

    recipe: str = "chase_grpo"
    env: str = "chase"
    engine: ag.LocalConfig = field(default_factory=lambda: ag.LocalConfig(model=CHECKPOINT))
    train: ag.TrainConfig = field(
        # A constant denominator: about the tokens that 64 rollouts sample, whatever groups had no signal.
        default_factory=lambda: ag.TrainConfig(model=CHECKPOINT, lr=2e-3, temperature=0.7, normalise=2000.0)
    )


if __name__ == "__main__":
    main(ChaseGRPO)
