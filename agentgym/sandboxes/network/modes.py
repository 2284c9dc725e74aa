"""The values of a sandbox's `network`: no network, its own loopback, a list of hosts, or a named Docker network."""

from collections.abc import Mapping, Sequence

from agentgym.sandboxes.network.proxy import PROXY_PORT
from agentgym.sandboxes.network.rules import Allow

NONE, LOOPBACK = "none", "loopback"
SOCKETS = 32
"""Maximum number of simultaneous connections into a sandbox."""


def allow_of(network: str | Allow) -> Allow | None:
    """Return the list of allowed hosts, or None if the sandbox has none."""
    return network if isinstance(network, Allow) else None


def engine_network(network: str | Allow) -> str:
    """Return the container's Docker network: "none", unless a network was requested by name."""
    return network if isinstance(network, str) and network != LOOPBACK else NONE


def has_own_loopback(network: str | Allow) -> bool:
    """Return whether the sandbox's network is a loopback that no other sandbox shares."""
    return isinstance(network, Allow) or network == LOOPBACK


def server_network(network: str | Allow) -> dict[str, int | None]:
    """Return the entry `network` of the configuration of the server in the sandbox.

    `listen` is the port on which the server listens for the proxy; None without a list of allowed hosts. `sockets` is
    the number of sockets that the server creates for connections into the sandbox.
    """
    return {"listen": PROXY_PORT if isinstance(network, Allow) else None, "sockets": SOCKETS}


def sockets_of(config: Mapping[str, int | None]) -> int:
    """Return how many sockets a sandbox's server with this configuration passes to this machine."""
    return SOCKETS + (config["listen"] is not None)


def proxy_environment(network: str | Allow, services: Sequence[str] = ()) -> dict[str, str]:
    """Return the variables that point programs in the sandbox to the proxy; services are reached without it."""
    if not isinstance(network, Allow):
        return {}
    proxy = f"http://127.0.0.1:{PROXY_PORT}"
    found = {"http_proxy": proxy, "https_proxy": proxy, "no_proxy": ",".join(["localhost", "127.0.0.1", *services])}
    return found | {name.upper(): value for name, value in found.items()}
