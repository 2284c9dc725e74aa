"""Environments of the `verifiers` package as envs, run by their own loop, which queries the policy in this process."""

from agentgym.bridges.verifiers.env import VerifiersEnv, VerifiersTask

__all__ = ["VerifiersEnv", "VerifiersTask"]
