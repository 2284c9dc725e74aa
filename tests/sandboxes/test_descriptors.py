"""The host's wire stays the server's alone, however many files the client has open when it starts a box."""

import os
import resource
from collections.abc import Iterator

import pytest

from agentgym.types import Box, Sandbox

MANY = 520
HOLDS = """
import json, os
def held():
    for name in os.listdir('/proc/self/fd'):
        try: yield int(name), os.readlink(f'/proc/self/fd/{name}').split(':')[0]
        except OSError: pass  # The listing's own.
print(json.dumps(dict(sorted(held()))))
"""
WORKER = '{"0": "/dev/null", "1": "pipe", "2": "pipe", "3": "socket"}\n'


@pytest.fixture
def many_files() -> Iterator[None]:
    """As many open files as a client has that holds data, HTTP connections and other boxes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, MANY + 400), hard))
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(MANY)]
    try:
        yield
    finally:
        for fd in held:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def worker_holds_its_own_only(box: Box) -> None:
    for fresh in (False, True):
        assert (await box.python(HOLDS, fresh=fresh)).stdout == WORKER
    shell = await box.exec("for n in $(seq 0 1500); do [ -e /proc/$$/fd/$n ] && echo $n; done")
    assert {int(number) for number in shell.stdout.split()} - {255} == {0, 1, 2}  # 255 is bash's own.
    async with await box.fork() as branch:
        assert (await branch.python(HOLDS)).stdout == WORKER


async def test_code_never_holds_the_wire_where_the_client_has_520_open_files(
    sandbox: Sandbox, many_files: None
) -> None:
    async with sandbox.open(1) as boxes:
        async with boxes.lease() as box:
            await worker_holds_its_own_only(box)
        async with boxes.lease() as box:  # After a reset.
            await worker_holds_its_own_only(box)
