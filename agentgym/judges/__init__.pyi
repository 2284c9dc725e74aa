"""The public names of agentgym.judges, each with the module that defines it."""

from .simulated_user import UserEnv as UserEnv

__all__: list[str]
