"""What the recipes of the tiny models have in common; each recipe says what it changes."""

from dataclasses import dataclass
from pathlib import Path

import agentgym as ag

CHECKPOINTS = Path(__file__).parent / "checkpoints"

TRAIN = ag.TrainConfig(
    decay_steps=20,
    temperature=0.7,
    normalise=2000.0,  # about what 64 rollouts sample: few groups with a signal then mean a small step
    grad_clip=0.05,  # a few times the usual norm, so that no single failure rules a step
    micro_tokens=4096,
)
"""`dataclasses.replace(TRAIN, decay_steps=45)` is a copy with another schedule."""


@dataclass(frozen=True, kw_only=True)
class TinyGRPO(ag.RunConfig):
    """GRPO from the tiny model that comes with the library; a turn is a call or an answer, and short."""

    model: Path | str = "tiny"
    steps: int = 25
    max_tokens: int | None = 40
    train: ag.TrainConfig = TRAIN
