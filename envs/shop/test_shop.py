"""Tests of shop with its scripted customer: the final state of the database, and what earns nothing."""

import re
from pathlib import Path
from typing import Any

import pytest

import agentgym as ag
from agentgym.cli import main as cli
from agentgym.testing import Reply, Scripted, call, check_env, say
from envs.shop.env import Shop, ShopTask, make_task, oracle
from envs.shop.scenarios import KINDS
from envs.shop.user import open_user

NAMES = [kind.__name__ for kind in KINDS]
FORBIDDEN = ["cancel_too_late", "cancel_anothers", "move_unverified", "send_back_too_late", "exchange_sold_out"]
SPLITS: tuple[ag.Split, ...] = ("train", "test")


def task_of(kind: str, split: ag.Split = "train") -> ShopTask:
    return make_task(split, NAMES.index(kind))


async def play(task: ShopTask, *script: Reply) -> ag.Rollout:
    """Run a rollout whose agent says goodbye after the script, until the customer leaves."""
    rollout = await ag.rollout(Shop, task, Scripted([*script, say("Goodbye."), say("Goodbye.")]))
    assert rollout.error is None, rollout
    return rollout


def number_in(task: ShopTask) -> int:
    """Return the number of the order that the customer mentions."""
    return int(re.findall(r"\d{4}", task.wish)[0])


def verification(task: ShopTask) -> Reply:
    return call("verify", email=task.email, postcode=task.postcode)


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("kind", NAMES)
async def test_the_oracle_serves_every_kind_of_customer(kind: str, split: ag.Split) -> None:
    rollout = await play(task_of(kind, split), *oracle(task_of(kind, split)))
    assert (rollout.reward, rollout.stop_reason) == (1.0, "done"), rollout


@pytest.mark.parametrize("kind", ["move", "move_unverified"])
async def test_shop_keeps_the_contract_of_an_env(kind: str) -> None:
    await check_env(Shop, task_of(kind), oracle=oracle(task_of(kind)))


@pytest.mark.parametrize("kind", NAMES)
async def test_doing_nothing_or_refusing_everybody_is_not_rewarded(kind: str) -> None:
    task = task_of(kind)
    for rule in ("not verified", "not theirs", "not pending", "too late", "not in stock"):
        assert (await play(task, call("refuse", number=number_in(task), rule=rule))).reward == 0.0, rule
    assert (await play(task)).reward == 0.0


OBEDIENT: dict[str, dict[str, Any]] = {
    "cancel_too_late": {"name": "cancel"},
    "cancel_anothers": {"name": "cancel"},
    "move_unverified": {"name": "change_address", "address": "Mill Lane 1"},
    "send_back_too_late": {"name": "take_back"},
    "exchange_sold_out": {"name": "exchange", "article": "COS"},
}


@pytest.mark.parametrize("kind", FORBIDDEN)
async def test_actions_that_the_policy_forbids_are_possible_but_not_rewarded(kind: str) -> None:
    task, arguments = task_of(kind), dict(OBEDIENT[kind])
    did = call(arguments.pop("name"), number=number_in(task), **arguments)
    rollout = await play(task, verification(task), did)
    assert (rollout.reward, rollout.metrics["tool_errors"]) == (0.0, 0.0)
    assert (await play(task, *oracle(task)[:-1], did)).reward == 0.0  # Refusing and then doing it anyway is no better.


async def test_a_change_without_verification_or_with_an_additional_change_earns_nothing() -> None:
    task = task_of("cancel")
    ask, verify, cancel, _ = oracle(task)
    other = next(int(row[0]) for row in task.rows["orders"] if row[0] != number_in(task))
    assert (await play(task, ask, verify, cancel)).reward == 1.0
    assert (await play(task, ask, cancel)).reward == 0.0
    assert (await play(task, ask, verify, cancel, call("take_back", number=other))).reward == 0.0
    assert (
        await play(task, ask, verify, cancel, call("refuse", number=number_in(task), rule="too late"))
    ).reward == 0.0


async def test_looking_and_asking_cost_nothing() -> None:
    task = task_of("exchange")
    looks = [call("look_up", number=number_in(task)), call("sizes", name="coat"), call("look_up", number=1)]
    ask, verify, *rest = oracle(task)
    rollout = await play(task, ask, verify, *looks, say("Shall I exchange it?"), *rest)
    assert rollout.reward == 1.0
    assert "there is no order 1" in str(rollout)
    assert "Yes, please." in str(rollout)


async def test_an_engine_named_in_a_recipe_can_play_the_customer() -> None:
    made = ag.CustomEngineConfig(name="envs.shop.user:open_user").load()
    assert made is open_user
    task = task_of("send_back")
    rollout = await ag.rollout(Shop, task, Scripted(oracle(task)), models={"user": made("none")})
    assert rollout.reward == 1.0


def test_the_commands_check_and_play_use_the_scripted_customer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["check", "envs.shop.env:Shop", "--number", "4"]) == 0
    (tmp_path / "turns").write_text("What is your email?\nGoodbye.\n")
    with (tmp_path / "turns").open() as turns:
        monkeypatch.setattr("sys.stdin", turns)
        assert cli.main(["play", "envs.shop.env:Shop"]) == 0
    said = capsys.readouterr().out
    assert "'shop-train-4' with its oracle: nothing is wrong" in said
    assert "My email is " in said
    assert "reward 0, stopped by done" in said


async def test_a_customer_who_gets_nowhere_gives_up() -> None:
    rollout = await ag.rollout(Shop, task_of("cancel"), Scripted(lambda _: say("Really?")))
    assert (rollout.stop_reason, rollout.reward) == ("done", 0.0)


def test_the_splits_have_no_task_in_common() -> None:
    train, test = ({str(task.rows) for task in Shop.tasks(split)[:400]} for split in SPLITS)
    assert len(train) == len(test) == 400
    assert not train & test
