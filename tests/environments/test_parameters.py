"""An env's parameters: declared by its class and set by a run, a command line or an evaluation."""

import asyncio
import math
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field

import agentgym as ag
from agentgym.cli.output import RefusedWords
from agentgym.cli.recipe import settings
from agentgym.engines.scripted import Scripted, say
from agentgym.environments.parameters import Parameter, parameters
from agentgym.store.run_settings import refuse_changes, write_settings
from tests.run.test_resume import SETTINGS


class Adding(ag.ToolEnv[ag.Task]):
    """Asks for a sum of ones; the difficulty is the number of ones."""

    difficulty = ag.Parameter(2, Annotated[int, Field(ge=1, le=9)], doc="Ones in the sum.")
    tone = ag.Parameter("plain", Literal["plain", "loud"])
    bonus = ag.Parameter(0.5)
    strict = ag.Parameter(False)
    name = ag.Parameter("sum")

    @classmethod
    def tasks(cls, split: ag.Split) -> list[ag.Task]:
        return [ag.Task(id="t", prompt="+".join("1" * cls.difficulty))]

    @ag.reward
    def right(self) -> float:
        return float(self.answer == str(self.difficulty)) + self.bonus


RECIPE = ag.RunConfig(recipe="adding", env="tests.environments.test_parameters:Adding", model="tiny")


async def test_a_configured_env_has_its_own_values_and_the_class_keeps_its_defaults() -> None:
    hard = Adding.configured(difficulty=4, bonus=1)
    assert hard.__name__ == "Adding"
    assert [task.prompt[0]["content"] for task in hard.tasks("test")] == ["1+1+1+1"]
    assert (await ag.evaluate(hard, Scripted([say("4")]))).reward == 2.0
    assert (await ag.evaluate(Adding, Scripted([say("2")]))).reward == 1.5


def test_values_accumulate_over_configurations_and_subclasses() -> None:
    class Louder(Adding):
        tone = ag.Parameter("loud", Literal["plain", "loud"])
        name = "fixed"  # a subclass may fix a value

    made = Louder.configured(difficulty=5).configured(strict=True)
    assert (made.difficulty, made.tone, made.strict) == (5, "loud", True)
    assert sorted(parameters(made)) == ["bonus", "difficulty", "strict", "tone"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"dificulty": 3}, r"^dificulty: Adding has no such parameter; did you mean 'difficulty'\?"),
        ({"zzz": 3}, r"^zzz: .* there are: bonus, difficulty, name, strict, tone$"),
        ({"difficulty": 10}, r"^difficulty: must be less than or equal to 9, got 10"),
        ({"difficulty": "3"}, r"^difficulty: must be a valid integer, got '3'"),
        ({"difficulty": True}, r"^difficulty: must be a valid integer, got True"),
        ({"tone": "soft"}, r"^tone: must be 'plain' or 'loud', got 'soft'"),
        ({"bonus": math.inf}, r"^bonus: must be a finite number, got inf"),
    ],
)
def test_an_invalid_name_or_value_is_refused_by_name(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Adding.configured(**arguments)


def test_a_default_that_is_not_a_plain_value_of_its_type_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^Parameter: the default must be a number, a bool or text, got None"):
        Parameter(None)
    with pytest.raises(ValueError, match=r"^Parameter: must be less than or equal to 3, got 4"):
        Parameter(4, Annotated[int, Field(le=3)])


def test_flags_under_env_are_parsed_by_their_parameters_types() -> None:
    flags = ["--env.difficulty", "3", "--env.strict=true", "--env.bonus", "-1", "--env.name", "7", "--max-steps", "4"]
    run = settings(RECIPE, flags)
    assert run.env_args == {"difficulty": 3, "strict": True, "bonus": -1.0, "name": "7"}
    assert run.max_steps == 4


def test_a_flag_replaces_only_its_own_value_of_the_recipe() -> None:
    recipe = replace(RECIPE, env_args={"difficulty": 8, "tone": "loud"})
    assert settings(recipe, ["--env.difficulty", "2"]).env_args == {"difficulty": 2, "tone": "loud"}


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--env.dificulty", "3"], "--env.dificulty: Adding has no such parameter; did you mean"),
        (["--env.difficulty", "ten"], "--env.difficulty: must be a valid integer"),
        (["--env.difficulty"], "--env.difficulty: expected a value"),
    ],
)
def test_a_flag_that_the_env_refuses_gives_one_line_with_its_name(flags: list[str], said: str) -> None:
    with pytest.raises(RefusedWords, match=f"^{said}"):
        settings(RECIPE, flags)


def helped(recipe: ag.RunConfig, flags: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[str, str]:
    """Return what `--help` prints, without its boxes and line breaks, and what it writes to stderr."""
    with pytest.raises(SystemExit, match="0"):
        settings(recipe, [*flags, "--help"])
    said = capsys.readouterr()
    return " ".join(said.out.translate(dict.fromkeys(map(ord, "│╭╮╰╯─"))).split()), said.err


def test_help_lists_each_parameter_of_the_env_with_type_default_and_text(capsys: pytest.CaptureFixture[str]) -> None:
    said, error = helped(RECIPE, [], capsys)
    assert "--env.difficulty INT Ones in the sum. (at least 1, at most 9) (default: 2)" in said
    assert "--env.tone {plain,loud} (default: plain)" in said
    assert "--env.bonus FLOAT (default: 0.5)" in said
    assert "--env.strict {true,false} (default: False)" in said
    assert "--env.name STR (default: sum)" in said
    assert "--max-steps INT Number of training steps; each collects a batch and trains on it." in said
    assert error == ""


def test_help_shows_the_recipes_values_and_the_parameters_of_the_chosen_env(
    capsys: pytest.CaptureFixture[str],
) -> None:
    recipe = replace(RECIPE, env_args={"difficulty": 8})
    assert "(at least 1, at most 9) (default: 8)" in helped(recipe, [], capsys)[0]
    assert "--env.difficulty" not in helped(recipe, ["--env", "envs.chase.env:Chase"], capsys)[0]
    said, error = helped(recipe, ["--env", "nowhere:Env"], capsys)
    assert "--max-steps INT" in said
    left_out, listed = error.splitlines()
    assert left_out.startswith("adding: env_args: difficulty is dropped: it belongs to ")
    assert listed.startswith("adding: the env's parameters cannot be listed: env 'nowhere:Env'")


def test_help_lists_the_parameters_of_several_envs_under_their_names(capsys: pytest.CaptureFixture[str]) -> None:
    both = replace(
        RECIPE,
        env={"tests.environments.test_parameters:Adding": 2.0, "chase": 1.0},
        env_args={"Adding.bonus": 1.5},
    )
    import envs.chase.env  # noqa: F401  the import registers it by name

    said, _ = helped(both, [], capsys)
    assert "--env.Adding.difficulty INT Ones in the sum." in said
    assert "--env.Adding.bonus FLOAT (default: 1.5)" in said


def test_a_configured_parameter_keeps_its_description() -> None:
    assert parameters(Adding.configured(difficulty=3))["difficulty"].doc == "Ones in the sum."


def test_a_run_refuses_unknown_env_arguments_before_it_starts(tmp_path: Path) -> None:
    run = replace(RECIPE, env_args={"dificulty": 3}, output_dir=tmp_path / "run")
    with pytest.raises(ValueError, match=r"^env_args\.dificulty: Adding has no such parameter"):
        asyncio.run(ag.train_policy(run))
    assert not (tmp_path / "run").exists()


def test_a_resumed_run_keeps_its_env_arguments(tmp_path: Path) -> None:
    run = replace(SETTINGS, env_args={"difficulty": 3})
    write_settings(tmp_path, run)
    refuse_changes(tmp_path, run)
    with pytest.raises(ValueError, match=r'env_args: the run has \{"difficulty": 3\}, not \{"difficulty": 4\}'):
        refuse_changes(tmp_path, replace(run, env_args={"difficulty": 4}))
