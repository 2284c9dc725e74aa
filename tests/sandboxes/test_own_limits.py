"""Server process limits that code can change if it sees that process: in an unsafe sandbox or under gVisor."""

import pytest

from agentgym.errors import SandboxKilledError
from agentgym.sandboxes.pool import Pool
from agentgym.sandboxes.protocol import Sandbox
from tests.sandboxes.conftest import make

SERVER = "import os, resource\nserver = os.getppid()\n"
LOWER = SERVER + "resource.prlimit(server, resource.RLIMIT_{0})"
BY_ITS_CODE = ["AS, (1 << 20, 1 << 20)", "NOFILE, (3, 3)", "FSIZE, (1000, 1000)"]
SHOW = SERVER + "[resource.prlimit(server, number) for number in range(16)]"


async def limits(sandbox: Sandbox) -> str:
    return (await sandbox.python(SHOW)).stdout


@pytest.mark.parametrize("kind", ["unsafe", pytest.param("runsc", marks=pytest.mark.docker)])
async def test_a_server_limit_that_code_lowered_is_restored_at_the_next_call(kind: str) -> None:
    async with make(kind).open(1) as sandboxes, sandboxes.lease() as sandbox:
        before = await limits(sandbox)
        await sandbox.python(LOWER.format("FSIZE, (1000, resource.prlimit(server, resource.RLIMIT_FSIZE)[1])"))
        await sandbox.write({"f": bytes(5000)})
        assert len(await sandbox.read("f")) == 5000
        assert await limits(sandbox) == before


@pytest.mark.docker
@pytest.mark.parametrize("lowered", BY_ITS_CODE)
async def test_a_server_limit_that_cannot_be_restored_ends_the_sandbox_by_its_code(lowered: str) -> None:
    async with make("runsc").open(1) as sandboxes:
        assert isinstance(sandboxes, Pool)
        async with sandboxes.lease() as sandbox:
            before = await limits(sandbox)
            await sandbox.python(LOWER.format(lowered))
            assert (await sandbox.exec("echo said")).status == "sandbox_killed"
            with pytest.raises(SandboxKilledError):
                await sandbox.write({"f": bytes(5000)})
        async with sandboxes.lease() as sandbox:
            assert await limits(sandbox) == before
        assert sandboxes.started == 2


@pytest.mark.docker
async def test_a_server_limit_that_code_lowered_is_in_no_later_episode() -> None:
    async with make("runsc").open(1) as sandboxes:
        assert isinstance(sandboxes, Pool)
        async with sandboxes.lease() as sandbox:
            before = await limits(sandbox)
            await sandbox.python(LOWER.format("FSIZE, (1000, 1000)"))
        async with sandboxes.lease() as sandbox:
            assert await limits(sandbox) == before
            await sandbox.write({"f": bytes(5000)})
        assert (sandboxes.started, sandboxes.unclean) == (2, 1)
