"""Runs the server: it listens on a port until it is stopped."""

import errno
import logging
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import closing, suppress

from agentgym.errors import AgentGymError
from agentgym.types.transcript import printable


class PrintableLines(logging.Formatter):
    """Escapes control characters in log lines.

    The lines contain file names and model output, which could otherwise control the terminal.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, and its traceback, with control characters escaped."""
        return printable(super().format(record))


def listening_socket(host: str, port: int) -> socket.socket:
    """Return a listening socket.

    Raises:
        AgentGymError: If the address can't be listened on; the message says what to do.
    """
    if not 0 <= port <= 65535:
        raise AgentGymError(f"--port: expected a number from 0 to 65535, got {port}; 0 picks a free port")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as error:
        raise AgentGymError(f"--host: {host} is not an address of this machine ({error}); omit it") from None
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(128)
    except OSError as error:
        listening.close()
        raise _refused(host, port, error) from None
    return listening


def _refused(host: str, port: int, error: OSError) -> AgentGymError:
    if error.errno == errno.EADDRNOTAVAIL:
        return AgentGymError(f"--host: {host} is not an address of this machine; omit it")
    if error.errno == errno.EADDRINUSE:
        return AgentGymError(f"--port: {port} is used by another process; choose another port, or omit it")
    return AgentGymError(f"--port: cannot listen on {port} ({error.strerror}); choose another port, or omit it")


def address_of(listening: socket.socket, host: str, token: str | None) -> str:
    """Return the URL to open in a browser, including the token."""
    port = listening.getsockname()[1]
    named = {"0.0.0.0": "127.0.0.1", "::": "[::1]", "": "127.0.0.1"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{named}:{port}/" + ("" if token is None else f"?token={token}")


def serve(app: object, listening: socket.socket, *, ready: Callable[[], None]) -> None:
    """Serve requests until Ctrl-C or SIGTERM, and log to stderr.

    Args:
        app: The ASGI application.
        listening: The listening socket.
        ready: Called once the server accepts requests.
    """
    import uvicorn

    to_stderr = logging.StreamHandler()
    to_stderr.setFormatter(PrintableLines("agentgym: %(message)s"))
    logging.basicConfig(handlers=[to_stderr], level=logging.WARNING)

    class Server(uvicorn.Server):  # type: ignore[misc]
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets=sockets)
            ready()

    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        server_header=False,
        lifespan="off",
        timeout_graceful_shutdown=2,
        ws="none",
    )
    signal.signal(signal.SIGTERM, _ended)
    with suppress(KeyboardInterrupt), closing(listening):
        Server(config).run(sockets=[listening])


def _ended(number: int, frame: object) -> None:
    """Exit because of a signal, after closing all open resources.

    The status is that of a process ended by the signal: 128 + `number`.
    """
    sys.exit(128 + number)
