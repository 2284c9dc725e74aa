"""The state needed to resume after a step: a copy in each process's memory, which is written to and read from disk.

An adapter and its optimizer's state are complete on every rank, and rank 0 writes them. If a whole model is trained,
each rank has only a part of it. Each rank writes its part with torch.distributed.checkpoint, but without collectives,
because a run may be stopped at any point between two collectives. Rank 0 then assembles the parts::

    .parts-000020-1f2e3d4c/rank-0/__0_0.distcp   one rank's part of the weights and the optimizer's moments
                           rank-0/.metadata
                           rank-0.json           its files, with sizes and checksums; written once they are complete
    step-000020/rank-0/__0_0.distcp              moved here, with the parts of all ranks
                .metadata                        of all parts, for torch.distributed.checkpoint on any number of ranks
"""

import io
import json
import pickle
import shutil
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

from agentgym.files.foreign.content import DAMAGE
from agentgym.files.foreign.opening import UnreadableFileError, read_bytes, regular_file
from agentgym.train.checkpoint import Sums, load_state, sum_of, write_checkpoint, write_file
from agentgym.train.policy.adapter_io import write_adapter, write_model
from agentgym.train.state import load_moments, refuse_strangers, trained_names
from agentgym.types.weights import Adapter

METADATA = ".metadata"
"""The file of torch.distributed.checkpoint that lists which part of which tensor is in which file."""
STILL_S = 60.0
"""Seconds after which rank 0 stops waiting for missing parts if no rank has written anything in this time."""
_ASK_S = 0.02
_WEIGHTS, _OPTIMIZER = "weights/", "optimizer/"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Snapshot:
    """A copy of everything needed to resume training, which further training doesn't change."""

    rank: int
    world: int
    state: Mapping[str, Any]
    """State that is the same on every rank."""
    adapter: Adapter | None
    """The adapter, or None if a whole model is trained."""
    part: Mapping[str, Tensor] | None
    """This rank's part of a whole model's weights and moments, or None if an adapter is trained."""
    name: str
    """Random name of the snapshot, the same on all ranks, from which the ranks name the folder of their parts."""

    def write_checkpoint(self, folder: Path, step: int, *, run: Mapping[str, Any], keep: int) -> None:
        """Write this rank's part of a checkpoint. On rank 0, the whole checkpoint is complete on return.

        Raises:
            TimeoutError: On rank 0, if another rank doesn't write its part. The existing checkpoints don't change.
        """
        content = {"trainer": dict(self.state), "run": dict(run)}
        if self.part is None:
            if self.rank == 0:
                write_checkpoint(folder, step, content, keep=keep)
            return
        folder.mkdir(exist_ok=True)
        parts = folder / f".parts-{step:06}-{self.name}"
        if self.rank == 0:
            _remove_parts(folder, but=parts)  # parts of earlier checkpoints that failed, which could fill the disk
        try:
            _write_part(parts, self.rank, self.part)
        except BaseException:
            shutil.rmtree(parts / f"rank-{self.rank}", ignore_errors=True)
            raise
        if self.rank == 0:
            write_checkpoint(folder, step, content, keep=keep, fill=partial(_put_together, parts, self.world))
            _remove_parts(folder)

    def write_policy(self, folder: Path, checkpoint: Path, files: Mapping[str, str]) -> None:
        """Write the adapter, or the whole model, into `folder`, with the texts in `files`, by file name.

        A whole model is read from `checkpoint`, the folder that this snapshot was written to, because the snapshot
        has only one rank's part of it.
        """
        if self.adapter is not None:
            write_adapter(self.adapter, folder, files)
        else:
            _write_model(self.state, checkpoint, folder, files=files)


def _remove_parts(folder: Path, but: Path | None = None) -> None:
    """Remove parts that were never assembled into a checkpoint, including those of processes that died.

    Keep the folder `but`.
    """
    for left in folder.glob(".parts-*"):
        if left != but:
            shutil.rmtree(left, ignore_errors=True)


def copied_part(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return a CPU copy of this rank's part of the trained weights and the optimizer's moments.

    With several replicas, only the ranks of the first replica return parts. All other ranks return an empty dict.
    """
    names = trained_names(model, optimizer)
    if any(_replica(weight) for weight in names):
        return {}
    held = {f"{_WEIGHTS}{name}": weight.detach() for weight, name in names.items()}
    for weight, name in names.items():
        held |= {f"{_OPTIMIZER}{name}/{key}": value for key, value in optimizer.state.get(weight, {}).items()}
    copied: dict[str, Tensor] = BlockingAsyncStager().stage(held)
    return copied


def _replica(weight: Tensor) -> int:
    """Return the number, from 0, of this rank's replica among the replicas of a weight."""
    mesh = weight.device_mesh if isinstance(weight, DTensor) else None
    return mesh.get_local_rank(0) if mesh is not None and mesh.ndim > 1 else 0


@torch.no_grad()
def restore_part(model: torch.nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Restore this rank's part of the weights and moments. The checkpoint may be from any number of ranks.

    Raises:
        ValueError: If the checkpoint belongs to another model, in which case nothing is changed.
    """
    names = trained_names(model, optimizer)
    saved = _saved(folder)
    shapes = {key.removeprefix(_WEIGHTS): size for key, size in saved.items() if key.startswith(_WEIGHTS)}
    refuse_strangers({name: weight.shape for weight, name in names.items()}, shapes)
    moments: dict[Tensor, dict[str, Tensor]] = {}
    wanted: dict[str, Tensor] = {}
    for weight, name in names.items():
        wanted[f"{_WEIGHTS}{name}"] = weight.detach()
        prefix = f"{_OPTIMIZER}{name}/"
        for key in (key for key in saved if key.startswith(prefix)):
            like = torch.zeros_like(weight) if saved[key] == weight.shape else torch.zeros(saved[key])
            moments.setdefault(weight, {})[key.removeprefix(prefix)] = wanted[key] = like.detach()
    with _alone():
        load(wanted, storage_reader=PartsReader(folder), no_dist=True)
    load_moments(optimizer, moments)


def checkpoint_base(checkpoint: Path) -> str:
    """Return the model that the run of a checkpoint started from.

    Raises:
        ValueError: If the checkpoint belongs to an adapter, or if it isn't complete.
    """
    return str(_full_state(checkpoint)["base"])


def _full_state(checkpoint: Path) -> Mapping[str, Any]:
    """Return the trainer's state in the checkpoint of a run that trains the full model.

    Raises:
        ValueError: If the checkpoint belongs to an adapter, or if it isn't complete.
    """
    if not (checkpoint / METADATA).is_file():
        raise ValueError(f"{checkpoint} belongs to a run that trains an adapter; merge that run's adapter/ folder")
    state: Mapping[str, Any] = load_state(checkpoint)["trainer"]
    return state


def write_checkpoint_model(checkpoint: Path, folder: Path, *, base: Path | str | None = None) -> None:
    """Write a checkpoint's model as a plain model folder, which is complete or doesn't exist.

    Args:
        checkpoint: Folder of one step's checkpoint.
        folder: Folder to write.
        base: The model that the run started from, if it was moved since. None uses the path in the checkpoint.

    Raises:
        ValueError: If the checkpoint belongs to an adapter or to another model, or if it isn't complete.
    """
    _write_model(_full_state(checkpoint), checkpoint, folder, base=base)


def _write_model(
    state: Mapping[str, Any],
    checkpoint: Path,
    folder: Path,
    *,
    base: Path | str | None = None,
    files: Mapping[str, str] = MappingProxyType({}),
) -> None:
    dtype, known = getattr(torch, state["dtype"]), state["policy"]["model"]
    write_model(base or state["base"], _weights(checkpoint), folder, dtype=dtype, fingerprint=known, files=files)


def _weights(folder: Path) -> dict[str, Tensor]:
    """Return the weights of a checkpoint on the CPU, by their names in the model."""
    sizes = {key: size for key, size in _saved(folder).items() if key.startswith(_WEIGHTS)}
    weights = {key: torch.empty(size) for key, size in sizes.items()}
    with _alone():
        load(weights, storage_reader=PartsReader(folder), no_dist=True)
    return {key.removeprefix(f"{_WEIGHTS}model."): weight for key, weight in weights.items()}


def _saved(folder: Path) -> dict[str, torch.Size]:
    """Return the shape of each tensor of a checkpoint."""
    found = PartsReader(folder).read_metadata().state_dict_metadata
    return {key: what.size for key, what in found.items() if isinstance(what, TensorStorageMetadata)}


class PartsReader(FileSystemReader):
    """Reads a checkpoint's parts safely, even from an untrusted source.

    No code runs, and only tensors in the checkpoint's folder are read. torch's own reader unpickles any content of
    `.metadata`, and any entry there that isn't a tensor.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._folder = folder

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return torch's record of which part of which tensor is in which file.

        Raises:
            UnreadableFileError: If the file contains anything else.
        """
        path = self._folder / METADATA
        content = read_bytes(path, within=self._folder)
        try:
            found = _Unpickler(io.BytesIO(content)).load()
            if not isinstance(found, Metadata):
                raise ValueError(f"it must contain torch's Metadata, got {type(found).__name__}")
            for key, said in found.state_dict_metadata.items():
                if not isinstance(said, TensorStorageMetadata):
                    raise ValueError(f"{key!r:.200} is not a tensor")
            for name in {where.relative_path for where in found.storage_data.values()}:
                regular_file(self._folder / name, within=self._folder)
        except (*DAMAGE, pickle.UnpicklingError, EOFError, OSError) as error:
            raise UnreadableFileError(
                f"{path}: expected the locations of the checkpoint's tensors ({error})"
            ) from error
        found.storage_meta = found.storage_meta or StorageMeta()
        found.storage_meta.load_id = self.load_id
        return found


class _Unpickler(pickle.Unpickler):
    """Unpickles only the types that torch writes into `.metadata`."""

    def find_class(self, module: str, name: str) -> Any:
        """Return the named object if torch writes it into `.metadata`, otherwise raise UnpicklingError."""
        if name in _PICKLED.get(module, ()) or (
            module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        ):
            return super().find_class(module.removesuffix("._local"), name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which isn't allowed in a checkpoint")


_PICKLED = {
    "pathlib": ("PosixPath",),
    "pathlib._local": ("PosixPath",),  # Python 3.13's name of it, which no other version has
    "torch": ("Size",),
    "torch.serialization": ("_get_layout",),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.distributed.checkpoint.metadata": (
        *("Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata", "ChunkStorageMetadata"),
        *("TensorProperties", "_MEM_FORMAT_ENCODING"),
    ),
}


def _write_part(parts: Path, rank: int, part: Mapping[str, Tensor]) -> None:
    place = parts / f"rank-{rank}"
    failed: BaseException | None = None
    try:
        with _alone():
            save(dict(part), checkpoint_id=place, no_dist=True)
    except CheckpointException as error:  # a BaseException that nothing handles; it wraps the actual error
        failed = next(iter(error.failures.values()))[0]
    if failed is not None:
        raise failed
    sums = {f"{place.name}/{path.name}": sum_of(path) for path in sorted(place.iterdir())}
    fresh = parts / f".rank-{rank}"
    fresh.write_text(json.dumps(sums))
    fresh.rename(parts / f"rank-{rank}.json")


def _put_together(parts: Path, world: int, fresh: Path) -> Sums:
    """Move all ranks' parts into their checkpoint's folder, and return the sizes and checksums of all files.

    `parts` is the folder to which the `world` ranks write their parts, and `fresh` the folder of the checkpoint.
    """
    said = [parts / f"rank-{rank}.json" for rank in range(world)]
    _wait(parts, said)
    sums: Sums = {}
    found: list[Metadata] = []
    for path in said:
        sums |= {name: (int(size), str(checksum)) for name, (size, checksum) in json.loads(path.read_text()).items()}
        place = parts / path.stem
        found.append(_placed(PartsReader(place).read_metadata(), path.stem))
        place.rename(fresh / path.stem)
    write_file(fresh / METADATA, pickle.dumps(_joined(found)))  # as FileSystemWriter writes it
    return sums | {METADATA: sum_of(fresh / METADATA)}


def _wait(parts: Path, said: list[Path]) -> None:
    """Wait until every rank has written the file that marks its part as complete (such as `rank-0.json`).

    `parts` is the folder of all parts, and `said` contains the path of each rank's file.

    Raises:
        TimeoutError: If nothing is written to any part for STILL_S seconds.
    """
    seen: object = None
    since = time.monotonic()
    while missing := [path.stem for path in said if not path.exists()]:
        sizes = [(path, path.stat().st_size) for path in sorted(parts.rglob("*")) if path.is_file()]
        if sizes != seen:
            seen, since = sizes, time.monotonic()
        if time.monotonic() - since > STILL_S:
            raise TimeoutError(
                f"checkpoint: {', '.join(missing)} did not write its part; the previous checkpoint is kept"
            )
        time.sleep(_ASK_S)


def _placed(part: Metadata, place: str) -> Metadata:
    """Return the metadata of one rank's part, with file names relative to the parent of the part's folder.

    `place` is the name of the part's folder.
    """
    moved = {
        index: replace(where, relative_path=f"{place}/{where.relative_path}")
        for index, where in part.storage_data.items()
    }
    return replace(part, storage_data=moved)


def _joined(parts: Sequence[Metadata]) -> Metadata:
    """Merge the metadata of all parts, so that each tensor has the chunks of all ranks, without duplicates."""
    tensors: dict[str, TensorStorageMetadata] = {}
    for part in parts:
        for key, said in part.state_dict_metadata.items():
            assert isinstance(said, TensorStorageMetadata)
            before = tensors.get(key)
            pieces = {piece.offsets: piece for piece in (*(before.chunks if before else ()), *said.chunks)}
            tensors[key] = replace(said, chunks=list(pieces.values()))
    return replace(
        parts[0],
        state_dict_metadata=dict(tensors),
        storage_data={index: where for part in parts for index, where in part.storage_data.items()},
    )


@contextmanager
def _alone() -> Iterator[None]:
    """Silence torch's warning about saving or loading in a single process, which is intended here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield
