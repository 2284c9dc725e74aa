"""The public names of agentgym.evals, each with the module that defines it."""

from .comparison import Comparison as Comparison

__all__: list[str]
