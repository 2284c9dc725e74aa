"""The contract of sandboxes: ours hold it, and one that breaks it is told where."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from agentgym.boxes import Boxes, Sandbox
from agentgym.sandboxes.local import Process
from agentgym.testing import check_sandbox
from tests.sandboxes.conftest import make


async def test_every_sandbox_of_ours_holds_the_contract(sandbox: Sandbox) -> None:
    await check_sandbox(sandbox)


@pytest.mark.docker
async def test_boxes_under_gvisor_hold_the_contract() -> None:
    await check_sandbox(make("runsc"))


@dataclass
class Spoiled:
    """Boxes of plain processes, with one method of each replaced."""

    name: str
    replaced: Any

    @asynccontextmanager
    async def open(self, size: int) -> AsyncIterator[Boxes]:
        async with Process(unsafe=True).open(size) as pool:
            yield SpoiledPool(pool, self)


class SpoiledPool:
    def __init__(self, pool: Boxes, by: Spoiled) -> None:
        self.pool, self.by = pool, by

    @asynccontextmanager
    async def lease(self) -> AsyncIterator[Any]:
        async with self.pool.lease() as box:
            setattr(box, self.by.name, self.by.replaced)
            try:
                yield box
            finally:
                delattr(box, self.by.name)


async def nothing(*_: object, **__: object) -> list[str]:
    return []


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("list", "files: list: ['a/', 'c'] is promised, got []"),
        ("reset", "resets: list after a reset: [] is promised, got ['a/']"),
        ("write", "files: FileNotFoundError"),
    ],
)
async def test_a_broken_promise_is_named(name: str, line: str) -> None:
    with pytest.raises(AssertionError, match="Spoiled breaks what it owes") as raised:
        await check_sandbox(Spoiled(name, nothing))
    assert any(found.startswith(line) for found in str(raised.value).splitlines()), str(raised.value)
