"""Weights to upload to servers: a model's weights with an adapter merged in, or weights that were trained whole."""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from agentgym.engines.sglang.policies.payloads import Bucket
from agentgym.errors.extras import needs_extra
from agentgym.types.weights import Adapter, ModelWeights

_NAME = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<side>[AB])(?:\.default)?\.weight")
_INDEX, _WHOLE = "model.safetensors.index.json", "model.safetensors"


class MergedWeights:
    """Yields the weights that a policy changes, and remembers which ones later policies must restore.

    Adapters are merged in float32. Unless `exact`, the sums are then rounded to the dtype of the model's files. In
    bfloat16, this loses changes smaller than half the distance between two adjacent numbers. The check after a weight
    sync detects such a loss.
    """

    def __init__(self, model: str | Path, *, bucket_bytes: int, exact: bool = False) -> None:
        self._model, self._bucket_bytes, self._exact = model, bucket_bytes, exact
        self._files: dict[str, Path] = {}
        self._changed: set[str] = set()

    def of(self, policy: Adapter | ModelWeights | None) -> Callable[[], Iterator[Bucket]]:
        """Return a function that yields, in buckets, the weights to upload for a policy; None is the base model.

        These are the weights that the policy changes, and the original values of weights that only an earlier policy
        changed. The names in the model's files are read before the method returns.

        Raises:
            ValueError: If the policy has a weight that the model's files don't have.
        """
        self._files = self._files or _files(self._model)
        if isinstance(policy, ModelWeights):
            return self._whole(policy)
        adapter = policy
        pairs = {} if adapter is None else _pairs(adapter)
        strange = sorted(pairs.keys() - self._files.keys())
        if strange:
            raise ValueError(
                f"adapter: {strange[0]} is not a weight in the files of {self._model}, so the adapter cannot be merged "
                "into it; set adapters=tensors"
            )
        self._changed |= pairs.keys()
        scale = 0.0 if adapter is None else float(adapter.config["lora_alpha"]) / float(adapter.config["r"])
        return partial(self._buckets, partial(self._sums, sorted(self._changed), pairs, scale))

    def _whole(self, weights: ModelWeights) -> Callable[[], Iterator[Bucket]]:
        """Return a function that yields these weights.

        It also yields the original values of weights that only an earlier policy changed.
        """
        strange = sorted(weights.files.keys() - self._files.keys())
        if strange:
            raise ValueError(
                f"weights: {strange[0]} is not a weight in the files of {self._model}, whose names the servers use; "
                "use weights of the same model, or sample with the embedded engine"
            )
        rest = sorted(self._changed - weights.files.keys())
        self._changed |= weights.files.keys()

        def give() -> Iterator[tuple[str, Any]]:
            # Cloned, because packing a slice of a larger tensor would pack all of that tensor.
            yield from ((name, weight.clone()) for name, weight in weights.files.items())
            yield from ((name, _read(self._files[name], name)) for name in rest)

        return partial(self._buckets, give)

    def _sums(
        self, names: list[str], pairs: Mapping[str, Mapping[str, Any]], scale: float
    ) -> Iterator[tuple[str, Any]]:
        for name in names:
            base = _read(self._files[name], name)
            merged = _merged(base, pairs.get(name), scale)
            yield name, merged if self._exact else merged.to(base.dtype)

    def _buckets(self, give: Callable[[], Iterator[tuple[str, Any]]]) -> Iterator[Bucket]:
        bucket: list[tuple[str, Any]] = []
        size = 0
        for name, weight in give():
            if bucket and size + weight.nbytes > self._bucket_bytes:
                yield bucket
                bucket, size = [], 0
            bucket.append((name, weight))
            size += weight.nbytes
        if bucket:
            yield bucket


def _merged(base: Any, pair: Mapping[str, Any] | None, scale: float) -> Any:
    if pair is None:
        return base
    return base.float().addmm(pair["B"].float(), pair["A"].float(), alpha=scale)


def _pairs(adapter: Adapter) -> dict[str, dict[str, Any]]:
    """Return lora_A and lora_B of each weight that the adapter changes, by the weight's name in the model's files."""
    pairs: dict[str, dict[str, Any]] = {}
    for name, tensor in adapter.tensors.items():
        match = _NAME.fullmatch(name)
        if match is None:
            raise ValueError(f"adapter: {name} cannot be merged into a weight; set adapters=tensors")
        pairs.setdefault(f"{match['module']}.weight", {})[match["side"]] = tensor
    halves = sorted(name for name, pair in pairs.items() if pair.keys() != {"A", "B"})
    if halves:
        raise ValueError(f"adapter: {halves[0]} has only one of lora_A and lora_B")
    return pairs


def _files(model: str | Path) -> dict[str, Path]:
    """Return the file of each weight of a model, given as a folder or hub name.

    Raises:
        ValueError: If the model has no safetensors files.
    """
    with needs_extra():
        from safetensors import safe_open
    folder = Path(model) if Path(model).is_dir() else _fetched(str(model))
    if (folder / _INDEX).is_file():
        return {name: folder / file for name, file in json.loads((folder / _INDEX).read_text())["weight_map"].items()}
    if not (folder / _WHOLE).is_file():
        raise ValueError(f"adapters: {folder} has no {_WHOLE}, which merging needs; set adapters=tensors")
    with safe_open(folder / _WHOLE, framework="pt") as file:
        return dict.fromkeys(file.keys(), folder / _WHOLE)


def _fetched(model: str) -> Path:
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(model, allow_patterns=["*.safetensors", "*.json"]))


def _read(file: Path, name: str) -> Any:
    from safetensors import safe_open

    with safe_open(file, framework="pt") as opened:
        return opened.get_tensor(name)
