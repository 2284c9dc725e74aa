"""The README: its file is tested and trains as it is printed, from the wheel, and it stays short."""

import json
import re
from pathlib import Path

import pytest

from agentgym.cli.main import COMMANDS
from tests.conftest import Installed
from tests.docs.blocks import files_in, needs_sandbox

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
SCREEN = 50
"""Lines that fit on a screen."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the README's file, as a reader would save it."""
    folder = tmp_path_factory.mktemp("readme")
    for name, text in files_in(ROOT / "README.md").items():
        (folder / name).write_text(text)
    return folder


def test_environment_test_and_recipe_fit_on_a_screen() -> None:
    [text] = files_in(ROOT / "README.md").values()
    assert len(text.splitlines()) <= SCREEN


def test_the_readme_has_at_most_180_lines() -> None:
    assert len(README.splitlines()) <= 180


@needs_sandbox
def test_the_file_passes_its_own_test(folder: Path, installed: Installed) -> None:
    done = installed.run("python", "-m", "pytest", "-q", "-p", "no:cacheprovider", "lookup.py", cwd=folder)
    assert "1 passed" in done.stdout, done.stdout[-3000:] + done.stderr[-1000:]


@needs_sandbox
def test_the_file_trains_and_its_adapter_is_evaluated_and_compared(folder: Path, installed: Installed) -> None:
    small = ["--max-steps", "1", "--prompts-per-step", "4", "--eval-tasks", "4"]
    done = installed.run("python", "lookup.py", *small, cwd=folder)
    assert done.returncode == 0, done.stderr[-3000:]
    summary = json.loads(done.stdout)
    assert summary["rollouts"] == 32
    assert summary["failed"] == 0
    adapter = Path(summary["output_dir"], "adapter")
    for name in ("A", "B"):
        words = [
            "eval",
            "lookup:Lookup",
            "--model",
            str(adapter),
            "--n",
            "4",
            "--output-dir",
            f"runs/eval-Lookup/{name}",
        ]
        done = installed.run("agentgym", *words, cwd=folder)
        assert done.returncode == 0, done.stderr[-3000:]
    done = installed.run("agentgym", "compare", "runs/eval-Lookup/A", "runs/eval-Lookup/B", cwd=folder)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.slow
@needs_sandbox
def test_the_file_learns_as_its_table_says(folder: Path, installed: Installed) -> None:
    [row] = re.findall(r"^\| 0 \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", README, re.MULTILINE)
    done = installed.run("python", "lookup.py", "--seed", "0", cwd=folder)
    assert done.returncode == 0, done.stderr[-3000:]
    summary = json.loads(done.stdout)
    assert summary["eval_before"] == pytest.approx(float(row[2]), abs=0.15)
    assert summary["eval_after"] == pytest.approx(float(row[3]), abs=0.15)


BLOCKS = "\n".join(re.findall(r"```sh\n(.*?)```", README, re.DOTALL))


@pytest.mark.parametrize("command", sorted(set(re.findall(r"^agentgym ([a-z]+)", BLOCKS, re.MULTILINE))))
def test_each_command_that_is_named_exists(command: str) -> None:
    assert command in COMMANDS


def test_every_file_and_page_that_is_linked_exists() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", README)
    assert [link for link in links if "://" not in link and not (ROOT / link).exists()] == []
