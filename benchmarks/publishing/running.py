"""A run of a benchmark as a separate process, and the conditions under which it ran."""

import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.publishing.plans import PEERS
from benchmarks.publishing.results import Made, Result, report_of

OURS = ("torch", "transformers", "tokenizers", "numpy", "ray", "aiohttp", "orjson")
THEIRS = ("skyrl", "trl", "verl")
CODE = ("agentgym", "envs", "recipes", "sandbox", "benchmarks/*.py")
"""The code that benchmarks measure; results and texts of the pages are not part of it."""
STOP_S = 10
"""Seconds that a stopped benchmark has to exit by itself before it is killed."""
ASKED = """
import importlib.metadata, sys
for name in sys.argv[1:]:
    try:
        print(name, importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        pass
"""


class BenchmarkFailed(Exception):
    """A benchmark ended without a report."""


def run(command: Sequence[str]) -> Result:
    """Run a benchmark and return its result; its table goes to stderr.

    Absolute paths are stored as their last component only, so that the result doesn't reveal this machine's folders.

    Raises:
        BenchmarkFailed: If its exit status isn't 0 or its last line isn't a report.
    """
    # Before the run: the code is measured as it is at this moment, and an error must not come after hours of
    # measuring.
    commit, versions = _commit(), {"python": platform.python_version()} | _versions(sys.executable, OURS)
    versions |= _peers_versions()
    load, began = os.getloadavg()[0], time.monotonic()
    status, printed = _printed(command)
    try:
        report = report_of(printed)
    except ValueError as error:
        why = f"ended with status {status} and without a report: {error}"
        raise BenchmarkFailed(f"{shlex.join(command)} {why}") from None
    if status:
        raise BenchmarkFailed(f"{shlex.join(command)} ended with status {status}")
    made = Made(
        command=shlex.join(
            ["python", *(Path(word).name if Path(word).is_absolute() else word for word in command[1:])]
        ),
        commit=commit,
        date=datetime.now(UTC).date().isoformat(),
        seconds=round(time.monotonic() - began),
        processors=f"{os.cpu_count()} x {_processor()}",
        load=[round(load, 1), round(os.getloadavg()[0], 1)],
        versions=versions,
    )
    return Result(made=made, report=report)


def _printed(command: Sequence[str]) -> tuple[int, str]:
    """Return the exit status and the output of a program; it is stopped if this call ends early."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as program:
        try:
            printed, _ = program.communicate()
        except BaseException:
            program.terminate()
            try:
                program.wait(STOP_S)
            except subprocess.TimeoutExpired:
                program.kill()
            raise
    return program.returncode, printed


def _peers_versions() -> dict[str, str]:
    python = PEERS / "bin" / "python"
    return _versions(str(python), THEIRS) if python.exists() else {}


def _versions(python: str, packages: Sequence[str]) -> dict[str, str]:
    lines = subprocess.run([python, "-c", ASKED, *packages], capture_output=True, text=True, check=True).stdout
    return dict(line.split() for line in lines.splitlines())


def _commit() -> str:
    """Return the commit of the checkout, with `+` if its code differs from it, or "" outside a checkout."""
    commit = subprocess.run(["git", "rev-parse", "--short=10", "HEAD"], capture_output=True, text=True, check=False)
    changed = subprocess.run(["git", "diff", "--quiet", "HEAD", "--", *CODE], capture_output=True, check=False)
    return commit.stdout.strip() + ("+" if changed.returncode == 1 else "")


def _processor() -> str:
    """Return the processor's name (Linux), else its architecture."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
