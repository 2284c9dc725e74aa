"""agentgym's envs in TRL's GRPOTrainer, which gets `environment_factory`, `reward` and the rows of `dataset`."""

from agentgym.bridges.trl.environment import TRLEnvironment, dataset, environment_factory, reward

__all__ = ["TRLEnvironment", "dataset", "environment_factory", "reward"]
