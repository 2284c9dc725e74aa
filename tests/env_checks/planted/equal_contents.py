"""The same tasks under other ids in both splits."""

from collections.abc import Sequence

from agentgym.environments.env import Split
from tests.env_checks.looking import TASK, Looking, LookTask

FOUND = r"tasks: train and test share 3 tasks under different ids \('train-0' and 'test-0'\)"


class Planted(Looking):
    @classmethod
    def tasks(cls, split: Split) -> Sequence[LookTask]:
        return [TASK.model_copy(update={"id": f"{split}-{number}", "answer": str(number)}) for number in range(3)]
