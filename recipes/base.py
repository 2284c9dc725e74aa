"""Settings that the recipes of the tiny models share. Each recipe states what it changes."""

from pathlib import Path

import agentgym as ag
import envs.chase.env  # noqa: F401  registers the env

CHECKPOINTS = Path(__file__).parent / "checkpoints"

TRAIN = ag.TrainConfig(
    decay_steps=20,
    temperature=0.7,
    loss_agg=2000.0,  # about what 64 rollouts sample; with few groups that have a signal, the step is small
    grad_clip=0.05,  # a few times the usual norm, so that no single failure dominates a step
    max_tokens_per_microbatch=4096,
)
"""Trainer settings. `dataclasses.replace(TRAIN, decay_steps=45)` is a validated copy with another schedule."""

TINY = ag.RunConfig(env="chase", model="tiny", max_steps=25, max_turn_tokens=40, train=TRAIN)
"""GRPO from the tiny model that comes with the library. Each turn is a short call or answer."""
