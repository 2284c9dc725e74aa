"""Tests of web with its site in a sandbox of each kind and in a separate container."""

import re
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import pytest
import pytest_asyncio

import agentgym as ag
from agentgym.sandboxes.docker.docker import why_no_docker
from agentgym.sandboxes.local.local import why_no_bubblewrap
from agentgym.sandboxes.protocol import SandboxPool
from agentgym.testing import Reply, Scripted, call, check_env, say
from envs.web.chores import KINDS, NAMES
from envs.web.env import Web, WebTask, make_task, oracle

SPLITS: tuple[ag.Split, ...] = ("train", "test")
BUY, RETURN, RATE = (make_task("train", index) for index in range(3))


class World(NamedTuple):
    """The env with the site in one of its possible locations, and an open pool of one sandbox for it."""

    env: type[Web]
    sandboxes: SandboxPool


@pytest_asyncio.fixture(
    params=["bubblewrap", *(pytest.param(world, marks=pytest.mark.docker) for world in ("docker", "container"))]
)
async def world(request: pytest.FixtureRequest) -> AsyncIterator[World]:
    """Yield the site in a bubblewrap sandbox, in a Docker sandbox, and in a container next to one."""
    bubblewrap = request.param == "bubblewrap"
    if (why_not := why_no_bubblewrap() if bubblewrap else why_no_docker()) is not None:
        pytest.skip(f"{request.param}: {why_not}")
    env = Web.configured(place="container" if request.param == "container" else "sandbox")
    spec = ag.Bubblewrap(network="loopback") if bubblewrap else env.sandbox_for(BUY)
    async with spec.open(1) as sandboxes:
        yield World(env, sandboxes)


async def play(world: World, task: WebTask, *script: Reply) -> ag.Rollout:
    rollout = await ag.rollout(world.env, task, Scripted([*script, say("Done.")]), sandboxes=world.sandboxes)
    assert rollout.error is None, rollout
    return rollout


async def test_the_oracle_does_every_kind_of_task(world: World) -> None:
    for index in range(len(KINDS)):
        task = make_task("test", index)
        rollout = await play(world, task, *oracle(task)[:-1])
        assert (rollout.reward, "Thank you." in str(rollout)) == (1.0, True), rollout


async def test_web_keeps_the_contract_of_an_env(world: World) -> None:
    await check_env(world.env, RETURN, oracle=oracle(RETURN), sandboxes=world.sandboxes)


async def test_following_links_from_the_first_page_leads_to_the_goal(world: World) -> None:
    wanted = max((row for row in RATE.content["products"] if row["id"] == RATE.action[1]), key=lambda row: row["price"])
    place = [row["id"] for row in RATE.content["products"] if row["category"] == wanted["category"]].index(wanted["id"])
    walk: list[Reply] = [call("get", path="/"), call("follow", text=wanted["category"])]
    walk += [call("follow", text="next")] * (place // 5)
    walk += [call("follow", text="buy"), call("follow", text=wanted["name"]), oracle(RATE)[1]]
    rollout = await play(world, RATE, *walk)
    assert (rollout.reward, rollout.metrics["tool_errors"]) == (1.0, 1), rollout
    assert "there is no such link; the links are: " in str(rollout)


async def test_a_different_additional_or_missing_action_is_not_rewarded(world: World) -> None:
    look, buy, *_ = oracle(BUY)
    other = oracle(RATE)[1]
    for script in ([look], [buy, buy], [buy, _with_token_of(BUY, other)], [_changed(buy, "count", "5")]):
        assert (await play(world, BUY, *script)).reward == 0.0


async def test_the_number_and_length_of_forms_is_bounded(world: World) -> None:
    form = {"token": BUY.content["token"], "count": "1", "name": "\U0001f600" * 40}
    products = [str(row["id"]) for row in BUY.content["products"] if row["stock"]][:9]
    orders = [call("post", path="/order", fields=form | {"id": product}) for product in products]
    rollout = await play(world, BUY, _changed(orders[0], "name", "\u00e9" * 41), *orders)
    assert rollout.reward == 0.0, rollout
    assert str(rollout).count("Thank you.") == 8
    assert "name: fill it in, with 40 characters at most" in str(rollout)
    assert "8 forms were taken, and no more are" in str(rollout)


async def test_a_form_that_the_site_refuses_has_no_effect_and_a_reason(world: World) -> None:
    buy = oracle(BUY)[1]
    wrong = [
        _changed(buy, "token", "guess"),
        _changed(buy, "count", "99"),
        _changed(buy, "count", "-1"),
        _changed(buy, "name", ""),
        _changed(buy, "id", "1"),
    ]
    rollout = await play(world, BUY, *wrong, buy)
    assert rollout.reward == 1.0, rollout
    assert len(re.findall(r"\b400 ", str(rollout))) == len(wrong)


async def test_no_tool_call_can_reset_or_leave_the_site(world: World) -> None:
    paths = ["/ledger", "//example.com/", "/../etc/passwd", "/?%0d%0aX: y"]
    malformed = [call("get", path=path) for path in ("http://example.com/", "/ HTTP/1.1\r\nX: y")]
    attempts = [*(call("get", path=path) for path in paths), call("post", path="/", fields={"products": "[]"})]
    rollout = await play(world, BUY, *attempts, *malformed, *oracle(BUY)[:-1])
    assert (rollout.reward, rollout.metrics["malformed_calls"]) == (1.0, 3.0), rollout


def _changed(sent: Reply, field: str, value: str) -> Reply:
    """Return the same form with another value in a field."""
    assert isinstance(sent, dict)
    arguments: Any = sent["tool_calls"][0]["function"]["arguments"]
    return call("post", path=arguments["path"], fields={**arguments["fields"], field: value})


def _with_token_of(task: WebTask, sent: Reply) -> Reply:
    """Return a form of another task's site for this one, about this task's product."""
    return _changed(_changed(sent, "token", task.content["token"]), "id", str(task.action[1]))


@pytest.mark.parametrize("split", SPLITS)
def test_every_task_has_one_right_action(split: ag.Split) -> None:
    for index in range(150):
        task = make_task(split, index)
        assert task == make_task(split, index)
        kind, number, *rest = task.action
        rows = task.content["orders" if kind == "return" else "products"]
        assert [row["id"] for row in rows].count(number) == 1
        assert len({row["price"] for row in task.content["products"]}) == len(task.content["products"])
        assert len({row["product"] for row in task.content["orders"]}) == len(task.content["orders"])
        assert kind != "order" or (rest[1] in NAMES and next(r for r in rows if r["id"] == number)["stock"] >= rest[0])


def test_the_splits_have_no_task_in_common() -> None:
    train, test = ({str(task.content) for task in Web.tasks(split)[:300]} for split in SPLITS)
    assert len(train) == len(test) == 300
    assert not train & test
