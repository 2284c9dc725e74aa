"""Held-out tasks that are made from the indices of the training tasks."""

import agentgym as ag
from agentgym.environments.env import Split
from tests.env_checks.looking import TASK, Looking, LookTask

FOUND = r"tasks: train and test share 14 ids among the first 64 tasks of each \('50', '51', '52'\): no held-out task"


class Planted(Looking):
    @classmethod
    def tasks(cls, split: Split) -> ag.Procedural[LookTask]:
        start = 0 if split == "train" else 50
        return ag.Procedural(lambda index: TASK.model_copy(update={"id": str(index)}), range(start, start + 1000))
