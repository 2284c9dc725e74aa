"""Tasks made from their index, and no other world for the held-out ones."""

import agentgym as ag
from agentgym.environments.env import Split
from tests.testing.env_checks.looking import TASK, Looking, LookTask

FOUND = r"tasks: the first 64 tasks of train and test are equal except for their ids \('train-0' and 'test-0'\): remove"


class Planted(Looking):
    @classmethod
    def tasks(cls, split: Split) -> ag.Procedural[LookTask]:
        def make(index: int) -> LookTask:
            return TASK.model_copy(update={"id": f"{split}-{index}", "answer": str(index)})

        return ag.Procedural(make, range(10**6))
