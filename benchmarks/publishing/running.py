"""One run of a benchmark as a process of its own, and the conditions under which it ran."""

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
"""What a benchmark measures: results and texts of the page are not among it."""
STOP_S = 10
"""Seconds that a benchmark has for ending by itself where the run is stopped."""
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
    """Run a benchmark and return what it found; its table goes to stderr.

    Absolute paths are kept by their last names: where things are on this machine is nobody's business.
    Raises BenchmarkFailed with its exit status where its last line is no report.
    """
    # Before the run: what is measured is the code as it is now, and nothing may fail behind hours of measuring.
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
    """The exit status of a program and what it printed; it ends with this call, however that ends."""
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
    """The commit of the checkout, with `+` where its code differs from it; "" outside of a checkout."""
    commit = subprocess.run(["git", "rev-parse", "--short=10", "HEAD"], capture_output=True, text=True, check=False)
    changed = subprocess.run(["git", "diff", "--quiet", "HEAD", "--", *CODE], capture_output=True, check=False)
    return commit.stdout.strip() + ("+" if changed.returncode == 1 else "")


def _processor() -> str:
    """The processor's name (Linux), else its architecture."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
