"""What a sandbox is connected to: requests that leave it, addresses that lead into it, containers beside it."""

from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, TypeAlias

RequestOutcome: TypeAlias = Literal["allowed", "refused", "malformed", "failed", "cut"]
"""What a sandbox's proxy did with a request: "cut" for one that was allowed, and then ended by a limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkRequest:
    """One request of code in a sandbox to the proxy, as far as it has come."""

    at: float
    """The time of the connection, in seconds since 1970."""
    method: str
    """CONNECT for a tunnel such as https uses; "" where no request could be read."""
    host: str
    port: int
    path: str
    """The path and query of a plain http request; of one over 1000 characters the begin and the end."""
    outcome: RequestOutcome
    why: str
    """The reason of every verdict but "allowed"."""
    sent: int
    """Bytes from the sandbox to the host."""
    received: int


class LocalAddress(NamedTuple):
    """An address of this machine that leads to a port inside a sandbox."""

    host: str
    port: int

    @property
    def url(self) -> str:
        """The address as the beginning of a URL, without a last slash."""
        return f"http://{self.host}:{self.port}"


class SandboxService(Protocol):
    """A container beside a sandbox, in the same private network."""

    async def logs(self, *, lines: int = 200) -> str:
        """Return the last lines of what it wrote since the episode began, at most 64 KiB of them."""
        ...
