"""Limits of the server's own process, which code can set where it sees that process: in an unsafe box, under gVisor."""

import pytest

from agentgym.errors import BoxKilledError
from agentgym.sandboxes.pool import Pool
from agentgym.sandboxes.protocol import Box
from tests.sandboxes.conftest import make

SERVER = "import os, resource\nserver = os.getppid()\n"
LOWER = SERVER + "resource.prlimit(server, resource.RLIMIT_{0})"
BY_ITS_CODE = ["AS, (1 << 20, 1 << 20)", "NOFILE, (3, 3)", "FSIZE, (1000, 1000)"]
SHOW = SERVER + "[resource.prlimit(server, number) for number in range(16)]"


async def limits(box: Box) -> str:
    return (await box.python(SHOW)).stdout


@pytest.mark.parametrize("kind", ["unsafe", pytest.param("runsc", marks=pytest.mark.docker)])
async def test_a_limit_of_the_server_that_code_set_is_what_it_was_at_the_next_call(kind: str) -> None:
    async with make(kind).open(1) as boxes, boxes.lease() as box:
        before = await limits(box)
        await box.python(LOWER.format("FSIZE, (1000, resource.prlimit(server, resource.RLIMIT_FSIZE)[1])"))
        await box.write({"f": bytes(5000)})
        assert len(await box.read("f")) == 5000
        assert await limits(box) == before


@pytest.mark.docker
@pytest.mark.parametrize("lowered", BY_ITS_CODE)
async def test_a_limit_that_code_took_from_the_server_for_good_ends_the_box_by_its_code(lowered: str) -> None:
    async with make("runsc").open(1) as boxes:
        assert isinstance(boxes, Pool)
        async with boxes.lease() as box:
            before = await limits(box)
            await box.python(LOWER.format(lowered))
            assert (await box.exec("echo said")).status == "box_killed"
            with pytest.raises(BoxKilledError):
                await box.write({"f": bytes(5000)})
        async with boxes.lease() as box:
            assert await limits(box) == before
        assert boxes.started == 2


@pytest.mark.docker
async def test_a_limit_that_code_took_from_the_server_is_in_no_later_episode() -> None:
    async with make("runsc").open(1) as boxes:
        assert isinstance(boxes, Pool)
        async with boxes.lease() as box:
            before = await limits(box)
            await box.python(LOWER.format("FSIZE, (1000, 1000)"))
        async with boxes.lease() as box:
            assert await limits(box) == before
            await box.write({"f": bytes(5000)})
        assert (boxes.started, boxes.unclean) == (2, 1)
