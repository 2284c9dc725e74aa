"""Space for files and memory: an error names the setting to raise, and files take no memory from programs."""

import os
from pathlib import Path

import pytest

import agentgym as ag
from agentgym.errors import SandboxError
from agentgym.sandboxes.docker import settings
from agentgym.sandboxes.docker.settings import DockerSettings
from agentgym.sandboxes.protocol import Sandbox
from tests.sandboxes.conftest import make

pytestmark = pytest.mark.asyncio(loop_scope="module")
MB = 1 << 20
HOLD = "def test_it():\n    bytearray(b'x') * (4 << 30)\n"


async def fill(sandbox: Sandbox, megabytes: int) -> None:
    """Put a file of that size into the working folder, as an author's `setup` does."""
    assert (await sandbox.exec(f"head -c {megabytes}M /dev/zero > big", timeout_s=60)).ok
    await sandbox.write({"solution.py": "def add(a, b):\n    return a + b\n"})


@pytest.mark.docker
async def test_files_take_nothing_from_the_memory_of_programs() -> None:
    async with make("docker", disk_mb=160, memory_mb=48).open(1) as pool, pool.lease() as sandbox:
        await fill(sandbox, 120)
        async with await sandbox.fork(timeout_s=60) as branch:
            verdict = await branch.verify(code="from solution import add", expect={"add(2, 3)": 5}, timeout_s=60)
    assert verdict.cases == {"add(2, 3)": None}


@pytest.mark.docker
async def test_a_copy_that_lacks_memory_is_reported_with_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "FOLDERS", 1)
    async with make("docker", disk_mb=160, memory_mb=48).open(1) as pool, pool.lease() as sandbox:
        await fill(sandbox, 130)
        verdict = await sandbox.verify(code="from solution import add", expect={"add(2, 3)": 5}, timeout_s=60)
        with pytest.raises(ValueError, match=r"the working folder cannot be copied: oom .*memory_mb"):
            await sandbox.fork(timeout_s=60)
    why = str(verdict.cases["add(2, 3)"])
    assert verdict.result.status == "oom"
    assert "oom after" in why
    assert "memory_mb" in why


async def test_a_case_that_used_up_its_memory_names_the_setting(isolated_sandbox: Sandbox) -> None:
    verdict = await isolated_sandbox.verify(code=HOLD, timeout_s=60)
    assert "memory_mb" in str(verdict.cases["test_it"])


@pytest.mark.parametrize("size", [8 * MB, 20 * MB], ids=["in one frame", "in pieces"])
@pytest.mark.parametrize("kind", ["bubblewrap", pytest.param("docker", marks=pytest.mark.docker)])
async def test_a_file_that_does_not_fit_is_reported_with_the_setting(kind: str, size: int, tmp_path: Path) -> None:
    (tmp_path / "big").write_bytes(os.urandom(size))
    async with make(kind, disk_mb=4).open(1) as pool, pool.lease() as sandbox:
        with pytest.raises(OSError, match=r"disk_mb.*: 'data/big'"):
            await sandbox.put(tmp_path / "big", "data/")
        with pytest.raises(OSError, match=r"disk_mb.*one of 2 files, a to b"):
            await sandbox.write({"a": bytes(3 * MB), "b": bytes(3 * MB)})


async def test_hidden_files_that_do_not_fit_name_the_setting() -> None:
    async with make("bubblewrap", disk_mb=2).open(1) as pool, pool.lease() as sandbox:
        await sandbox.exec("head -c 3M /dev/zero > full")
        verdict = await sandbox.verify(command="python3 hidden.py", files={"hidden.py": "pass"})
    assert "disk_mb" in str(verdict.cases)


@pytest.mark.docker
async def test_more_memory_than_the_machine_has_is_refused_by_name() -> None:
    spec = make("docker", disk_mb=100_000_000)
    with pytest.raises(SandboxError, match=r"memory_mb, disk_mb: a sandbox may use .* 400000512 MB, but the machine"):
        async with spec.open(1):
            pass


async def test_a_container_has_memory_for_files_in_addition_to_its_programs() -> None:
    assert DockerSettings(memory_mb=500, disk_mb=100).container_mb == 900
    assert DockerSettings(memory_mb=500, disk_mb=100, runtime="runsc").container_mb == 1156
    assert ag.Docker().container_mb == 512 + 4 * 64
