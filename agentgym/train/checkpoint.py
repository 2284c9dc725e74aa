"""The checkpoints of a run: one folder a step, complete or absent, and loaded only if its checksums agree.

::

    step-000020/state.pt        tensors and plain values, read by torch without running code
    step-000020/rank-0/ ..      of a model that is trained whole: the parts of all ranks, see `agentgym.train.snapshot`
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
"""The file of a checkpoint that holds its state, and the one that says which files there are."""
_AT_ONCE = 1 << 24

Sums: TypeAlias = dict[str, tuple[int, str]]
"""Size and SHA-256 of files, by their names in a folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """The state that a run goes on from."""

    step: int
    """Number of steps that were done when it was written."""
    state: dict[str, Any]
    folder: Path
    """Where it is."""


def write_checkpoint(
    folder: Path,
    step: int,
    state: Mapping[str, Any],
    *,
    keep: int,
    fill: Callable[[Path], Sums] | None = None,
) -> None:
    """Write a checkpoint; it is on disk on return, and a process that dies meanwhile harms no other one.

    `state` holds tensors on the CPU, numbers, strings, lists and dicts; `fill` puts further files into the checkpoint's
    folder before it is complete, and returns their sizes and checksums. The last `keep` checkpoints stay. Checkpoints
    of later steps belong to a run that was cut back, and are removed. `folder` is made if the folder above it is there.
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
    """Write the folder of one step with these files and their manifest, under a hidden name until it is complete."""
    folder.mkdir(exist_ok=True)
    _sweep(folder)
    # A run that was cut back replaces the folder of the same step.
    with written_whole(step_folder(folder, step)) as fresh:
        for name, content in files.items():
            write_file(fresh / name, content)
        found = {name: sum_of(fresh / name) for name in files} | (fill(fresh) if fill else {})
        sums = {name: {"bytes": size, "sha256": checksum} for name, (size, checksum) in found.items()}
        write_file(fresh / _MANIFEST, json.dumps({"step": step, "files": sums}).encode())
        _sync(fresh)
    _sync(folder)


def last_checkpoint(folder: Path) -> Checkpoint:
    """Load the last whole checkpoint; each later one is named in a warning, and never loaded.

    Raises ValueError if no checkpoint is whole.
    """
    _sweep(folder)
    steps = _steps(folder)
    for step in sorted(steps, reverse=True):
        try:
            return Checkpoint(step=step, state=load_state(steps[step]), folder=steps[step])
        except ValueError as error:
            warnings.warn(printable(f"checkpoint {steps[step]} is not used: {error}"), stacklevel=2)
    raise ValueError(f"resume: no whole checkpoint in {folder} (looked at {len(steps)})")


def load_state(path: Path) -> dict[str, Any]:
    """Return the state in one step's folder; ValueError that says what is wrong if it is not what was written."""
    import torch

    check_step(path)
    try:
        with opened(path / STATE, within=path) as file:
            state = torch.load(file, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, pickle.UnpicklingError, EOFError, *DAMAGE) as error:
        raise ValueError(f"its {STATE} cannot be read ({type(error).__name__})") from error
    if not isinstance(state, dict):
        raise ValueError(f"its {STATE} holds no state of a run, but a {type(state).__name__}")
    return state


def check_step(path: Path) -> None:
    """Raise ValueError, which says what is wrong, if the files of one step's folder are not what was written."""
    try:
        manifest = read_json(path / _MANIFEST, within=path)
        sums = {str(name): (int(said["bytes"]), str(said["sha256"])) for name, said in manifest["files"].items()}
    except (OSError, *DAMAGE) as error:
        raise ValueError(f"its {_MANIFEST} cannot be read ({type(error).__name__}: {error})") from None
    if STATE not in sums:
        raise ValueError(f"its {_MANIFEST} names no {STATE}")
    for name, (size, checksum) in sums.items():
        try:
            with opened(path / name, within=path) as file:
                found = os.fstat(file.fileno()).st_size
                read = _sum(file)[1] if found == size else ""
        except (OSError, UnreadableFileError) as error:
            raise ValueError(f"{name} cannot be read ({type(error).__name__})") from None
        if found != size:
            raise ValueError(f"{name} has {found} bytes of {size}")
        if read != checksum:
            raise ValueError(f"{name} is not what was written: its checksum differs")


def step_folder(folder: Path, step: int) -> Path:
    """Return where the checkpoint of a step is, or would be."""
    return folder / f"step-{step:06}"


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


def write_file(path: Path, content: bytes) -> None:
    """Write a file; it is on disk on return."""
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


def sum_of(path: Path) -> tuple[int, str]:
    """Return the size and the SHA-256 of a file of any size."""
    with opened(path, within=path.parent) as file:
        return _sum(file)


def _sum(file: BinaryIO) -> tuple[int, str]:
    size, found = 0, hashlib.sha256()
    while content := file.read(_AT_ONCE):
        size += len(content)
        found.update(content)
    return size, found.hexdigest()
