"""The public names of agentgym.train, each with the module that defines it."""

from .trainer import Trainer as Trainer

__all__: list[str]
