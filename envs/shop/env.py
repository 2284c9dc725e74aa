"""Shop: serve a simulated customer by a policy, with tools that change a database; the database decides the reward.

The tools do whatever they are told, and the agent has to know what the policy allows. Five of nine customers want
something that it forbids. The right action is then to refuse, citing the right rule, and to change nothing.
"""

from collections.abc import Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, ClassVar

import agentgym as ag
from agentgym.judges import UserEnv
from agentgym.testing import Reply, Scripted, call, say
from agentgym.tools import DynamicTool, tools_of
from envs.shop.scenarios import KINDS, Shelf
from envs.shop.store import Rows, Store
from envs.shop.user import scripted_user

COUNT = 10_000
"""Number of tasks per split."""
POLICY = (Path(__file__).parent / "policy.md").read_text()


class ShopTask(ag.Task):
    """A database, a customer who wants something, and the right calls."""

    kind: str
    rows: Rows
    wish: str
    email: str
    postcode: str
    """The postcode that the customer gives, which may be wrong."""
    right_calls: tuple[tuple[str, dict[str, Any]], ...]


def make_task(split: ag.Split, index: int) -> ShopTask:
    """Create the task of an index; the kinds alternate by index.

    The same arguments always give the same task.
    """
    kind, shelf = KINDS[index % len(KINDS)], Shelf(Random(f"{split} {index}"))
    scene = kind(shelf)
    _, email, postcode = map(str, shelf.customers[0])
    known = scene.postcode or postcode
    return ShopTask(
        id=f"shop-{split}-{index}",
        prompt=ag.Message(role="system", content=POLICY),
        kind=kind.__name__,
        rows=shelf.rows(),
        wish=scene.wish,
        email=email,
        postcode=known,
        right_calls=(("verify", {"email": email, "postcode": known}), *scene.calls),
    )


@ag.register("shop")
class Shop(UserEnv[ShopTask]):
    """Reward 1 if the final database is as the policy demands, including the required refusals."""

    limits = ag.Limits(turns=20, seconds=600)
    fallback_models: ClassVar = {"user": Scripted(scripted_user)}  # Used if no other model plays the customer.

    def __init__(self, task: ShopTask) -> None:
        super().__init__(task)
        self.store = Store(task.rows)

    @classmethod
    def tasks(cls, split: ag.Split) -> ag.Procedural[ShopTask]:
        return ag.Procedural(partial(make_task, split), range(COUNT))

    async def extra_tools(self) -> Sequence[DynamicTool]:
        """Return the store's methods as tools."""
        return tools_of(self.store)

    async def user_system(self) -> str:
        return (
            "You are a customer of a clothes shop, and talk with its staff.\n"
            f"You want: {self.task.wish}\nYour email: {self.task.email}\nYour postcode: {self.task.postcode}\n"
            "Give your email and postcode when you are asked for them. Accept a refusal."
        )

    @ag.reward
    def right(self) -> float:
        """Return whether every row of the database is as the right calls leave it."""
        wanted = Store(self.task.rows)
        for name, arguments in self.task.right_calls:
            getattr(wanted, name)(**arguments)
        with closing(wanted.database):
            return float([*self.store.database.iterdump()] == [*wanted.database.iterdump()])

    async def close(self) -> None:
        self.store.database.close()


def oracle(task: ShopTask) -> list[Reply]:
    """Return replies that solve the task with user.py's scripted user; `agentgym check` and the tests play them."""
    right = [call(name, **arguments) for name, arguments in task.right_calls]
    return [say("What are your email and your postcode?"), *right, say("That is all that I can do.")]
