"""HTTP/1.1 requests and answers, as the agents' API takes and gives them."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpRequest:
    """A whole request; the names of its headers are in lower case."""

    method: str
    path: str
    """Without its query."""
    headers: Mapping[str, str]
    body: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpAnswer:
    """An answer: a body, or the events that it is made of."""

    status: int
    body: bytes | Sequence[bytes]
    headers: Mapping[str, str] = field(default_factory=dict)


Handle: TypeAlias = Callable[[HttpRequest], Awaitable[HttpAnswer]]
"""What answers requests; it raises nothing but a cancellation."""
