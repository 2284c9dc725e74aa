"""docs/defaults.md: its tables have the defaults and the ranges of the code."""

import re
from dataclasses import replace

import pytest

import agentgym as ag
from agentgym.causal_lm import model_defaults as code
from agentgym.environments.limits import Limits
from agentgym.store.run_settings import FOLLOW_MODEL, flat
from tests.docs.blocks import DOCS

PAGE = (DOCS / "defaults.md").read_text()
PLAIN = flat(ag.RunConfig(env="chase", model="tiny"))


def cells(heading: str) -> list[list[str]]:
    section = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    table = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in row] for row in table]


def test_the_first_table_has_every_setting_that_follows_the_model() -> None:
    named = {name for row in cells("Settings that follow the model") for name in re.findall(r"`([\w.]+)`", row[0])}
    assert named == {*FOLLOW_MODEL, "train.dtype", "engine.dtype"}
    assert all(PLAIN[name] is None for name in FOLLOW_MODEL)
    assert PLAIN["train.dtype"] == PLAIN["engine.dtype"] == "auto"


def test_the_first_table_has_the_values_of_the_code() -> None:
    rows = cells("Settings that follow the model")
    rates = [float(row[1]) for row in rows if row[0] == "`train.lr`"]
    assert rates == [code.TINY_RATE, code.RATE["lora"], code.RATE["full"]]
    [tokens, context] = [row for row in rows if "tokens" in row[0]]
    assert tokens[1] == f"{code.LEAST_TOKENS} to {code.MOST_TOKENS:,}"
    assert f"{code.CPU_ACTIVATIONS >> 30} GiB" in tokens[2]
    assert code.ACTIVATION_SHARE == {"cpu": 8, "cuda": 4}
    assert context[1].startswith(f"{code.LEAST_CONTEXT} ")
    assert f"{code.KV_BYTES >> 30} GiB" in context[2]
    assert code.KV_SHARE == {"cpu": 4, "cuda": 8}
    assert f"{code.LARGE // 1_000_000} million" in next(row[2] for row in rows if row[1] == "all processors")


@pytest.mark.parametrize(("setting", "value"), [row[:2] for row in cells("Settings that are the same for every model")])
def test_the_second_table_has_the_plain_defaults(setting: str, value: str) -> None:
    assert str(PLAIN[setting.strip("`")]).removesuffix(".0") == value


def test_a_turn_has_1024_tokens_if_the_env_sets_no_limit() -> None:
    assert Limits().turn_tokens == 1024


def test_the_third_table_has_the_ranges_beyond_which_a_warning_is_logged() -> None:
    usual = [code.USUAL_RATE["lora"], code.USUAL_RATE["full"], code.USUAL_TEMPERATURE, code.USUAL_RANK]
    for (_, stated, instead), found in zip(cells("Values that cause a warning"), usual, strict=True):
        low, high = map(float, stated.split(" to "))
        assert (low, high, instead) == (found.low, found.high, found.instead)


def test_the_defaults_of_large_models_are_inside_the_ranges() -> None:
    config = replace(ag.TrainConfig(), lr=code.RATE["lora"])
    assert not code.USUAL_RATE["lora"].is_far(code.RATE["lora"])
    assert not code.USUAL_RATE["full"].is_far(code.RATE["full"])
    assert not code.USUAL_TEMPERATURE.is_far(config.temperature)
    assert not code.USUAL_RANK.is_far(config.lora_rank)
