"""GRPO on chase_long:  chains several contexts long, carried by the model's own summaries."""

from dataclasses import dataclass, field
from pathlib import Path

import agentgym as ag
import envs.chase_long.env  # noqa: F401  registers the env


@dataclass(frozen=True, kw_only=True)
class ChaseLongGRPO(ag.RunConfig):
    """Follow chains of up to 12 keys with a context for three, from a base that mostly guesses."""

    recipe: str = "chase_long"
    env: str = "chase_long"
    model: Path | str = Path(__file__).parent / "checkpoints" / "chase_compaction"
    steps: int = 45
    max_tokens: int | None = 40
    train: ag.TrainConfig = field(
        default_factory=lambda: ag.TrainConfig(
            lr=2e-3,
            decay_steps=40,
            temperature=0.7,
            normalise=3000.0,  # between what 64 rollouts sample at first and in the end
            grad_clip=0.05,  # a few times the usual norm, so that no single failure rules a step
            micro_tokens=4096,
        )
    )


if __name__ == "__main__":
    ag.main(ChaseLongGRPO)
