"""GRPO on bisect: a tiny model learns to halve what is left, from a base that mostly guesses blindly."""

from dataclasses import dataclass, field
from pathlib import Path

import agentgym as ag
import envs.bisect.env  # noqa: F401  registers the env


@dataclass(frozen=True, kw_only=True)
class BisectGRPO(ag.RunConfig):
    """Find a secret in four guesses, asked from Python."""

    recipe: str = "bisect_grpo"
    env: str = "bisect"
    model: Path | str = Path(__file__).parent / "checkpoints" / "bisect"
    steps: int = 50
    max_tokens: int | None = 40
    train: ag.TrainConfig = field(
        default_factory=lambda: ag.TrainConfig(
            lr=2e-3,
            decay_steps=45,
            temperature=0.7,
            normalise=2500.0,  # about what 64 rollouts sample: few groups with a signal then mean a small step
            grad_clip=0.05,  # a few times the usual norm, so that no single failure rules a step
            micro_tokens=4096,
        )
    )


if __name__ == "__main__":
    ag.main(BisectGRPO)
