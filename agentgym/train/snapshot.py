"""All that training goes on from after a step: a copy in each process's memory, and its way to disk and back.

An adapter and its optimizer's state are whole on every rank, and the first one writes them. Of a model that is trained
whole each rank has its part, and writes it with torch.distributed.checkpoint and without a collective, for a run may be
stopped anywhere between two of them; the first rank then puts the parts together::

    .parts-000020-1f2e3d4c/rank-0/__0_0.distcp   what one rank has of the weights and the optimizer's moments
                           rank-0/.metadata
                           rank-0.json           its files, with sizes and checksums; written when they are complete
    step-000020/rank-0/__0_0.distcp              moved there with those of all ranks
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
"""The file of torch.distributed.checkpoint that says which part of which tensor is where."""
STILL_S = 60.0
"""Seconds in which nothing is written to any part, after which the first rank waits no longer for the missing ones."""
_ASK_S = 0.02
_WEIGHTS, _OPTIMIZER = "weights/", "optimizer/"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Snapshot:
    """A copy of all that training goes on from, which further training does not change."""

    rank: int
    world: int
    state: Mapping[str, Any]
    """What every rank has alike."""
    adapter: Adapter | None
    """The adapter; None where the model is trained whole."""
    part: Mapping[str, Tensor] | None
    """This rank's part of the weights and moments of a model that is trained whole; None with an adapter."""
    name: str
    """The name that all ranks know the snapshot by."""

    def write_checkpoint(self, folder: Path, step: int, *, run: Mapping[str, Any], keep: int) -> None:
        """Write what this rank has to write of a checkpoint; on the first rank it is complete on return.

        Raises TimeoutError, with nothing changed, on the first rank where another one does not write its part.
        """
        content = {"trainer": dict(self.state), "run": dict(run)}
        if self.part is None:
            if self.rank == 0:
                write_checkpoint(folder, step, content, keep=keep)
            return
        folder.mkdir(exist_ok=True)
        parts = folder / f".parts-{step:06}-{self.name}"
        if self.rank == 0:
            _remove_parts(folder, but=parts)  # of a checkpoint that the disk did not take: they may be what fills it
        try:
            _write_part(parts, self.rank, self.part)
        except BaseException:
            shutil.rmtree(parts / f"rank-{self.rank}", ignore_errors=True)
            raise
        if self.rank == 0:
            write_checkpoint(folder, step, content, keep=keep, fill=partial(_put_together, parts, self.world))
            _remove_parts(folder)

    def write_policy(self, folder: Path, checkpoint: Path) -> None:
        """Write the adapter into `folder`, or the model as the checkpoint of this snapshot has it."""
        if self.adapter is not None:
            write_adapter(self.adapter, folder)
        else:
            _write_model(self.state, checkpoint, folder)


def _remove_parts(folder: Path, but: Path | None = None) -> None:
    """Remove the parts of checkpoints that were not put together, of processes that died too."""
    for left in folder.glob(".parts-*"):
        if left != but:
            shutil.rmtree(left, ignore_errors=True)


def copied_part(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return a copy on the CPU of what this rank has of the trained weights and the optimizer's moments.

    Of several replicas the first has all, and a rank of another one returns nothing.
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
    """Return the number of this rank's replica among those that have the weight, from 0."""
    mesh = weight.device_mesh if isinstance(weight, DTensor) else None
    return mesh.get_local_rank(0) if mesh is not None and mesh.ndim > 1 else 0


@torch.no_grad()
def restore_part(model: torch.nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Put back this rank's part of the weights and moments from a checkpoint of any number of ranks.

    Raises ValueError for the checkpoint of another model, and changes nothing.
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


def write_checkpoint_model(checkpoint: Path, folder: Path, *, base: Path | str | None = None) -> None:
    """Write the model of a checkpoint as a plain model folder, never half written.

    `base` is the model that its run began with, where that has been moved since. Raises ValueError for the checkpoint
    of an adapter, of another model, and for one that is not whole.
    """
    if not (checkpoint / METADATA).is_file():
        raise ValueError(f"{checkpoint} is of a run that trains an adapter; merge the adapter/ of that run")
    _write_model(load_state(checkpoint)["trainer"], checkpoint, folder, base=base)


def _write_model(state: Mapping[str, Any], checkpoint: Path, folder: Path, *, base: Path | str | None = None) -> None:
    dtype = getattr(torch, state["dtype"])
    write_model(base or state["base"], _weights(checkpoint), folder, dtype=dtype, fingerprint=state["policy"]["model"])


def _weights(folder: Path) -> dict[str, Tensor]:
    """Return the weights of a checkpoint by their names in the model, on the CPU."""
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
    """Reads the parts of a checkpoint, whoever has made it: no code runs, and tensors alone are read from its folder.

    torch's own reader unpickles whatever `.metadata` holds, and whatever that says is no tensor.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._folder = folder

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return which part of which tensor is where; UnreadableFileError for a file that says anything else."""
        path = self._folder / METADATA
        content = read_bytes(path, within=self._folder)
        try:
            found = _Unpickler(io.BytesIO(content)).load()
            if not isinstance(found, Metadata):
                raise ValueError(f"it must be Metadata, got {type(found).__name__}")
            for key, said in found.state_dict_metadata.items():
                if not isinstance(said, TensorStorageMetadata):
                    raise ValueError(f"{key!r:.200} is no tensor")
            for name in {where.relative_path for where in found.storage_data.values()}:
                regular_file(self._folder / name, within=self._folder)
        except (*DAMAGE, pickle.UnpicklingError, EOFError, OSError) as error:
            raise UnreadableFileError(f"{path}: it does not say where the tensors are ({error})") from error
        found.storage_meta = found.storage_meta or StorageMeta()
        found.storage_meta.load_id = self.load_id
        return found


class _Unpickler(pickle.Unpickler):
    """Builds what torch writes into `.metadata`, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        """Return one of the names that are allowed."""
        if name in _PICKLED.get(module, ()) or (
            module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        ):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which is no part of a checkpoint")


_PICKLED = {
    "pathlib": ("PosixPath",),
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
    except CheckpointException as error:  # a BaseException, which nobody would handle; what it is about is in it
        failed = next(iter(error.failures.values()))[0]
    if failed is not None:
        raise failed
    sums = {f"{place.name}/{path.name}": sum_of(path) for path in sorted(place.iterdir())}
    fresh = parts / f".rank-{rank}"
    fresh.write_text(json.dumps(sums))
    fresh.rename(parts / f"rank-{rank}.json")


def _put_together(parts: Path, world: int, fresh: Path) -> Sums:
    """Move the parts of all ranks into the folder of their checkpoint; return the sizes and checksums of all files."""
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
    """Return when every rank has said that its part is complete; TimeoutError where nothing is written any more."""
    seen: object = None
    since = time.monotonic()
    while missing := [path.stem for path in said if not path.exists()]:
        sizes = [(path, path.stat().st_size) for path in sorted(parts.rglob("*")) if path.is_file()]
        if sizes != seen:
            seen, since = sizes, time.monotonic()
        if time.monotonic() - since > STILL_S:
            raise TimeoutError(f"checkpoint: {', '.join(missing)} did not write its part; the one before it stays")
        time.sleep(_ASK_S)


def _placed(part: Metadata, place: str) -> Metadata:
    """Return what is said of one rank's part, with its files named from the folder above."""
    moved = {
        index: replace(where, relative_path=f"{place}/{where.relative_path}")
        for index, where in part.storage_data.items()
    }
    return replace(part, storage_data=moved)


def _joined(parts: Sequence[Metadata]) -> Metadata:
    """Return what is said of all parts: each tensor has the pieces that any rank has of it, each once."""
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
    """Silence torch's warning that it saves or loads in one process: that is what is asked for."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield
