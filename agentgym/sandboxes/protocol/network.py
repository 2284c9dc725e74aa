"""A sandbox's connections: its requests to the network, addresses that lead into it, and its service containers."""

from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, TypeAlias

RequestOutcome: TypeAlias = Literal["allowed", "refused", "malformed", "failed", "cut"]
"""The outcome of a request at a sandbox's proxy; "cut" means that it was allowed, but then ended by a limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkRequest:
    """One request from code in a sandbox to the proxy, with its state so far if it is still in progress."""

    at: float
    """The time of the connection, in seconds since 1970."""
    method: str
    """The HTTP method; CONNECT for a tunnel, which https uses, and "" if no request could be read."""
    host: str
    port: int
    path: str
    """The path and query of a plain http request; if over 1000 characters, only its beginning and end."""
    outcome: RequestOutcome
    why: str
    """The reason for every outcome other than "allowed"."""
    sent: int
    """Bytes from the sandbox to the requested `host`."""
    received: int


class LocalAddress(NamedTuple):
    """An address on this machine that leads to a port inside a sandbox."""

    host: str
    port: int

    @property
    def url(self) -> str:
        """The address as the start of a URL, without a trailing slash."""
        return f"http://{self.host}:{self.port}"


class SandboxService(Protocol):
    """A service container next to a sandbox, in the same private network."""

    async def logs(self, *, lines: int = 200) -> str:
        """Return the last lines that the service has written since the episode began, at most 64 KiB.

        Args:
            lines: Maximum number of lines.
        """
        ...
