"""The command `agentgym train`: its flags, what it runs by default, and what it says to look at next."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import agentgym as ag
from agentgym.cli import main as cli
from agentgym.cli.envs.new import renamed
from agentgym.cli.envs.train import recipe_of
from agentgym.run.command import refuse_ignored, settings

ROOT = Path(__file__).parents[2]


def train(folder: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    """The command in a folder, in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "100"}
    command = [sys.executable, "-m", "agentgym", "train", *words]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the env hello."""
    made = tmp_path_factory.mktemp("train")
    (made / "hello").mkdir()
    (made / "hello/__init__.py").touch()
    text = renamed((ROOT / "templates/tool/env.py").read_text(), "tool", "hello")
    parameter = (
        '    """A class with a parameter."""\n\n    spare = ag.Parameter(7, doc="A number that a run sets.")\n\n'
    )
    (made / "hello/env.py").write_text(text.replace("    @classmethod\n", parameter + "    @classmethod\n", 1))
    return made


def test_a_run_of_the_tiny_model_ends_with_what_to_look_at(folder: Path) -> None:
    small = ("--steps", "2", "--prompts", "2", "--group-size", "4", "--eval-tasks", "2", "--env.spare", "9")
    done = train(folder, "hello", *small)
    assert done.returncode == 0, done.stderr[-3000:]
    [line] = done.stdout.splitlines()
    summary = json.loads(line)
    assert (summary["recipe"], summary["steps"], summary["tool_errors"]) == ("hello", 2, {})
    out = Path(summary["out"])
    assert out.parent == Path("runs/hello")
    kept = json.loads((folder / out / "settings.json").read_text())["settings"]
    assert (kept["env"], kept["model"], kept["train.lr"], kept["max_tokens"]) == ("hello.env:Hello", "tiny", 2e-3, 40)
    assert any(line.startswith("learned: ") for line in done.stderr.splitlines())
    assert done.stderr.splitlines()[-6:] == [
        f"next: agentgym show {out} --best 3, or --worst 3 or --suspicious, prints rollouts as they were",
        f"      agentgym view {out} shows curves, rollouts and tokens in a browser",
        f"      agentgym report {out} writes curves, settings and rollouts into one file",
        f"      {out}/metrics.jsonl has the figures of each step",
        f"      agentgym eval hello --model {out}/adapter plays what was trained on the held-out tasks",
        f"      {out}/adapter is what was trained; agentgym merge {out}/adapter FOLDER makes a whole model of it",
    ]
    more = train(folder, "hello/env.py", *small, "--resume", str(out), "--steps", "3")
    assert json.loads(more.stdout)["steps"] == 3, more.stderr[-3000:]


def test_its_help_lists_every_setting_and_the_parameters_of_the_env(folder: Path) -> None:
    done = train(folder, "hello", "--help")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage: agentgym train hello [-h] [OPTIONS]")
    assert "$ agentgym train hello --steps 40" in done.stdout
    assert "A number that a run sets." in done.stdout
    for flag in ("--train.lr", "--engine.slots", "--group-size", "--env.spare", "--oversample.stop"):
        assert flag in done.stdout


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ((), 2, "agentgym: train: name an environment first, as in `agentgym train hello`; `agentgym ls` lists them"),
        (("--steps", "3"), 2, "agentgym: train: name an environment first"),
        (("helo",), 1, "agentgym: there is no environment 'helo'; did you mean 'hello'?"),
        (("hello", "--setps", "3"), 2, "agentgym train hello: there is no option --setps; did you mean --steps?"),
        (("hello", "--prompts", "0"), 2, "agentgym train hello: --prompts: must be at least 1, got 0"),
        (("hello", "--env.spair", "1"), 2, "agentgym train hello: --env.spair"),
        (("hello", "--model", "no/such/folder"), 1, "agentgym train hello: model: there is no folder no/such/folder"),
    ],
)
def test_what_cannot_be_run_is_one_line(folder: Path, words: tuple[str, ...], code: int, said: str) -> None:
    done = train(folder, *words)
    assert (done.returncode, done.stdout) == (code, "")
    assert done.stderr.startswith(said)
    assert done.stderr.count("\n") == 1


def test_another_model_is_trained_with_the_defaults_of_a_run() -> None:
    words = ["--model", "Qwen/Qwen3-0.6B", "--train.lora-rank", "8"]
    recipe = recipe_of("hello", "hello.env:Hello", words)
    refuse_ignored(recipe)
    model = Path("Qwen/Qwen3-0.6B")  # A flag gives a Path for every model.
    learning = ag.TrainConfig(lora_rank=8)
    expected = ag.RunConfig(recipe="hello", env="hello.env:Hello", model=model, train=learning)
    made = settings(recipe, words)
    assert {name: getattr(made, name) for name in vars(expected)} == vars(expected)


def test_its_words_are_listed_without_an_environment(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        cli.main(["train", "--help"])
    said = capsys.readouterr().out
    assert said.startswith("usage: agentgym train ENV [-h] [OPTIONS]")
    assert "Args:" not in said
