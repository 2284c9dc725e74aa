"""The connection to the server in a container: the listening socket, the first message, and the sandbox's network."""

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from agentgym.errors import SandboxError
from agentgym.sandboxes.docker.client import EngineFailed
from agentgym.sandboxes.docker.settings import DockerSettings, server_config
from agentgym.sandboxes.faults import readable
from agentgym.sandboxes.network.modes import allow_of, sockets_of
from agentgym.sandboxes.network.sandbox_network import SandboxNetwork, receive
from agentgym.sandboxes.remote.link import WhyItEnded
from agentgym.sandboxes.remote.sandbox import START_S, RemoteSandbox
from agentgym.sandboxes.remote.wire import Wire

LOOK_S = 1.0
"""Seconds without a connection after which the state of the container is checked."""


async def first_word(
    wire: Wire, digest: str, end: Callable[[], Any], why_it_ended: WhyItEnded, network: SandboxNetwork | None = None
) -> RemoteSandbox:
    """Wait for the server's first message and return the sandbox.

    Args:
        wire: The connection to the server in the container.
        digest: The image's id, for the sandbox's `digest`.
        end: Removes the container, and its services if it has any, when the sandbox ends.
        why_it_ended: Returns how the code in the sandbox ended the sandbox.
        network: This client's access to the sandbox's network; None for no access.

    Raises:
        EngineFailed: If the message doesn't come or is not the expected one, in which case the connection is closed.
    """
    try:
        return await RemoteSandbox.open(wire, digest=digest, end=end, network=network, why_it_ended=why_it_ended)
    except SandboxError as error:
        raise EngineFailed(str(error)) from error


def listener(path: Path) -> socket.socket:
    """Return a listening unix socket at `path`, which every user who can reach the path may connect to.

    The container mounts the folder of `path`, and its user is not this one. Other users of this machine can't reach
    the path, because the folder above the mounted one is private.
    """
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        listening = socket.socket(socket.AF_UNIX)
    except OSError:
        os.close(folder)
        raise
    try:
        # Through the descriptor: a socket's address is limited to 107 bytes, and TMPDIR may be longer.
        listening.bind(f"/proc/self/fd/{folder}/{path.name}")
        path.chmod(0o666)
        listening.listen(1)
        listening.setblocking(False)
    except BaseException:
        listening.close()
        raise
    finally:
        os.close(folder)
    return listening


async def accepted(
    listening: socket.socket, state: Callable[[], Awaitable[Mapping[str, Any]]], patience_s: float = START_S
) -> socket.socket:
    """Accept the connection from the server in the container.

    If the call is cancelled, no connection is lost or left open.

    Args:
        listening: The socket that the server connects to.
        state: Queries the container's state from the engine.
        patience_s: Maximum seconds to wait.

    Raises:
        EngineFailed: If a check finds that the container has ended, or if nothing connects in time.
    """
    # Not loop.sock_accept: if cancelled in the same loop iteration that accepted, it leaves the connection open.
    loop = asyncio.get_running_loop()
    deadline = loop.time() + patience_s
    while True:
        try:
            await readable(listening.fileno(), LOOK_S)
        except TimeoutError:
            found = await state()
            if not found["Running"] or loop.time() > deadline:
                raise EngineFailed(
                    f"the sandbox did not start: its container is {found['Status']}, "
                    f"exit code {found['ExitCode']} {found['Error']}"
                ) from None
        with suppress(BlockingIOError):  # No connection, or it was closed before it was accepted.
            return listening.accept()[0]


async def network_of(connection: socket.socket, spec: DockerSettings) -> SandboxNetwork:
    """Return the network of a sandbox whose server has just connected."""
    said = server_config(spec, connected=True).get("network")
    try:
        sockets = await receive(connection, sockets_of(said), START_S) if said is not None else []
    except BaseException:
        connection.close()
        raise
    return SandboxNetwork(sockets, allow_of(spec.network))
