"""Market: an order over HTTP at an app with a database, which runs in a container beside the sandbox.

The app has its own container, memory and file system: code in the sandbox reaches it by HTTP and in no other way. Its
database is new in every episode. What was ordered is asked of the app itself, after the episode, by a verifier.
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
"""Tasks of each split."""
FRUIT = ("apples", "cherries", "figs", "grapes", "lemons", "mangos", "pears", "plums")
KINDS = 4
"""So many kinds of fruit are in the market; of the cheapest one there are too few."""
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
    """What is on the shelves, and what is to be ordered."""

    stock: tuple[tuple[str, int, int], ...]
    """Name, price and count of each kind of fruit."""
    name: str
    count: int = Field(ge=1)


def make_task(split: ag.Split, index: int) -> MarketTask:
    """Make the task of an index, always the same."""
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
    """Reward 1 where the market has sold what was to be ordered, and nothing else."""

    sandbox_spec = ag.Docker(
        network="loopback",
        services={
            # Any image with a Python would do; an app of yours has one of its own, with its own entrypoint.
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
        """Whether the market's database has that order and no other one."""
        expect = {"ask('GET', '/orders')": [[self.task.name, self.task.count]]}
        return (await self.sandbox.verify(code=CLIENT, expect=expect)).fraction


def oracle(task: MarketTask) -> list[Reply]:
    """Replies that order what is to be ordered; `agentgym check` and the tests play them."""
    order = {"name": task.name, "count": task.count}
    return [call("python", code=f"{CLIENT}ask('POST', '/orders', {order!r})"), say("Done.")]
