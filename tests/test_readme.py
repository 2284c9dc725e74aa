"""The README's files run as they are printed, from the wheel, in an empty folder and without the checkout."""

import ast
import importlib
import json
import re
import tomllib
from pathlib import Path

import pytest

from agentgym.cli.main import COMMANDS
from tests.conftest import Installed
from tests.docs.blocks import needs_sandbox, no_sandbox, readme_files, write_readme_files

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty folder, and in it the README's files as a reader would save them."""
    folder = tmp_path_factory.mktemp("readme")
    write_readme_files(folder)
    return folder


@pytest.fixture(scope="module")
def run(folder: Path, installed: Installed) -> tuple[Path, set[str]]:
    """The folder of two small steps of the README's recipe, and the names of what they leave in it.

    Where no sandbox runs, the tiny model's code runs without one.
    """
    small = [
        "--max-steps",
        "2",
        "--prompts-per-step",
        "4",
        "--eval-tasks",
        "8",
        *(["--sandbox", "unsafe"] if no_sandbox() else []),
    ]
    done = installed.run("python", "train_pointers.py", *small, cwd=folder)
    assert done.returncode == 0, done.stderr[-3000:]
    summary = json.loads(done.stdout)
    assert summary["optimizer_steps"] == 2
    assert summary["failed"] == 0
    out = folder / str(summary["output_dir"])
    return out, {path.name for path in out.iterdir()}


@pytest.fixture(scope="module")
def run_folder(run: tuple[Path, set[str]]) -> Path:
    """The folder of the run; readers of its store may have left files of their own in it."""
    return run[0]


def test_the_installed_library_is_the_wheels(folder: Path, installed: Installed) -> None:
    done = installed.run("python", "-c", "import agentgym; print(agentgym.__file__)", cwd=folder)
    assert Path(done.stdout.strip()).is_relative_to(installed.folder)


@needs_sandbox
def test_the_environments_tests_pass_without_a_configuration(folder: Path, installed: Installed) -> None:
    done = installed.run("python", "-m", "pytest", "-q", "-p", "no:cacheprovider", cwd=folder)
    assert "3 passed" in done.stdout, done.stdout[-3000:] + done.stderr[-1000:]
    assert "arning" not in done.stdout


def test_the_recipe_lists_its_settings(folder: Path, installed: Installed) -> None:
    done = installed.run("python", "train_pointers.py", "--help", cwd=folder)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "--train.lr" in done.stdout


def test_the_recipe_trains_and_leaves_the_files_of_the_table(run: tuple[Path, set[str]]) -> None:
    files = set(
        re.findall(r"^\| `([\w./]+)` \|", README.partition("## Its recipe")[2].partition("\n## ")[0], re.MULTILINE)
    )
    assert {"settings.json", "metrics.jsonl", "summary.json", "checkpoints/", "adapter/"} <= files
    assert {name.rstrip("/") for name in files} == run[1]


def test_what_was_trained_can_be_read_in_the_terminal(folder: Path, run_folder: Path, installed: Installed) -> None:
    done = installed.run("agentgym", "show", str(run_folder), "--worst", "3", cwd=folder)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "What is the value?" in done.stdout


@pytest.mark.slow
@needs_sandbox
def test_the_trained_adapter_is_evaluated(folder: Path, run_folder: Path, installed: Installed) -> None:
    done = installed.run("python", "evaluate_pointers.py", str(run_folder / "adapter"), cwd=folder)
    assert done.returncode == 0, done.stderr[-3000:]
    before, after = done.stdout.splitlines()
    assert before.startswith("before Evaluation(reward=")
    assert after.startswith("after  Evaluation(reward=")


@pytest.mark.slow
def test_the_files_pass_a_strict_type_checker(folder: Path, installed: Installed) -> None:
    done = installed.run("python", "-m", "mypy", "--strict", *sorted(readme_files()), cwd=folder)
    assert "Success" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize(
    "command", sorted(set(re.findall(r"(?:`|^)agentgym ([a-z]+)(?! language)\b", README, re.MULTILINE)))
)
def test_each_command_that_is_named_exists(command: str) -> None:
    assert command in COMMANDS


def test_the_extras_are_those_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = set(re.findall(r"`agentgym-kit\[(\w+)\]`", README))
    assert named == set(project["optional-dependencies"]) - {"bench"}


def test_the_map_has_every_room_in_the_order_that_is_held() -> None:
    house = ast.parse((ROOT / "tests/test_house.py").read_text())
    [order] = [
        ast.literal_eval(node.value)
        for node in house.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "ORDER"
    ]
    drawn = re.findall(r"^  (\w+)(?:/|\.py) ", README.partition("## The rooms")[2].partition("## ")[0], re.MULTILINE)
    assert drawn == [room for room in order if "." not in room]


@pytest.mark.parametrize(("name", "module"), re.findall(r"^\| `(\w+)` \| `(agentgym[\w.]*)` \|", README, re.MULTILINE))
def test_each_type_of_a_tokens_way_is_where_the_table_says(name: str, module: str) -> None:
    assert getattr(importlib.import_module(module), name).__module__ == module


def test_the_environment_is_at_most_thirty_lines() -> None:
    code = readme_files()["my_env.py"].split("class Pointers(")[1]
    assert len([line for line in code.splitlines() if line.strip()]) <= 30


def test_every_file_and_page_that_is_linked_exists() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", README)
    assert [link for link in links if "://" not in link and not (ROOT / link).exists()] == []
