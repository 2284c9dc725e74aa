"""The command `agentgym show`: what it prints of a run's rollouts, and its errors."""

import os
import re
import sqlite3
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from agentgym.cli import main as cli
from agentgym.store.schema import FILE
from agentgym.store.writer import RolloutWriter, Trained
from tests.store.test_store import group, rollout, segment

ROOT = Path(__file__).parents[2]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Write a run of two steps with two groups each, one failed rollout, training data for a/0, and an evaluation."""
    long = segment([(2, 4), (5, 9)], length=12, text="x" * 5000)
    with RolloutWriter(tmp_path) as writer:
        writer.add([group(rollout("a/0", 0.5), rollout("a/1", None)), group(rollout("b/0", -1.0))], step=0)
        writer.add([group(rollout("c/0", 2.0, segments=(long,)))], step=1)
        writer.add([group(rollout("d/0", 1.0))], phase="eval_after", step=2)
        logprobs = np.zeros(6, np.float32)
        writer.add_step([Trained(rollout_id="a/0", segment=0, logprobs=logprobs, advantages=[1, -1], gap=2.5)], step=0)
    return tmp_path


def show(capsys: pytest.CaptureFixture[str], *args: object) -> str:
    assert cli.main(["show", *map(str, args)]) == 0
    return capsys.readouterr().out


def shown(said: str) -> list[str]:
    """Return the rollouts whose transcripts were printed, in order."""
    return re.findall(r"^rollout (\S+):", said, re.MULTILINE)


def test_without_a_selection_show_prints_a_table_of_the_last_rollouts(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = show(capsys, run).splitlines()
    assert lines[0].split() == ["number", "phase", "step", "rollout", "reward", "stop", "turns", "tokens"]
    assert lines[1].split() == ["1", "train", "0", "a/0", "0.5", "answer", "2", "6", "logprob-gap"]
    assert lines[2].split()[4:] == ["failed", "error", "2", "6", "EnvError:", "KeyError:", "'x'"]
    assert [line.split()[3] for line in show(capsys, run, "--limit", 2).splitlines()[1:]] == ["c/0", "d/0"]
    assert [line.split()[3] for line in show(capsys, run, "--phase", "eval_after").splitlines()[1:]] == ["d/0"]


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        (["--worst", "2"], ["b/0", "a/0"]),
        (["--best", "1"], ["c/0"]),
        (["--worst", "1", "--best", "1", "--phase", "train"], ["b/0", "c/0"]),
        (["--failed"], ["a/1"]),
        (["--suspicious"], ["a/0"]),
        (["--id", "3", "a"], ["a/0", "a/1", "b/0"]),
        (["--id", "c/0"], ["c/0"]),
        (["--best", "9", "--step", "0"], ["a/0", "b/0"]),
        (["--best", "9", "--limit", "1"], ["c/0"]),
    ],
)
def test_a_selection_prints_the_transcripts_of_its_rollouts(
    run: Path, capsys: pytest.CaptureFixture[str], asked: list[str], found: list[str]
) -> None:
    assert shown(show(capsys, run, *asked)) == found


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        (["--worst", "1"], ["train/0"]),
        (["--best", "1"], ["train/0"]),
        (["--worst", "1", "--phase", "eval_before"], ["low/0"]),
        (["--best", "1", "--phase", "all"], ["high/0"]),
        (["--worst", "1", "--id", "high"], ["high/0"]),
    ],
)
def test_worst_and_best_select_training_rollouts_unless_a_phase_is_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], asked: list[str], found: list[str]
) -> None:
    with RolloutWriter(tmp_path) as writer:
        writer.add([group(rollout("low/0", -2.0))], phase="eval_before", step=0)
        writer.add([group(rollout("train/0", 0.5))], step=0)
        writer.add([group(rollout("high/0", 2.0))], phase="eval_after", step=1)
    assert shown(show(capsys, tmp_path, *asked)) == found


@pytest.mark.parametrize(
    ("asked", "option"),
    [(["--limit", "1"], "limit"), (["--worst", "1"], "worst"), (["--best", "2", "--limit", "1"], "limit")],
)
def test_if_rollouts_are_left_out_the_option_that_shows_more_is_named(
    run: Path, capsys: pytest.CaptureFixture[str], asked: list[str], option: str
) -> None:
    assert cli.main(["show", str(run), *asked]) == 0
    assert f"rollouts are shown; --{option} N shows more\n" in capsys.readouterr().err


@pytest.mark.parametrize("asked", ["--worst", "--best"])
def test_of_equal_rewards_the_latest_step_comes_first_and_then_the_ids_in_order(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], asked: str
) -> None:
    with RolloutWriter(tmp_path) as writer:
        for step in (0, 1):
            for name in ("c", "a", "b"):  # in the order in which they finished
                writer.add([group(rollout(f"{name}{step}/0", 0.5))], step=step)
    assert shown(show(capsys, tmp_path, asked, 4)) == ["a1/0", "b1/0", "c1/0", "a0/0"]


@pytest.mark.parametrize(
    ("asked", "tied"),
    [
        (["--worst", "1"], "2 more rollouts have the reward 0 of the last one shown"),
        (["--worst", "2"], "1 more rollout has the reward 0 of the last one shown"),
        (["--worst", "9", "--limit", "1"], "2 more rollouts have the reward 0 of the last one shown"),
        (["--worst", "3"], ""),
        (["--worst", "4"], ""),
        (["--best", "1"], ""),
        (["--best", "2"], "2 more rollouts have the reward 0 of the last one shown"),
        (["--worst", "1", "--step", "1"], ""),
        (["--failed"], ""),
    ],
)
def test_rollouts_with_the_reward_of_the_last_one_shown_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], asked: list[str], tied: str
) -> None:
    with RolloutWriter(tmp_path) as writer:
        writer.add([group(rollout("a/0", 0.0), rollout("a/1", 0.0), rollout("a/2", 1.0), rollout("a/3", None))], step=0)
        writer.add([group(rollout("b/0", 0.0))], step=1)
    assert cli.main(["show", str(tmp_path), *asked]) == 0
    assert [line for line in capsys.readouterr().err.splitlines() if " more rollout" in line] == (
        [tied] if tied else []
    )


def test_without_training_rollouts_worst_covers_all_and_a_missing_phase_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with RolloutWriter(tmp_path) as writer:
        writer.add([group(rollout("a/0", 0.5))], phase="eval", step=0)
    assert shown(show(capsys, tmp_path, "--worst", 1)) == ["a/0"]
    assert cli.main(["show", str(tmp_path), "--worst", "1", "--phase", "train"]) == 1
    assert "no rollout has the phase 'train'; the phases are: eval, all\n" in capsys.readouterr().err


def test_a_transcript_ends_with_the_training_data_of_each_turn(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = show(capsys, run, "--id", "a/0")
    assert "suspicious: logprob-gap: a trainer log-probability differs from the engine's by more than 1 nat" in said
    *_, advantages, gaps = said.splitlines()
    assert advantages == "segment 0: advantage by turn: 1 -1"
    assert gaps.startswith("segment 0: largest log-probability gap to the trainer by turn, in nats: 0.")
    assert "advantage" not in show(capsys, run, "--id", "b/0")


def test_long_messages_are_cut_unless_full_is_given(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "characters not shown" in show(capsys, run, "--id", "c/0")
    assert "x" * 5000 in show(capsys, run, "--id", "c/0", "--full")


@pytest.mark.parametrize(
    ("folder", "asked", "said"),
    [
        ("nowhere", [], "run: there is no folder"),
        (".", [], "the latest run in it is"),
        ("other", [], f"contains no {FILE}; name the folder of a run"),
        ("empty", [], "has no rollouts yet; look again"),
        ("torn", [], "this rollout store cannot be opened (file is not a database)"),
        ("run", ["--id", "zzz"], "none of the 1 rollouts in"),
        ("run", ["--limit", "0"], "--limit: must be at least 1, got 0"),
        ("run", ["--step", "1" + "0" * 20], "none of the 1 rollouts in"),
        ("run", ["--id", "\udcff\udcfe"], "none of the 1 rollouts in"),
        ("run", ["--phase", "foo"], "--phase: no rollout has the phase 'foo'; the phases are: train"),
        ("damaged", ["--id", "a/0"], "the store cannot be read (rollout 1: "),
        ("malformed", ["--id", "a/0"], "it has no table segments, or a view in its place"),
    ],
)
def test_errors_of_show_are_one_line_that_says_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], folder: str, asked: list[str], said: str
) -> None:
    (tmp_path / "other").mkdir()
    for name in ("empty", "run"):
        with RolloutWriter(tmp_path / name) as writer:
            writer.add([group(rollout("a/0"))] if name == "run" else [], step=0)
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / FILE).write_text("no database" * 99)
    for name, deed in (("damaged", "UPDATE segments SET turns = x'00'"), ("malformed", "DROP TABLE segments")):
        with RolloutWriter(tmp_path / name) as writer:
            writer.add([group(rollout("a/0"))], step=0)
        with closing(sqlite3.connect(tmp_path / name / FILE)) as connection, connection:
            connection.execute(deed)
    assert cli.main(["show", str(tmp_path / folder), *asked]) == 1
    out, error = capsys.readouterr()
    assert (out, error.count("\n")) == ("", 1)
    assert error.startswith("agentgym: ")
    assert said in error


def piped(script: str, run: Path) -> "subprocess.CompletedProcess[str]":
    command = f"{sys.executable} -m agentgym show {run}"
    words = ["bash", "-o", "pipefail", "-c", script.format(command)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": ""}
    return subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def test_a_pipe_gets_plain_text_and_may_close_early(run: Path) -> None:
    with RolloutWriter(run, done=9) as writer:  # more than a pipe's buffer holds
        writer.add([group(rollout(f"n{i}/0", segments=(segment([(2, 4)], length=5),))) for i in range(5000)], step=3)
    done = piped("{} --limit 9999 | head -1", run)
    assert (done.stdout.split()[0], done.stderr) == ("number", "")
    assert done.returncode == 141
    assert "\x1b" not in piped("{} --best 2 | cat", run).stdout


def test_in_one_file_with_stderr_the_rollouts_come_before_the_number_of_those_left_out(run: Path) -> None:
    said = piped("{} --limit 1 2>&1", run).stdout.splitlines()
    assert (said[0].split()[0], said[-1]) == ("number", "1 of 5 rollouts are shown; --limit N shows more")


@pytest.mark.parametrize("option", ["--limit", "--worst", "--best"])
def test_a_count_larger_than_sqlite_integers_shows_all(
    run: Path, capsys: pytest.CaptureFixture[str], option: str
) -> None:
    assert "c/0" in show(capsys, run, option, 10**20)


def test_if_no_rollout_failed_show_says_so_without_an_error(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert show(capsys, run, "--failed", "--step", 1) == "none of the 1 selected rollouts failed\n"


@pytest.mark.parametrize("where", ["> /dev/full", ">&-"])
@pytest.mark.parametrize("asked", ["", "--worst 2 --full"])
def test_an_unwritable_stdout_is_an_error_of_one_line(run: Path, where: str, asked: str) -> None:
    done = piped(f"{{}} {asked} {where}", run)
    assert done.returncode == 1
    assert re.fullmatch(r"agentgym: stdout (is closed|cannot be written)[^\n]*\n", done.stderr)


def test_control_characters_from_a_model_cannot_control_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    odd = segment([(2, 4)], length=5, text="\x1b[2J\ud800")
    with RolloutWriter(tmp_path) as writer:
        writer.add([group(rollout("a/0", segments=(odd,)))], step=0)
    said = show(capsys, tmp_path, "--id", 1)
    assert "\x1b" not in said
    assert r"\x1b[2J\ud800" in said


@pytest.mark.parametrize("command", [["doctor"], ["gc"], ["ls"], ["merge"], ["sandbox", "build"], ["show"]])
def test_the_help_of_each_subcommand_has_its_own_examples(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="0"):
        cli.main([*command, "--help"])
    assert f"$ agentgym {' '.join(command)}" in capsys.readouterr().out


@pytest.fixture
def named_run(tmp_path: Path) -> Path:
    """Write a run with one trained rollout of two turns, whose token ids have texts, one of them an escape sequence."""
    words = {0: b"<|start|>", 1: b"tools", 2: "ü".encode()[:1], 3: "ü".encode()[1:], 4: b"\x1b[31m", 5: b"\n"}
    own = replace(segment([(2, 4), (5, 6)], length=7), token_ids=np.array([0, 1, 2, 3, 0, 4, 5]))
    with RolloutWriter(tmp_path) as writer:
        writer.vocabulary.token_bytes = lambda model, ids: {i: words[i] for i in ids}
        writer.add([group(rollout("a/0", 0.5, segments=(own,)))], step=0)
        scored = own.logprobs[own.sampled] + np.log(np.float32(2))
        writer.add_step([Trained(rollout_id="a/0", segment=0, logprobs=scored, advantages=[1, -1], gap=0.7)], step=0)
    return tmp_path


def test_show_prints_the_prompt_and_the_turns_as_the_model_read_them(
    named_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert show(capsys, named_run, "--prompt").splitlines() == [
        "number 1, train, step 0",
        "rollout a/0",
        "segment 0, root: 7 tokens, 3 of them sampled",
        "--- prompt: 2 tokens",
        "<|start|>tools",
        "--- turn 0, sampled: 2 tokens",
        "ü",
        "--- context: 1 token",
        "<|start|>",
        "--- turn 1, sampled: 1 token",
        "\\x1b[31m",
        "--- context: 1 token",
        "",
        "",
    ]


def test_show_prints_what_is_known_of_each_token(named_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [line.split() for line in show(capsys, named_run, "--tokens").splitlines()[3:]]
    logprob = lines[2][3]
    assert lines == [
        ["token", "id", "text", "log-prob", "ratio", "advantage"],
        ["0", "to", "1:", "2", "tokens,", "not", "sampled;", "--full", "lists", "them"],
        ["2", "2", "'⟨C3⟩'", logprob, "2.0000", "+1.0000"],
        ["3", "3", "'⟨BC⟩'", lines[3][3], "2.0000", "+1.0000"],
        ["4", "to", "4:", "1", "token,", "not", "sampled;", "--full", "lists", "them"],
        ["5", "4", "'\\x1b[31m'", lines[5][3], "2.0000", "-1.0000"],
        ["6", "to", "6:", "1", "token,", "not", "sampled;", "--full", "lists", "them"],
    ]
    full = [line.split() for line in show(capsys, named_run, "--tokens", "--full").splitlines()[3:]]
    assert [line[:3] for line in full[1:3]] == [["0", "0", "'<|start|>'"], ["1", "1", "'tools'"]]
    assert len(full) == 8


def test_tokens_whose_texts_were_not_stored_are_shown_as_ids(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for flag in ("--prompt", "--tokens"):
        said = show(capsys, run, flag, "--id", "a/0")
        assert "did not store the texts of its token ids" in said


def test_tokens_have_colors_only_in_a_terminal(named_run: Path) -> None:
    words = [sys.executable, "-m", "agentgym", "show", str(named_run), "--tokens", "--prompt"]
    environment = {**os.environ, "TERM": "xterm", "PYTHONPATH": str(ROOT)}
    leader, follower = os.openpty()
    subprocess.run(words, stdout=follower, env=environment, check=True)
    os.close(follower)
    shown_there = os.read(leader, 1 << 16)
    os.close(leader)
    assert b"\x1b[32m" in shown_there
    assert b"\x1b[31m\xc3" not in shown_there
    assert b"\\x1b[31m" in shown_there
    piped = subprocess.run(words, stdout=subprocess.PIPE, env=environment, check=True)
    assert b"\x1b" not in piped.stdout
