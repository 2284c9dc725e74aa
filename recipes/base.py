"""What the recipes of the tiny models have in common; each recipe says what it changes."""

from pathlib import Path

import agentgym as ag
import envs.chase.env  # noqa: F401  registers the env

CHECKPOINTS = Path(__file__).parent / "checkpoints"

TRAIN = ag.TrainConfig(
    decay_steps=20,
    temperature=0.7,
    loss_agg=2000.0,  # about what 64 rollouts sample: few groups with a signal then mean a small step
    grad_clip=0.05,  # a few times the usual norm, so that no single failure rules a step
    max_tokens_per_microbatch=4096,
)
"""`dataclasses.replace(TRAIN, decay_steps=45)` is a copy with another schedule, and is checked like any other."""

TINY = ag.RunConfig(env="chase", model="tiny", max_steps=25, max_turn_tokens=40, train=TRAIN)
"""GRPO from the tiny model that comes with the library; a turn is a call or an answer, and short."""
