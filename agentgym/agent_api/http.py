"""HTTP/1.1 requests and responses of the agents' API."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpRequest:
    """A complete request; the names of its headers are in lowercase."""

    method: str
    path: str
    """Path without the query."""
    headers: Mapping[str, str]
    body: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpAnswer:
    """A response, with a body or the events that make it up."""

    status: int
    body: bytes | Sequence[bytes]
    headers: Mapping[str, str] = field(default_factory=dict)


Handle: TypeAlias = Callable[[HttpRequest], Awaitable[HttpAnswer]]
"""Responds to requests; raises nothing but cancellations."""
