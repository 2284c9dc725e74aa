"""The two files of an untrusted adapter, checked before its tensors are loaded into memory."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from agentgym.files.foreign.content import parsed, read_object
from agentgym.files.foreign.opening import MOST_BYTES, UnreadableFileError, opened, read_bytes, real_path

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
TEMPLATE = "chat_template.jinja"
"""The file with the chat template that the adapter was trained with, under the name that transformers gives it.

It is the only file of the tokenizer in an adapter's folder: if PEFT finds a tokenizer there, it cuts the base model's
embedding to the tokenizer's length, and the base model has the rest.
"""
MOST_HEADER = 32 << 20
"""Maximum size in bytes of a tensor file's header; a hundred thousand tensors need half of it."""
BYTES_A_BYTE = 8
"""Maximum ratio of a file's size to its space on disk. Compression stays below it, but a sparse file can exceed it."""
MOST_RANK = 1 << 14
"""Maximum rank of an adapter. PEFT allocates matrices of the rank in the config before it reads the tensors."""


def adapter_config(folder: Path) -> dict[str, Any]:
    """Return the config of an adapter.

    Links may point anywhere within the adapter's folder or, in the hub's cache, to the files that the cache stores
    next to it.

    Raises:
        FileNotFoundError: If there is no config.
        UnreadableFileError: If it isn't a regular file, a link leads out of the folder, or it doesn't contain a JSON
            object.
    """
    folder, within = _real(folder)
    return read_object(folder / CONFIG, within=within)


def adapter_template(folder: Path) -> str | None:
    """Return the chat template that an adapter was trained with, or None if its folder has none.

    Links are allowed as in `adapter_config`.

    Raises:
        UnreadableFileError: If it isn't a regular file of text.
    """
    folder, within = _real(folder)
    try:
        return read_bytes(folder / TEMPLATE, within=within).decode()
    except FileNotFoundError:
        return None
    except UnicodeDecodeError as error:
        raise UnreadableFileError(f"{folder / TEMPLATE} is not UTF-8 text; save the adapter again") from error


def adapter_tensors(folder: Path) -> Path:
    """Return the path of an adapter's tensors, with links resolved.

    Checks first that the file's size matches its header. Links are allowed as in `adapter_config`.

    Raises:
        FileNotFoundError: If there are no tensors.
        UnreadableFileError: If it isn't a regular file of tensors, or takes far less space on disk than its size.
    """
    folder, within = _real(folder)
    with opened(folder / TENSORS, within=within) as file:
        _check_size(file, folder / TENSORS)
        _header(file, folder / TENSORS)
    return real_path(folder / TENSORS)


def check_ranks(folder: Path) -> None:
    """Raise UnreadableFileError if an adapter's config has a larger rank than its tensors, or than MOST_RANK.

    Call it before PEFT loads the adapter. It also raises the errors of `adapter_config` and `adapter_tensors`.
    """
    config = adapter_config(folder)
    pattern = config.get("rank_pattern")
    named = [config.get("r"), *(pattern.values() if isinstance(pattern, dict) else ())]
    largest = max([rank for rank in named if isinstance(rank, int)], default=0)
    path = adapter_tensors(folder)
    with opened(path, within=None) as file:
        shapes = [of["shape"] for name, of in _header(file, path).items() if "lora_" in name and "_A" in name]
    there = max([shape[0] for shape in shapes if shape], default=0)
    if largest > min(there, MOST_RANK):
        raise UnreadableFileError(
            f"{folder / CONFIG}: its rank is {largest:,}, but it must be at most the tensors' rank, "
            f"{there:,}, and at most {MOST_RANK:,}; correct r or rank_pattern"
        )


def _real(folder: Path) -> tuple[Path, Path]:
    """Return the adapter's folder with links resolved, and the folder that must contain the targets of its links."""
    folder = real_path(folder)
    return folder, folder.parents[1] if folder.parent.name == "snapshots" else folder


def _check_size(file: BinaryIO, path: Path) -> None:
    found = os.fstat(file.fileno())
    on_disk = 512 * found.st_blocks
    if found.st_size > MOST_BYTES + BYTES_A_BYTE * on_disk:
        raise UnreadableFileError(
            f"{path} has {found.st_size:,} bytes, but takes only {on_disk:,} on disk, so most of it is holes; "
            "save the adapter again"
        )


def _header(file: BinaryIO, path: Path) -> dict[str, Any]:
    """Return the header's entry for each tensor.

    Raises:
        UnreadableFileError: If the tensors don't fill exactly the rest of the file, or the header is damaged.
    """
    size = os.fstat(file.fileno()).st_size
    length = int.from_bytes(file.read(8), "little")
    if size < 8 or length > min(size - 8, MOST_HEADER):
        raise UnreadableFileError(f"{path} does not start like a safetensors file; save the adapter again")
    try:
        found = {name: of for name, of in parsed(file.read(length)).items() if name != "__metadata__"}
        total = sum(_bytes_of(of) for of in found.values())
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise UnreadableFileError(
            f"{path}: its header is not a valid safetensors header ({error}); save the adapter again"
        ) from error
    if total != size - 8 - length:
        raise UnreadableFileError(
            f"{path}: its header declares {total:,} bytes of tensors, but {size - 8 - length:,} follow; is it "
            "truncated?"
        )
    return found


def _bytes_of(tensor: Mapping[str, Any]) -> int:
    begin, end = tensor["data_offsets"]
    for number in (begin, end, *tensor["shape"]):
        if not isinstance(number, int) or number < 0:
            raise TypeError(f"lengths and offsets must be integers of at least 0, got {number!r:.80}")
    if begin > end:
        raise ValueError("a tensor ends before it begins")
    return int(end - begin)
