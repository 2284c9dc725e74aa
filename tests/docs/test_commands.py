"""Each shell command in the docs is run, is parsed by the program's own parser, or has a stated reason for neither."""

import importlib
import re
import shlex
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import pytest
import tyro
from torch.distributed.run import get_args_parser

import agentgym as ag
from agentgym.cli import main as cli
from agentgym.cli.envs.train import recipe_of
from agentgym.cli.recipe import settings
from agentgym.sandboxes.docker.docker import why_no_docker
from tests.docs.blocks import ROOT, files_in, needs_sandbox, no_sandbox, write_walkthrough_files
from tests.docs.commands import LANGUAGES, NOT_RUN, PARSED, RUN, Command, commands, fences, rule_of

ALL = commands()
DOCKER = "check market"
"""Commands that contain it need Docker: a service next to a sandbox is a container."""
HEAVY = "--n 64"
"""Commands that contain it take longer; the slow tests run them."""


def under(rules: tuple[str, ...] | dict[str, str]) -> list[Command]:
    return [command for command in ALL if any(re.match(rule, command.text) for rule in rules)]


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Create the folder of a reader who has followed the README: its files, a short run, and an evaluation."""
    folder = tmp_path_factory.mktemp("reader")
    write_walkthrough_files(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(folder)
        for name in ("my_env", "train_pointers"):
            patch.delitem(sys.modules, name, raising=False)
        yield folder
        for name in ("my_env", "train_pointers"):
            sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def kept(reader: Path) -> Path:
    """Return the same folder, after a short run and a small evaluation."""
    small = [
        "--max-steps",
        "1",
        "--prompts-per-step",
        "2",
        "--eval-tasks",
        "2",
        *(["--sandbox", "unsafe"] if no_sandbox() else []),
    ]
    assert (
        cli.main(["train", "my_env:Pointers", "--recipe", "pointers", *small, "--output-dir", "runs/pointers/TIME"])
        == 0
    )
    words = "eval my_env:Pointers --model tiny --n 4 --max-tokens 40 --output-dir runs/eval-pointers/first"
    assert cli.main(words.split()) == 0
    return reader


def test_each_block_says_its_language() -> None:
    wrong = [f"{page.relative_to(ROOT)}:{line}" for page, line, language, _ in fences() if language not in LANGUAGES]
    assert wrong == []


@pytest.mark.parametrize("command", ALL, ids=str)
def test_each_command_is_run_or_has_a_reason_why_not(command: Command) -> None:
    assert rule_of(command), "list the command in tests/docs/commands.py"


@pytest.mark.parametrize("rule", [*RUN, *PARSED, *NOT_RUN])
def test_each_rule_matches_a_command(rule: str) -> None:
    assert any(re.match(rule, command.text) for command in ALL)


@needs_sandbox
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
@pytest.mark.parametrize("command", [one for one in under(RUN) if HEAVY not in one.text], ids=str)
def test_a_command_runs(command: Command, kept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if DOCKER in command.text and (why := why_no_docker()):
        pytest.skip(why)
    assert cli.main(shlex.split(command.text)[1:]) == 0, capsys.readouterr().err


@pytest.mark.slow
@needs_sandbox
@pytest.mark.parametrize("command", [one for one in under(RUN) if HEAVY in one.text], ids=str)
def test_a_slow_command_runs(command: Command, kept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(shlex.split(command.text)[1:]) == 0, capsys.readouterr().err


@pytest.mark.parametrize("command", under(PARSED), ids=str)
def test_a_command_is_accepted_by_its_parser(command: Command, reader: Path) -> None:
    words = shlex.split(command.text.rstrip("&"))
    if words[0] == "torchrun":
        asked = get_args_parser().parse_args(words[1:])
        words = ["python", *(["-m"] if asked.module else []), asked.training_script, *asked.training_script_args]
    if words[:3] == ["python", "-m", "agentgym"]:
        words = words[2:]
    if words[:2] == ["agentgym", "train"]:
        settings(recipe_of("name", words[2], "tiny"), words[3:])
    elif words[0] == "agentgym":
        assert callable(cli._read(words[1:]))
    else:
        module, flags = (words[2], words[3:]) if words[1] == "-m" else (Path(words[1]).stem, words[2:])
        recipe = recipe_in(module)
        if isinstance(recipe, ag.RunConfig):
            assert settings(recipe, flags).name == recipe.name
        else:
            assert isinstance(tyro.cli(recipe, args=flags), recipe)


def recipe_in(module: str) -> Any:
    """Return a program's settings: its recipe, or the dataclass that it passes to its parser."""
    there = vars(importlib.import_module(module))
    if "RECIPE" in there:
        return there["RECIPE"]
    found = [value for value in there.values() if isinstance(value, type)]
    [recipe] = [value for value in found if value.__module__ == module and is_dataclass(value)]
    return recipe


@pytest.mark.parametrize("command", under(NOT_RUN), ids=str)
def test_everything_that_a_command_names_exists(command: Command) -> None:
    """Extras are in pyproject.toml, targets in the Makefile, modules and folders in the checkout."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    if found := re.search(r"(?:agentgym-kit|whl|\.)\[([\w,]+)\]", command.text):
        assert set(found[1].split(",")) <= set(extras)
    for folder in re.findall(r"pytest (\S+)", command.text):
        assert (ROOT / folder).exists() or folder in files_in(ROOT / "README.md")
    for target in re.findall(r"^make (\S+)", command.text):
        assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for module in re.findall(r"python -m (benchmarks\.\w+)", command.text):
        path = ROOT / module.replace(".", "/")
        assert path.with_suffix(".py").is_file() or (path / "__main__.py").is_file()
