"""The command `agentgym new` and the environments that it creates; the templates have tests in their folders."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from agentgym.cli import main as cli
from agentgym.cli.envs.new import class_name, renamed, templates
from tests.conftest import Installed

ROOT = Path(__file__).parents[2]
KINDS = ("chat", "game", "sandbox", "tool")


def test_every_kind_has_a_template() -> None:
    assert templates() == ROOT / "templates"
    assert tuple(sorted(path.name for path in templates().iterdir() if (path / "env.py").exists())) == KINDS


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_folder_has_the_files_of_its_kind_with_its_own_names(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["new", "my_shop", "--kind", kind]) == 0
    files = {path.name: path.read_text() for path in (tmp_path / "my_shop").iterdir()}
    assert set(files) == {"README.md", "__init__.py", "env.py", "test_my_shop.py"}
    assert '@ag.register("my_shop")\nclass MyShop(' in files["env.py"]
    assert not [name for name, text in files.items() if "template" in text.lower()]
    said = capsys.readouterr().out.splitlines()
    assert said[:-1] == [f"wrote my_shop/{name}" for name in ("README.md", "__init__.py", "env.py", "test_my_shop.py")]
    assert said[-1].startswith("next: pytest my_shop; then agentgym check my_shop,")
    [train] = re.findall(r"^agentgym train .*?(?=    #)", files["README.md"], re.MULTILINE)
    assert said[-1].endswith(f" and {train}")


def test_the_new_tool_env_is_ten_lines_of_code() -> None:
    source = (ROOT / "templates/tool/env.py").read_text()
    [made] = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)]
    docstrings = [
        node.body[0]
        for node in ast.walk(made)
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None
    ]
    ignored = {line for node in docstrings for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)}
    lines = source.splitlines()
    code = [n for n in range(made.lineno, (made.end_lineno or 0) + 1) if lines[n - 1].strip() and n not in ignored]
    assert len(code) <= 10


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "My-Shop",
            "folder: 'My-Shop' is not a valid name for a Python package and a class; use lowercase letters, digits and "
            "_, start with a letter, and avoid Python's keywords, as in my_env",
        ),
        *((name, f"folder: {name!r} is not a valid name") for name in ("class", "none", "_", "_1", "__main__", "café")),
        (
            "scripted",
            "folder: the class of scripted would be called Scripted, which is another name in the template; choose "
            "another name, such as my_scripted",
        ),
        ("json", "folder: a Python package json already exists; choose another name, such as my_json"),
        ("pydantic", "folder: a Python package pydantic already exists; choose another name, such as my_pydantic"),
        ("there", "folder: there already exists; choose another name, or remove it first"),
        (
            "shop",
            "folder: shop would hide the file shop.py: Python would import the folder instead; choose another name",
        ),
        ("no/where/shop", "folder: there is no folder no/where; create it first"),
        ("shop.py/two", "folder: shop.py/two cannot be created (Not a directory); choose another folder"),
        ("dangling", "folder: dangling already exists; choose another name, or remove it first"),
        *(
            (long, f"folder: {long} cannot be created (File name too long); choose another folder")
            for long in ("a" * 248, "a" * 253, "a" * 300)  # too long for the name of the test, of a module, of a folder
        ),
    ],
    ids=lambda word: word[:30],
)
def test_an_invalid_name_is_refused_in_one_line(
    name: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    (tmp_path / "shop.py").touch()
    (tmp_path / "dangling").symlink_to("nowhere")
    assert cli.main(["new", name]) == 1
    out, error = capsys.readouterr()
    assert error.startswith(f"agentgym: {said}")
    assert (out, error.count("\n")) == ("", 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dangling", "shop.py", "there"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root can write everywhere")
def test_an_unwritable_folder_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    tmp_path.chmod(0o500)
    assert cli.main(["new", "shop"]) == 1
    assert "folder: shop cannot be created (Permission denied); choose another folder" in capsys.readouterr().err


def test_template_names_become_names_of_the_new_environment() -> None:
    assert class_name("my_2nd_shop") == "My2ndShop"
    assert (
        renamed("sandbox_template SandboxTemplate SandboxTask AnySandbox self.sandbox", "sandbox", "mend")
        == "mend Mend MendTask AnySandbox self.sandbox"
    )
    assert renamed("game_template GameTemplate GameTask", "game", "game_task") == "game_task GameTask GameTaskTask"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, installed: Installed) -> Path:
    """Return a folder in which the wheel has created an environment of each kind."""
    folder = tmp_path_factory.mktemp("made")
    for kind in KINDS:
        done = installed.run("agentgym", "new", f"my_{kind}", "--kind", kind, cwd=folder)
        assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_tests_of_a_new_environment_pass_with_only_the_wheel_installed(
    kind: str, made: Path, installed: Installed
) -> None:
    pytest_ = ("python", "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", "-W", "error")
    done = installed.run(*pytest_, cwd=made / f"my_{kind}")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    if "skipped" in done.stdout:
        assert kind == "sandbox"
        assert "no sandbox runs on this machine: " in done.stdout


def test_new_environments_can_be_tested_together_and_are_listed_by_ls(made: Path, installed: Installed) -> None:
    done = installed.run("python", "-m", "pytest", "-q", "-p", "no:cacheprovider", "--collect-only", cwd=made)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    listed = installed.run("agentgym", "ls", cwd=made)
    assert listed.returncode == 0, listed.stderr
    lines = [line.split()[:2] for line in listed.stdout.splitlines()]
    assert all([f"my_{kind}", f"my_{kind}.env:My{kind.title()}"] in lines for kind in KINDS)
    assert ["search", "envs.search.env:Search"] in lines


def test_a_checkout_and_python_m_create_the_same_files(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    words = [sys.executable, "-m", "agentgym", "new", "hello"]
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    expected = renamed((ROOT / "templates/tool/env.py").read_text(), "tool", "hello")
    assert (tmp_path / "hello/env.py").read_text() == expected
