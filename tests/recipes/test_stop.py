"""A signal at any moment: the last finished step is saved, and the printed line resumes the run."""

import asyncio
import json
import os
import pty
import re
import shlex
import signal
import subprocess
import sys
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest

from agentgym.cli.recipe import Stop
from agentgym.store.reader import RolloutStore
from tests.torchrun import torchrun

ROOT = Path(__file__).parents[2]
SMALL = [
    "--sandbox",
    "unsafe",
    "--engine.slots",
    "8",
    "--prompts-per-step",
    "2",
    "--group-size",
    "4",
    "--eval-tasks",
    "2",
]
FLAGS = [*SMALL, "--max-steps", "3", "--save-every", "1"]
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
CODES = {"SIGINT": 130, "SIGTERM": 143}


def start(*command: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, check=False)


def stopped(moment: str, name: str, out: Path, *flags: str, steps: int = 0) -> str:
    """Return the line that the stopped recipe prints at its end, after the lines of this many steps."""
    script = [sys.executable, "-m", "tests.recipes.stopped_script", moment, name]
    done = start(*script, *FLAGS, *flags, "--output-dir", str(out))
    assert done.returncode == CODES[name], done.stderr[-3000:]
    assert "Traceback" not in done.stderr, done.stderr[-3000:]
    said = [line for line in done.stderr.splitlines() if line.startswith("Stopped by ")]
    assert len(said) == 1
    assert done.stdout == ""
    assert re.findall(r"^step (\d+), \d+/", done.stderr, re.MULTILINE) == [str(step) for step in range(steps)]
    came = {"SIGINT": "Ctrl-C", "SIGTERM": "SIGTERM"}[name]
    assert done.stderr.count(f"\n{came}: stopping after ") == (moment != "importing")
    return said[0]


def steps_kept(out: Path) -> list[str]:
    return sorted(path.name for path in (out / "checkpoints").glob("step-*"))


def steps_logged(out: Path) -> list[int]:
    rows = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return [row["step"] for row in rows if "eval/reward" not in row]


def stored(out: Path) -> dict[tuple[str, int], int]:
    """Return the number of stored rollouts by phase and step."""
    with RolloutStore(out) as store:
        return dict(Counter((found.phase, found.step) for found in store.find()))


@pytest.mark.parametrize(
    ("moment", "name", "kept"),
    [
        pytest.param("loading", "SIGTERM", 0, marks=pytest.mark.slow),
        pytest.param("evaluation", "SIGINT", 0, marks=pytest.mark.slow),
        ("rollouts", "SIGTERM", 1),
        pytest.param("training", "SIGINT", 1, marks=pytest.mark.slow),
        pytest.param("syncing", "SIGTERM", 1, marks=pytest.mark.slow),
        pytest.param("holding", "SIGINT", 2, marks=pytest.mark.slow),
        pytest.param("logged", "SIGINT", 2, marks=pytest.mark.slow),
        pytest.param("writing", "SIGTERM", 2, marks=pytest.mark.slow),
        pytest.param("last evaluation", "SIGINT", 3, marks=pytest.mark.slow),
    ],
)
def test_a_stop_keeps_the_last_finished_step_and_prints_a_line_that_resumes_it(
    moment: str, name: str, kept: int, tmp_path: Path
) -> None:
    out = tmp_path / "a run"
    said = stopped(moment, name, out, steps=kept)
    assert str(out) in said
    assert steps_logged(out) == list(range(kept))
    assert steps_kept(out)[-1:] == [f"step-{kept:06}"] * bool(kept)
    assert (out / "adapter").exists() == bool(kept)
    assert all(stored(out)["train", step] == 8 for step in range(kept))
    program, *words = shlex.split(said.partition("to resume: ")[2])
    assert words[:2] == ["-m", "tests.recipes.stopped_script"]
    words[1] = "recipes.chase_grpo"
    done = start(program, *words)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1])["steps"] == 3
    assert steps_kept(out)[-1] == "step-000003"
    trained = {("train", step): 8 for step in range(3)}
    assert stored(out) == {("eval_before", 0): 2, **trained, ("eval_after", 3): 2}


@pytest.mark.parametrize("name", CODES)
def test_a_stop_during_imports_says_that_nothing_was_started(name: str, tmp_path: Path) -> None:
    said = stopped("importing", name, tmp_path / "run")
    assert re.search(r"nothing was started; to run it: .* --output-dir ", said)
    assert not (tmp_path / "run").exists()


def test_a_second_ctrl_c_ends_at_once_and_restores_the_cursor(tmp_path: Path) -> None:
    ours, terminals = pty.openpty()
    script = [
        sys.executable,
        "-m",
        "tests.recipes.stopped_script",
        "twice",
        "SIGINT",
        *FLAGS,
        "--output-dir",
        str(tmp_path),
    ]
    environment = ENVIRONMENT | {"TERM": "xterm", "COLUMNS": "500"}
    with subprocess.Popen(script, cwd=ROOT, env=environment, stderr=terminals) as running:
        os.close(terminals)
        said = b""
        with suppress(OSError), os.fdopen(ours, "rb", buffering=0) as terminal:  # raises if the other end is closed
            while more := terminal.read(1 << 16):
                said += more
    assert running.returncode == 130
    assert b"no step was finished" in said
    assert said.rindex(b"\x1b[?25h") > said.rindex(b"\x1b[?25l")


def test_a_signal_after_the_end_of_a_run_has_no_effect() -> None:
    async def work() -> str:
        return "done"

    with Stop() as stop:
        assert asyncio.run(stop.cancels(work())) == "done"
        signal.raise_signal(signal.SIGTERM)


def test_a_process_that_waits_for_a_missing_rank_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def ends(code: int) -> None:
        raise SystemExit(code)

    async def work() -> None:
        stop._came(signal.SIGTERM, None)  # as torchrun does if the first process was refused

    monkeypatch.setattr(os, "_exit", ends)
    for name, value in {"RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    stop = Stop()
    with pytest.raises(SystemExit, match="143"):
        asyncio.run(stop.cancels(work()))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["lora", "full"])
def test_a_stop_under_torchrun_keeps_the_last_finished_step(tmp_path: Path, method: str) -> None:
    """For full training, each process writes its part of the model independently of the other processes."""
    out, flags = tmp_path / "run", [*FLAGS, "--train.method", method]
    launch = torchrun(tmp_path / "logs")
    script = ["-m", "tests.recipes.stopped_script", "training", "SIGINT"]
    done = start(sys.executable, *launch, *script, *flags, "--save-every", "0", "--output-dir", str(out))
    said = [line for line in done.stderr.splitlines() if line.startswith("Stopped by Ctrl-C: 1 finished steps")]
    assert len(said) == 1, done.stderr[-3000:]
    assert steps_kept(out) == ["step-000001"]
    assert (out / {"lora": "adapter", "full": "model"}[method]).is_dir()
    again = start(sys.executable, "-m", "recipes.chase_grpo", *flags, "--resume", str(out))
    assert again.returncode == 0, again.stderr[-3000:]
