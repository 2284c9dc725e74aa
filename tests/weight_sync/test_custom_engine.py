"""A run samples from any engine: one named in its settings, or one passed to it."""

import importlib
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import agentgym as ag
from agentgym.cli.output import RefusedWords
from agentgym.cli.recipe import settings
from envs.chase.env import Chase
from recipes import chase_grpo

MINE = '''
from functools import partial, wraps

import agentgym as ag

opened = []


class Mine(ag.TransformersEngine):
    """The embedded engine, under another name."""

    def __init__(self, model):
        super().__init__(model, ag.TransformersConfig(slots=8, device="cpu"))

    async def __aenter__(self):
        opened.append("in")
        return await super().__aenter__()

    async def __aexit__(self, *error):
        opened.append("out")
        await super().__aexit__(*error)


def broken(model):
    return "an engine"


async def later(model):
    return Mine(model)


def of_nothing():
    return Mine("tiny")


def with_slots(function):
    @wraps(function)
    def injecting(*values):
        return function(*values, 8)

    return injecting


@with_slots
def injected(model, slots):
    return Mine(model)


class Injected(Mine):
    """An engine whose second argument comes from a decorator."""

    @with_slots
    def __init__(self, model, slots):
        super().__init__(model)


bound = partial(injected.__wrapped__, slots=8)
unbound = partial(injected.__wrapped__)
number = 3
'''


SMALL = ag.RunConfig(
    recipe="small",
    env="envs.chase.env:Chase",
    model="tiny",
    sandbox="unsafe",
    max_steps=1,
    prompts_per_step=2,
    group_size=2,
    eval_tasks=0,
    max_turn_tokens=16,
    train=ag.TrainConfig(device="cpu"),
)


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Yield the module of a user who wrote an engine."""
    (tmp_path / "mine_engine.py").write_text(MINE)
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("mine_engine")
    del sys.modules["mine_engine"]


async def test_a_run_opens_and_closes_the_engine_named_in_its_settings(mine: Any, tmp_path: Path) -> None:
    run = replace(SMALL, output_dir=tmp_path / "run", engine=ag.CustomEngineConfig(name="mine_engine:Mine", slots=4))
    summary = await ag.train_policy(run)
    assert summary["rollouts"] == 4
    assert mine.opened == ["in", "out"]
    assert '"engine.name": "mine_engine:Mine"' in (tmp_path / "run" / "settings.json").read_text()


async def test_a_run_uses_an_engine_that_it_is_given_and_leaves_it_open(mine: Any, tmp_path: Path) -> None:
    async with mine.Mine("tiny") as engine:
        await ag.train_policy(replace(SMALL, output_dir=tmp_path / "run"), engine=engine)
        assert engine.version == 1
        assert mine.opened == ["in"]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("mine_engine:Missing", "engine: 'mine_engine:Missing': mine_engine has no Missing"),
        ("no_such_module:Engine", "engine: 'no_such_module:Engine': no module named no_such_module"),
        (
            "mine_engine:number",
            "engine: expected a class, but 'mine_engine:number' is of type int; name a class",
        ),
        (
            "mine_engine:of_nothing",
            r"engine: 'mine_engine:of_nothing' is called with one argument, .* its parameters are \(\); change them",
        ),
        (
            "mine_engine:unbound",
            r"engine: 'mine_engine:unbound' is called with one argument, .* its parameters are \(model, slots\)",
        ),
    ],
)
def test_a_name_without_an_engine_is_refused_in_one_line_before_a_model_is_loaded(
    mine: Any, name: str, said: str
) -> None:
    engine = ag.CustomEngineConfig(name=name)
    judge = ag.ModelRoleConfig(model="tiny", engine=engine)
    for field, run in {
        "engine": replace(SMALL, engine=engine),
        "models.judge.engine": replace(SMALL, models={"judge": judge}),
        "teacher_engine": replace(SMALL, teacher="tiny", teacher_engine=engine),
    }.items():
        with pytest.raises(ValueError, match=f"^{field.removesuffix('engine')}{said}"):
            run.check_files()


@pytest.mark.parametrize("name", ["injected", "Injected", "bound"])
def test_an_engine_whose_other_arguments_are_injected_is_called_with_one(mine: Any, name: str) -> None:
    assert ag.CustomEngineConfig(name=f"mine_engine:{name}").load() is getattr(mine, name)
    assert isinstance(getattr(mine, name)("tiny"), mine.Mine)


def test_an_error_in_an_engines_own_module_is_not_mistaken_for_a_missing_class(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torn_engine.py").write_text("import os\nos.no_such_name\nclass Mine: ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(AttributeError, match="no_such_name"):
        ag.CustomEngineConfig(name="torn_engine:Mine").load()


@pytest.mark.parametrize(
    "template",
    [{"chat_template": "{{ messages }}"}, {"chat_template_kwargs": {"loud": True}}, {"tools": "prompt"}],
)
def test_a_template_that_a_custom_engine_would_not_get_is_refused(template: dict[str, Any]) -> None:
    with pytest.raises(
        ValueError, match=r"^chat_template, chat_template_kwargs, tools: a custom engine brings its own"
    ):
        replace(SMALL, engine=ag.CustomEngineConfig(name="mine_engine:Mine"), **template)


async def test_an_invalid_engine_is_refused_before_the_first_rollout(mine: Any, tmp_path: Path) -> None:
    run = replace(SMALL, output_dir=tmp_path / "run", engine=ag.CustomEngineConfig(name="mine_engine:broken"))
    with pytest.raises(TypeError, match="engine: must be an engine, got 'an engine'"):
        await ag.train_policy(run)


def test_a_custom_engine_can_be_named_on_the_command_line() -> None:
    run = settings(chase_grpo.RECIPE, ["--engine", "mine_engine:Mine", "--engine.slots", "5"])
    assert run.engine == ag.CustomEngineConfig(name="mine_engine:Mine", slots=5)
    with pytest.raises(
        RefusedWords, match=r"^--engine: expected transformers, sglang or package\.module:Class, got 'vllm'"
    ):
        settings(chase_grpo.RECIPE, ["--engine", "vllm"])
    with pytest.raises(ValueError, match=r"^name: expected package\.module:Class, got 'mine'"):
        ag.CustomEngineConfig(name="mine")


def test_colocated_servers_are_refused_if_rollouts_overlap_training() -> None:
    run = replace(SMALL, engine=ag.SGLangConfig(colocate="keep"))
    with pytest.raises(ValueError, match=r"^engine\.colocate, max_staleness: "):
        replace(run, max_staleness=1)


async def test_a_run_warns_at_its_start_if_the_engines_context_is_smaller_than_the_envs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Chase, "limits", replace(Chase.limits, context_tokens=2048))
    await ag.train_policy(
        replace(
            SMALL, output_dir=tmp_path / "run", engine=ag.TransformersConfig(slots=4, context_tokens=256), max_steps=0
        )
    )
    [said] = [record.getMessage() for record in caplog.records if "limits.context_tokens" in record.getMessage()]
    assert said.endswith(
        "set engine.context_tokens to 2048 if the model and the memory allow it, or limits.context_tokens to 256"
    )
