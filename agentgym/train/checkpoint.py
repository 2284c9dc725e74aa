"""Checkpoints of a run: one folder per step, complete or absent, and loaded only if its checksums match.

::

    step-000020/state.pt        tensors and plain values; torch reads it without running code
    step-000020/rank-0/ ..      if a whole model is trained: all ranks' parts (see `agentgym.train.snapshot`)
    step-000020/manifest.json   {"step": 20, "files": {"state.pt": {"bytes": 123456, "sha256": "..."}}}
    .step-000030-x1y2           a checkpoint whose process died while writing it; the next write removes it
"""

import hashlib
import io
import json
import os
import pickle
import re
import shutil
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

from agentgym.files.foreign.content import DAMAGE, read_json
from agentgym.files.foreign.opening import UnreadableFileError, opened
from agentgym.files.replace_folder import sweep, written_whole
from agentgym.types.transcript import printable

_NAME = re.compile(r"step-(\d+)")
_LEFT = re.compile(r"\.(step-\d+)-")
STATE, _MANIFEST = "state.pt", "manifest.json"
"""A checkpoint's state file, and the file that lists all other files with their sizes and checksums."""
_AT_ONCE = 1 << 24

Sums: TypeAlias = dict[str, tuple[int, str]]
"""Size and SHA-256 of each file in a folder, by file name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """The saved state from which a run resumes."""

    step: int
    """Number of finished steps when the checkpoint was written."""
    state: dict[str, Any]
    folder: Path
    """Folder of the checkpoint."""


def write_checkpoint(
    folder: Path,
    step: int,
    state: Mapping[str, Any],
    *,
    keep: int,
    fill: Callable[[Path], Sums] | None = None,
) -> None:
    """Write a checkpoint, which is on disk when this function returns.

    If the process dies while writing, no other checkpoint is harmed. Checkpoints of later steps are removed. They
    exist only if the run was cut back to an earlier step, which made them invalid.

    Args:
        folder: Folder of the checkpoints; created if its parent exists.
        step: Number of finished steps.
        state: Tensors on the CPU, numbers, strings, lists and dicts.
        keep: Number of latest checkpoints to keep.
        fill: Called with the checkpoint's folder before it is complete; adds files to it and returns their sizes and
            checksums. None adds no files.

    Raises:
        ValueError: If `keep` is below 1.
    """
    import torch

    if keep < 1:
        raise ValueError(f"keep: must be at least 1, got {keep}")
    buffer = io.BytesIO()
    torch.save(dict(state), buffer)
    write_step(folder, step, {STATE: buffer.getvalue()}, fill)
    steps = _steps(folder)
    kept = [number for number in steps if number <= step][-keep:]
    for number in steps.keys() - set(kept):
        shutil.rmtree(steps[number], ignore_errors=True)


def write_step(folder: Path, step: int, files: Mapping[str, bytes], fill: Callable[[Path], Sums] | None = None) -> None:
    """Write one step's folder with these files and their manifest.

    The folder has a hidden name until it is complete. `files` contains the content of each file by its name. `fill`
    adds more files, as in `write_checkpoint`.
    """
    folder.mkdir(exist_ok=True)
    _sweep(folder)
    # If a run was cut back, the step's old folder is replaced.
    with written_whole(step_folder(folder, step)) as fresh:
        for name, content in files.items():
            write_file(fresh / name, content)
        found = {name: sum_of(fresh / name) for name in files} | (fill(fresh) if fill else {})
        sums = {name: {"bytes": size, "sha256": checksum} for name, (size, checksum) in found.items()}
        write_file(fresh / _MANIFEST, json.dumps({"step": step, "files": sums}).encode())
        _sync(fresh)
    _sync(folder)


def last_checkpoint(folder: Path) -> Checkpoint:
    """Load the last complete checkpoint. Warn about each later one, which can't be used.

    An incomplete checkpoint is never loaded.

    Raises:
        ValueError: If no checkpoint is complete.
    """
    _sweep(folder)
    steps = _steps(folder)
    for step in sorted(steps, reverse=True):
        try:
            return Checkpoint(step=step, state=load_state(steps[step]), folder=steps[step])
        except ValueError as error:
            warnings.warn(printable(f"checkpoint {steps[step]} is not used: {error}"), stacklevel=2)
    raise ValueError(
        f"resume: no complete checkpoint in {folder} (checked {len(steps)}); resume from another folder, or "
        "start a new run"
    )


def load_state(path: Path) -> dict[str, Any]:
    """Return the state in one step's folder.

    Raises:
        ValueError: If a file has changed since it was written, or can't be read. The message explains what is wrong.
    """
    import torch

    check_step(path)
    try:
        with opened(path / STATE, within=path) as file:
            state = torch.load(file, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, pickle.UnpicklingError, EOFError, *DAMAGE) as error:
        raise ValueError(f"its {STATE} cannot be read ({type(error).__name__})") from error
    if not isinstance(state, dict):
        raise ValueError(f"its {STATE} must contain a dict, got {type(state).__name__}")
    return state


def check_step(path: Path) -> None:
    """Raise ValueError if a file of a step can't be read or has changed since it was written."""
    try:
        manifest = read_json(path / _MANIFEST, within=path)
        sums = {str(name): (int(said["bytes"]), str(said["sha256"])) for name, said in manifest["files"].items()}
    except (OSError, *DAMAGE) as error:
        raise ValueError(f"the step's {_MANIFEST} cannot be read ({type(error).__name__}: {error})") from None
    if STATE not in sums:
        raise ValueError(f"the step's {_MANIFEST} does not list {STATE}")
    for name, (size, checksum) in sums.items():
        try:
            with opened(path / name, within=path) as file:
                found = os.fstat(file.fileno()).st_size
                read = _sum(file)[1] if found == size else ""
        except (OSError, UnreadableFileError) as error:
            raise ValueError(f"{name} cannot be read ({type(error).__name__})") from None
        if found != size:
            raise ValueError(f"{name} has {found} bytes, expected {size}")
        if read != checksum:
            raise ValueError(f"{name} has changed since it was written: its checksum differs")


def step_folder(folder: Path, step: int) -> Path:
    """Return the path of a step's checkpoint, whether or not it exists."""
    return folder / f"step-{step:06}"


def has_checkpoints(folder: Path) -> bool:
    """Return whether the folder has any checkpoint, complete or not."""
    return bool(_steps(folder))


def last_step(folder: Path) -> int:
    """Return the step of the last checkpoint without reading it, or 0 if there is none."""
    return max(_steps(folder), default=0)


def _sweep(folder: Path) -> None:
    """Remove leftovers of processes that died while writing."""
    for name in {match[1] for left in folder.glob(".step-*") if (match := _LEFT.match(left.name))}:
        sweep(folder / name)


def _steps(folder: Path) -> dict[int, Path]:
    """Return the folder of each step by the step's number, in ascending order."""
    found = ((_NAME.fullmatch(path.name), path) for path in folder.glob("step-*"))
    return dict(sorted((int(match[1]), path) for match, path in found if match))


def write_file(path: Path, content: bytes) -> None:
    """Write a file, and flush it to disk."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    """Flush a folder's list of files to disk. Before that, a rename may be lost in a crash."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sum_of(path: Path) -> tuple[int, str]:
    """Return the size and SHA-256 of a file of any size."""
    with opened(path, within=path.parent) as file:
        return _sum(file)


def _sum(file: BinaryIO) -> tuple[int, str]:
    size, found = 0, hashlib.sha256()
    while content := file.read(_AT_ONCE):
        size += len(content)
        found.update(content)
    return size, found.hexdigest()
