"""The commands `agentgym eval` and `agentgym compare`: what they print, store and refuse."""

import asyncio
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import agentgym as ag
from agentgym.cli import main as cli
from agentgym.store.reader import RolloutStore
from agentgym.store.run_settings import write_settings
from agentgym.store.writer import RolloutWriter
from agentgym.types.rollout import Group, Rollout

ROOT = Path(__file__).parents[2]
ENV = '''
"""Envs for the command line."""
import asyncio

import agentgym as ag
from agentgym.testing import Scripted, say


class Short(ag.ToolEnv[ag.Task]):
    """Worth 1 where the answer has few words."""

    limits = ag.Limits(turns=1, turn_tokens=4, context_tokens=512)
    most_words = ag.Parameter(2)

    @classmethod
    def tasks(cls, split):
        return [ag.Task(id=f"{split}-{i}", prompt=f"Say {i}") for i in range(6)]

    @ag.reward
    def short(self) -> float:
        return float(len((self.answer or "").split()) <= self.most_words)


class Judged(Short):
    """Worth what the judge says, and 1 where there is an answer."""

    @ag.reward
    async def judged(self) -> float:
        said = await self.model("judge").ask(f"Is this good? {self.answer}", max_tokens=2)
        return 0.5 * (said == "yes")


class Alone(Judged):
    fallback_models = {"judge": Scripted([say("yes")])}


class Stuck(Short):
    """Never begins, but for its first task."""

    async def reset(self, **given):
        if self.task.id != "test-0":
            print("stuck", flush=True)
            await asyncio.Event().wait()
        return await super().reset(**given)
'''


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Return a folder with an env module."""
    (tmp_path / "my_short.py").write_text(ENV)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def write_run(folder: Path, places: list[tuple[str, int]]) -> None:
    """Write a training run with one rollout at each phase and step."""
    write_settings(folder, ag.RunConfig(env="my_short:Short", model="tiny"))
    rollout = Rollout(rollout_id="0/0", group_id="0", segments=(), reward=1.0, stop_reason="answer")
    with RolloutWriter(folder, done=9) as writer:
        for phase, step in places:
            writer.add([Group(group_id="0", rollouts=(rollout,))], phase=phase, step=step)


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, list[str], str]:
    code = cli.main(args)
    said = capsys.readouterr()
    return code, said.out.splitlines(), said.err


def test_a_model_is_evaluated_stored_resumed_and_compared(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("eval", "my_short:Short", "--model", "tiny", "--n", "3", "--k", "2")
    code, lines, _ = run(capsys, *asked, "--output-dir", "one")
    assert code == 0
    assert [line.split()[0] for line in lines[:5]] == ["reward", "pass@1", "pass@2", "pass^2", "rollouts"]
    assert "6, 0 failed" in lines[4]
    assert sorted(line.split()[0] for line in lines if line.startswith("test-")) == ["test-0", "test-1", "test-2"]
    again, resumed, _ = run(capsys, *asked, "--output-dir", "one", "--resume")
    begun, first, _ = run(capsys, *asked, "--output-dir", "new", "--resume")
    assert (begun, first[4]) == (0, "rollouts  6, 0 failed, 0 already done")
    there = [line.replace("0 failed", "0 failed, 6 already done") for line in lines]
    assert (again, resumed) == (0, there)
    more, resumed, _ = run(capsys, *asked[:-2], "--k", "3", "--output-dir", "one", "--resume")
    assert (more, resumed[4]) == (0, "rollouts  9, 0 failed, 6 already done")
    chosen = ("eval", "my_short:Short", "--model", "tiny", "--tasks", "test-1", "test-4")
    assert run(capsys, *chosen, "--output-dir", "two", "--seed", "1")[0] == 0
    with RolloutStore("two") as store:
        assert {row.group_id for row in store.summaries()} == {"test-1", "test-4"}
    code, _, refused = run(capsys, "compare", "one", "two")
    assert (code, "compare the 1 that both have with common=True (--common)" in refused) == (1, True)
    code, lines, _ = run(capsys, "compare", "one", "two", "--common")
    assert code == 0
    assert lines[0] == "tasks       1 in both, 3 left out because one side has no score for them"
    assert [line.split()[0] for line in lines[1:5]] == ["attempts", "reward", "difference", "p"]


def test_an_env_parameter_is_a_flag_and_stays_the_same_on_resume(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("eval", "my_short:Short", "--model", "tiny", "--n", "2", "--output-dir", "kept")
    code, lines, _ = run(capsys, *asked, "--env.most-words", "-1")
    assert (code, lines[0].split()[1]) == (0, "0.000")
    code, _, said = run(capsys, *asked, "--resume", "--env.most-words=5")
    assert (code, said.count("\n")) == (1, 1)
    assert f"env_args: {Path.cwd()}/kept was started with {{'most_words': -1}}, but this is {{'most_words': 5}}" in said
    code, resumed, _ = run(capsys, *asked, "--resume", "--env.most-words=-1")
    assert (code, resumed[0]) == (0, lines[0])


def test_an_env_parameter_may_come_after_two_dashes(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("eval", "--model", "tiny", "--n", "2", "--", "my_short:Short", "--env.most-words", "-1")
    code, lines, _ = run(capsys, *asked)
    assert (code, lines[0].split()[1]) == (0, "0.000")


def test_an_unused_model_role_is_warned_about(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    asked = (
        "eval",
        "my_short:Alone",
        "--model",
        "tiny",
        "--n",
        "1",
        "--output-dir",
        "kept",
        "--models.jugde.model",
        "tiny",
    )
    assert run(capsys, *asked)[0] == 0
    assert "Alone: no rollout has queried the model 'jugde'; did you mean 'judge'?" in caplog.messages
    assert any(
        "recipes, `agentgym train` and `agentgym eval` take --models.judge.model MODEL" in line
        for line in caplog.messages
    )


@pytest.mark.parametrize("out", ["my_short.py", "my_short.py/kept", "/proc/kept"])
def test_an_output_folder_that_cannot_be_created_is_refused_in_one_line(
    capsys: pytest.CaptureFixture[str], out: str
) -> None:
    code, _, said = run(capsys, "eval", "my_short:Short", "--model", "tiny", "--n", "1", "--output-dir", out)
    assert (code, said.count("\n")) == (1, 1)
    assert said.startswith(f"agentgym: output_dir: {Path.cwd() / out} cannot be created (")


@pytest.mark.parametrize(
    ("command", "flags", "said"),
    [
        (
            "check",
            ("--env.most_word", "1"),
            "--env.most_word: Short has no such parameter; did you mean 'most_words'?",
        ),
        ("play", ("--env.most-words", "many"), "--env.most_words: must be a valid integer"),
        ("serve", ("--env.most_words",), "serve: --env.most_words: expected a value"),
        ("check", ("--env.most_words", "--number", "1"), "check: --env.most_words: expected a value"),
        ("eval", ("--model", "tiny", "--", "--env.most_words", "many"), "--env.most_words: must be a valid integer"),
        ("play", ("--", "--env.most_words", "many"), "--env.most_words: must be a valid integer"),
        ("serve", ("--", "--env.most_words=many"), "--env.most_words: must be a valid integer"),
        ("check", ("--env.most_words", "--", "--env.most_words", "1"), "check: --env.most_words: expected a value"),
    ],
)
def test_every_command_that_runs_rollouts_names_a_wrong_parameter(
    capsys: pytest.CaptureFixture[str], command: str, flags: tuple[str, ...], said: str
) -> None:
    code, _, error = run(capsys, command, "my_short:Short", *flags)
    assert (code > 0, error.count("\n")) == (True, 1)
    assert error.startswith(f"agentgym: {said}")


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["my_short:Short"], "--model, --url: give a model"),
        (["my_short:Short", "--model", "tiny", "--resume"], "--resume: give the folder"),
        (["my_short:Short", "--model", "tiny", "--tasks", "x"], "--tasks: Short has no test task with the id x"),
        (["my_short:Short", "--model", "tiny", "--k", "0"], "n, k: must be at least 1"),
        (["my_short:Short", "--model", "tiny", "--n", "1", "--tasks", "x"], "--n, --tasks: give only one of them"),
        (["my_short:Short", "--model", "tiny", "--rows", "-1"], "--rows: must not be negative, got -1"),
        (["my_short:Short", "--url", "localhost:1"], "url: must begin with http:// or https://"),
        (["nothing", "--model", "tiny"], "there is no environment 'nothing'"),
    ],
)
def test_evaluations_that_cannot_run_are_refused_in_one_line(
    capsys: pytest.CaptureFixture[str], args: list[str], told: str
) -> None:
    code, _, err = run(capsys, "eval", *args)
    assert code == 1
    assert err.startswith(f"agentgym: {told}")
    assert err.count("\n") == 1


def test_a_folder_without_an_evaluation_cannot_be_compared(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, _, err = run(capsys, "compare", str(tmp_path), str(tmp_path))
    assert code == 1
    assert "contains no rollouts.sqlite" in err


def test_a_table_of_fewer_than_no_rows_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "compare", "one", "two", "--rows", "-1")
    assert (code, err) == (1, "agentgym: --rows: must not be negative, got -1\n")


@pytest.mark.parametrize(
    ("words", "phases"),
    [
        (["--phase", "before", "after"], "before after"),
        (["after"], "before after"),
        (["5"], "after 5"),
        (["after", "--phase", "5", "after", "9"], "before after"),
        (["5", "--phase", "before", "after"], "before after"),
    ],
)
def test_comparing_a_run_with_itself_by_one_folder_names_the_command(
    capsys: pytest.CaptureFixture[str], folder: Path, words: list[str], phases: str
) -> None:
    write_run(folder / "run", [("eval_before", 0), ("train", 5), ("eval", 5), ("eval_after", 9)])
    code, _, err = run(capsys, "compare", "run", *words)
    assert code == 1
    assert err.startswith("agentgym: other: there is no folder ")
    assert "; to compare two evaluations of one run, give its folder twice: " in err
    assert err.endswith(f" compare run run --phase {phases}\n")
    assert run(capsys, "compare", "run", "run", "--phase", *phases.split())[0] == 0


@pytest.mark.parametrize("words", [["7"], ["0005"], ["after"], ["before", "--phase", "7"]])
def test_comparing_a_run_with_an_evaluation_that_it_lacks_names_those_that_it_has(
    capsys: pytest.CaptureFixture[str], folder: Path, words: list[str]
) -> None:
    write_run(folder / "run", [("eval_before", 0), ("train", 5), ("eval", 5)])
    code, _, err = run(capsys, "compare", "run", *words)
    what_to_do = "run has the evaluations before, 0, 5; give its folder twice, and two of them with --phase"
    assert (code, err) == (1, f"agentgym: other: there is no folder {words[0]}; {what_to_do}\n")


def test_a_run_without_an_evaluation_cannot_be_compared(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    write_run(folder / "run", [("train", 1)])
    code, _, err = run(capsys, "compare", "run", "after")
    assert (code, err) == (1, "agentgym: one: run contains no evaluation; pass the folder of one\n")


@pytest.mark.parametrize(
    ("sides", "told"),
    [(("before", "after"), "one: before contains no"), (("kept", "after"), "other: after contains no")],
)
def test_a_missing_folder_is_not_mistaken_for_a_phase_if_the_first_is_not_a_runs(
    capsys: pytest.CaptureFixture[str], folder: Path, sides: tuple[str, str], told: str
) -> None:
    assert run(capsys, "eval", "my_short:Short", "--model", "tiny", "--n", "1", "--output-dir", "kept")[0] == 0
    code, _, err = run(capsys, "compare", *sides)
    assert code == 1
    assert err.startswith(f"agentgym: {told} rollouts.sqlite")


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow)]
)
def test_a_signal_stops_an_evaluation_and_prints_how_to_resume(folder: Path, number: int, code: int) -> None:
    words = ["eval", "my_short:Stuck", "--model", "tiny", "--output-dir", "kept", "--concurrency", "1"]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{folder}"}
    command = [sys.executable, "-m", "agentgym", *words]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "stuck\n"
        process.send_signal(number)
        said = process.stderr.read().splitlines()
        assert any(line.startswith("agentgym: stopping after") for line in said)
        words[5] = str(folder / "kept")
        again = said[-1].partition("stopped; to resume: ")[2]
        assert shlex.split(again) == [
            "agentgym",
            *words[:4],
            "--concurrency",
            "1",
            "--output-dir",
            words[5],
            "--resume",
        ]
    assert process.returncode == code
    with RolloutStore("kept") as store:
        assert [row.rollout_id for row in store.summaries()] == ["test-0/0"]


@pytest.mark.parametrize("command", ["eval", "compare"])
def test_the_help_has_an_example(capsys: pytest.CaptureFixture[str], command: str) -> None:
    with pytest.raises(SystemExit, match="0"):
        cli.main([command, "--help"])
    assert f"$ agentgym {command} " in capsys.readouterr().out


async def test_a_model_role_is_a_flag_and_is_kept_on_resume(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    pytest.importorskip("openai", reason="needs the extra agentgym-kit[endpoint]")
    from tests.engines.endpoint.chat_server import Request, Sent, chat_server, said

    def answers(request: Request, number: int) -> Sent:
        assert request["model"] == "judging"
        return said("yes")

    words = ("eval", "my_short:Judged", "--model", "tiny", "--n", "2", "--output-dir", "judged")
    async with chat_server(answers) as server:
        judge = ("--models.judge.url", server.url, "--models.judge.model=judging", "--models.judge.prompt-price", "1")
        code, _, err = await asyncio.to_thread(run, capsys, *words, *judge)
        assert code == 0, err
        assert stored_rewards(folder / "judged", "judged") == [0.5, 0.5]
        rescored = await asyncio.to_thread(run, capsys, "rescore", "judged", *judge)
    assert rescored[1][0].endswith("0 of 2 changed")
    code, _, err = await asyncio.to_thread(run, capsys, *words, "--resume", "--models.judge.model", "tiny")
    assert code == 1
    assert err.startswith(f"agentgym: models: {folder}/judged was started with")


def test_a_runs_folder_that_cannot_be_created_is_refused_in_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").touch()
    code, _, err = run(capsys, "eval", "my_short:Judged", "--model", "tiny")
    assert code == 1
    assert "cannot be created (a file is in its way)" in err
    assert err.count("\n") == 1


def stored_rewards(folder: Path, name: str) -> list[float]:
    with RolloutStore(folder) as store:
        return [found.rollout.rewards[name] for found in store.find()]


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (
            ["--models.judge", "tiny"],
            2,
            "eval: --models.judge: write --models.NAME.FIELD, as in --models.judge.url URL/v1",
        ),
        (["--models.judge.urll", "x"], 2, "eval: --models.judge.urll: write --models.NAME.FIELD"),
        (["--models.judge.url"], 2, "eval: --models.judge.url: expected a value"),
        (
            ["--models.judge.concurrency", "many"],
            2,
            "eval: --models.judge.concurrency: Input should be a valid integer",
        ),
        (["--models.judge.tools", "api"], 1, "--models.judge: give --models.judge.model or --models.judge.url"),
        (["--models.judge.url", "localhost:1"], 1, "--models.judge.url: must begin with http:// or https://"),
    ],
)
def test_a_wrong_flag_of_a_model_role_is_named(
    capsys: pytest.CaptureFixture[str], words: list[str], code: int, told: str
) -> None:
    assert run(capsys, "eval", "my_short:Judged", "--model", "tiny", *words)[0] == code
    assert run(capsys, "eval", "my_short:Judged", "--model", "tiny", *words)[2].startswith(f"agentgym: {told}")


async def test_an_endpoint_is_evaluated_and_its_tokens_and_cost_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("openai", reason="needs the extra agentgym-kit[endpoint]")
    from tests.engines.endpoint.chat_server import Request, Sent, chat_server, said

    def answers(request: Request, number: int) -> Sent:
        if request == {}:
            return Sent({"object": "list", "data": [{"id": "served", "object": "model"}]})
        assert request["model"] == "served"
        return said("one")

    async with chat_server(answers) as server:
        prices = ("--prompt-price", "1", "--completion-price", "10")
        args = ("eval", "my_short:Short", "--url", server.url, "--n", "2", *prices)
        code, lines, _ = await asyncio.to_thread(run, capsys, *args)
    assert code == 0
    assert lines[0].split()[:2] == ["reward", "1.000"]
    assert "tokens    200 in prompts" in lines
    assert "          20 sampled, in 2 requests" in lines
    assert "cost      0.0004" in lines
