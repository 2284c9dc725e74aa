"""The command `agentgym check`: its report about an env, the ways to name one, and its exit code."""

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from agentgym.cli.envs.names import find
from agentgym.cli.envs.new import renamed
from agentgym.cli.main import main
from agentgym.environments import registry
from agentgym.errors import EnvError

ROOT = Path(__file__).parents[2]
TEXT = renamed((ROOT / "templates/tool/env.py").read_text(), "tool", "hello")


@dataclass(frozen=True)
class Done:
    """The command's output and exit code."""

    returncode: int
    stdout: str
    stderr: str


Check = Callable[..., Done]


@pytest.fixture
def check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Check:
    """Return a function that runs the command in a folder with the env hello, which is imported anew each time."""
    (tmp_path / "hello").mkdir()
    (tmp_path / "hello/__init__.py").touch()
    (tmp_path / "hello/env.py").write_text(TEXT)

    def run(*words: str, folder: Path = tmp_path) -> Done:
        monkeypatch.chdir(folder)
        monkeypatch.setattr(sys, "path", list(sys.path))
        monkeypatch.setattr(registry, "_registry", {k: v for k, v in registry._registry.items() if k != "hello"})
        for name in [name for name in sys.modules if name.partition(".")[0] in ("hello", "env")]:
            del sys.modules[name]
        importlib.invalidate_caches()
        code = main(["check", *words])
        said = capsys.readouterr()
        return Done(code, said.out, said.err)

    return run


@pytest.mark.parametrize("name", ["hello", "hello.env:Hello", "hello/env.py:Hello", "hello/env.py"])
def test_a_sound_env_is_found_by_each_of_its_names(check: Check, name: str) -> None:
    done = check(name, "--task", "31")
    assert (done.stderr, done.returncode) == ("", 0)
    assert done.stdout == "hello (hello.env:Hello), task '31' with its oracle: nothing is wrong\n"


def test_a_name_that_is_also_a_file_name_gets_a_hint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("calc.py").write_text(TEXT)
    with pytest.raises(
        EnvError, match=r"^there is no environment 'calc'; did you mean 'calc\.py'\?; create one with `agentgym new`"
    ):
        find("calc")


def test_an_env_is_found_by_name_in_its_own_folder(check: Check, tmp_path: Path) -> None:
    done = check("hello", "--number", "3", "--split", "test", folder=tmp_path / "hello")
    assert done.stdout == "hello (hello.env:Hello), task '83' with its oracle: nothing is wrong\n", done.stderr


@pytest.mark.parametrize("path", ["envs/terminal", "envs/terminal/", str(ROOT / "envs/terminal"), "terminal"])
def test_an_env_is_found_by_the_path_of_its_folder(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    monkeypatch.chdir(ROOT)
    assert find(path) is find("envs.terminal.env:Terminal")


def test_each_finding_names_the_fix_and_the_exit_code_is_1(check: Check, tmp_path: Path) -> None:
    (tmp_path / "hello/env.py").write_text(TEXT.replace("return float(str(", "return 1.0  # float(str("))
    done = check("hello")
    assert done.returncode == 1
    assert done.stdout.splitlines() == [
        "no-op: reward 1.0 >= 1.0, {'right': 1.0}",
        "    -> doing nothing must earn less than a solution; pass idle_is_right=True (--idle-is-right) if it is right",
        "hello (hello.env:Hello), task '10' with its oracle: 1 finding",
    ]
    assert check("hello", "--idle-is-right").returncode == 0


def test_without_an_oracle_the_report_says_what_was_not_checked(check: Check, tmp_path: Path) -> None:
    (tmp_path / "hello/env.py").write_text(TEXT.replace("def oracle", "def solution"))
    done = check("hello")
    assert done.returncode == 0
    not_checked, result = done.stdout.splitlines()
    assert not_checked.startswith("not checked: whether the task can be solved")
    assert "add to the env's file a `def oracle(task)`" in not_checked
    assert result == "hello (hello.env:Hello), task '10': nothing is wrong"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ("helo",),
            "there is no environment 'helo'; did you mean 'hello'?; create one with `agentgym new`, or give",
        ),
        (
            ("hello/env.py:Helo",),
            "env: 'hello/env.py:Helo' is not an Env class; name a subclass of ag.Env or ag.ToolEnv after the colon "
            "(did you mean 'Hello'?)",
        ),
        (("no/env.py",), "env: there is no file no/env.py; name one, as in my_env.py:Pointers"),
        (("hello.env:Nothing",), "env: 'hello.env:Nothing' is not an Env class; "),
        (("hello", "--task", "7"), "--task: none of the first 70 train tasks has the id '7'"),
        (("hello", "--number", "70"), "--number: Hello has 70 train tasks, numbered from 0"),
    ],
)
def test_an_unknown_env_or_task_is_refused_in_one_line(check: Check, words: tuple[str, ...], said: str) -> None:
    done = check(*words)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"agentgym: {said}")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            TEXT.replace("VALUES = {", "VALUES = 1 / 0, {"),
            "hello/env.py: ZeroDivisionError: division by zero, at env.py",
        ),
        (TEXT.replace("return [call(", "return call("), "hello/env.py: SyntaxError: "),
        (
            TEXT.replace("return [call(", "return 1, [call("),
            "Hello: oracle(task): TypeError: oracle[0]: must be a reply",
        ),
        (
            TEXT.replace("def tasks", "def no_tasks"),
            "Hello.tasks('train'): ValueError: the env has no tasks; define `@cl",
        ),
        (TEXT + "\n\nclass Two(Hello): pass\n", ""),
    ],
)
def test_an_env_that_cannot_be_checked_is_refused_in_one_line(
    check: Check, tmp_path: Path, text: str, said: str
) -> None:
    (tmp_path / "hello/env.py").write_text(text)
    done = check("hello")
    if not said:  # it then finds the registered env
        assert done.returncode == 0
        assert "name one class, as in hello/env.py:Hello" in check("hello/env.py").stderr
        return
    assert done.returncode == 1
    assert done.stderr.startswith(f"agentgym: {said}")
    assert done.stderr.count("\n") == 1
