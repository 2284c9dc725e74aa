"""An env that scores stored rollouts again, for `agentgym rescore`."""

import agentgym as ag


class Scored(ag.ToolEnv[ag.Task]):
    """Gives every rollout the same reward."""

    @classmethod
    def tasks(cls, split: str) -> list[ag.Task]:
        """Return one task."""
        return [ag.Task(id="task0", prompt="Say it.")]

    @ag.reward
    def one(self) -> float:
        """Return 1."""
        return 1.0
