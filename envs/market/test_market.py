"""Tests of market, with its app in a second container."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

import agentgym as ag
from agentgym.sandboxes.docker.docker import why_no_docker
from agentgym.sandboxes.protocol import SandboxPool
from agentgym.testing import Reply, Scripted, call, check_env, say
from envs.market.env import CLIENT, Market, make_task

TASK = make_task("train", 0)


@pytest_asyncio.fixture
async def real() -> AsyncIterator[SandboxPool]:
    """Yield a pool of one sandbox with the market next to it."""
    if (why_not := why_no_docker()) is not None:
        pytest.skip(f"docker: {why_not}")
    async with Market.sandbox_spec.open(1) as pool:
        yield pool


def ordering(name: str, count: int) -> Reply:
    return call("python", code=f"{CLIENT}ask('POST', '/orders', {{'name': {name!r}, 'count': {count}}})")


async def play(sandboxes: SandboxPool, *script: Reply) -> ag.Rollout:
    rollout = await ag.rollout(Market, TASK, Scripted([*script, say("Done.")]), sandboxes=sandboxes)
    assert rollout.error is None
    return rollout


def said(rollout: ag.Rollout) -> str:
    """Return the whole conversation as text."""
    return str(rollout)


@pytest.mark.docker
async def test_market_keeps_the_contract_of_an_env(real: SandboxPool) -> None:
    await check_env(Market, TASK, oracle=[ordering(TASK.name, TASK.count), say("Done.")], sandboxes=real)


@pytest.mark.docker
async def test_the_right_order_is_rewarded_and_the_next_episode_has_a_new_database(real: SandboxPool) -> None:
    look = call("python", code=f"{CLIENT}ask('GET', '/stock') == {[list(row) for row in TASK.stock]!r}")
    for _ in range(2):
        rollout = await play(real, look, ordering(TASK.name, TASK.count))
        assert "True" in said(rollout)
        assert rollout.reward == 1.0


@pytest.mark.docker
async def test_a_different_additional_or_missing_order_is_not_rewarded(real: SandboxPool) -> None:
    other = next(name for name, _, count in TASK.stock if name != TASK.name and count >= TASK.count)
    right = ordering(TASK.name, TASK.count)
    for script in (
        [],
        [ordering(other, TASK.count)],
        [ordering(TASK.name, TASK.count - 1)],
        [right, ordering(other, 1)],
    ):
        assert (await play(real, *script)).reward == 0.0


@pytest.mark.docker
async def test_the_market_does_not_sell_what_it_lacks(real: SandboxPool) -> None:
    scarce = min(TASK.stock, key=lambda row: row[1])
    rollout = await play(real, ordering(scarce[0], TASK.count))
    assert "409" in said(rollout)
    assert rollout.reward == 0.0


@pytest.mark.docker
async def test_code_in_the_sandbox_cannot_refill_read_or_replace_the_market(
    real: SandboxPool,
) -> None:
    attempts = f"""{CLIENT}
import glob, socket
for attempt in (
    lambda: ask("PUT", "/stock", [["gold", 1, 99]]),
    lambda: socket.create_server(("127.0.0.1", 8000)),
    lambda: open("/tmp/market.db"),
):
    try:
        print("it", "worked", attempt())
    except OSError as error:
        print(type(error).__name__, error)
"""
    rollout = await play(real, call("python", code=attempts), ordering(TASK.name, TASK.count))
    assert "it worked" not in said(rollout)
    assert [word in said(rollout) for word in ("409", "Address already in use", "No such file")] == [True] * 3
    assert rollout.reward == 1.0


def test_the_task_asks_for_the_cheapest_fruit_in_sufficient_stock() -> None:
    for index in range(200):
        task = make_task("test", index)
        enough = [row for row in task.stock if row[2] >= task.count]
        assert min(enough, key=lambda row: row[1])[0] == task.name
        assert min(task.stock, key=lambda row: row[1]) not in enough


def test_the_splits_have_no_id_in_common() -> None:
    train, test = ({task.id for task in Market.tasks(split)[:300]} for split in ("train", "test"))
    assert not train & test
