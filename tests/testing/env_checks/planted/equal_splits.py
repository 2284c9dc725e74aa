"""The held-out tasks are those that are trained on."""

from collections.abc import Sequence

from agentgym.environments.env import Split
from tests.testing.env_checks.looking import TASK, Looking, LookTask

FOUND = r"tasks: train and test share 1 id \('t'\): no held-out task may be trained on"


class Planted(Looking):
    @classmethod
    def tasks(cls, split: Split) -> Sequence[LookTask]:
        return [TASK]
