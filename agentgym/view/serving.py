"""The running of the server: a port of its own, until it is stopped."""

import socket
from collections.abc import Callable

from agentgym.errors import AgentGymError


def listening_socket(host: str, port: int) -> socket.socket:
    """A socket that listens; AgentGymError, which says what to do, where the address is not to be had."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        family, kind, protocol, _, address = found[0]
        made = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError, OverflowError) as error:
        raise AgentGymError(f"--host: {host!r} is no address of this machine ({error}); leave it out") from None
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
        made.listen(128)
    except (OSError, OverflowError) as error:
        made.close()
        raise AgentGymError(
            f"--port: {host}:{port} cannot be listened on ({error}); leave --port out, and a free one is taken"
        ) from None
    return made


def address_of(listening: socket.socket, host: str, token: str | None) -> str:
    """The address to open in a browser, with the token."""
    port = listening.getsockname()[1]
    named = {"0.0.0.0": "127.0.0.1", "::": "[::1]", "": "127.0.0.1"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{named}:{port}/" + ("" if token is None else f"?token={token}")


def serve(app: object, listening: socket.socket, *, ready: Callable[[], None]) -> None:
    """Answer requests until Ctrl-C or SIGTERM; `ready` is called once the server answers."""
    import uvicorn

    class Server(uvicorn.Server):  # type: ignore[misc]
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets=sockets)
            ready()

    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        server_header=False,
        lifespan="off",
        timeout_graceful_shutdown=2,
        ws="none",
    )
    try:
        Server(config).run(sockets=[listening])
    except KeyboardInterrupt:
        pass
    finally:
        listening.close()
