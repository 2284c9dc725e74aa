"""What has ended in a sandbox is collected, and who collects it is asked only where there is something."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sandboxes.conftest import make

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


def descendants(pid: int) -> Iterator[int]:
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            yield int(child)
            yield from descendants(int(child))


def depth(pid: int) -> int:
    """In how many namespaces of processes it is, and whether it is the first one of the last."""
    line = Path(f"/proc/{pid}/status").read_text().partition("NSpid:")[2].splitlines()[0].split()
    return len(line) if line[-1] == "1" else 0


def wakings(pid: int) -> int:
    return int(Path(f"/proc/{pid}/status").read_text().partition("\nvoluntary_ctxt_switches:")[2].split()[0])


@pytest.mark.skipif(
    not Path(f"/proc/self/task/{os.getpid()}/children").exists(), reason="this kernel does not list children"
)
async def test_a_call_that_leaves_no_process_wakes_nobody_but_its_worker_and_supervisor() -> None:
    async with make("bubblewrap").open(1) as sandboxes, sandboxes.lease() as sandbox:
        await sandbox.python("1")
        first = max(descendants(os.getpid()), key=depth)
        assert depth(first) > 1
        before = wakings(first)
        for _ in range(20):
            await sandbox.python("1")
        assert wakings(first) - before <= 1
        for _ in range(5):  # Two that end at once may wake it once.
            await sandbox.python(LEAVES_ZOMBIES)
        await sandbox.python("1")
        assert wakings(first) - before > 1


async def test_what_a_call_left_dead_is_collected_at_its_end() -> None:
    async with make("bubblewrap").open(1) as sandboxes, sandboxes.lease() as sandbox:
        await sandbox.python(LEAVES_ZOMBIES)
        assert (await sandbox.python(ZOMBIES)).stdout == "0\n"
