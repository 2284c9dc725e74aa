"""What a run runs on: packages, processors, GPUs, and the state of the code."""

import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agentgym.files.disk import write_whole
from agentgym.store.run_settings import versions

FILE = "environment.json"
"""The file in the run's folder that holds what it runs on."""
PATIENCE_S = 10
"""Seconds for a command that says something of the machine."""


def write_surroundings(folder: Path) -> None:
    """Write what the run runs on into its folder; what cannot be found out is null."""
    content = {
        "versions": versions(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "gpus": _gpus(),
        "git": _git(Path.cwd()),
        "command": [sys.executable, *sys.argv],
        "processes": int(os.environ.get("WORLD_SIZE", "1")),
    }
    write_whole(folder / FILE, json.dumps(content, indent=2) + "\n")


def _gpus() -> list[str] | None:
    """The name, memory and driver of each GPU; None where there is no nvidia-smi to ask."""
    said = _said(["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"])
    return None if said is None else said.splitlines()


def _git(folder: Path) -> dict[str, Any] | None:
    """The commit of the folder's repository, and whether files of it are changed; None where there is none."""
    commit = _said(["git", "-C", str(folder), "rev-parse", "HEAD"])
    changed = _said(["git", "-C", str(folder), "status", "--porcelain", "--untracked-files=no"])
    return None if commit is None else {"commit": commit, "dirty": None if changed is None else bool(changed)}


def _said(command: Sequence[str]) -> str | None:
    """What a command says on stdout; None where it is not installed, fails, or takes too long."""
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
