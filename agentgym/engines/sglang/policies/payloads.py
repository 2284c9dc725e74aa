"""Policies on their way to servers: named, and packed once for all servers."""

import base64
import json
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from agentgym.types.weights import Adapter

Bucket = Sequence[tuple[str, Any]]
"""Tensors of a model by the names of its files."""


class PolicyVersion(NamedTuple):
    """The weights that new tokens are sampled from, by the names that the servers know them by; it can be pickled."""

    lora: str | None
    """The name of the adapter beside the weights; None for the weights alone."""
    version: int
    weights: str = ""
    """The name of the weights; empty for the model's own."""
    digest: str = ""
    """What tells the adapter or the weights from others (`digest_of`); empty for the model's own."""


class Payload(Protocol):
    """A packed policy; its owner keeps it while the policy is current, for a server that is started again."""

    def requests(self, tp: int) -> Iterator[tuple[str, bytes]]:
        """Give path and body of the requests that load it into a server of `tp` processes."""
        ...


@dataclass(frozen=True, slots=True)
class AdapterFolder:
    """An adapter in a folder that the servers can read."""

    lora: str
    folder: Path

    def requests(self, tp: int) -> Iterator[tuple[str, bytes]]:
        """Give the one request that names the folder."""
        yield "/load_lora_adapter", json.dumps({"lora_name": self.lora, "lora_path": str(self.folder)}).encode()


class PackedAdapter:
    """An adapter as a request's body, made when it is packed: it may be some hundred megabytes."""

    def __init__(self, lora: str, adapter: Adapter, *, tps: Sequence[int]) -> None:
        packed = packed_tensors(adapter.tensors)
        named = json.dumps({"lora_name": lora, "config_dict": dict(adapter.config)})[:-1]
        self._bodies = {tp: f'{named},"serialized_named_tensors":{_for_each(packed, tp)}}}'.encode() for tp in set(tps)}

    def requests(self, tp: int) -> Iterator[tuple[str, bytes]]:
        """Give the one request that holds the adapter, once for each process of the server."""
        yield "/load_lora_adapter_from_tensors", self._bodies[tp]


@dataclass(frozen=True, slots=True)
class Weights:
    """A model's weights, read and packed bucket by bucket while they are sent."""

    version: int
    buckets: Callable[[], Iterator[Bucket]]

    def requests(self, tp: int) -> Iterator[tuple[str, bytes]]:
        """Give one request for each bucket; making the next one takes time."""
        for bucket in self.buckets():
            packed = packed_tensors(dict(bucket), listed=True)
            body = f'{{"flush_cache":false,"weight_version":"{self.version}",'
            yield "/update_weights_from_tensor", f'{body}"serialized_named_tensors":{_for_each(packed, tp)}}}'.encode()


def packed_tensors(tensors: Mapping[str, Any], *, listed: bool = False) -> str:
    """Return tensors as a server unpickles them, by name or as a list of pairs.

    Raises ValueError for other than torch's, which would end the server.
    """
    for name, tensor in tensors.items():
        if not type(tensor).__module__.startswith("torch"):
            raise ValueError(f"adapter: {name} is a {type(tensor).__name__}, and a server takes torch tensors")
    return base64.b64encode(pickle.dumps(list(tensors.items()) if listed else dict(tensors))).decode()


def _for_each(packed: str, tp: int) -> str:
    """Return the JSON array in which each of a server's processes reads an entry of its own."""
    return "[" + ",".join([f'"{packed}"'] * tp) + "]"
