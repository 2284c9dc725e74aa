"""One time limit covers all the work of a call, however much code has put into its folder."""

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from agentgym.sandboxes.protocol import Sandbox, SandboxPool
from agentgym.sandboxes.remote.calls import MARGIN_S
from agentgym.sandboxes.remote.sandbox import RemoteSandbox
from agentgym.sandboxes.server_files import image_folder
from tests.sandboxes.conftest import make

pytestmark = pytest.mark.asyncio(loop_scope="module")

FULL = """
import os
try:
    for n in range({0}): os.mknod('x' * 60 + str(n))
except OSError: pass
"""
FOLDERS = """
import os
try:
    for n in range(10**6):
        os.mkdir(str(n))
        for inner in range(700): os.mkdir(f'{n}/' + 'y' * 60 + str(inner))
except OSError: pass
"""
NO_TIME_S = 1e-9


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


async def test_the_time_to_copy_for_a_fresh_cell_counts_toward_its_limit() -> None:
    async with make("bubblewrap").open(1) as sandboxes, sandboxes.lease() as sandbox:
        filled = await sandbox.python(FULL.format(30_000), timeout_s=60.0)
        assert len(await sandbox.list()) == 30_000, filled
        result = await sandbox.python("import time; time.sleep(1000)", fresh=True, timeout_s=3.0)
        assert result.status == "timeout"
        assert result.seconds < 3.0  # The time of the code alone, which started after the copy.


async def test_closing_a_branch_keeps_its_time_limit_and_a_reset_removes_the_rest(
    sandboxes: SandboxPool,
) -> None:
    async with sandboxes.lease() as sandbox:
        branch = await sandbox.fork()
        assert isinstance(branch, RemoteSandbox)
        await branch.write({"f": "x"})
        folder = (await branch.python("import os\nos.getcwd()")).stdout.strip()[1:-1]
        await branch.link.call("end", b"", MARGIN_S, branch=int(Path(folder).name), timeout_s=NO_TIME_S)
        assert (await sandbox.exec(f"cat {folder}/f")).stdout == "x"
    async with sandboxes.lease() as sandbox:
        assert not (await sandbox.exec(f"cat {folder}/f")).ok


async def test_files_that_cannot_all_be_written_in_time_are_refused(sandbox: Sandbox) -> None:
    assert isinstance(sandbox, RemoteSandbox)
    with pytest.raises(TimeoutError, match="it took longer than its time limit"):
        await sandbox.link.call("write", b"x", MARGIN_S, files=[["f", 1, False]], timeout_s=NO_TIME_S)


async def test_a_restore_without_time_to_empty_the_folder_leaves_the_sandbox_usable(
    sandbox: Sandbox, tmp_path: Path
) -> None:
    await sandbox.snapshot(tmp_path / "it.tar")
    with pytest.raises(ValueError, match="it took over 1e-09 s"):
        await sandbox.restore(tmp_path / "it.tar", timeout_s=NO_TIME_S)
    assert (await sandbox.exec("echo said")).stdout == "said\n"


async def test_the_removal_of_a_folder_ends_at_its_deadline(tmp_path: Path) -> None:
    (tmp_path / "f").touch()
    (tmp_path / "d/e").mkdir(parents=True)
    code = "empty_folder(sys.argv[2], float(sys.argv[3]))"
    for deadline, left in (("0", ["d", "f"]), ("inf", [])):
        begin = "import os, sys; os.dup2(os.open('/proc', os.O_PATH), 5); sys.path.append(sys.argv[1])"
        program = f"{begin}; from server.files import empty_folder; {code}"
        words = [sys.executable, "-c", program, str(image_folder()), str(tmp_path), deadline]
        done = await asyncio.to_thread(subprocess.run, words, capture_output=True, text=True, check=False)
        assert ("TimeoutError" in done.stderr) == bool(left)
        assert names_in(tmp_path) == left


@pytest.mark.slow
async def test_a_folder_full_of_inodes_costs_no_sandbox(tmp_path: Path) -> None:
    async with make("bubblewrap", disk_mb=1024).open(1) as sandboxes, sandboxes.lease() as sandbox:
        await sandbox.snapshot(tmp_path / "it.tar")
        await sandbox.write({"solution.py": "import time\ntime.sleep(1000)\n"})
        await sandbox.python(FULL.format(10**6), timeout_s=300.0)
        verdict = await sandbox.verify(code="def test_a():\n    import solution\n", timeout_s=10.0)
        assert not verdict.ok
        with pytest.raises(ValueError, match=r"it took over 0\.1 s"):
            await sandbox.restore(tmp_path / "it.tar", timeout_s=0.1)
        async with await sandbox.fork(timeout_s=60.0) as branch:
            await branch.python(FOLDERS, timeout_s=300.0)
        assert (await sandbox.exec("echo said")).stdout == "said\n"
