"""A description of the packages, processors, GPUs and code that a run uses."""

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
"""The file in the run's folder that describes its hardware and software."""
PATIENCE_S = 10
"""Timeout in seconds for a command that describes the machine."""


def write_surroundings(folder: Path) -> None:
    """Describe a run's hardware and software in a file in its folder. Values that can't be determined are null."""
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
    """Return the name, memory and driver of each GPU, or None if nvidia-smi is missing or fails."""
    said = _said(["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"])
    return None if said is None else said.splitlines()


def _git(folder: Path) -> dict[str, Any] | None:
    """Return the commit of the folder's repository and whether tracked files changed; None outside a repository."""
    commit = _said(["git", "-C", str(folder), "rev-parse", "HEAD"])
    changed = _said(["git", "-C", str(folder), "status", "--porcelain", "--untracked-files=no"])
    return None if commit is None else {"commit": commit, "dirty": None if changed is None else bool(changed)}


def _said(command: Sequence[str]) -> str | None:
    """Return a command's stdout, or None if it isn't installed, fails, or times out."""
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
