"""Chain sum: one addition or subtraction from reasoning-gym, with a worked example in the prompt."""

import re
from functools import cache, partial
from hashlib import blake2b
from typing import Any

import agentgym as ag
from agentgym.errors.extras import needs_extra
from agentgym.testing import Reply, say

COUNT = 100_000
"""Number of tasks per split."""
EXAMPLE = (ag.Message(role="user", content="3 + 6 ="), ag.Message(role="assistant", content="3 + 6 = 9"))


class SumTask(ag.Task):
    """A problem, such as `42 - 17 =`, and its result."""

    result: str


@cache
def problems() -> Any:
    """Return reasoning-gym's data set, whose every index is a problem."""
    with needs_extra():
        import reasoning_gym
    return reasoning_gym.create_dataset("chain_sum", seed=0, max_terms=2, max_digits=2)


def make_task(split: ag.Split, index: int) -> SumTask:
    """Create the task of an index; the same arguments always give the same task."""
    problem = problems()[index]
    attempt = 0
    while is_held_out(problem["question"]) != (split == "test"):
        attempt += 1
        problem = problems()[index + attempt * COUNT]
    asked = ag.Message(role="user", content=problem["question"].partition(": ")[2])
    return SumTask(id=f"chain-sum-{split}-{index}", prompt=(*EXAMPLE, asked), result=problem["answer"])


def is_held_out(question: str) -> bool:
    """Return whether this question is for evaluation only.

    One in eight is. This depends on the text and not on the index, since two indices can have the same question.
    """
    return blake2b(question.encode(), digest_size=1).digest()[0] % 8 == 0


@ag.register("chain_sum")
class ChainSum(ag.ToolEnv[SumTask]):
    """Reward 1 if the last number of the answer is the result."""

    system = "Write the problem and its result."
    limits = ag.Limits(turns=1, turn_tokens=16)

    @classmethod
    def tasks(cls, split: ag.Split) -> ag.Procedural[SumTask]:
        return ag.Procedural(partial(make_task, split), range(COUNT))

    @ag.reward
    def correct(self) -> float:
        """Return whether the last number is the result."""
        numbers = re.findall(r"-?\d+", self.answer or "")
        return float(numbers[-1:] == [self.task.result])


def oracle(task: SumTask) -> list[Reply]:
    """Return the problem with its result; `agentgym check` and the tests play it."""
    return [say(f"{task.prompt[-1]['content']} {task.result}")]
