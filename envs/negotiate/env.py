"""Negotiate: two players with private values divide a pool of things by talking and making matching offers.

The first player is the rollout's first conversation, the second a sub-agent with the role "second" that stays open.
Each has a separate reward and baseline, and can be the policy, the frozen policy or another model.
"""

import random
from contextlib import AsyncExitStack
from functools import partial
from typing import Any, ClassVar, Literal

import agentgym as ag
from agentgym.testing import Reply, Scripted, say
from envs.negotiate.deals import Things, best_split, conceder, draw_values, last_offer, listed, quoted, rest, worth

COUNT = 10_000
"""Number of tasks per split."""
THINGS = ("book", "hat", "ball", "cup", "lamp", "ring")
ROUNDS = 4
"""Number of messages per player."""
RULES = """\
You and another player divide these things: {pool}. One of each is worth to you: {values}. The other has values of its \
own. You talk in turn, with {rounds} messages each. A line such as `OFFER: {example}` says what you want to have. It \
is a deal when the last offers of both of you make up all the things. Without a deal both of you have nothing."""
Player = Literal["policy", "frozen", "opponent"]


class DealTask(ag.Task):
    """The pool, and what one of each thing is worth to the first and to the second player."""

    pool: Things
    values: tuple[Things, Things]


def rules(pool: Things, values: Things) -> str:
    """Return the opening message for a player with these values."""
    example = listed(dict.fromkeys(pool, 1))
    return RULES.format(pool=listed(pool), values=listed(values), rounds=ROUNDS, example=example)


def make_task(split: ag.Split, index: int) -> DealTask:
    """Create the task of an index: the values differ, and the best split is worth something to both.

    The same arguments always give the same task.
    """
    rng = random.Random(f"{split} {index}")
    while True:
        # Because there is only one of the first kind, some values always add up to the total.
        counts = (1, rng.randint(1, 3), rng.randint(1, 3))
        pool = dict(zip(rng.sample(THINGS, len(counts)), counts, strict=True))
        first, second = draw_values(rng, pool), draw_values(rng, pool)
        if first != second and worth(best_split(pool, first, second), first):
            prompt = ag.Message(role="user", content=rules(pool, first))
            return DealTask(id=f"negotiate-{split}-{index}", prompt=(prompt,), pool=pool, values=(first, second))


@ag.register("negotiate")
class Negotiate(ag.Env[DealTask]):
    """Reward: the value a player got as a share of its part in the best split for both, or 0 without a deal."""

    limits = ag.Limits(turns=2 * ROUNDS, seconds=300, turn_tokens=256)
    fallback_models: ClassVar = {"opponent": Scripted(conceder)}
    first = ag.Parameter(
        "policy", Player, doc="who plays first: the policy, trained or frozen, or the model role opponent"
    )
    second = ag.Parameter(
        "policy", Player, doc="who plays second: the policy, trained or frozen, or the model role opponent"
    )

    def __init__(self, task: DealTask) -> None:
        super().__init__(task)
        self.offers: list[Things | None] = [None, None]
        self.rounds = 0
        self.other: Any = None
        self.stack = AsyncExitStack()

    @classmethod
    def tasks(cls, split: ag.Split) -> ag.Procedural[DealTask]:
        return ag.Procedural(partial(make_task, split), range(COUNT))

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[list[ag.Message], dict[str, Any]]:
        self.root_engine = "opponent" if self.first == "opponent" else None
        self.root_trained = self.first == "policy"
        return await super().reset(seed=seed, options=options)

    async def step(self, action: ag.Message) -> ag.StepResult:
        said = action["content"]
        self._hear(0, said)
        if not self.is_deal:
            said = await self._answer(said)
            self._hear(1, said)
        self.rounds += 1
        if self.is_deal or self.rounds == ROUNDS:
            return ag.StepResult([], 0.0, True, False, {"stop_reason": "deal" if self.is_deal else "no deal"})
        return ag.StepResult([ag.Message(role="user", content=quoted(said))], 0.0, False, False, {})

    async def step_cut(self, action: ag.Message) -> None:
        """Leave a message out that is cut off, since the other player does not answer it."""

    @property
    def is_deal(self) -> bool:
        """Whether the last offers of both players together are exactly the pool."""
        first, second = self.offers
        return first is not None and second == rest(self.task.pool, first)

    def _hear(self, player: int, said: str) -> None:
        """Record the offer in a message; without one, the player's last offer stays valid."""
        self.offers[player] = last_offer(said, self.task.pool) or self.offers[player]

    async def _answer(self, said: str) -> str:
        """Let the second player answer; return "" if a limit stopped it, in this turn or before."""
        if self.other is None:
            told = f"{rules(self.task.pool, self.task.values[1])}\n\nThe other player says:\n{quoted(said)}"
            engine, train = ("opponent", None) if self.second == "opponent" else ("", self.second == "policy")
            first = ag.Message(role="user", content=told)
            opening = self.fork("subagent", [first], role="second", engine=engine, train=train)
            self.other = await self.stack.enter_async_context(opening)
        elif self.other.stop_reason is not None:
            return ""
        else:
            self.other.reply([ag.Message(role="user", content=quoted(said))])
        answer = await self.other.turn()
        return "" if answer is None else str(answer["content"])

    async def score(self) -> dict[str, float]:
        best = best_split(self.task.pool, *self.task.values)
        shares = []
        for player, part in enumerate((best, rest(self.task.pool, best))):
            values, got = self.task.values[player], self.offers[player] if self.is_deal else None
            shares.append(worth(got, values) / worth(part, values) if got else 0.0)
        if self.other is not None:
            self.role_rewards["second"] = shares[1]
        self.metrics["deal"] = float(self.is_deal)
        return {"first": shares[0]}

    async def close(self) -> None:
        await self.stack.aclose()


def oracle(task: DealTask) -> list[Reply]:
    """Return the messages of two players who agree on the best split at once."""
    best = best_split(task.pool, *task.values)
    return [say(f"OFFER: {listed(best)}"), say(f"OFFER: {listed(rest(task.pool, best))}")]
