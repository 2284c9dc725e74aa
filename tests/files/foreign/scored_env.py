"""An env that scores stored rollouts again, for `agentgym rescore`."""

import agentgym as ag


class Scored(ag.ToolEnv[ag.Task]):
    """Scores every rollout alike."""

    @classmethod
    def tasks(cls, split: str) -> list[ag.Task]:
        """One task."""
        return [ag.Task(id="task0", prompt="Say it.")]

    @ag.reward
    def one(self) -> float:
        """One."""
        return 1.0
