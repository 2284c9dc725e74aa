"""Only the server holds the host's wire, however many files the client has open when it starts a sandbox."""

import subprocess
import sys

import pytest

from agentgym.sandboxes.protocol import Sandbox, SandboxSpec
from agentgym.sandboxes.server_files import image_folder

HOLDS = """
import json, os
def held():
    for name in os.listdir('/proc/self/fd'):
        try: yield int(name), os.readlink(f'/proc/self/fd/{name}').split(':')[0]
        except OSError: pass  # The listing's own.
print(json.dumps(dict(sorted(held()))))
"""
WORKER = '{"0": "/dev/null", "1": "pipe", "2": "pipe", "3": "socket"}\n'


async def worker_holds_its_own_only(sandbox: Sandbox) -> None:
    for fresh in (False, True):
        assert (await sandbox.python(HOLDS, fresh=fresh)).stdout == WORKER
    shell = await sandbox.exec("for n in $(seq 0 1500); do [ -e /proc/$$/fd/$n ] && echo $n; done")
    assert {int(number) for number in shell.stdout.split()} - {255} == {0, 1, 2}  # 255 belongs to bash itself.
    async with await sandbox.fork() as branch:
        assert (await branch.python(HOLDS)).stdout == WORKER


async def test_code_never_holds_the_wire_if_the_client_has_520_open_files(spec: SandboxSpec, many_files: None) -> None:
    async with spec.open(1) as sandboxes:
        async with sandboxes.lease() as sandbox:
            await worker_holds_its_own_only(sandbox)
        async with sandboxes.lease() as sandbox:  # After a reset.
            await worker_holds_its_own_only(sandbox)


def alone(code: str) -> "subprocess.CompletedProcess[str]":
    """Run code in a process that can import the server's modules and has 100 open files above its limit."""
    begin = (
        "import os, resource, sys\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (1000, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))\n"
        "held = [os.open(os.devnull, os.O_RDONLY) for _ in range(600)]\n"
        "os.closerange(3, 500)\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))\n"  # Files above the limit stay open.
        f"sys.path.append({str(image_folder())!r})\n"
        "from server import children\n"
    )
    return subprocess.run([sys.executable, "-c", begin + code], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("kernel", ["has close_range", "has no close_range"])
def test_descriptors_above_the_limit_of_open_files_are_closed_too(kernel: str) -> None:
    without = "children.SYS_CLOSE_RANGE = -1\n" if kernel == "has no close_range" else ""
    done = alone(f"{without}children.keep_only({{0, 1, 2}})\nprint(children.open_descriptors())")
    assert (done.stderr, done.stdout) == ("", "[0, 1, 2]\n")


def test_a_worker_that_holds_an_extra_descriptor_ends_before_any_code_runs() -> None:
    done = alone(
        "children.close_from = lambda first: os.closerange(first, 600)\nchildren.keep_only({0, 1, 2})\nprint(1)"
    )
    assert done.returncode == 70
    assert done.stdout == ""
    assert "are open, which no worker may have" in done.stderr
