"""The held-out tasks are those that are trained on."""

from collections.abc import Sequence

from agentgym.environments.env import Split
from tests.testing.env_checks.looking import TASK, Looking, LookTask

FOUND = r"tasks: train and test share 1 id \('t'\): remove test tasks from train; a held-out task must"


class Planted(Looking):
    @classmethod
    def tasks(cls, split: Split) -> Sequence[LookTask]:
        return [TASK]
