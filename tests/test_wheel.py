"""The wheel: the library and the container files, nothing else; it works outside the checkout."""

import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]

PLAY = """
import asyncio, sys
sys.path.insert(0, sys.argv[1])
import agentgym as ag
from agentgym.testing import Scripted, call, say

class Adder(ag.ToolEnv[ag.Task]):
    @ag.tool
    async def add(self, a: int, b: int) -> int:
        "Add."
        return a + b

    @ag.reward
    def right(self) -> float:
        return float(self.answer == "5")

task = ag.Task(id="t", prompt=({"role": "user", "content": "2 + 3?"},))
played = asyncio.run(ag.rollout(Adder, task, Scripted([call("add", a=2, b=3), say("5")])))
print(played.reward, played.stop_reason, ag.__file__)
"""

FIND = """
import sys
from pathlib import Path

# A checkout that is installed editable is on the path, and its envs would be found first.
sys.path[:] = [sys.argv[1], *(folder for folder in sys.path if not (Path(folder) / "envs").is_dir())]
import agentgym as ag

found = [ag.find_env(name) for name in ("search", "judge_essay_pairs", "chase_long")]
print(*(env.__module__ for env in found), sys.modules[found[0].__module__].__file__)
"""


def test_the_wheel_contains_only_the_library_and_the_container_files(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {"agentgym/__init__.py", "agentgym/rollouts/rollout.py", "agentgym/_image/server/__main__.py"} <= set(names)
    assert {"agentgym/_models/tiny/config.json", "agentgym/_models/tiny/model.safetensors"} <= set(names)
    assert {name.split("/")[0].removesuffix(".dist-info").split("-")[0] for name in names} == {
        "agentgym",
        "agentgym_kit",
    }
    assert not [name for name in names if "__pycache__" in name or name.endswith(".pyc")]


def test_the_docs_install_the_wheel_by_its_file_name(wheel: Path) -> None:
    assert f"pip install 'dist/{wheel.name}[train,docker,test]'" in (ROOT / "docs/installation.md").read_text()


def test_every_module_of_the_checkout_is_in_the_wheel(wheel: Path) -> None:
    modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / "agentgym").rglob("*.py")}
    assert modules <= set(zipfile.ZipFile(wheel).namelist())


def test_the_wheel_has_every_file_that_the_viewers_page_loads(wheel: Path) -> None:
    page = {path.relative_to(ROOT).as_posix() for path in (ROOT / "agentgym/view/page").rglob("*") if path.is_file()}
    assert "agentgym/view/page/index.html" in page
    assert page <= set(zipfile.ZipFile(wheel).namelist())


def test_every_file_of_the_gallery_is_in_the_wheel(wheel: Path) -> None:
    files = [path for path in (ROOT / "envs").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert {f"agentgym/_gallery/{path.relative_to(ROOT).as_posix()}" for path in files} <= set(
        zipfile.ZipFile(wheel).namelist()
    )


def test_an_unpacked_wheel_finds_a_gallery_env_by_name(wheel: Path, tmp_path: Path) -> None:
    site, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    zipfile.ZipFile(wheel).extractall(site)
    elsewhere.mkdir()
    command = [sys.executable, "-I", "-W", "error", "-c", FIND, str(site)]
    done = subprocess.run(command, cwd=elsewhere, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    names = [f"envs.{name}.env" for name in ("search", "judge_essay", "chase_long")]
    assert done.stdout.split() == [*names, str(site / "agentgym/_gallery/envs/search/env.py")]


def test_an_unpacked_wheel_runs_a_rollout_from_another_directory(wheel: Path, tmp_path: Path) -> None:
    site, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    zipfile.ZipFile(wheel).extractall(site)
    elsewhere.mkdir()
    command = [sys.executable, "-I", "-W", "error", "-c", PLAY, str(site)]
    done = subprocess.run(command, cwd=elsewhere, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    assert done.stdout.split() == ["1.0", "answer", str(site / "agentgym/__init__.py")]
