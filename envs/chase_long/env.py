"""Chase over chains that don't fit into the context: the model has to summarize repeatedly to reach the end."""

import random
from itertools import pairwise

import agentgym as ag
from envs.chase.env import HELD_OUT, Chase, ChaseTask, oracle as oracle


def make_task(index: int) -> ChaseTask:
    """Create the task of an index, a chain of 2 to 12 keys; the same index always gives the same task."""
    rng = random.Random(index)
    keys = [str(key) for key in rng.sample(range(10, 100), rng.randint(2, 12))]
    value = rng.randint(10, 99)
    store = {key: f"see {following}" for key, following in pairwise(keys)}
    store[keys[-1]] = f"value {value}"
    prompt = ag.Message(role="user", content=f"Start at key {keys[0]}. What is the value?")
    return ChaseTask(id=f"chase-long-{index}", prompt=(prompt,), store=store, value=value)


@ag.register("chase_long")
class ChaseLong(Chase):
    """Chase with chains of up to 12 keys and a context for about three; half of the reward is the share looked up."""

    limits = ag.Limits(turns=18, seconds=120, context_tokens=192)
    context = ag.Compact(at=0.55, instruction="Summarise.")

    def __init__(self, task: ChaseTask) -> None:
        super().__init__(task)
        self.seen: set[str] = set()

    @classmethod
    def tasks(cls, split: ag.Split) -> ag.Procedural[ChaseTask]:
        start = 0 if split == "train" else HELD_OUT
        return ag.Procedural(make_task, range(start, start + HELD_OUT))

    def _get(self, key: object) -> str:
        self.seen.add(str(key))
        return super()._get(key)

    @ag.reward(weight=0.5)
    def solved(self) -> float:
        """Return whether the answer is the value."""
        return super().solved()

    @ag.reward(weight=0.5)
    def way(self) -> float:
        """Return the share of the chain that was looked up.

        Without this reward, a model that guesses early would solve too few chains to learn from.
        """
        return len(self.seen & self.task.store.keys()) / len(self.task.store)


@ag.register("chase_long_turns")
class ChaseLongTurns(ChaseLong):
    """Chase over long chains in which looking up a key is rewarded at that turn; the total reward is the same."""

    def __init__(self, task: ChaseTask) -> None:
        super().__init__(task)
        self.paid = 0.0
        """Share of the chain that earlier turns were paid for."""

    async def step(self, action: ag.Message) -> ag.StepResult:
        result = await super().step(action)
        if result.terminated:  # the outcome includes the share not paid yet
            return result
        gained = self.way()
        self.paid += gained
        return result._replace(reward=0.5 * gained)

    @ag.reward(weight=0.5)
    def way(self) -> float:
        """Return the share of the chain that was looked up and that no turn was paid for."""
        return super().way() - self.paid
