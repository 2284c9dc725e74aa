"""Fingerprints of an evaluation's models, which must be the same when the evaluation is resumed."""

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TypeAlias

from agentgym.engines.fingerprint import fingerprint, model_files
from agentgym.evals.opening import Model, adapter_folder, base_of, is_url
from agentgym.evals.playing import OwnPlaying, Playing
from agentgym.files.disk import write_whole
from agentgym.files.foreign.content import read_object
from agentgym.store.run_settings import SETTINGS
from agentgym.tools.tool_threads import in_own_thread

Fingerprints: TypeAlias = Mapping[str, Mapping[str, str]]
"""For each model by name, a digest of each part that the model's outputs depend on; "" names the evaluated model."""
KEPT = "fingerprints"
"""The key of the fingerprints in an evaluation's settings."""
PARTS = {
    "files": "the content of the model's files",
    "weights": "the content of the engine's weights",
    "adapter_files": "the content of the adapter's files",
    "adapter": "the engine's adapter or loaded weights",
    "chat": "the chat template",
    "context_tokens": "the engine's context_tokens",
    "served": "the model that the endpoint serves",
    "version": "the version of the engine's policy",
}
"""Descriptions of the parts of a fingerprint, for messages."""
_OPENED = ("weights", "adapter")
"""The parts that are known only once a model given by name is open. They are stored, too, so that the evaluation can be
resumed with an open engine instead of the name.
"""


async def fingerprints(models: Mapping[str, Model]) -> Fingerprints:
    """Return the models' fingerprints, before models given by name are opened."""
    return {name: await _fingerprint_of(model) for name, model in models.items()}


async def fingerprints_now(models: Mapping[str, Model], playing: Playing) -> Fingerprints:
    """Return the fingerprints of models given by name, after they were opened and their files were downloaded."""
    named = {name: model for name, model in models.items() if isinstance(model, str | Path)}
    found = {name: await _fingerprint_of(model) for name, model in named.items()}
    if isinstance(playing, OwnPlaying):
        opened = {"": playing.engine, **playing.models}
        for name, of in named.items():
            parts = await fingerprint(opened[name])
            found[name] |= parts if is_url(of) else {part: parts[part] for part in _OPENED if part in parts}
    return found


async def _fingerprint_of(model: Model) -> dict[str, str]:
    if not isinstance(model, str | Path):
        return await fingerprint(model)
    if is_url(model):
        return {}
    adapter = adapter_folder(Path(model))
    files: dict[str, str | Path] = {"files": model} if adapter is None else {"files": base_of(adapter)}
    files |= {} if adapter is None else {"adapter_files": adapter}
    found = {part: await in_own_thread(partial(model_files, of), name="agentgym-digest") for part, of in files.items()}
    return {part: digest for part, digest in found.items() if digest}


def hold_models(folder: Path, found: Fingerprints) -> None:
    """Add the fingerprints to the settings in an evaluation's folder, unless they are there already.

    Raises:
        ValueError: If a part of a model differs from the stored one. The message names the part.
    """
    path = folder / SETTINGS
    begun = read_object(path, within=folder)
    kept: dict[str, dict[str, str]] = begun.setdefault(KEPT, {})
    before = json.dumps(kept)
    for name, parts in found.items():
        _refuse_unknown(folder, name, kept.get(name, {}), parts)
        for part, now in parts.items():
            if (was := kept.setdefault(name, {}).setdefault(part, now)) != now:
                raise ValueError(
                    f"{f'models[{name!r}]' if name else 'model'}: {PARTS.get(part, part)} changed since {folder} was "
                    f"started ({was or 'none'} then, {now or 'none'} now); use the same model, or another folder"
                )
    if json.dumps(kept) != before:
        write_whole(path, json.dumps(begun, indent=2) + "\n")


def _refuse_unknown(folder: Path, name: str, kept: Mapping[str, str], parts: Mapping[str, str]) -> None:
    """Raise ValueError if a model's stored and current fingerprints have no part in common."""
    if kept and parts and not kept.keys() & parts.keys():
        raise ValueError(
            f"{f'models[{name!r}]' if name else 'model'}: can't tell whether this is the model with which {folder} was "
            f"started: the stored fingerprint has {', '.join(kept)}, this model's {', '.join(parts)}; pass the model "
            "in the same way as then, by name or as an engine, or use another folder"
        )
