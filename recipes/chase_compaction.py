"""GRPO on chase with a memory of two calls: the model must write summaries that it can go on from.

The summaries are sampled and trained like every other turn, by the one reward at the end.
"""

from dataclasses import dataclass, field
from pathlib import Path

import agentgym as ag
import envs.chase.env  # noqa: F401  registers the env


@dataclass(frozen=True, kw_only=True)
class ChaseCompactionGRPO(ag.RunConfig):
    """Follow pointers and summarise, from a base that mostly guesses and often summarises wrongly."""

    recipe: str = "chase_compaction"
    env: str = "chase_compaction"
    model: Path | str = Path(__file__).parent / "checkpoints" / "chase_compaction"
    steps: int = 25
    max_tokens: int | None = 40
    train: ag.TrainConfig = field(
        default_factory=lambda: ag.TrainConfig(
            lr=2e-3,
            decay_steps=20,
            temperature=0.7,
            normalise=2500.0,  # about what 64 rollouts sample: few groups with a signal then mean a small step
            grad_clip=0.05,  # a few times the usual norm, so that no single failure rules a step
            micro_tokens=4096,
        )
    )


if __name__ == "__main__":
    ag.main(ChaseCompactionGRPO)
