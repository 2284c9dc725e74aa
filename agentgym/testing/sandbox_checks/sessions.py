"""Checks of a sandbox as its host sees it: its digest, branches, network and reset."""

import asyncio
from collections.abc import Sequence
from contextlib import closing

from agentgym.errors import ClosedError
from agentgym.sandboxes.protocol import LocalAddress, Sandbox
from agentgym.testing.sandbox_checks.claims import holds, raises, same
from agentgym.testing.sandbox_checks.files import CONTENT

SERVE = """
import socket, threading
listener = socket.create_server(("127.0.0.1", 0))
def answer():
    while True:
        connection, _ = listener.accept()
        try:
            connection.sendall(b"hello")
        except OSError:
            pass  # Whoever looked whether something listens is gone.
        connection.close()
threading.Thread(target=answer, daemon=True).start()
listener.getsockname()[1]
"""
"""Python code that starts a server in the sandbox and returns its port; it fails if there is no loopback interface."""


async def digest(sandbox: Sandbox) -> None:
    """Check that the digest is non-empty text, which should identify everything that the sandbox is made of."""
    same("the type of digest", type(sandbox.digest).__name__, "str")
    holds("digest is not empty", bool(sandbox.digest))


async def fork(sandbox: Sandbox) -> None:
    """Check that a branch continues from the current state, and that neither side sees the other's changes."""
    await sandbox.write({"f": "before", "large": CONTENT * 64})
    await sandbox.python("x = 1")
    async with await sandbox.fork() as branch:
        same("an earlier file in a branch", await branch.read("f"), b"before")
        same("a large earlier file in a branch", await branch.read("large", limit=1 << 24), CONTENT * 64)
        await branch.write({"f": "branch"})
        same("a name in a branch", (await branch.python("x += 1; x")).stdout, "2\n")
        same("a file in a branch", (await branch.exec("cat f")).stdout, "branch")
        same("the parent's file after a change in a branch", await sandbox.read("f"), b"before")
        same("the parent's name after a change in a branch", (await sandbox.python("x")).stdout, "1\n")
    await raises("a call of a closed branch", ClosedError, branch.python("1"))
    await branch.close()


async def requests(sandbox: Sandbox) -> None:
    """Check that a new episode's requests are an empty sequence."""
    made = sandbox.requests()
    holds("requests() is a sequence", isinstance(made, Sequence) and not isinstance(made, str))
    same("the requests of a new episode", [*made], [])


async def port(sandbox: Sandbox) -> None:
    """Check that the address from `port` leads to a server in the sandbox.

    A sandbox without a separate network may raise ValueError instead.
    """
    for wrong in (0, 65536):
        await raises(f"port {wrong}", ValueError, _greeting(sandbox, wrong))
    served = await sandbox.python(SERVE)
    number = int(served.stdout) if served.ok else 8000
    try:
        greeted = await _greeting(sandbox, number)
    except ValueError:
        return
    same("the response at the address from port", greeted, b"hello")


async def _greeting(sandbox: Sandbox, number: int) -> bytes:
    async with sandbox.port(number, timeout_s=10) as address:
        if not isinstance(address, LocalAddress):
            raise AssertionError(f"port: expected a LocalAddress, got {address!r:.300}")
        reader, writer = await asyncio.open_connection(*address)
        with closing(writer):
            return await reader.read()


async def service(sandbox: Sandbox) -> None:
    """Check that an unknown service raises ValueError."""
    try:
        found = sandbox.service("no-such-service")
    except ValueError:
        return
    raise AssertionError(f"an unknown service: expected ValueError, got {found!r:.300}")


async def reset(sandbox: Sandbox) -> None:
    """Check that a reset leaves no file, no name, no process and no branch."""
    await sandbox.write({"a/f": "x"})
    await sandbox.python("import subprocess\nx = subprocess.Popen(['sleep', '73.25'])")
    branch = await sandbox.fork()
    await sandbox.reset()
    same("list after a reset", await sandbox.list(), [])
    holds("a name after a reset", "NameError" in (await sandbox.python("x")).stderr)
    left = await sandbox.exec("cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' ' ' | grep -c '[s]leep 73.25'")
    same("processes after a reset", left.stdout.strip(), "0")
    await raises("a branch after a reset", ClosedError, branch.python("1"))
