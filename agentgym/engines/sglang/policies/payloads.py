"""Policies to upload to servers: named, and packed once for all servers."""

import base64
import json
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from agentgym.types.weights import Adapter

Bucket = Sequence[tuple[str, Any]]
"""Some of a model's tensors, each with its name in the model's files. A request uploads one bucket."""


class PolicyVersion(NamedTuple):
    """Identifies a policy by the names that the servers use for its adapter and its weights. It can be pickled."""

    lora: str | None
    """Name of the adapter; None if the servers load none, for example because it is merged into the weights."""
    version: int
    weights: str = ""
    """Name of the weights; empty for the model's original ones."""
    digest: str = ""
    """Digest of the adapter or weights (`digest_of`); empty for the model's original weights."""


class Receiver(NamedTuple):
    """What the format of an upload depends on. It is the same for all servers that were started alike."""

    tp: int = 1
    """Number of processes of the server, each of which gets a copy."""
    shares_adapters: bool = False
    """Whether all processes read one copy of an adapter, under another name, as before SGLang 0.5.17."""


class Payload(Protocol):
    """A policy, packed for uploading. Its owner keeps it while the policy is current, in case a server is restarted."""

    def requests(self, to: Receiver) -> Iterator[tuple[str, bytes]]:
        """Yield the path and body of each request that loads the policy into a server."""
        ...


@dataclass(frozen=True, slots=True)
class AdapterFolder:
    """An adapter in a folder that the servers can read."""

    lora: str
    folder: Path

    def requests(self, to: Receiver) -> Iterator[tuple[str, bytes]]:
        """Yield a single request, which names the folder."""
        yield "/load_lora_adapter", json.dumps({"lora_name": self.lora, "lora_path": str(self.folder)}).encode()


class PackedAdapter:
    """An adapter as a request body, built in advance because it may take hundreds of megabytes."""

    def __init__(self, lora: str, adapter: Adapter, *, receivers: Sequence[Receiver]) -> None:
        packed = packed_tensors(adapter.tensors)
        named = json.dumps({"lora_name": lora, "config_dict": dict(adapter.config)})[:-1]
        self._bodies = {to: f"{named},{_adapter_field(packed, to)}}}".encode() for to in set(receivers)}

    def requests(self, to: Receiver) -> Iterator[tuple[str, bytes]]:
        """Yield a single request, whose body has a copy of the adapter for each process of the server."""
        yield "/load_lora_adapter_from_tensors", self._bodies[to]


@dataclass(frozen=True, slots=True)
class Weights:
    """A model's weights, read and packed bucket by bucket while they are sent."""

    version: int
    buckets: Callable[[], Iterator[Bucket]]

    def requests(self, to: Receiver) -> Iterator[tuple[str, bytes]]:
        """Yield one request per bucket. Each takes time to build."""
        for bucket in self.buckets():
            packed = packed_tensors(dict(bucket), listed=True)
            body = f'{{"flush_cache":false,"weight_version":"{self.version}",'
            yield (
                "/update_weights_from_tensor",
                f'{body}"serialized_named_tensors":{_for_each(packed, to.tp)}}}'.encode(),
            )


def packed_tensors(tensors: Mapping[str, Any], *, listed: bool = False) -> str:
    """Pack tensors in the format that a server unpickles: as a dict by name, or as a list of pairs if `listed`.

    Raises:
        ValueError: If a tensor isn't a torch tensor, which would crash the server.
    """
    for name, tensor in tensors.items():
        if not type(tensor).__module__.startswith("torch"):
            raise ValueError(f"adapter: {name} must be a torch tensor, got {type(tensor).__name__}")
    return base64.b64encode(pickle.dumps(list(tensors.items()) if listed else dict(tensors))).decode()


def _adapter_field(packed: str, to: Receiver) -> str:
    """Return the JSON field with an adapter's packed tensors."""
    if to.shares_adapters:
        return f'"serialized_tensors":"{packed}"'
    return f'"serialized_named_tensors":{_for_each(packed, to.tp)}'


def _for_each(packed: str, tp: int) -> str:
    """Return a JSON array with one copy of the packed tensors for each of the server's `tp` processes."""
    return "[" + ",".join([f'"{packed}"'] * tp) + "]"
