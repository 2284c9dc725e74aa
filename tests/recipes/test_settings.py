"""A recipe's command line: the engine is chosen first, and determines which flags it has."""

import asyncio
import json
import os
import re
import shlex
import shutil
import socketserver
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import agentgym as ag
from agentgym.chat.tokenizer import chat_tokenizer
from agentgym.cli.output import RefusedWords
from agentgym.cli.recipe import Stop, finished, main, program, resume_command, settings
from agentgym.engines.scripted import Scripted
from agentgym.errors.extras import install_line
from agentgym.files.names import whole_path
from agentgym.hub import ROLLOUTS, find_model, is_tiny, loading, of_field
from agentgym.run.open_collector import server_line, server_settings
from agentgym.run.preflight import warn_of_engine_limits
from agentgym.store.run_settings import SETTINGS, refuse_changes, write_settings
from agentgym.store.schema import FILE
from recipes.bisect_turns import RECIPE as TURNS
from recipes.chase_grpo import RECIPE

ROOT = Path(__file__).parents[2]
WITHOUT_TORCH = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            raise ModuleNotFoundError("No module named 'torch'", name=name)
sys.meta_path.insert(0, Missing())
"""
BUG = "import agentgym.cli.recipe as c\ndef bug(run, **more): return int('three')\nc.train_policy = bug\n"
START = "import agentgym as ag; from recipes.chase_grpo import RECIPE; ag.main(RECIPE)"
RESUMING = """
import pathlib
import agentgym.cli.recipe as c
print(c.resume_command(pathlib.Path("runs/a"), ["--seed", "3"]))
"""


def recipe(*arguments: str, first: str = "") -> "subprocess.CompletedProcess[str]":
    """Run the recipe in a separate process, after the code `first`."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    words = [sys.executable, "-c", first + START, *arguments]
    return subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def error_of(done: "subprocess.CompletedProcess[str]") -> str:
    """Return what the recipe wrote to stderr after its first line, which says that it starts."""
    start, _, rest = done.stderr.partition("\n")
    assert re.fullmatch("starting: chase_grpo on .*; loading torch and the model", start)
    return rest


def run_here(*arguments: str) -> None:
    """Run the recipe in this process."""
    with program(RECIPE.name) as stop:
        finished(settings(RECIPE, arguments), stop)


def refused(*arguments: str) -> str:
    """Run the recipe in this process and return the one line with which it is refused."""
    with pytest.raises(SystemExit) as ended:
        run_here(*arguments)
    [line] = str(ended.value).splitlines()
    return line


@pytest.mark.parametrize(
    ("arguments", "engine"),
    [
        ([], ag.TransformersConfig()),
        (["--engine", "transformers", "--engine.slots", "8"], ag.TransformersConfig(slots=8)),
        (["--engine.slots", "8"], ag.TransformersConfig(slots=8)),
        (["--engine", "sglang"], ag.SGLangConfig()),
        (
            ["--seed", "3", "--engine=sglang", "--engine.servers", "2", "--engine.arguments=--x 2"],
            ag.SGLangConfig(servers=2, arguments="--x 2"),
        ),
        (
            ["--engine", "sglang", "--engine.urls", "http://a", "http://b"],
            ag.SGLangConfig(urls=("http://a", "http://b")),
        ),
    ],
)
def test_the_engine_is_chosen_by_name_and_configured_by_its_flags(
    arguments: list[str], engine: ag.TransformersConfig | ag.SGLangConfig
) -> None:
    run = settings(RECIPE, arguments)
    assert run.engine == engine
    assert run.recipe == "chase_grpo"


@pytest.mark.parametrize("arguments", [["--engine", "vllm"], ["--engine.servers", "2"]])
def test_an_unknown_engine_or_flag_is_refused(arguments: list[str]) -> None:
    with pytest.raises(RefusedWords, match=f"^{arguments[0]}: "):
        settings(RECIPE, arguments)


def test_a_flag_of_another_engine_is_refused_with_that_engines_name() -> None:
    with pytest.raises(
        RefusedWords, match=r"^--engine\.servers: TransformersConfig has no .*, but the engine sglang does"
    ):
        settings(RECIPE, ["--engine.servers", "2"])


def test_an_env_parameter_may_come_after_two_dashes() -> None:
    assert settings(replace(RECIPE, env="nim"), ["--", "--env.skill", "1"]).env_args == {"skill": 1.0}


def test_the_recipes_engine_settings_stay_if_the_command_line_names_the_same_kind() -> None:
    servers = replace(RECIPE, engine=ag.SGLangConfig(slots=7))
    assert settings(servers, ["--engine", "sglang", "--engine.tp", "2"]).engine == ag.SGLangConfig(slots=7, tp=2)
    assert settings(servers, ["--engine", "transformers"]).engine == ag.TransformersConfig()
    assert settings(servers, ["--engine", "mine:Engine"]).engine == ag.CustomEngineConfig(name="mine:Engine")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--seed", "1" + "0" * 30], "--seed: must be below"),
        (["--recipe="], "--recipe: must not be empty, got ''"),
        (["--group-size", "1"], "--group-size: a single rollout can't be compared"),
        (["--train.lr", "-1"], "--train.lr: must be at least 0, got '-1'"),
        (["--train.lora-rank", "0"], "--train.lora-rank: must be at least 1, got '0'"),
        (["--train.betas", "0.9", "1"], "--train.betas: must be below 1, got ('0.9', '1')"),
        (["--train.decay", "cosine", "--train.decay-steps", "None"], "--train.decay, --train.decay-steps: the decay"),
        (["--train.threads", "0"], "--train.threads: must be at least 1"),
        (["--engine.threads", "0"], "--engine.threads: must be at least 1"),
        (["--engine", "sglang", "--engine.servers", "0"], "--engine.servers: must be at least 1"),
        (["--engine", "sglang", "--train.dora"], "--train.dora: SGLang can't serve DoRA"),
        (["--oversample.carry", "1"], "--oversample.carry: has no effect with stop='all'"),
        (["--max-staleness", "1", "--oversample.stop", "deadline"], "--oversample.stop: 'deadline' cuts"),
        (["--setps", "3"], "there is no option --setps; did you mean --max-steps?"),
        (["--train.lrr", "1"], "there is no option --train.lrr; did you mean --train.lr?"),
        (["--max-steps", "x"], "--max-steps: must be a valid integer, unable to parse string as an integer, got 'x'"),
        (["--sandbox", "shoe"], "--sandbox: must be 'auto', 'docker', 'bubblewrap' or 'unsafe', got 'shoe'"),
        (["--max-steps"], "--max-steps: expected a value"),
        (["--max-steps", "3", "4"], "--max-steps: unexpected argument '4'"),
        (["--train.dora", "0"], "unexpected argument '0'"),
        (["3"], "unexpected argument '3'"),
        (
            ["--chat-template-kwargs", "loud"],
            "--chat-template-kwargs: expected pairs of a name and a value, each with a different first word",
        ),
        (
            ["--env", "chase", "3", "bisect"],
            "--env: expected pairs of an env and its weight, each with a different first word, got 'chase 3 bisect'",
        ),
        (
            ["--env", "chase", "1", "chase", "2"],
            "--env: expected pairs of an env and its weight, each with a different first word",
        ),
        (["--env", "chase", "x"], "--env: 'chase' must be a valid number, unable to parse string as a number, got 'x'"),
        (["--env", "chase", "-1"], "--env: 'chase' must be above 0, got -1.0"),
        (
            ["--", "--max_steps", "0"],
            "--max_steps: expected before `--`, which ends the options; move the option there",
        ),
        (["--", "--train.no-dora"], "--train.no-dora: expected before `--`"),
        (["--train.no-dra"], "there is no option --train.no-dra; did you mean --train.no-dora?"),
        (["--train", "ppo"], "there is no option --train; did you mean"),
        (["--models", "judge", "tiny"], "there is no option --models; did you mean"),
        (["--models.judge", "tiny"], "there is no option --models.judge; did you mean --models.judge.model?"),
        (["--models.judge.engine.slots", "8"], "--models.judge.model: missing; give the model's folder or name"),
        (["--models.judge.modle", "tiny"], "there is no option --models.judge.modle; did you mean"),
        (["--models.a/b.model", "tiny"], "there is no option --models.a/b.model"),
        (["--cluster.workers", "2"], "--cluster.workers: these settings apply only to a run on Ray"),
    ],
)
def test_a_value_that_a_config_refuses_gives_one_line_with_its_flag(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        run_here(*arguments)
    error = capsys.readouterr().err
    assert error.startswith(f"chase_grpo: {said}")
    assert error.endswith("; see --help for all options\n")
    assert error.count("\n") == 1


def test_a_launched_server_accepts_adapters_of_the_trainers_rank() -> None:
    run = settings(RECIPE, ["--engine", "sglang", "--train.lora-rank", "32"])
    assert isinstance(run.engine, ag.SGLangConfig)
    assert server_settings(run, run.engine).max_lora_rank == 32


def test_a_servers_long_message_is_cut_at_its_end() -> None:
    for said in ("3 s of at most 600 s: " + "loading " * 20, "12 s of at most 600 s: /models/" + "a" * 70, "y" * 81):
        assert server_line(said) == f"server: {said[:77]}..."
    assert server_line("y" * 80) == "server: " + "y" * 80
    assert server_line("loading\nweights") == "server: loading weights"


def test_dora_is_refused_if_no_server_supports_it() -> None:
    run = settings(RECIPE, ["--train.dora"])
    assert run.train.dora
    with pytest.raises(ValueError, match=r"^train\.dora: .*--engine transformers"):
        replace(run, engine=ag.SGLangConfig())


def test_adapter_targets_can_be_set_on_the_command_line() -> None:
    assert settings(RECIPE, []).train.lora_targets == ("all-linear",)
    assert settings(RECIPE, ["--train.lora-targets", "q_proj", "v_proj"]).train.lora_targets == (
        "q_proj",
        "v_proj",
    )


def test_per_turn_advantages_are_a_setting_of_the_run() -> None:
    assert settings(TURNS, []).credit == "turn"
    assert settings(RECIPE, ["--credit", "turn", "--advantage-estimator", "reinforce++"]).credit == "turn"


@pytest.mark.parametrize(
    ("made", "said"),
    [(ag.RunConfig, "the class RunConfig"), (dict, "the class dict"), ("chase", "'chase'")],
)
def test_a_value_that_is_not_a_recipe_is_refused_with_what_one_is(made: Any, said: str) -> None:
    with pytest.raises(SystemExit, match=rf"^ag\.main: expected a config, as in `.*`, got {said}$"):
        main(made)


async def test_a_recipe_inside_an_event_loop_or_thread_is_told_what_to_call() -> None:
    with pytest.raises(RuntimeError, match=r"^ag\.main: .*`await ag\.train_policy\(run\)`"):
        main(RECIPE)
    with pytest.raises(RuntimeError, match=r"^ag\.main: .*main thread"):
        await asyncio.to_thread(main, RECIPE)


async def test_an_invalid_engine_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match=r"^engine: must be an engine, got 'tiny'"):
        await ag.train_policy(RECIPE, engine="tiny")  # type: ignore[arg-type]


def test_untyped_template_variables_are_parsed_as_numbers_booleans_or_text() -> None:
    words = {"a": "1", "b": "0", "c": "no", "d": "True", "e": "1.5", "f": "nan"}
    typed = [word for pair in words.items() for word in pair]
    assert settings(RECIPE, ["--chat-template-kwargs", *typed]).chat_template_kwargs == {
        "a": 1,
        "b": 0,
        "c": "no",
        "d": True,
        "e": 1.5,
        "f": "nan",
    }


def test_a_model_role_can_be_typed_with_a_hyphen_or_an_underscore() -> None:
    judged = replace(RECIPE, models={"my_judge": ag.ModelRoleConfig(model="tiny")})
    for name in ("my_judge", "my-judge"):
        roles = settings(judged, [f"--models.{name}.engine.slots", "3"]).models
        assert roles == {"my_judge": ag.ModelRoleConfig(model="tiny", engine=ag.TransformersConfig(slots=3))}
        assert settings(RECIPE, [f"--models.{name}.model", "tiny"]).models.keys() == {name}  # a new role


def test_the_text_of_a_chat_template_may_be_longer_than_a_file_name(tmp_path: Path) -> None:
    text = "{{ messages[0].content }}" * 20
    write_settings(tmp_path, settings(RECIPE, ["--chat-template", text]))
    assert json.loads((tmp_path / SETTINGS).read_text())["settings"]["chat_template"] == text


def test_a_link_to_itself_is_not_the_tiny_model(tmp_path: Path) -> None:
    (tmp_path / "tiny").symlink_to("tiny")
    assert not is_tiny(tmp_path / "tiny")
    assert is_tiny("tiny")


def test_a_resumed_run_keeps_its_steps_and_says_so_if_the_recipe_differs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_settings(tmp_path, replace(RECIPE, max_steps=2))
    assert settings(RECIPE, ["--resume", str(tmp_path)]).max_steps == 2
    other = f"--max-steps {RECIPE.max_steps} uses the recipe's"
    told = f"chase_grpo: max_steps: continuing to 2 steps, as when the run last started; {other}\n"
    assert capsys.readouterr().err == told
    settings(replace(RECIPE, max_steps=2), ["--resume", str(tmp_path)])
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("start", [["-c", RESUMING], ["program"]], ids=["words", "folder"])
def test_the_resume_command_of_a_program_without_a_file_can_be_typed(start: list[str], tmp_path: Path) -> None:
    (tmp_path / "program").mkdir()
    (tmp_path / "program/__main__.py").write_text(RESUMING)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, *start], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert shlex.split(done.stdout) == [sys.executable, *start, "--seed", "3", "--resume", "runs/a"], done.stderr


def test_a_recipes_callbacks_get_the_run_that_its_flags_describe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[tuple[int, Path]] = []

    class Hears(ag.Callback):
        def on_run_start(self, run: ag.RunConfig, folder: Path) -> None:
            heard.append((run.max_steps, folder))

    monkeypatch.setattr(
        sys,
        "argv",
        [
            "recipe",
            "--sandbox",
            "unsafe",
            "--max-steps",
            "0",
            "--eval-tasks",
            "0",
            "--output-dir",
            str(tmp_path / "run"),
        ],
    )
    main(RECIPE, callbacks=[Hears()])
    assert heard == [(0, tmp_path / "run")]


def test_an_invalid_callback_gives_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["recipe", "--output-dir", str(tmp_path / "run")])
    with pytest.raises(SystemExit, match=r"^chase_grpo: callbacks: must be .*Callback"):
        main(RECIPE, callbacks=[print])  # type: ignore[list-item]
    assert not (tmp_path / "run").exists()


def test_a_model_role_can_be_added_and_changed_on_the_command_line() -> None:
    words = ["--models.judge.model", "tiny", "--models.judge.engine.slots", "8"]
    tiny = Path("tiny")
    judge = ag.ModelRoleConfig(model=tiny, engine=ag.TransformersConfig(slots=8))
    assert settings(RECIPE, words).models == {"judge": judge}
    assert settings(RECIPE, ["--models.judge.model=tiny"]).models == {"judge": ag.ModelRoleConfig(model=tiny)}
    judged = replace(RECIPE, models={"judge": judge})
    both = settings(judged, ["--models.judge.engine.slots", "4", "--models.user.model", "tiny"]).models
    assert both == {
        "judge": replace(judge, engine=ag.TransformersConfig(slots=4)),
        "user": ag.ModelRoleConfig(model=tiny),
    }


def test_a_mixture_can_be_typed_as_the_help_shows_it() -> None:
    assert settings(RECIPE, ["--env", "chase", "3", "bisect", "0.5"]).env == {"chase": 3.0, "bisect": 0.5}


@pytest.mark.parametrize(
    ("env", "env_args", "typed", "kept", "lost"),
    [
        ("search", {"rows": 5}, ["search", "1", "chase", "2"], {"search.rows": 5}, ""),
        ("search", {"rows": 5}, ["chase"], {}, "chase_grpo: env_args: rows is dropped: it belongs to search, which"),
        ({"search": 1.0, "chase": 1.0}, {"search.rows": 5}, ["search"], {"rows": 5}, ""),
        ({"search": 1.0, "chase": 1.0}, {"search.rows": 5}, ["chase", "1", "bisect", "1"], {}, "rows is dropped"),
        ({"search": 1.0, "chase": 1.0}, {"search.rows": 5}, ["search", "3", "bisect", "1"], {"search.rows": 5}, ""),
    ],
)
def test_another_env_keeps_its_own_parameters_and_the_others_are_reported(
    env: Any,
    env_args: dict[str, Any],
    typed: list[str],
    kept: dict[str, Any],
    lost: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    recipe = replace(RECIPE, env=env, env_args=env_args)
    assert settings(recipe, ["--env", *typed]).env_args == kept
    said = capsys.readouterr().err
    assert lost in said
    assert said.count("\n") == (1 if lost else 0)


def test_a_run_without_a_name_is_named_after_its_env() -> None:
    assert ag.RunConfig(env="my_env:Pointers", model="tiny").name == "Pointers"
    assert ag.RunConfig(env={"chase": 1.0, "a.b:Bisect": 2.0}, model="tiny").name == "chase+Bisect"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--env", "nowhere"], "env: 'nowhere' is not registered"),
        (["--env", "chsae"], "did you mean 'chase'?"),
        (["--env", "no_such_module:Env"], "env 'no_such_module:Env': "),
        (["--model", "no/such/folder"], "model: there is no folder"),
        (["--teacher", "no/such/teacher"], "teacher: there is no folder no/such/teacher"),
        (["--output-dir", "README.md"], "README.md cannot be created (a file is in its way); choose another folder"),
        (["--output-dir", "README.md/run"], "README.md/run cannot be created (a file is in its way)"),
        (["--output-dir", "docs"], "docs contains 'agents.md' but no run; use a new"),
        (["--resume", "no_such_run"], "no_such_run is not the folder of a run"),
        (["--resume", "n" * 300], f"{'n' * 300} is not the folder of a run"),
        (["--train.lora-targets", "no_such_layer"], "lora_targets: "),
    ],
)
def test_a_wrong_setting_gives_one_line(
    arguments: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    line = refused(
        *arguments, *([] if {"--resume", "--output-dir"}.intersection(arguments) else ["--output-dir", str(tmp_path)])
    )
    assert line.startswith("chase_grpo: ")
    assert said in line


def test_a_path_on_the_command_line_that_the_system_refuses_gives_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    long = "n" * 300
    monkeypatch.setattr("sys.argv", ["recipe.py", f"--output-dir={long}"])
    said = f"mine: {long}/a cannot be used (File name too long); give another path"
    with pytest.raises(SystemExit, match=re.escape(said)), program("mine"):
        Path(long, "a").stat()
    with pytest.raises(OSError, match="File name too long"), program("mine"):
        Path(f"other{long}").stat()


def test_a_path_refused_during_a_run_is_reported_with_the_command_that_resumes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["recipe.py", f"--output-dir={tmp_path}"])
    write_settings(tmp_path, RECIPE)

    def fail(stop: Stop) -> None:
        stop.folder = whole_path(tmp_path)
        raise PermissionError(13, "Permission denied", str(tmp_path / "metrics.jsonl"))

    said = r"^mine: .*/metrics\.jsonl cannot be used .*; give another path\. no step was finished in .*; to resume: .*"
    with pytest.raises(SystemExit, match=said), program("mine") as stop:
        fail(stop)


def test_a_wrong_setting_ends_the_process_with_only_its_line(tmp_path: Path) -> None:
    done = recipe("--env", "chsae", "--output-dir", str(tmp_path))
    assert done.returncode == 1
    [line] = error_of(done).splitlines()
    assert line.startswith("chase_grpo: env: ")


@pytest.mark.slow
def test_sandboxes_that_do_not_run_here_give_one_line_with_the_fix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path / 'none.sock'}")
    done = recipe("--sandbox", "docker", "--output-dir", str(tmp_path / "run"))
    assert done.returncode == 1
    assert error_of(done).startswith("chase_grpo: sandbox: docker doesn't work here: ")
    assert done.stderr.endswith("`--sandbox auto` uses the best one\n")
    assert done.stderr.count("none.sock") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("first", [WITHOUT_TORCH, "import sys; sys.modules['torch'] = None\n"])
def test_a_missing_package_gives_one_line(first: str) -> None:
    done = recipe("--max-steps", "1", first=first)
    assert done.returncode == 1
    assert done.stderr.endswith(f"chase_grpo: torch is not installed: {install_line('train')}\n")
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_missing_shipped_model_gives_one_line(tmp_path: Path) -> None:
    done = recipe(
        "--output-dir", str(tmp_path), "--model", "tiny", first="import agentgym.hub as m; m.SHIPPED['tiny'] = 'x'\n"
    )
    assert done.returncode == 1
    assert error_of(done).startswith("chase_grpo: model: 'tiny' is not in this installation (")
    assert done.stderr.endswith("; install agentgym again\n")


@pytest.mark.parametrize("lacks", ["tokenizer", "config", "weights"])
def test_a_folder_without_a_whole_model_gives_one_line(lacks: str, tmp_path: Path) -> None:
    model = shutil.copytree(ROOT / "recipes" / "checkpoints" / "chase", tmp_path / "model")
    if lacks == "tokenizer":
        (model / "tokenizer.json").write_text("{}")
    elif lacks == "config":
        (model / "config.json").write_text('{"model_type": "no_such_type"}')
    else:
        (model / "model.safetensors").write_bytes(b"")
    line = refused("--output-dir", str(tmp_path / "out"), "--model", str(model), "--max-steps", "0")
    assert line.startswith(
        f"chase_grpo: model: {model} cannot be loaded; give the folder of a whole model, a GGUF file, or a name on "
    )


def test_the_command_line_accepts_the_name_of_a_shipped_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = find_model(settings(RECIPE, ["--model", "tiny"]).model)
    assert (Path(found) / "config.json").exists()
    (tmp_path / "tiny").mkdir()
    assert str(find_model(settings(RECIPE, ["--model", "tiny"]).model)) == "tiny"


def test_a_bug_keeps_its_traceback() -> None:
    done = recipe("--max-steps", "1", first=BUG)
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert "invalid literal for int()" in done.stderr


def test_help_lists_the_engines_and_how_to_list_their_settings(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        settings(RECIPE, ["--help"], about="Follow pointers.")
    said = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "Follow pointers." in said
    assert "`--engine sglang` uses SGLang servers" in said
    assert "Each has its own settings: `--engine sglang --help` lists SGLang's." in said
    with pytest.raises(SystemExit, match="0"):
        settings(RECIPE, ["--engine", "sglang", "--help"])
    assert "--engine.urls" in capsys.readouterr().out


def test_closing_the_pipe_of_the_help_gives_no_traceback() -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-c", START, "--help"]
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=writer, stderr=subprocess.PIPE, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")


def test_a_resumed_run_keeps_its_number_of_steps_unless_it_is_given(tmp_path: Path) -> None:
    write_settings(tmp_path, settings(RECIPE, ["--max-steps", "2"]))
    assert settings(RECIPE, ["--resume", str(tmp_path)]).max_steps == 2
    assert settings(RECIPE, ["--resume", str(tmp_path), "--max-steps", "7"]).max_steps == 7
    assert settings(RECIPE, ["--resume", str(tmp_path), "--max-steps=7"]).max_steps == 7
    assert settings(RECIPE, ["--resume", str(tmp_path / "none")]).max_steps == RECIPE.max_steps


def test_a_recipe_that_sets_its_folder_is_resumed_by_the_printed_command(tmp_path: Path) -> None:
    own = replace(RECIPE, output_dir=tmp_path / "own")
    write_settings(tmp_path / "run", replace(own, max_steps=2))
    resumed = settings(own, ["--resume", str(tmp_path / "run")])
    assert (resumed.output_dir, resumed.resume) == (None, tmp_path / "run")
    with pytest.raises(RefusedWords, match=r"output.dir"):
        settings(own, ["--resume", str(tmp_path / "run"), "--output-dir", str(tmp_path / "new")])


@pytest.mark.parametrize(
    "typed", [["--output-dir", "x"], ["--output_dir", "x"], ["--output_dir=x"], ["--output-dir=x"], ["--resume", "y"]]
)
def test_the_resume_command_omits_the_folder_flag_however_it_was_typed(typed: list[str]) -> None:
    line = resume_command(Path("runs/a"), ["--seed", "3", *typed, "--max_steps", "2"])
    assert line.endswith(" --seed 3 --max_steps 2 --resume runs/a")


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("--out", "--output-dir"),
        ("--lr", "--train.lr"),
        ("--learning_rate", "--train.lr"),
        ("--grop-size", "--group-size"),
        ("--advantage-level", "--credit"),
        ("--max-tokens", "--max-turn-tokens"),
        ("--temperature", "--train.temperature"),
        ("--slots", "--engine.slots"),
        ("--holes", "--env.holes"),
        ("--env_holes", "--env.holes"),
    ],
)
def test_a_flag_with_a_similar_name_gets_a_suggestion(typed: str, meant: str) -> None:
    with pytest.raises(RefusedWords, match=rf"^there is no option {typed}; did you mean {meant}\?$"):
        settings(replace(RECIPE, env="frozen_lake"), [typed, "1"])


def test_a_wrong_flag_is_refused_even_if_the_env_cannot_be_found() -> None:
    with pytest.raises(RefusedWords, match=r"^there is no option --setps; did you mean --max-steps\?$"):
        settings(replace(RECIPE, env="no_such_module:Env"), ["--setps", "1"])


@pytest.mark.parametrize("flag", ["url", "api-key-env", "api_key_env"])
def test_the_refusal_of_a_model_roles_url_says_how_a_run_uses_an_endpoint(flag: str) -> None:
    typed = f"--models.judge.{flag}"
    with pytest.raises(RefusedWords, match=f"^{typed}: only `agentgym eval` and `rescore` have this flag") as refused:
        settings(RECIPE, ["--models.judge.model", "fake-1", typed, "http://localhost/v1"])
    assert str(refused.value).endswith("--models.judge.model MODEL --models.judge.engine my_models:open_model")


def test_the_quoted_code_for_a_model_roles_url_is_a_whole_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("openai", reason="agentgym-kit[endpoint] is not installed")
    with pytest.raises(RefusedWords) as refused:
        settings(RECIPE, ["--models.judge.url", "http://localhost/v1"])
    quoted = re.findall("`([^`]+)`", str(refused.value).partition(" put ")[2])
    (tmp_path / "quoted_models.py").write_text("\n".join(quoted).replace("URL", "'http://localhost/v1'"))
    monkeypatch.syspath_prepend(tmp_path)
    opened = ag.CustomEngineConfig(name="quoted_models:open_model").load()("fake-1")
    assert isinstance(opened, ag.Endpoint)


def test_a_refused_resume_suggests_merging_only_if_there_is_an_adapter(tmp_path: Path) -> None:
    write_settings(tmp_path, settings(RECIPE, []))
    with pytest.raises(ValueError, match=r"^resume: .*, or start a new run in another output_dir$"):
        refuse_changes(tmp_path, settings(RECIPE, ["--seed", "3"]))
    (tmp_path / "adapter").mkdir()
    with pytest.raises(
        ValueError, match=r"or start a new run from its trained adapter: `agentgym merge .*, in another"
    ):
        refuse_changes(tmp_path, settings(RECIPE, ["--seed", "3"]))


def test_a_teacher_that_cannot_be_loaded_is_called_the_teacher(tmp_path: Path) -> None:
    named = rf"^teacher: {tmp_path} cannot be loaded"
    with pytest.raises(ValueError, match=named), of_field(model="teacher"), loading(tmp_path):
        raise OSError("nobody is there")


@pytest.mark.parametrize(
    ("holds", "said"),
    [
        (
            [],
            "if it is a run, finish it with --resume '.*/run 1', which .*; if it "
            "is an evaluation, give the model that it evaluated; or",
        ),
        (["model", "adapter"], r"did you mean .*/model\?$"),
        (["adapter"], "merge its trained adapter with `agentgym merge '.*/run 1/adapter' MODEL`, and give MODEL$"),
    ],
)
def test_the_folder_of_an_evaluation_or_a_run_is_refused_as_a_model(
    holds: list[str], said: str, tmp_path: Path
) -> None:
    (folder := tmp_path / "run 1").mkdir()
    (folder / ROLLOUTS).touch()
    for name in holds:
        (folder / name).mkdir()
    told = rf"^model: {folder} is the folder of a run or an evaluation, not of a model; {said}"
    with pytest.raises(ValueError, match=told), loading(folder):
        raise AssertionError
    assert ROLLOUTS == FILE


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the address of a hub that cannot be reached."""
    with socketserver.TCPServer(("127.0.0.1", 0), socketserver.BaseRequestHandler) as free:
        hub = f"http://127.0.0.1:{free.server_address[1]}"
    monkeypatch.setenv("HF_ENDPOINT", hub)
    for name in ("http_proxy", "HTTP_PROXY", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    return hub


@pytest.mark.parametrize("field", ["model", "teacher"])
def test_a_misspelled_model_gives_one_line_with_the_places_searched(
    field: str, no_hub: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    changes: dict[str, Any] = {field: "nofolder"}
    with pytest.raises(ValueError, match=f"^{field}: nofolder ") as refused:
        replace(RECIPE, **changes).check_files()
    assert str(refused.value) == (
        f"{field}: nofolder cannot be loaded: there is no such folder here, it is not in the hub's cache, and {no_hub} "
        "cannot be reached (Connection refused); give the folder of a whole model, a GGUF file, or a name on the "
        "Hugging Face hub"
    )


def test_an_unreachable_hub_is_not_retried(no_hub: str) -> None:
    with pytest.raises(ValueError, match=r"^model: nobody/nofolder cannot be loaded: .* cannot be reached"):
        chat_tokenizer("nobody/nofolder")


def test_a_model_in_the_hubs_cache_needs_no_network(
    no_hub: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    held = tmp_path / "models--somebody--model"
    (held / "refs").mkdir(parents=True)
    (held / "refs" / "main").write_text("abc")
    (held / "snapshots" / "abc").mkdir(parents=True)
    refused = replace(RECIPE, model="somebody/model")
    with pytest.raises(ValueError, match="it is not in the hub's cache"):
        refused.check_files()
    (held / "snapshots" / "abc" / "config.json").write_text("{}")
    refused.check_files()


@pytest.mark.parametrize(("asked", "warned"), [({}, False), ({"context_tokens": 2048}, True)])
def test_only_an_env_that_needs_more_context_than_the_engine_has_gives_a_warning(
    asked: dict[str, int], warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    env = type("Quiz", (ag.ToolEnv,), {"limits": ag.Limits(**asked)})
    warn_of_engine_limits(env, Scripted([], context_tokens=1024))
    assert (
        "Quiz.limits.context_tokens is 2048, but rollouts end at the engine's context of 1024 tokens" in caplog.text
    ) == warned
