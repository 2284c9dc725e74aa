"""A task that holds the function that judges it."""

from collections.abc import Callable
from typing import Any

from agentgym.environments.env import Split
from tests.testing.env_checks.looking import TASK, Looking, LookTask

FOUND = (
    r"tasks: Judged\.check: expected a value with the same text in every process, got a function; .*: a run, and an "
    "evaluation"
)


class Judged(LookTask):
    check: Callable[[str], bool]


class Planted(Looking):
    @classmethod
    def tasks(cls, split: Split) -> Any:
        return [Judged(**{**TASK.model_dump(), "id": split}, check=lambda text: True)]
