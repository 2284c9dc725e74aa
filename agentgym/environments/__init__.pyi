"""The public names of agentgym.environments, each with the module that defines it."""

from .game import GameTask as GameTask, IllegalMove as IllegalMove

__all__: list[str]
