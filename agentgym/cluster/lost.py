"""The loss of a training process, which sends a run back to its last checkpoint."""

from agentgym.errors import AgentGymError


class TrainerLost(AgentGymError):
    """A training process of a cluster has ended by itself: the run goes on from its last checkpoint."""
