"""The command line of a recipe: which engine comes first, and decides what the flags under it mean."""

from dataclasses import replace

import pytest

import agentgym as ag
from agentgym.engines.sglang.engine import SGLangEngine
from agentgym.run.command import settings
from agentgym.run.loop import open_engine
from recipes.bisect_turns import BisectTurns
from recipes.chase_grpo import ChaseGRPO


@pytest.mark.parametrize(
    ("arguments", "engine"),
    [
        ([], ag.LocalConfig()),
        (["--engine", "local", "--engine.slots", "8"], ag.LocalConfig(slots=8)),
        (["--engine.slots", "8"], ag.LocalConfig(slots=8)),
        (["--engine", "sglang"], ag.SGLangConfig()),
        (
            ["--seed", "3", "--engine=sglang", "--engine.servers", "2", "--engine.arguments=--tp 2"],
            ag.SGLangConfig(servers=2, arguments="--tp 2"),
        ),
        (
            ["--engine", "sglang", "--engine.urls", "http://a", "http://b"],
            ag.SGLangConfig(urls=("http://a", "http://b")),
        ),
    ],
)
def test_the_engine_is_chosen_by_name_and_set_by_the_flags_under_it(
    arguments: list[str], engine: ag.LocalConfig | ag.SGLangConfig
) -> None:
    run = settings(ChaseGRPO, arguments)
    assert run.engine == engine
    assert run.recipe == "chase_grpo"


@pytest.mark.parametrize("arguments", [["--engine", "vllm"], ["--engine.servers", "2"]])
def test_an_engine_or_a_flag_that_is_not_there_is_refused(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        settings(ChaseGRPO, arguments)
    assert arguments[0] in capsys.readouterr().err


def test_a_recipe_without_a_value_for_a_field_is_told_which() -> None:
    with pytest.raises(SystemExit, match=r"RunConfig: every field .* 'recipe', 'env'"):
        settings(ag.RunConfig, [])


def test_a_launched_server_takes_an_adapter_of_the_trainers_rank() -> None:
    engine = open_engine(settings(ChaseGRPO, ["--engine", "sglang", "--train.lora-rank", "32"]), print)
    assert isinstance(engine, SGLangEngine)
    assert engine._config.max_lora_rank == 32


def test_dora_is_refused_where_no_server_serves_it() -> None:
    run = settings(ChaseGRPO, ["--train.dora"])
    assert run.train.dora
    with pytest.raises(ValueError, match=r"^train\.dora: .*--engine local"):
        replace(run, engine=ag.SGLangConfig())


def test_targets_of_the_adapter_are_named_on_the_command_line() -> None:
    assert settings(ChaseGRPO, []).train.lora_targets == ("all-linear",)
    assert settings(ChaseGRPO, ["--train.lora-targets", "q_proj", "v_proj"]).train.lora_targets == ("q_proj", "v_proj")


def test_credit_by_turn_is_a_setting_of_the_run() -> None:
    assert settings(BisectTurns, []).advantage_level == "turn"
    assert settings(ChaseGRPO, ["--advantage-level", "turn", "--advantage", "reinforce++"]).advantage_level == "turn"
