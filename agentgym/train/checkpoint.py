"""The checkpoints of a run: one folder a step, complete or absent, and loaded only if its checksums agree.

::

    step-000020/state.pt        tensors and plain values, read by torch without running code
    step-000020/manifest.json   {"step": 20, "files": {"state.pt": {"bytes": 123456, "sha256": "..."}}}
    .step-000030-x1y2           a checkpoint whose process died while writing it; the next write removes it
"""

import hashlib
import io
import json
import os
import re
import shutil
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentgym.train.replace_folder import sweep, written_whole

_NAME = re.compile(r"step-(\d+)")
_LEFT = re.compile(r"\.(step-\d+)-")
_STATE, _MANIFEST = "state.pt", "manifest.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """The state that a run goes on from."""

    step: int
    """Number of steps that were done when it was written."""
    state: dict[str, Any]


def write_checkpoint(folder: Path, step: int, state: Mapping[str, Any], *, keep: int) -> None:
    """Write a checkpoint; it is on disk on return, and a process that dies meanwhile harms no other one.

    `state` holds tensors on the CPU, numbers, strings, lists and dicts. The last `keep` checkpoints stay. Checkpoints
    of later steps belong to a run that was cut back, and are removed.
    """
    import torch

    if keep < 1:
        raise ValueError(f"keep: must be at least 1, got {keep}")
    buffer = io.BytesIO()
    torch.save(dict(state), buffer)
    write_step(folder, step, {_STATE: buffer.getvalue()})
    steps = _steps(folder)
    kept = [number for number in steps if number <= step][-keep:]
    for number in steps.keys() - set(kept):
        shutil.rmtree(steps[number], ignore_errors=True)


def write_step(folder: Path, step: int, files: Mapping[str, bytes]) -> None:
    """Write the folder of one step with these files and their manifest, under a hidden name until it is complete."""
    _sweep(folder)
    with written_whole(
        folder / f"step-{step:06}"
    ) as fresh:  # a run that was cut back replaces the folder of the same step
        for name, content in files.items():
            _write(fresh / name, content)
        sums = {name: {"bytes": len(content), "sha256": _sum(content)} for name, content in files.items()}
        _write(fresh / _MANIFEST, json.dumps({"step": step, "files": sums}).encode())
        _sync(fresh)
    _sync(folder)


def last_checkpoint(folder: Path) -> Checkpoint:
    """Load the last whole checkpoint; each later one is named in a warning, and never loaded.

    Raises ValueError where no checkpoint is whole.
    """
    import torch

    _sweep(folder)
    steps = _steps(folder)
    for step in sorted(steps, reverse=True):
        try:
            files = read_step(steps[step])
        except ValueError as error:
            warnings.warn(f"checkpoint {steps[step]} is not used: {error}", stacklevel=2)
            continue
        state = torch.load(io.BytesIO(files[_STATE]), map_location="cpu", weights_only=True)
        return Checkpoint(step=step, state=state)
    raise ValueError(f"resume: no whole checkpoint in {folder} (looked at {len(steps)})")


def read_step(path: Path) -> dict[str, bytes]:
    """Return the files of one step's folder; ValueError that says what is wrong if they are not what was written."""
    try:
        manifest = json.loads((path / _MANIFEST).read_bytes())
        sums = {str(name): (int(said["bytes"]), str(said["sha256"])) for name, said in manifest["files"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"its {_MANIFEST} cannot be read ({type(error).__name__}: {error})") from None
    files = {}
    for name, (size, checksum) in sums.items():
        try:
            content = (path / name).read_bytes()
        except OSError as error:
            raise ValueError(f"{name} cannot be read ({type(error).__name__})") from None
        if len(content) != size:
            raise ValueError(f"{name} has {len(content)} bytes of {size}")
        if _sum(content) != checksum:
            raise ValueError(f"{name} is not what was written: its checksum differs")
        files[name] = content
    return files


def has_checkpoints(folder: Path) -> bool:
    """Tell whether the folder has any checkpoint, whole or not."""
    return bool(_steps(folder))


def last_step(folder: Path) -> int:
    """Return the step of the last checkpoint without reading it; 0 where there is none."""
    return max(_steps(folder), default=0)


def _sweep(folder: Path) -> None:
    """Remove what processes left that died while writing."""
    for name in {match[1] for left in folder.glob(".step-*") if (match := _LEFT.match(left.name))}:
        sweep(folder / name)


def _steps(folder: Path) -> dict[int, Path]:
    """Return the folders of the steps by number, in rising order."""
    found = ((_NAME.fullmatch(path.name), path) for path in folder.glob("step-*"))
    return dict(sorted((int(match[1]), path) for match, path in found if match))


def _write(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    """Write the folder's entries to disk: only then is a rename safe."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _sum(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
