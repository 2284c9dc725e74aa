"""Starts, watches and ends sandbox servers that are child processes of this one."""

import asyncio
import functools
import json
import os
import socket
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from agentgym.errors import SandboxError
from agentgym.machine.process_identity import remove_folder
from agentgym.sandboxes.faults import exits
from agentgym.sandboxes.network.modes import sockets_of
from agentgym.sandboxes.network.rules import Allow
from agentgym.sandboxes.network.sandbox_network import SandboxNetwork, receive, release
from agentgym.sandboxes.remote.sandbox import START_S, RemoteSandbox
from agentgym.sandboxes.remote.wire import Wire
from agentgym.sandboxes.server_files import SANDBOX_KILLED

END_S = 3.0


def memory_file(content: bytes) -> Any:
    """Return a file that exists only in memory, positioned at its start."""
    file = os.fdopen(os.memfd_create("agentgym"), "w+b")
    file.write(content)
    file.seek(0)
    return file


async def start_server(
    command: Sequence[str],
    config: Mapping[str, Any],
    *,
    digest: str,
    environment: Mapping[str, str] | None = None,
    keep: Sequence[int] = (),
    held: ExitStack | None = None,
    scratch: Sequence[str] = (),
    allow: Allow | None = None,
) -> RemoteSandbox:
    """Start a sandbox server that is connected by a socket pair.

    Args:
        command: The command that starts the server, without its configuration.
        config: The server's configuration.
        digest: The kind of sandbox and the digest of the server's files, for the sandbox's `digest`.
        environment: The server's environment; None for this process's.
        keep: Descriptors that the server inherits.
        held: Context that keeps these descriptors open here. It is closed as soon as the server has inherited them,
            even before the server's first message, so a hundred sandboxes that start at once keep no more files open
            than one.
        scratch: Folders to remove when the server has ended.
        allow: The hosts that the sandbox may reach; None for none.

    Raises:
        SandboxError: If the server doesn't start; the message contains its error output.
    """
    with memory_file(b"") as errors:
        ours, theirs = socket.socketpair()
        try:
            # In the event loop's thread on purpose: --die-with-parent refers to the thread that forked.
            process = subprocess.Popen(  # noqa: ASYNC220
                [*command, json.dumps({**config, "ends": [theirs.fileno()]})],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                env=environment,
                pass_fds=[theirs.fileno(), *keep],
                start_new_session=True,
                cwd="/",
            )
        except OSError as error:
            ours.close()
            raise SandboxError(f"the sandbox did not start: {error}") from error
        finally:
            theirs.close()
            if held is not None:
                held.close()
        ending = functools.partial(_end, process, scratch)
        why_it_ended = functools.partial(_why_it_ended, process, open_to_signals=bool(scratch))
        network = SandboxNetwork()
        try:
            if "network" in config:
                network = SandboxNetwork(await receive(ours, sockets_of(config["network"]), START_S), allow)
            wire = await Wire.over(ours)
            sandbox = await RemoteSandbox.open(
                wire, digest=digest, end=ending, network=network, why_it_ended=why_it_ended
            )
            await sandbox.begin_surroundings()
            return sandbox
        except BaseException as error:
            ours.close()
            await release(network, ending)
            if isinstance(error, SandboxError):
                errors.seek(0)
                said = errors.read(2000).decode("utf-8", "replace").strip()
                raise SandboxError(f"{error}{f': {said}' if said else ''}") from error.__cause__
            raise


async def _why_it_ended(process: "subprocess.Popen[bytes]", *, open_to_signals: bool) -> str | None:
    """Return how the code in a sandbox ended the sandbox, or None if the code was not the cause.

    None is also returned if the sandbox is still running.

    Args:
        process: The server.
        open_to_signals: Whether the code can kill the server, in which case any failure is attributed to the code.
    """
    if process.poll() is None and not await exits(process.pid, END_S):
        return None
    code = process.poll()
    if code == SANDBOX_KILLED or (open_to_signals and code):
        return f"its server ended with code {code}"
    return None


async def _end(process: "subprocess.Popen[bytes]", scratch: Sequence[str]) -> None:
    """Wait for the server to end, and kill it if it doesn't.

    The server's connection is already cut, and this call is never cancelled.
    """
    if process.poll() is None and not await exits(process.pid, END_S):
        process.kill()
        await asyncio.to_thread(process.wait)
    process.poll()
    if scratch:
        await asyncio.to_thread(remove_folders, scratch)


def remove_folders(folders: Sequence[str]) -> None:
    for folder in folders:
        remove_folder(folder)
