"""The public names of agentgym.weight_sync, each with the module that defines it."""

from .sync import WeightSync as WeightSync

__all__: list[str]
