"""Effects of this machine's own limits and leftovers on a client."""

import asyncio
import os
import resource
import tempfile
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from agentgym.errors import SandboxError
from agentgym.machine import process_identity as owners
from agentgym.machine.process_identity import new_folder, owner
from agentgym.sandboxes.docker.client import connect
from agentgym.sandboxes.local.local import Process
from tests.sandboxes.conftest import make


def names(folder: Path) -> list[str]:
    return [inside.name for inside in folder.iterdir()]


@pytest.mark.parametrize("name", ["unsafe", "bubblewrap", pytest.param("docker", marks=pytest.mark.docker)])
async def test_a_temporary_folder_may_have_a_long_path(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = make(name)
    long = tmp_path.joinpath(*["x" * 60] * 3)
    long.mkdir(parents=True)
    for folder in (long, *long.parents[:3]):
        folder.chmod(0o755)
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    async with spec.open(1) as sandboxes, sandboxes.lease() as sandbox:
        assert (await sandbox.python("1")).stdout == "1\n"
    assert names(long) == []


@contextmanager
def room_for(free: int) -> Iterator[None]:
    """Let this process open only `free` more files during the block."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(name) for name in names(Path("/proc/self/fd")))
    held: list[int] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 100, before[1]))
    try:
        with suppress(OSError):
            while True:
                held.append(os.dup(0))
        for _ in range(free):
            os.close(held.pop())
        yield
    finally:
        for fd in held:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize("name", ["unsafe", "bubblewrap", pytest.param("docker", marks=pytest.mark.docker)])
async def test_a_process_that_can_open_no_more_files_raises_a_sandbox_error_about_it(name: str) -> None:
    outcomes = []
    async with make(name).open(1) as sandboxes:
        for free in range(60):
            with room_for(free):
                try:
                    async with sandboxes.lease() as sandbox:
                        outcomes.append((await sandbox.python("1")).stdout)
                except SandboxError as error:
                    outcomes.append(str(error))
            if outcomes[-1] == "1\n":
                break
        async with sandboxes.lease() as sandbox:
            assert (await sandbox.python("1")).ok
    assert outcomes[-1] == "1\n"
    assert len(outcomes) > 1
    assert [said for said in outcomes[:-1] if not ("sandbox_lost" in said and "RLIMIT_NOFILE" in said)] == []


async def test_sandboxes_that_start_at_once_take_turns_holding_their_servers_files() -> None:
    count = 12
    async with make("bubblewrap").open(count) as sandboxes:
        with room_for(50 + 3 * count):  # A start needs about 40; a sandbox that waits for its first frame needs 2.
            async with AsyncExitStack() as stack:
                leases = [asyncio.create_task(stack.enter_async_context(sandboxes.lease())) for _ in range(count)]
                for lease in leases:
                    assert (await (await lease).python("1")).stdout == "1\n"


def test_an_engine_over_ssh_is_refused_with_an_alternative() -> None:
    with pytest.raises(SandboxError, match=r"ssh://there: only unix:// and tcp:// .* `ssh -NL 2375:.*tcp://127"):
        connect(host="ssh://there")


def make_deep(folder: Path, levels: int) -> None:
    """Create nested folders, deeper than Python's own removal can handle."""
    here = os.open(folder, os.O_RDONLY)
    for _ in range(levels):
        os.mkdir("d", dir_fd=here)  # The full path would be too long.
        below = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)


async def test_unsafe_sandboxes_sweep_the_folders_of_dead_owners_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    host, boot, namespace, pid, _ = owner().split("/")
    with monkeypatch.context() as dead:
        dead.setattr(owners, "owner", lambda: f"{host}/{boot}/{namespace}/{pid}/1")
        left = new_folder("sandbox")
        (left / "file").touch()
        make_deep(left, 2000)
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(owners, "owner", lambda: f"elsewhere/another-boot/{namespace}/{pid}/1")
        theirs = new_folder("sandbox")
    async with Process(unsafe=True).open(1) as sandboxes, sandboxes.lease():
        assert {name.split("-")[1] for name in names(tmp_path) if name != theirs.name} == {"sandbox", "branches"}
        assert left.name not in names(tmp_path)
    assert names(tmp_path) == [theirs.name]
