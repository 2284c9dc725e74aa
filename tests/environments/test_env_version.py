"""An env's version and content hash, and where they are stored and shown."""

import json
import logging
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import agentgym as ag
from agentgym.cli.main import main
from agentgym.engines.scripted import Scripted, say
from agentgym.environments import registry
from agentgym.environments.env_version import env_versions
from agentgym.environments.mixture import Member, mix
from agentgym.types.env_version import EnvVersion
from tests.run.test_resume import SETTINGS

ENV = """
import agentgym as ag
from {package}.helpers import WORD


class Said(ag.ToolEnv[ag.Task]):
    version = "1.2"
    data_files = ("words.txt", "more")

    @classmethod
    def tasks(cls, split):
        return [ag.Task(id=f"{{split}}-{{i}}", prompt=f"{{split}} {{i}}?") for i in range(4)]

    @ag.reward
    def said(self):
        return float(len(self.answer or "") % 2)
"""
FILES = {
    "helpers.py": "from . import deeper\nWORD = deeper.WORD\n",
    "deeper.py": "WORD = 'x'\n",
    "words.txt": "a\n",
    "more/b.txt": "b\n",
    "unused.py": "WORD = 'y'\n",
    "__init__.py": "",
}


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setattr(registry, "_registry", {})
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.startswith("hashed"):
            del sys.modules[name]


def made(folder: Path, package: str = "hashed") -> type[ag.Env[ag.Task]]:
    for name, text in {**FILES, "env.py": ENV.format(package=package)}.items():
        (folder / package / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / package / name).write_text(text)
    return ag.find_env(f"{package}.env:Said")


def content(env: type[ag.Env[ag.Task]]) -> str:
    found = env_versions(env)["Said"].sha256
    assert found is not None
    return found


@pytest.mark.parametrize("name", ["env.py", "helpers.py", "deeper.py", "words.txt", "more/b.txt", "__init__.py"])
def test_the_hash_depends_on_the_class_its_imports_and_its_data(tmp_path: Path, name: str) -> None:
    env = made(tmp_path)
    before = content(env)
    with (tmp_path / "hashed" / name).open("a") as file:
        file.write("# changed\n")
    assert content(env) != before


def test_the_hash_does_not_depend_on_the_location_or_other_files(tmp_path: Path) -> None:
    env = made(tmp_path)
    before = content(env)
    (tmp_path / "hashed" / "unused.py").write_text("changed")
    (tmp_path / "hashed" / "more" / "__pycache__").mkdir()
    (tmp_path / "hashed" / "more" / "__pycache__" / "x.pyc").write_text("changed")
    assert content(env) == before
    for name in [name for name in sys.modules if name.startswith("hashed")]:
        del sys.modules[name]
    (tmp_path / "elsewhere").mkdir()
    sys.path[:] = [path for path in sys.path if path != str(tmp_path)] + [str(tmp_path / "elsewhere")]
    assert content(made(tmp_path / "elsewhere")) == before


def test_a_new_data_file_changes_the_hash_and_a_missing_one_is_an_error(tmp_path: Path) -> None:
    env = made(tmp_path)
    before = content(env)
    (tmp_path / "hashed" / "more" / "c.txt").write_text("c\n")
    assert content(env) != before
    (tmp_path / "hashed" / "words.txt").unlink()
    with pytest.raises(
        ValueError, match=r"^Said\.data_files: .*words\.txt does not exist; name files and folders next to env"
    ):
        content(env)


async def test_an_evaluation_records_the_version_of_its_env_and_mixture_members(tmp_path: Path) -> None:
    env = made(tmp_path)
    result = await ag.evaluate(env, Scripted([say("x")]), n=1)
    assert result.envs == {"Said": EnvVersion(where="hashed.env:Said", version="1.2", sha256=content(env))}
    both = mix({"one": Member(env, 1), "two": Member(env.configured(), 1)})
    assert list(env_versions(both)) == ["one", "two"]


async def test_a_run_stores_the_version_show_prints_it_and_resume_warns_about_changes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    env, folder = made(tmp_path), tmp_path / "run"
    run = replace(
        SETTINGS, env="hashed.env:Said", prompts_per_step=2, group_size=2, max_steps=1, eval_tasks=0, output_dir=folder
    )
    run = replace(run, max_turn_tokens=4, env_args={})
    await ag.train_policy(run)
    first = content(env)
    kept = json.loads((folder / "settings.json").read_text())["envs"]
    assert kept == {"Said": {"where": "hashed.env:Said", "version": "1.2", "sha256": first}}
    capsys.readouterr()
    assert main(["show", str(folder)]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == f"env Said: hashed.env:Said, version 1.2, sha256 {first[:12]}"
    assert shown[1].startswith("number")
    (tmp_path / "hashed" / "words.txt").write_text("other\n")
    with caplog.at_level(logging.WARNING):
        await ag.train_policy(replace(run, output_dir=None, resume=folder))
    assert f"it was (hashed.env:Said, version 1.2, sha256 {first[:12]}), and is now" in caplog.text


def test_an_env_without_a_file_has_no_hash() -> None:
    env = type("Said", (ag.ToolEnv,), {"__module__": "nowhere", "reset": ag.Env.reset})
    assert env_versions(env)["Said"] == EnvVersion(where="nowhere:Said")
