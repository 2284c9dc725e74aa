"""The walkthrough's files run as printed, from the wheel, in an empty folder and without the checkout."""

import json
import re
from pathlib import Path

import pytest

from tests.conftest import Installed
from tests.docs.blocks import DOCS, files_in, needs_sandbox, no_sandbox, write_walkthrough_files

PAGE = DOCS / "walkthrough.md"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a folder with the walkthrough's files, as a reader would save them."""
    folder = tmp_path_factory.mktemp("walkthrough")
    write_walkthrough_files(folder)
    return folder


@pytest.fixture(scope="module")
def run(folder: Path, installed: Installed) -> tuple[Path, set[str]]:
    """Run two small steps of the recipe; return the run's folder and the names of the files in it.

    If the machine has no sandbox, the tiny model's code runs without one.
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
    """Return the run's folder, which may contain additional files from readers of its store."""
    return run[0]


def test_the_installed_library_comes_from_the_wheel(folder: Path, installed: Installed) -> None:
    done = installed.run("python", "-c", "import agentgym; print(agentgym.__file__)", cwd=folder)
    assert Path(done.stdout.strip()).is_relative_to(installed.folder)


@needs_sandbox
def test_the_environments_tests_pass_without_configuration(folder: Path, installed: Installed) -> None:
    done = installed.run("python", "-m", "pytest", "-q", "-p", "no:cacheprovider", cwd=folder)
    assert "3 passed" in done.stdout, done.stdout[-3000:] + done.stderr[-1000:]
    assert "arning" not in done.stdout


def test_the_recipe_lists_its_settings(folder: Path, installed: Installed) -> None:
    done = installed.run("python", "train_pointers.py", "--help", cwd=folder)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "--train.lr" in done.stdout


def test_the_recipe_trains_and_leaves_the_files_in_the_table(run: tuple[Path, set[str]]) -> None:
    files = set(
        re.findall(
            r"^\| `([\w./]+)` \|", PAGE.read_text().partition("## Its recipe")[2].partition("\n## ")[0], re.MULTILINE
        )
    )
    assert {"settings.json", "metrics.jsonl", "summary.json", "checkpoints/", "adapter/"} <= files
    assert {name.rstrip("/") for name in files} == run[1]


def test_the_trained_rollouts_can_be_shown_in_the_terminal(
    folder: Path, run_folder: Path, installed: Installed
) -> None:
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
    done = installed.run("python", "-m", "mypy", "--strict", *sorted(files_in(PAGE)), cwd=folder)
    assert "Success" in done.stdout, done.stdout + done.stderr


def test_the_environment_is_at_most_thirty_lines() -> None:
    code = files_in(PAGE)["my_env.py"].split("class Pointers(")[1]
    assert len([line for line in code.splitlines() if line.strip()]) <= 30
