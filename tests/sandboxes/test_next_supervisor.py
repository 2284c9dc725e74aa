"""The supervisor of the next episode waits during one: code can't reach it, and no sandbox depends on it."""

import ast
import asyncio
import os
import signal
import time
from pathlib import Path

import pytest

from agentgym.sandboxes.local.local import why_no_bubblewrap
from tests.sandboxes.conftest import make, wait_for_end

pytestmark = [
    pytest.mark.asyncio,
    pytest.mark.skipif(why_no_bubblewrap() is not None, reason=f"no bubblewrap: {why_no_bubblewrap()}"),
]


def children(pid: int) -> list[int]:
    return [int(child) for path in Path(f"/proc/{pid}/task").glob("*/children") for child in path.read_text().split()]


def servers(pid: int) -> list[int]:
    """Return the servers of sandboxes among the descendants of a process; these are the keepers.

    A process of Python's own, which it keeps after a process pool, is not among them.
    """
    found = []
    for child in children(pid):
        command = Path(f"/proc/{child}/cmdline").read_bytes()
        if b"multiprocessing" not in command:
            is_server = Path(f"/proc/{child}/comm").read_text().startswith("python")
            found += [child] if is_server else servers(child)
    return found


def sockets_of(pid: int) -> set[str]:
    held = [str(fd.readlink()) for fd in Path(f"/proc/{pid}/fd").iterdir()]
    return {name for name in held if name.startswith("socket:")}


async def supervisors(keeper: int) -> list[int]:
    """Return the serving and the waiting supervisor, once both exist."""
    return await asyncio.to_thread(wait_for_two, keeper)


def wait_for_two(keeper: int) -> list[int]:
    end = time.monotonic() + 30
    while len(found := children(keeper)) != 2:
        assert time.monotonic() < end
        time.sleep(0.01)
    return found


async def test_the_waiting_supervisor_serves_the_next_episode() -> None:
    async with make("bubblewrap").open(1) as sandboxes, sandboxes.lease() as sandbox:
        [keeper] = servers(os.getpid())
        now, waiting = await supervisors(keeper)
        await sandbox.reset()
        assert (await sandbox.python("6 * 7")).stdout == "42\n"
        serving, another = await supervisors(keeper)
        assert serving == waiting
        assert another not in (now, waiting)


async def test_no_code_sees_the_waiting_supervisor() -> None:
    seen = "import os\nsorted(int(name) for name in os.listdir('/proc') if name.isdigit())"
    async with make("bubblewrap").open(1) as sandboxes, sandboxes.lease() as sandbox:
        [keeper] = servers(os.getpid())
        for _ in range(2):
            await supervisors(keeper)
            assert (await sandbox.python(seen)).stdout == "[1, 2]\n"
            await sandbox.reset()


async def test_no_code_learns_when_its_supervisor_was_created() -> None:
    find = """
import os, socket
channel = socket.socket(fileno=os.dup(3))
def ask(call, *what):
    try: call(socket.SOL_SOCKET, *what)
    except OSError as error: return error.strerror
ask(channel.getsockopt, 77), ask(channel.setsockopt, 76, 1)
"""
    async with make("bubblewrap").open(1) as sandboxes, sandboxes.lease() as sandbox:
        said = (await sandbox.python(find)).stdout
        assert ast.literal_eval(said) == ("Protocol not available", "Protocol not available")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can look at the descriptors of a server")
async def test_no_code_finds_a_socket_of_the_waiting_supervisor_in_its_network() -> None:
    async with make("bubblewrap").open(1) as sandboxes, sandboxes.lease():
        [keeper] = servers(os.getpid())
        _, waiting = await supervisors(keeper)
        assert sockets_of(waiting) == sockets_of(keeper)  # The sandbox's wire.


async def test_a_supervisor_that_dies_while_it_waits_costs_no_sandbox() -> None:
    async with make("bubblewrap").open(1) as sandboxes:
        for _ in range(2):
            async with sandboxes.lease() as sandbox:
                [keeper] = servers(os.getpid())
                _, waiting = await supervisors(keeper)
                os.kill(waiting, signal.SIGKILL)
                await asyncio.to_thread(wait_for_end, [waiting])
                assert (await sandbox.python("6 * 7")).stdout == "42\n"
        async with sandboxes.lease() as sandbox:
            assert (await sandbox.python("6 * 7")).stdout == "42\n"
            assert servers(os.getpid()) == [keeper]
