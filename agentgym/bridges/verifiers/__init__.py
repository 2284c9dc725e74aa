"""Environments of the `verifiers` package as envs: verifiers runs its own turns, and the policy here samples them."""

from agentgym.bridges.verifiers.env import VerifiersEnv, VerifiersTask

__all__ = ["VerifiersEnv", "VerifiersTask"]
