"""Digests of everything that determines a model's output: its weights, adapter and chat template, but not its name.

They tell whether two results come from the same model.
"""

import asyncio
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from agentgym.hub import find_model
from agentgym.types.weights import Adapter, ModelWeights

KINDS = (".json", ".jinja", ".txt", ".model", ".safetensors", ".bin", ".pt")
"""Suffixes of the files in a model's folder that the digest covers."""
WHOLE = 1 << 26
"""Size, in bytes, up to which a file is read completely. Of a larger file, only the size, the first BEGIN bytes, and
PIECES samples of PIECE bytes are read.
"""
BEGIN, PIECES, PIECE = 1 << 16, 64, 1 << 12
VALUES = 1 << 14
"""Approximate number of values read from each tensor, evenly spaced."""


def model_files(model: str | Path) -> str:
    """Return a digest of a model's or adapter's files, or "" for a hub name that isn't in the local cache.

    This function reads files, so call it in a thread.
    """
    folder = _folder(find_model(model))
    if folder is None:
        return ""
    found = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.suffix in KINDS and path.is_file():
            found.update(f"{path.name}\0{path.stat().st_size}\0".encode())
            for part in _parts(path):
                found.update(part)
    return found.hexdigest()[:16]


def _folder(model: str | Path) -> Path | None:
    """Return a model's folder, or None if there is none. A hub name's folder is in the hub's cache."""
    if os.path.isdir(model):  # noqa: PTH112 - Path.is_dir raises for a name that is too long
        return Path(model)
    try:
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(str(model), "config.json")
    except (ImportError, ValueError):  # The hub raises a ValueError for an invalid name.
        return None
    return Path(cached).parent if isinstance(cached, str) else None


def _parts(path: Path) -> Iterator[bytes]:
    size = path.stat().st_size
    with path.open("rb") as file:
        if size <= WHOLE:
            while part := file.read(1 << 20):
                yield part
            return
        yield file.read(BEGIN)
        for number in range(PIECES):
            file.seek((size - PIECE) * (number + 1) // PIECES)
            yield file.read(PIECE)


def digest_of(given: Adapter | ModelWeights | None) -> str:
    """Return a digest of an adapter or of weights, or "" for None. Only some values of each tensor are read."""
    if given is None:
        return ""
    found = hashlib.sha256()
    if isinstance(given, Adapter):
        found.update(json.dumps(dict(given.config), sort_keys=True, default=str).encode())
    _add(found, given.tensors)
    return found.hexdigest()[:16]


def weights_digest(model: Any) -> str:
    """Return a digest of a torch model's current weights."""
    found = hashlib.sha256()
    _add(found, dict(model.named_parameters()))
    return found.hexdigest()[:16]


def _add(found: "hashlib._Hash", tensors: Mapping[str, Any]) -> None:
    for name in sorted(tensors):
        tensor = tensors[name]
        found.update(f"{name} {tuple(np.shape(tensor))} {getattr(tensor, 'dtype', None)}\0".encode())
        flat = tensor.detach().reshape(-1) if hasattr(tensor, "detach") else np.asarray(tensor).reshape(-1)
        some = flat[:: max(len(flat) // VALUES, 1)]
        # NumPy has no bfloat16. float32 represents every smaller float type exactly.
        found.update((some.float().cpu().numpy() if hasattr(some, "float") else some).tobytes())


def chat_digest(tokenizer: Any) -> str:
    """Return a digest of how a tokenizer renders chats: its class, template, variables and form of tools."""
    own = getattr(tokenizer, "tokenizer", None)
    written = [getattr(own, "chat_template", None), getattr(tokenizer, "variables", {})]
    written += [shown] if (shown := getattr(tokenizer, "tools_shown_by", None)) == "prompt" else []
    shown = json.dumps([type(tokenizer).__name__, *written], sort_keys=True, default=str)
    return hashlib.sha256(shown.encode()).hexdigest()[:16]


async def fingerprint(engine: Any) -> dict[str, str]:
    """Return a digest of each component that determines an open engine's output. Unknown components are left out.

    A custom engine may define an async method `fingerprint` that returns such a dict. For an engine without one, the
    policy version is used.
    """
    if callable(own := getattr(engine, "fingerprint", None)):
        return dict(await own())
    if callable(policy := getattr(engine, "current_policy", None)):  # The engine samples on servers.
        files = await asyncio.to_thread(model_files, engine.model_name)
        known = {"files": files} if files else {}
        return known | {"adapter": policy().digest, "chat": chat_digest(engine.tokenizer)}
    return {"version": str(engine.version)} if hasattr(engine, "version") else {}
