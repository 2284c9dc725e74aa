"""Chase over chains that no context holds: the model has to summarise again and again to get to the end."""

import random
from itertools import pairwise

import agentgym as ag
from agentgym.env import Split
from envs.chase.env import HELD_OUT, Chase, ChaseTask


def make_task(index: int) -> ChaseTask:
    """The task of an index, always the same: a chain of 2 to 12 keys, half of them of 4 at most.

    Without the short ones a model that tends to guess early would never see a reward.
    """
    rng = random.Random(index)
    length = rng.randint(2, 4) if rng.random() < 0.5 else rng.randint(5, 12)
    keys = [str(key) for key in rng.sample(range(10, 100), length)]
    value = rng.randint(10, 99)
    store = {key: f"see {following}" for key, following in pairwise(keys)}
    store[keys[-1]] = f"value {value}"
    prompt = ag.Message(role="user", content=f"Start at key {keys[0]}. What is the value?")
    return ChaseTask(id=f"chase-long-{index}", prompt=(prompt,), store=store, value=value)


@ag.register("chase_long")
class ChaseLong(Chase):
    """Chase with chains of up to 12 keys and a context for about three of them."""

    limits = ag.Limits(turns=18, seconds=120, context_tokens=192)
    context = ag.Compact(at=0.55, instruction="Summarise.")

    @classmethod
    def tasks(cls, split: Split) -> ag.Procedural[ChaseTask]:
        start = 0 if split == "train" else HELD_OUT
        return ag.Procedural(make_task, range(start, start + HELD_OUT))
