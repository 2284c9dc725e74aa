"""The same tests over every kind of box that runs here; the others are skipped aloud."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from agentgym.sandboxes.docker import Docker, why_no_docker
from agentgym.sandboxes.local import Bubblewrap, Process, why_no_bubblewrap
from agentgym.types import Box, Boxes, Sandbox

ISOLATED = ["bubblewrap", pytest.param("docker", marks=pytest.mark.docker)]


def make(kind: str) -> Sandbox:
    if kind == "unsafe":
        return Process(unsafe=True)
    why_not = why_no_bubblewrap() if kind == "bubblewrap" else why_no_docker()
    if why_not is not None:
        pytest.skip(f"{kind}: {why_not}")
    return Bubblewrap() if kind == "bubblewrap" else Docker()


@pytest.fixture(scope="module", params=["unsafe", *ISOLATED])
def sandbox(request: pytest.FixtureRequest) -> Sandbox:
    """Each kind of box."""
    return make(request.param)


@pytest.fixture(scope="module", params=ISOLATED)
def isolated(request: pytest.FixtureRequest) -> Sandbox:
    """Each kind of box that holds against intent."""
    return make(request.param)


@pytest.fixture(params=["unsafe", *ISOLATED])
def kind(request: pytest.FixtureRequest) -> str:
    """The name of each kind of box that runs here."""
    make(request.param)
    return str(request.param)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def boxes(sandbox: Sandbox) -> AsyncIterator[Boxes]:
    """A pool of one box of each kind, shared by a module's tests: each starts from what the last one left."""
    async with sandbox.open(1) as pool:
        yield pool


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def isolated_boxes(isolated: Sandbox) -> AsyncIterator[Boxes]:
    """The same, of each kind that holds against intent."""
    async with isolated.open(1) as pool:
        yield pool


@pytest_asyncio.fixture(loop_scope="module")
async def box(boxes: Boxes) -> AsyncIterator[Box]:
    """A clean box of each kind."""
    async with boxes.lease() as leased:
        yield leased


@pytest_asyncio.fixture(loop_scope="module")
async def isolated_box(isolated_boxes: Boxes) -> AsyncIterator[Box]:
    """A clean box of each kind that holds against intent."""
    async with isolated_boxes.lease() as leased:
        yield leased
