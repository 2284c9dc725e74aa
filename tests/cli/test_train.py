"""The command `agentgym train`: its flags and defaults, and the commands that it suggests at the end."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import agentgym as ag
from agentgym.chat.tokenizer import chat_tokenizer
from agentgym.cli import main as cli
from agentgym.cli.envs.new import renamed
from agentgym.cli.envs.train import recipe_of
from agentgym.cli.main import _read
from agentgym.cli.recipe import say_what_is_next, settings
from tests.test_house import HEAVY

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "100"}


def train(folder: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    """Run the command in a folder, in a separate process."""
    environment = {**os.environ, **ENVIRONMENT, "PWD": str(folder)}  # as a shell sets it
    command = [sys.executable, "-m", "agentgym", "train", *words]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the env hello."""
    made = tmp_path_factory.mktemp("train")
    (made / "hello").mkdir()
    (made / "hello/__init__.py").touch()
    text = renamed((ROOT / "templates/tool/env.py").read_text(), "tool", "hello")
    parameter = (
        '    """A class with a parameter."""\n\n    spare = ag.Parameter(7, doc="A number that a run sets.")\n\n'
    )
    (made / "hello/env.py").write_text(text.replace("    @classmethod\n", parameter + "    @classmethod\n", 1))
    return made


def test_a_run_of_the_tiny_model_ends_with_suggested_commands(folder: Path) -> None:
    small = (
        "--max-steps",
        "2",
        "--prompts-per-step",
        "2",
        "--group-size",
        "4",
        "--eval-tasks",
        "2",
        "--env.spare",
        "9",
    )
    done = train(folder, "hello", *small)
    assert done.returncode == 0, done.stderr[-3000:]
    [line] = done.stdout.splitlines()
    summary = json.loads(line)
    assert (summary["recipe"], summary["steps"], summary["tool_errors"]) == ("hello", 2, {})
    out = Path(summary["output_dir"]).relative_to(folder)
    assert out.parent == Path("runs/hello")
    kept = json.loads((folder / out / "settings.json").read_text())["settings"]
    values = [kept[name] for name in ("env", "model", "train.lr", "max_turn_tokens")]
    assert tuple(values) == (
        "hello.env:Hello",
        "tiny",
        2e-3,
        40,
    )
    assert re.search("^(learned|got worse|reward unchanged): held-out reward ", done.stderr, re.MULTILINE)
    trained = f"{out}/adapter --temperature 0.7 --max-tokens 40"
    assert done.stderr.splitlines()[-6:] == [
        f"next: agentgym show {out} --best 3, or --worst 3 or --suspicious, prints transcripts; "
        "--phase eval_after chooses those after training",
        f"      agentgym view {out} shows curves, rollouts and tokens in a browser",
        f"      agentgym report {out} writes curves, settings and rollouts into one file",
        f"      {out}/metrics.jsonl has the metrics of each step",
        f"      agentgym eval hello --env.spare 9 --model {trained} evaluates the trained model on the held-out tasks",
        f"      {out}/adapter is the trained adapter; agentgym merge {out}/adapter FOLDER merges it into a full model",
    ]


@pytest.mark.slow
def test_a_run_can_be_resumed_under_another_name_of_its_env(folder: Path) -> None:
    small = ("--prompts-per-step", "2", "--group-size", "4", "--eval-tasks", "2")
    assert train(folder, "hello", *small, "--max-steps", "1", "--output-dir", "run").returncode == 0
    more = train(folder, "hello/env.py", *small, "--resume", "run", "--max-steps", "2")
    assert json.loads(more.stdout)["steps"] == 2, more.stderr[-3000:]


def test_the_first_line_of_a_run_comes_before_the_import_of_any_large_package(folder: Path) -> None:
    watched = (
        "import os, sys\n"
        "class Watched:\n"
        "    def write(self, line):\n"
        f"        heavy = [name for name in {HEAVY!r} if name in sys.modules]\n"
        "        print(line.strip(), heavy, flush=True)\n"
        "        os._exit(0)\n"
        "from agentgym.cli.main import main\n"
        "sys.stderr = Watched()\n"
        "main(['train', 'hello', '--output-dir', 'watched'])\n"
    )
    environment = {**os.environ, **ENVIRONMENT}
    words = [sys.executable, "-c", watched]
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout == "starting: hello on tiny; loading torch and the model []\n", done.stderr
    assert not (folder / "watched").exists()


def test_help_lists_every_setting_and_the_envs_parameters(folder: Path) -> None:
    done = train(folder, "hello", "--help")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage: agentgym train hello [-h] [OPTIONS]")
    assert "$ agentgym train hello --max-steps 40" in done.stdout
    assert "A number that a run sets." in done.stdout
    for flag in ("--train.lr", "--engine.slots", "--group-size", "--env.spare", "--oversample.stop"):
        assert flag in done.stdout


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ((), 2, "agentgym: train: give an environment first, as in `agentgym train hello`; `agentgym ls` lists them"),
        (("--max-steps", "3"), 2, "agentgym: train: give an environment first"),
        (("helo",), 1, "agentgym: there is no environment 'helo'; did you mean 'hello'?"),
        (("hello", "--setps", "3"), 2, "agentgym train hello: there is no option --setps; did you mean --max-steps?"),
        (
            ("hello", "--prompts-per-step", "0"),
            2,
            "agentgym train hello: --prompts-per-step: must be at least 1, got '0'",
        ),
        (("hello", "--env.spair", "1"), 2, "agentgym train hello: --env.spair"),
        (("hello", "--model", "no/such/folder"), 1, "agentgym train hello: model: there is no folder no/such/folder"),
    ],
)
def test_runs_that_cannot_start_are_refused_in_one_line(
    folder: Path, words: tuple[str, ...], code: int, said: str
) -> None:
    done = train(folder, *words)
    assert (done.returncode, done.stdout) == (code, "")
    line = done.stderr.removeprefix("starting: hello on no/such/folder; loading torch and the model\n")
    assert line.startswith(said)
    assert line.count("\n") == 1


def test_another_model_is_trained_with_the_defaults_of_a_run() -> None:
    words = ["--model", "Qwen/Qwen3-0.6B", "--train.lora-rank", "8"]
    recipe = recipe_of("hello", "hello.env:Hello", "Qwen/Qwen3-0.6B")
    model = Path("Qwen/Qwen3-0.6B")  # The flag gives a Path for every model.
    learning = ag.TrainConfig(lora_rank=8)
    expected = ag.RunConfig(recipe="hello", env="hello.env:Hello", model=model, train=learning)
    assert settings(recipe, words) == expected


def test_help_works_without_an_environment(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        cli.main(["train", "--help"])
    said = capsys.readouterr()
    assert said.out.startswith("usage: agentgym train ENV [-h] [OPTIONS]")
    assert "Args:" not in said.out
    assert said.err == ""


@pytest.fixture
def odd_folder(tmp_path: Path) -> Path:
    """Return a folder whose name a shell would split, with an env module in it."""
    made = tmp_path / "my dir ü's"
    made.mkdir()
    (made / "quick.py").write_text(
        "import agentgym as ag\n\n\nclass Quick(ag.ToolEnv[ag.Task]):\n    limits = ag.Limits(turns=1, turn_tokens=4)\n"
        "    least = ag.Parameter(1, doc='The fewest characters of an answer.')\n\n    @classmethod\n"
        "    def tasks(cls, split):\n        return [ag.Task(id=f'{split}{i}', prompt='Hi') for i in range(4)]\n\n"
        "    @ag.reward\n    def long(self) -> float:\n        return float(len(self.answer or '') >= self.least)\n"
    )
    return made


def printed_commands(stderr: str) -> list[str]:
    """Return the commands in a run's last lines as they should be typed, with placeholders filled in."""
    lines = [line[6:] for line in stderr.splitlines() if line.startswith(("next: ", "      "))]
    found = [WHAT_IT_DOES.sub("", line) for line in lines if WHAT_IT_DOES.search(line)]
    return [command.rpartition("; ")[2].replace("FOLDER", "'a whole model'") for command in found]


WHAT_IT_DOES = re.compile(r"(, or --worst| shows curves| writes curves| evaluates the| merges it).*")
"""The description that follows a command in its line."""


def test_every_printed_command_can_be_typed(odd_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = odd_folder / "runs/a b é"
    (out / "adapter").mkdir(parents=True)
    say_what_is_next(out, ag.RunConfig(env="quick:Quick", env_args={"least": "2 3"}, model="tiny"))
    commands = printed_commands(capsys.readouterr().err)
    assert [command.split()[1] for command in commands] == ["show", "view", "report", "eval", "merge"]
    for command in commands:
        words = shlex.split(command)
        assert any(Path(word).is_relative_to(out) for word in words), words
        if words[1] != "eval":
            assert callable(_read(words[1:]))
    assert shlex.split(commands[3])[2:5] == ["quick:Quick", "--env.least", "2 3"]


def test_each_env_of_a_mixture_gets_an_eval_command_with_its_parameters_and_models(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    judge = ag.ModelRoleConfig(model="tiny")
    own = ag.ModelRoleConfig(model="tiny", engine=ag.CustomEngineConfig(name="mine:Engine"))
    run = ag.RunConfig(
        env={"search": 3.0, "quick:Quick": 1.0},
        env_args={"search.rows": 5, "Quick.least": 2},
        model="tiny",
        models={"judge": judge, "user": own},
        chat_template="{{ messages }}",  # in the folder of the model
        chat_template_kwargs={"enable_thinking": False, "style": "very short"},
        tools="prompt",
    )
    say_what_is_next(tmp_path, run)
    shown = [shlex.split(line) for line in printed_commands(capsys.readouterr().err) if " eval " in line]
    chat = ["--chat-template-kwargs", "enable_thinking", "False", "style", "very short", "--tools", "prompt"]
    told = ["--model", str(tmp_path / "model"), *chat, "--models.judge.model", "tiny"]
    assert [words[words.index("eval") :] for words in shown] == [
        ["eval", "search", "--env.rows", "5", *told],
        ["eval", "quick:Quick", "--env.least", "2", *told],
    ]


def test_a_value_that_looks_like_a_flag_is_joined_to_its_flag(
    odd_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    say_what_is_next(odd_folder, ag.RunConfig(env="quick:Quick", env_args={"name": "--odd x"}, model="tiny"))
    [line] = [line for line in printed_commands(capsys.readouterr().err) if " eval " in line]
    assert "--env.name=--odd x" in shlex.split(line)


def test_a_run_is_named_after_its_env(folder: Path) -> None:
    small = ("--max-steps", "0", "--eval-tasks", "0")
    done = train(folder, "hello", "--env", "hello.env:Hello", "2", "chase", "1", *small)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout)["recipe"] == "Hello+chase"
    commands = printed_commands(done.stderr)
    assert [command.split()[1:3] for command in commands[3:5]] == [["eval", "hello.env:Hello"], ["eval", "chase"]]


@pytest.mark.slow
def test_the_printed_commands_work(odd_folder: Path) -> None:
    small = (
        "--max-steps",
        "1",
        "--prompts-per-step",
        "1",
        "--group-size",
        "2",
        "--eval-tasks",
        "0",
        "--env.least",
        "2",
        "--chat-template",
        "my template.jinja",
        "--chat-template-kwargs",
        "greeting",
        "it's me",
        "--tools",
        "prompt",
    )
    template = chat_tokenizer("tiny").tokenizer.chat_template
    (odd_folder / "my template.jinja").write_text(f"{{{{ greeting }}}}{template}")
    done = train(odd_folder, "quick:Quick", *small, "--output-dir", "runs/a b é")
    assert done.returncode == 0, done.stderr[-3000:]
    commands = printed_commands(done.stderr)
    assert [command.split()[1] for command in commands] == ["show", "view", "report", "eval", "merge"]
    environment = {**os.environ, **ENVIRONMENT, "PWD": str(odd_folder)}
    for command in commands:
        if command.startswith("agentgym view"):  # it runs until it is stopped
            continue
        typed = subprocess.run(command, shell=True, cwd=odd_folder, env=environment, capture_output=True, text=True)
        assert typed.returncode == 0, (command, typed.stderr[-2000:])
    [evaluation] = (odd_folder / "runs").glob("eval-*/*/settings.json")
    kept = json.loads(evaluation.read_text())
    assert (kept["chat_template_kwargs"], kept["tools"]) == ({"greeting": "it's me"}, "prompt")
    assert (odd_folder / "a whole model/config.json").is_file()
    assert (odd_folder / "a whole model/chat_template.jinja").read_text().startswith("{{ greeting }}")
    assert (odd_folder / "runs/a b é/report/report.html").is_file()
