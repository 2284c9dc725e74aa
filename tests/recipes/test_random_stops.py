"""Signals at random moments of a run: each leaves the last finished step and nothing else.

If it is resumed, the run equals one that was never stopped.
"""

import ctypes
import json
import os
import random
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from agentgym.train.checkpoint import check_step, last_step
from tests.engines.sglang.server.conftest import real_config
from tests.recipes.test_resume import is_the_same
from tests.torchrun import torchrun

ROOT = Path(__file__).parents[2]
PARTS = ("opening", "collecting", "training", "syncing", "evaluating", "saving", "closing")
CODES = {"SIGINT": 130, "SIGTERM": 143}
CHAINS, STOPS = 4, 5
STEPS = 2 * STOPS
"""Each process is stopped in its first or second step, so a chain's stops all fit into these steps."""
# One rollout at a time, so that the engine computes every token in the same shapes, with the same float noise.
FLAGS = [
    *(
        "--sandbox",
        "unsafe",
        "--engine.slots",
        "1",
        "--prompts-per-step",
        "2",
        "--group-size",
        "3",
        "--eval-tasks",
        "2",
    ),
    *("--eval-every", "1", "--max-steps", str(STEPS)),
]
FEW = [*FLAGS, "--max-steps", "4"]
_SUBREAPER = 36


@dataclass(frozen=True, kw_only=True)
class Stop:
    """A moment in a run, relative to the length of a part, and the signals that are sent then."""

    part: str
    occurrence: int
    share: float
    signals: Sequence[str]
    to: str = "self"

    def moment(self, seconds: float) -> list[Any]:
        """Return the script's MOMENT argument if the part takes this many seconds."""
        return [self.part, self.occurrence, self.share * seconds, list(self.signals), self.to]


def drawn(seed: int = 11) -> list[list[Stop]]:
    """Draw five stops per chain of processes, with each part and signal combined at least once.

    Stops while closing come last in their chain.
    """
    dice = random.Random(seed)
    pairs = [(part, name) for part in PARTS for name in CODES]
    pairs += dice.choices(pairs, k=CHAINS * STOPS - len(pairs))
    dice.shuffle(pairs)
    chains = []
    for first in range(0, len(pairs), STOPS):
        chain = sorted(pairs[first : first + STOPS], key=lambda pair: pair[0] == "closing")
        chains.append(
            [
                Stop(
                    part=part,
                    occurrence=1 if part in ("opening", "closing") else dice.randint(1, 2),
                    share=dice.random(),
                    signals=[name],
                )
                for part, name in chain
            ]
        )
    return chains


@dataclass(frozen=True)
class Place:
    """The files of a chain of processes: its run folder, its temporary files, and the script's notes."""

    folder: Path

    @property
    def out(self) -> Path:
        return self.folder / "a run"

    @property
    def temporary(self) -> Path:
        return self.folder / "tmp"

    @property
    def notes(self) -> list[dict[str, Any]]:
        path = self.folder / "notes"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def left_files(self, *, of_all: bool = True) -> list[str]:
        """Return the temporary files that are left, or only agentgym's."""
        names = [path.name for path in self.temporary.iterdir()]
        return [name for name in names if of_all or name.startswith("agentgym")]

    @property
    def finished(self) -> int:
        """The last finished step."""
        return max((note["finished"] for note in self.notes if "finished" in note), default=0)

    def run(self, moment: Any, flags: Sequence[str], launch: Sequence[str] = ()) -> "subprocess.CompletedProcess[str]":
        self.temporary.mkdir(exist_ok=True)
        script = ["-m", "tests.recipes.random_stop_script", str(self.folder / "notes"), json.dumps(moment)]
        own = {"TMPDIR": str(self.temporary), "TORCHINDUCTOR_CACHE_DIR": str(self.folder / "cache")}
        return subprocess.run(
            [sys.executable, *launch, *script, *flags],
            cwd=ROOT,
            env=os.environ | own | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=False,
            start_new_session=True,
        )


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """Complete a run without stopping it."""
    place = Place(tmp_path_factory.mktemp("whole"))
    done = place.run(None, [*FLAGS, "--output-dir", str(place.out)])
    assert done.returncode == 0, done.stderr[-3000:]
    return place


def seconds_of(part: str, whole: Place) -> float:
    """Return the mean duration of a part in the run that isn't stopped."""
    return mean(float(note["seconds"]) for note in whole.notes if note.get("part") == part)


def children() -> dict[int, str]:
    """Return this process's living children, with their command lines."""
    found = {}
    for task in Path("/proc/self/task").iterdir():
        for child in map(int, (task / "children").read_text().split()):
            line = Path(f"/proc/{child}/cmdline").read_bytes().replace(b"\0", b" ").decode()
            if line:  # a child that has ended has no command line
                found[child] = line
    return found


@contextmanager
def left_processes(*, come_to_an_end: bool = False) -> Iterator[list[str]]:
    """Yield a list that is filled after the block with the processes that the block left; they are killed.

    With `come_to_an_end`, wait for each of them instead.
    """
    before = children()
    left: list[str] = []
    ctypes.CDLL(None).prctl(_SUBREAPER, 1)  # orphaned descendants become this process's children
    try:
        yield left
        while come_to_an_end and (going := children().keys() - before):
            os.waitpid(going.pop(), 0)
    finally:
        ctypes.CDLL(None).prctl(_SUBREAPER, 0)
        for child, line in children().items():
            if child not in before:
                left.append(line)
                os.kill(child, signal.SIGKILL)


def stop(place: Place, at: Stop, flags: Sequence[str], seconds: float, *, all_files: bool = True) -> list[str]:
    """Stop the run during a part that takes this many seconds.

    Returns:
        The flags in the line that says how to resume, or an empty list if the run had reached its end.
    """
    with left_processes() as left:
        done = place.run(at.moment(seconds), flags)
    assert "Traceback" not in done.stderr, done.stderr[-3000:]
    assert left == []
    assert place.left_files(of_all=all_files) == []
    if done.returncode == 0:
        assert at.part == "closing"
        return []
    assert done.returncode == CODES[at.signals[0]], done.stderr[-3000:]
    return flags_to_go_on(done.stderr)


def flags_to_go_on(stderr: str) -> list[str]:
    """Return the flags after the program in the one line that says how to resume."""
    said = [line for line in stderr.splitlines() if line.startswith("Stopped by ")]
    assert len(said) == 1, stderr[-3000:]
    words = shlex.split(said[0].partition("to resume: ")[2] or said[0].partition("to run it: ")[2])
    return words[words.index("tests.recipes.random_stop_script") + 1 :]


def is_whole(place: Place) -> None:
    """Assert that the last finished step is on disk, without leftovers of an unfinished write."""
    checkpoints = place.out / "checkpoints"
    assert last_step(checkpoints) == place.finished
    for kept in checkpoints.glob("*"):
        assert kept.name.startswith("step-")
        check_step(kept)
    assert (place.out / "adapter").exists() == bool(place.finished)
    assert not list(place.out.glob(".*"))


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, *(pytest.param(n, marks=pytest.mark.proof) for n in range(1, CHAINS))])
def test_a_signal_at_any_moment_leaves_exactly_the_last_finished_step(number: int, place: Place, whole: Place) -> None:
    flags = [*FLAGS, "--save-every", str(number % 2), "--output-dir", str(place.out)]
    for at in drawn()[number]:
        flags = stop(place, at, flags, seconds_of(at.part, whole)) or [
            *FLAGS,
            "--save-every",
            "0",
            "--resume",
            str(place.out),
        ]
        if place.out.exists():
            is_whole(place)
    done = place.run(None, flags)
    assert done.returncode == 0, done.stderr[-3000:]
    is_the_same(place.out, whole.out)


@pytest.mark.slow
@pytest.mark.parametrize(
    "signals",
    [
        ("SIGINT", "SIGINT"),
        ("SIGTERM", "SIGINT"),
        pytest.param(("SIGINT", "SIGTERM"), marks=pytest.mark.proof),
        pytest.param(("SIGTERM", "SIGTERM"), marks=pytest.mark.proof),
    ],
    ids=" then ".join,
)
def test_a_second_signal_leaves_no_process_and_a_run_that_can_be_resumed(
    signals: tuple[str, str], place: Place, whole: Place
) -> None:
    at = Stop(part="collecting", occurrence=2, share=random.Random(str(signals)).random(), signals=signals)
    begun = [*FLAGS, "--save-every", "1", "--output-dir", str(place.out)]
    with left_processes(come_to_an_end=True):
        done = place.run(at.moment(seconds_of(at.part, whole)), begun)
    assert done.returncode == CODES[signals[0]], done.stderr[-3000:]
    done = place.run(None, flags_to_go_on(done.stderr))
    assert done.returncode == 0, done.stderr[-3000:]
    assert place.left_files() == []
    is_whole(place)
    is_the_same(place.out, whole.out)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """Complete a run of two processes without stopping it."""
    place = Place(tmp_path_factory.mktemp("pair"))
    done = place.run(None, [*FEW, "--output-dir", str(place.out)], torchrun(place.folder / "logs"))
    assert done.returncode == 0, done.stderr[-3000:]
    return place


@pytest.mark.slow
@pytest.mark.parametrize(
    ("part", "name", "to"),
    [
        pytest.param("collecting", "SIGINT", "group", marks=pytest.mark.proof),
        ("training", "SIGINT", "parent"),
        pytest.param("syncing", "SIGTERM", "parent", marks=pytest.mark.proof),
        ("saving", "SIGTERM", "group"),
    ],
)
def test_a_signal_to_torchrun_ends_all_processes_and_keeps_the_last_step(
    part: str, name: str, to: str, place: Place, pair: Place
) -> None:
    at = Stop(part=part, occurrence=2, share=random.Random(part).random(), signals=[name], to=to)
    launch = torchrun(place.folder / "logs")
    with left_processes() as left:
        stopped = place.run(
            at.moment(seconds_of(part, pair)), [*FEW, "--save-every", "0", "--output-dir", str(place.out)], launch
        )
    assert stopped.returncode != 0
    assert left == []
    assert place.left_files() == []
    is_whole(place)
    done = place.run(None, flags_to_go_on(stopped.stderr), torchrun(place.folder / "logs"))
    assert done.returncode == 0, done.stderr[-3000:]
    is_the_same(place.out, pair.out)


SLOW_SERVER = """
import signal, subprocess, sys
subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"]).wait()
"""
"""A server with a child process, which never accepts requests."""


@pytest.mark.slow
@pytest.mark.parametrize("name", CODES)
@pytest.mark.parametrize(("part", "seconds"), [("spawning", 0.05), ("launching", 2.0)])
def test_a_signal_during_a_servers_start_leaves_no_server(part: str, seconds: float, name: str, place: Place) -> None:
    (place.folder / "server.py").write_text(SLOW_SERVER)
    command = shlex.join([sys.executable, str(place.folder / "server.py")])
    at = Stop(part=part, occurrence=1, share=random.Random(part + name).random(), signals=[name])
    flags = stop(
        place, at, [*FEW, "--engine", "sglang", "--engine.command", command, "--output-dir", str(place.out)], seconds
    )
    is_whole(place)
    assert flags[-2:] == ["--resume", str(place.out)]


@pytest.mark.sglang
@pytest.mark.slow
@pytest.mark.parametrize(("name", "seconds"), [("SIGINT", 5.0), ("SIGTERM", 20.0)])
def test_a_signal_during_a_real_servers_launch_leaves_a_run_that_can_be_resumed(
    name: str, seconds: float, place: Place
) -> None:
    server = ["--engine", "sglang", "--engine.startup-s", "1200", "--engine.command", real_config().command]
    at = Stop(part="launching", occurrence=1, share=random.Random(name).random(), signals=[name])
    flags = stop(
        place, at, [*FLAGS, "--max-steps", "1", *server, "--output-dir", str(place.out)], seconds, all_files=False
    )
    is_whole(place)
    with left_processes() as left:
        done = place.run(None, flags)
    assert done.returncode == 0, done.stderr[-3000:]
    assert left == []
    assert place.left_files(of_all=False) == []  # SGLang itself leaves sockets, however it ends
    is_whole(place)
