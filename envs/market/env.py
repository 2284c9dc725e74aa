"""Market: place an order over HTTP with an app that has a database and runs in a container next to the sandbox.

The app has its own container, memory and file system; code in the sandbox can reach it only by HTTP. Its database is
new in every episode. After the episode, a verifier queries the app's orders.
"""

import random
from functools import partial
from pathlib import Path
from typing import Annotated

from pydantic import Field

import agentgym as ag
from agentgym.sandboxes.docker.images.names import default_image
from agentgym.testing import Reply, call, say

COUNT = 10_000
"""Number of tasks per split."""
FRUIT = ("apples", "cherries", "figs", "grapes", "lemons", "mangos", "pears", "plums")
KINDS = 4
"""Kinds of fruit in the market. There is too little of the cheapest one."""
APP = (Path(__file__).parent / "app.py").read_text()
PROMPT = """\
The market at http://market:8000 answers with JSON: GET /stock lists [name, price, count], POST /orders takes
{{"name": ..., "count": ...}}. Order {count} of the cheapest fruit of which there are {count}, in one order.
Use Python: urllib.request is there."""
CLIENT = """
import json, urllib.request
def ask(method, path, content=None):
    body = None if content is None else json.dumps(content).encode()
    with urllib.request.urlopen(urllib.request.Request("http://market:8000" + path, body, method=method)) as answer:
        return json.load(answer)
"""


class MarketTask(ag.Task):
    """The stock, and the fruit and count to order."""

    stock: tuple[tuple[str, int, int], ...]
    """Name, price and count of each kind of fruit."""
    name: str
    count: int = Field(ge=1)


def make_task(split: ag.Split, index: int) -> MarketTask:
    """Create the task of an index; the same arguments always give the same task."""
    rng = random.Random(f"{split} {index}")
    count = rng.randint(3, 20)
    names = rng.sample(FRUIT, KINDS)
    prices = sorted(rng.sample(range(10, 100), KINDS))
    counts = [rng.randint(1, count - 1), *(rng.randint(count, 3 * count) for _ in names[1:])]
    stock = sorted(zip(names, prices, counts, strict=True))
    prompt = ag.Message(role="user", content=PROMPT.format(count=count))
    return MarketTask(id=f"market-{split}-{index}", prompt=(prompt,), stock=tuple(stock), name=names[1], count=count)


@ag.register("market")
class Market(ag.ToolEnv[MarketTask]):
    """Reward 1 if the market has sold exactly what had to be ordered, and nothing else."""

    sandbox_spec = ag.Docker(
        network="loopback",
        services={
            # Any image with Python would do. Your own app would have its own image and entrypoint.
            "market": ag.Service(
                image=default_image(),
                entrypoint=["python3", "-c", APP],
                ready="http://market:8000/stock",
                memory_mb=128,
            )
        },
    )
    limits = ag.Limits(turns=8, seconds=120)

    @classmethod
    def tasks(cls, split: ag.Split) -> ag.Procedural[MarketTask]:
        return ag.Procedural(partial(make_task, split), range(COUNT))

    async def setup(self) -> None:
        opened = await self.sandbox.python(f"{CLIENT}ask('PUT', '/stock', {self.task.stock!r})", fresh=True)
        if not opened.ok:
            raise RuntimeError(f"the market did not open: {opened.text()}")

    @ag.tool(timeout_s=30)
    async def python(self, code: Annotated[str, Field(max_length=2000)]) -> str:
        """Run Python code; names persist."""
        return (await self.sandbox.python(code, timeout_s=20)).text(limit=1000)

    @ag.reward
    async def ordered(self) -> float:
        """Return whether the market's database has that order and no other."""
        expect = {"ask('GET', '/orders')": [[self.task.name, self.task.count]]}
        return (await self.sandbox.verify(code=CLIENT, expect=expect)).fraction


def oracle(task: MarketTask) -> list[Reply]:
    """Return replies that place the right order; `agentgym check` and the tests play them."""
    order = {"name": task.name, "count": task.count}
    return [call("python", code=f"{CLIENT}ask('POST', '/orders', {order!r})"), say("Done.")]
