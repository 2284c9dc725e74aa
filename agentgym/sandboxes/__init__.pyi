"""The public names of agentgym.sandboxes, each with the module that defines it."""

from .protocol import ExecResult as ExecResult

__all__: list[str]
