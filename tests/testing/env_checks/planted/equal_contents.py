"""The same tasks under other ids in both splits."""

from collections.abc import Sequence

from agentgym.environments.env import Split
from tests.testing.env_checks.looking import TASK, Looking, LookTask

FOUND = r"tasks: 3 of 4 test tasks are in train under another id \('train-0' and 'test-0'\): remove test tasks"


class Planted(Looking):
    @classmethod
    def tasks(cls, split: Split) -> Sequence[LookTask]:
        count = 3 if split == "train" else 4
        return [TASK.model_copy(update={"id": f"{split}-{number}", "answer": str(number)}) for number in range(count)]
