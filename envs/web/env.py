"""Web: a chore at a small site, with tools that open pages, follow links and send forms; the site's state is judged.

The site is a program that runs in the sandbox or in a separate container. The model runs no code, so it can only do
what a browser can.
"""

import json
import random
import re
from functools import partial
from html import unescape
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlencode

from pydantic import Field

import agentgym as ag
from agentgym.sandboxes.docker.images.names import default_image
from agentgym.testing import Reply, call, say
from envs.web.chores import KINDS, draw_content

COUNT = 10_000
"""Number of tasks per split."""
SITE = (Path(__file__).parent / "site.py").read_text()
IN_THE_SANDBOX = f"{SITE}\nthreading.Thread(target=server.serve_forever, daemon=True).start()\n"
BROWSER = """
import urllib.error, urllib.parse, urllib.request
def ask(method, path, body=None):
    path = urllib.parse.quote(path, safe="/?=&%+")
    try:
        with urllib.request.urlopen(urllib.request.Request(SITE + path, body, method=method), timeout=10) as answer:
            print(answer.read().decode())
    except urllib.error.HTTPError as error:
        print(error.code, error.read().decode())
"""
PROMPT = "You are at a web shop, whose first page is /. {chore} Do it once, and nothing else. Say done when it is done."
SitePath = Annotated[str, Field(pattern=r"^/[^\s]*$", max_length=500)]
FieldText = Annotated[str, Field(max_length=200)]
Fields = Annotated[dict[FieldText, FieldText], Field(max_length=20)]
SHOWN = 6000
"""Largest number of characters of a page that are returned; a ledger has fewer."""


class WebTask(ag.Task):
    """The content of the site, and the one action that should be in its ledger."""

    kind: str
    content: dict[str, Any]
    action: tuple[str | int, ...]


def make_task(split: ag.Split, index: int) -> WebTask:
    """Create the task of an index; the kinds alternate by index.

    The same arguments always give the same task.
    """
    rng, kind = random.Random(f"{split} {index}"), KINDS[index % len(KINDS)]
    content = draw_content(rng)
    chore = kind(rng, content)
    return WebTask(
        id=f"web-{split}-{index}",
        prompt=PROMPT.format(chore=chore.words),
        kind=kind.__name__,
        content=content,
        action=tuple(chore.action),
    )


@ag.register("web")
class Web(ag.ToolEnv[WebTask]):
    """Reward 1 if the requested action was done once, and nothing else."""

    limits = ag.Limits(turns=16, seconds=180)
    place = ag.Parameter(
        "sandbox",
        Literal["sandbox", "container"],
        doc="where the site runs: in the sandbox, or in a separate container, which needs Docker",
    )

    @classmethod
    def tasks(cls, split: ag.Split) -> ag.Procedural[WebTask]:
        return ag.Procedural(partial(make_task, split), range(COUNT))

    @classmethod
    def sandbox_for(cls, task: WebTask) -> ag.AnySandbox | ag.Docker:
        if cls.place == "sandbox":
            return ag.AnySandbox(network="loopback")
        serve = ["python3", "-c", f"{SITE}\nserver.serve_forever()"]
        site = ag.Service(image=default_image(), entrypoint=serve, ready=8000, memory_mb=128)
        return ag.Docker(network="loopback", services={"site": site})

    async def setup(self) -> None:
        self.page = ""
        site = "127.0.0.1" if self.place == "sandbox" else "site"
        started = await self.sandbox.python(
            f"{IN_THE_SANDBOX if self.place == 'sandbox' else ''}\nSITE = 'http://{site}:8000'{BROWSER}"
        )
        opened = await self._asked("PUT", "/", json.dumps(self.task.content).encode())
        if opened != "open":
            raise RuntimeError(f"the site did not open: {started.text()} {opened}")

    @ag.tool
    async def get(self, path: SitePath) -> str:
        """Open a page by its path, with its query if it has one, such as /products?color=red."""
        self.page = await self._asked("GET", path)
        return self.page

    @ag.tool
    async def follow(self, text: Annotated[str, Field(max_length=200)]) -> str:
        """Follow the link with this text on the page that was opened last."""
        links = {
            unescape(words): unescape(path) for path, words in re.findall(r'<a href="([^"]*)">([^<]*)<', self.page)
        }
        if text not in links:
            raise ag.ToolError(f"there is no such link; the links are: {', '.join(links) or 'none'}")
        return await self.get(links[text])

    @ag.tool
    async def post(self, path: SitePath, fields: Fields) -> str:
        """Send a form to its action, with all of its fields by name, the hidden ones too."""
        self.page = await self._asked("POST", path, urlencode(fields).encode())
        return self.page

    async def _asked(self, method: str, path: str, body: bytes | None = None) -> str:
        """Return the site's response."""
        return (await self.sandbox.python(f"ask({method!r}, {path!r}, {body!r})", timeout_s=20)).text(limit=SHOWN)

    @ag.reward
    async def done(self) -> float:
        """Return whether the site's ledger has the right action and no other."""
        try:
            return float(json.loads(await self._asked("REPORT", "/")) == [[*self.task.action]])
        except (ValueError, RecursionError):  # The site doesn't respond, or its response isn't a ledger.
            return 0.0


def oracle(task: WebTask) -> list[Reply]:
    """Return replies that solve the task; `agentgym check` and the tests play them."""
    kind, number, *values = task.action
    names = {"order": ("count", "name"), "return": ("reason",), "rate": ("stars",)}[str(kind)]
    fields = {"token": task.content["token"], "id": str(number)} | dict(zip(names, map(str, values), strict=True))
    page = f"/{'return' if kind == 'return' else 'product'}?id={number}"
    return [call("get", path=page), call("post", path=f"/{kind}", fields=fields), say("Done.")]
