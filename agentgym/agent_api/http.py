"""HTTP/1.1 requests and responses of the agents' API."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpRequest:
    """A complete request. The names of its headers are in lowercase."""

    method: str
    path: str
    """Path without the query."""
    headers: Mapping[str, str]
    body: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpAnswer:
    """A response. Its body is either whole, or a list of events whose concatenation is the body."""

    status: int
    body: bytes | Sequence[bytes]
    headers: Mapping[str, str] = field(default_factory=dict)


Handle: TypeAlias = Callable[[HttpRequest], Awaitable[HttpAnswer]]
"""A function that responds to a request. It raises no exception, except when it is cancelled."""
