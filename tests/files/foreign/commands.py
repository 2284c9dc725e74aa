"""Commands on folders from strangers, and checks of each: its exit code, its memory, and the files that it changed."""

import json
import os
import sqlite3
import stat
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
EXITS = (0, 1, 2, 141)
"""The documented exit codes."""
MOST_MIB = 1024
MOST_CPU_S = 60.0
"""Far more than any command needs, and small enough to detect one that never ends."""


class Worker:
    """Runs commands in a separate process, one at a time."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process = process

    def run(self, *commands: Sequence[str]) -> list[dict[str, Any]]:
        """Run commands and return their results."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{json.dumps(commands)}\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        assert line, f"the worker exited with {self.process.wait()} during one of {commands}"
        found: list[dict[str, Any]] = json.loads(line)
        return found


@contextmanager
def worker(cache: Path) -> Iterator[Worker]:
    """Start a process for commands, whose caches are in that folder."""
    environment = os.environ | {"XDG_CACHE_HOME": str(cache), "MPLCONFIGDIR": str(cache), "COLUMNS": "200"}
    environment |= {"PYTHONPATH": str(ROOT), "PYTHONFAULTHANDLER": "1"}
    command = [sys.executable, "-m", "tests.files.foreign.worker"]
    process = subprocess.Popen(
        command, cwd=cache, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:
        yield Worker(process)
        assert process.stdin is not None
        process.stdin.close()


@dataclass(frozen=True)
class Place:
    """A run, and the folder around it that no command may change."""

    around: Path

    @classmethod
    def made(cls, around: Path) -> "Place":
        """Create the folder, with files that attacks try to damage."""
        around.mkdir(parents=True)
        (around / "thesis.txt").write_text("years of work")
        with closing(sqlite3.connect(around / "mine.sqlite")) as mine:
            mine.executescript("CREATE TABLE texts (a); INSERT INTO texts VALUES ('my notes'); PRAGMA user_version = 7")
        (around / "site").mkdir()
        (around / "site" / "report.html").write_text("mine")
        (around / "site" / "picture.png").write_bytes(b"mine")
        return cls(around)

    @property
    def run(self) -> Path:
        """The run's folder."""
        return self.around / "run"

    def commands(self) -> list[list[str]]:
        """Return every command that reads a run, applied to this run."""
        run, sound = str(self.run), str(self.around.parent / "sound")
        made = self.around / "made"
        return [
            ["show", run],
            ["show", run, "--best", "2", "--phase", "all", "--full"],
            ["show", run, "--failed"],
            ["show", run, "--suspicious"],
            ["export", run, "--to", "sft", "--output", f"{made}.jsonl"],
            ["export", run, "--to", "openai", "--unscored"],
            ["export", run, "--to", "atif", "--phase", "all", "--output", f"{made}-atif"],
            ["compare", run, sound],
            [
                "rescore",
                run,
                "--env",
                f"{Path(__file__).parent / 'scored_env.py'}:Scored",
                "--output-dir",
                f"{made}-again",
            ],
            ["report", run, "--output-dir", f"{made}-report"],
            ["report", run],
            ["import", run, "--output-dir", f"{made}-store"],
            ["GET", str(self.around)],
        ]

    @staticmethod
    def quick(commands: Sequence[list[str]]) -> list[list[str]]:
        """Return those of these commands that take milliseconds."""
        return [words for words in commands if words[0] not in ("rescore", "report")]

    def kept(self) -> Mapping[str, str]:
        """Return the type of every file in the folder and the run, and the content of small files."""
        paths = [path for path in self.around.rglob("*") if not path.is_relative_to(self.around / "made")]
        return {str(path): _content(path) for path in sorted(paths)}

    def changes(self, before: Mapping[str, str]) -> list[str]:
        """Return the files that are gone or have other content.

        SQLite's shared memory next to a store may change, partial imports are removed, and reports are written again.
        """
        after = self.kept()
        changed = [name for name, content in before.items() if after.get(name) != content]
        own = ("-shm", ".part")
        return [name for name in changed if not name.endswith(own) and not name.startswith(f"{self.run}/report/")]

    def strange(self) -> list[str]:
        """Return new files at places to which no command should write."""
        known = {"thesis.txt", "site", "run", "mine.sqlite"}
        return [path.name for path in self.around.iterdir() if path.name not in known and path.name[:4] != "made"]


def _content(path: Path) -> str:
    found = path.lstat()
    if stat.S_ISLNK(found.st_mode):
        return f"link to {path.readlink()}"
    if not stat.S_ISREG(found.st_mode):
        return f"kind {stat.S_IFMT(found.st_mode):o}"
    return f"{found.st_size} {path.read_bytes().hex()}" if found.st_size < 1 << 20 else f"{found.st_size}"


def wrong_with(found: Mapping[str, Any]) -> list[str]:
    """Return everything that is wrong with a command's result, or an empty list."""
    said = found["error"]
    wrong = []
    if found["code"] not in EXITS or "Traceback" in said:
        wrong.append(
            f"its exit is {found['code']}: {found['out'][-2000:] if found['words'][0] == 'GET' else ''}{said[-3000:]}"
        )
    if found["mib"] >= MOST_MIB:
        wrong.append(f"it used {found['mib']} MiB of memory")
    if found["cpu_s"] >= MOST_CPU_S:
        wrong.append(f"it used {found['cpu_s']:.0f} s of CPU time")
    if found["words"][0] != "GET" and any(c for text in (found["out"], said) for c in text if _steers(c)):
        wrong.append("it prints control characters")
    if found["code"] == 1 and found["words"][0] != "GET" and "agentgym: " not in said:
        wrong.append(f"it prints no error message: {said[-500:]}")
    return [f"{' '.join(found['words'][:3])}: {each}" for each in wrong]


def _steers(character: str) -> bool:
    return not (character.isprintable() or character in "\n\t")
