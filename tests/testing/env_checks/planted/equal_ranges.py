"""Held-out tasks that are made from the indices of the training tasks."""

import agentgym as ag
from agentgym.environments.env import Split
from tests.testing.env_checks.looking import TASK, Looking, LookTask

FOUND = r"tasks: train and test share 64 ids among the 64 test tasks that were compared \('100', '101', '102'\): re"


class Planted(Looking):
    @classmethod
    def tasks(cls, split: Split) -> ag.Procedural[LookTask]:
        start = 0 if split == "train" else 50
        return ag.Procedural(lambda index: TASK.model_copy(update={"id": str(index)}), range(start, start + 1000))
