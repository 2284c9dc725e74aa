"""Processes that ended in a sandbox are collected, and the collector wakes only if there is something to collect."""

import os
from pathlib import Path

import pytest

from tests.sandboxes.conftest import below, make

LEAVES_ZOMBIES = """
import os
for _ in range(20):
    if os.fork() == 0:
        if not (inner := os.fork()):
            os._exit(0)
        os.waitid(os.P_PID, inner, os.WEXITED | os.WNOWAIT)  # Dead, and left to whoever is its parent next.
        os._exit(0)
    os.wait()
"""
ZOMBIES = "import os; sum(' Z ' in open(f'/proc/{n}/stat').read() for n in os.listdir('/proc') if n.isdigit())"


def depth(pid: int) -> int:
    """Return the depth of the process's PID namespace if it is that namespace's first process, else 0."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:  # It has ended in the meantime.
        return 0
    line = status.partition("NSpid:")[2].splitlines()[0].split()
    return len(line) if line[-1] == "1" else 0


def wakings(pid: int) -> int:
    return int(Path(f"/proc/{pid}/status").read_text().partition("\nvoluntary_ctxt_switches:")[2].split()[0])


@pytest.mark.skipif(
    not Path(f"/proc/self/task/{os.getpid()}/children").exists(), reason="this kernel does not list children"
)
async def test_a_call_that_leaves_no_process_wakes_only_its_worker_and_supervisor() -> None:
    async with make("bubblewrap").open(1) as sandboxes, sandboxes.lease() as sandbox:
        await sandbox.python("1")
        first = max(below(os.getpid()), key=depth)
        assert depth(first) > 1
        before = wakings(first)
        for _ in range(20):
            await sandbox.python("1")
        assert wakings(first) - before <= 1
        for _ in range(5):  # Two that end at once may cause one wake-up.
            await sandbox.python(LEAVES_ZOMBIES)
        await sandbox.python("1")
        assert wakings(first) - before > 1


async def test_dead_processes_of_a_call_are_collected_at_its_end() -> None:
    async with make("bubblewrap").open(1) as sandboxes, sandboxes.lease() as sandbox:
        await sandbox.python(LEAVES_ZOMBIES)
        assert (await sandbox.python(ZOMBIES)).stdout == "0\n"
