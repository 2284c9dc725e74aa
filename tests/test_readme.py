"""The README's code runs as it is printed."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BLOCKS = dict(re.findall(r"```python\n# (\S+)\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The README's files, as a reader would save them."""
    for name in ("my_env.py", "test_my_env.py"):
        (tmp_path / name).write_text(BLOCKS[name])
    (tmp_path / "bugfix_grpo.py").write_text(BLOCKS["recipes/bugfix_grpo.py"])
    (tmp_path / "pytest.ini").write_text("[pytest]\nasyncio_mode = auto\n")
    return tmp_path


def run(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    environment = os.environ | {"PYTHONPATH": f"{folder}:{ROOT}", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


def test_the_readmes_env_passes_the_readmes_test(folder: Path) -> None:
    done = run(folder, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_my_env.py")
    if "no sandbox runs here" in done.stdout:
        pytest.skip("no Docker and no bubblewrap on this machine")
    assert "2 passed" in done.stdout, done.stdout[-3000:] + done.stderr[-1000:]


def test_the_readmes_recipe_lists_its_settings(folder: Path) -> None:
    done = run(folder, "bugfix_grpo.py", "--help")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "--train.lr" in done.stdout


def test_the_readmes_env_is_at_most_thirty_lines() -> None:
    code = BLOCKS["my_env.py"].split("class BugTask")[1]
    assert len([line for line in code.splitlines() if line.strip()]) <= 30
