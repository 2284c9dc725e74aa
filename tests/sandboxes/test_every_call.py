"""Every call ends in a documented status or exception, whatever state code leaves its sandbox in."""

import io
import tarfile
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import pytest

from agentgym.errors import SandboxKilledError
from agentgym.sandboxes.protocol import Branch, Sandbox
from agentgym.sandboxes.remote.sandbox import RemoteSandbox
from tests.sandboxes.conftest import make

DOCUMENTED = (FileNotFoundError, ValueError, TimeoutError, SandboxKilledError)
"""The documented errors of calls that have no status."""
DAEMON = """
import os
if os.fork() == 0:
    os.setsid()
    while True:
        try: os.{does}
        except OSError: pass"""
STATES = {
    "stops every new process": DAEMON.format(does="kill(-1, 19)"),
    "kills every new process": DAEMON.format(does="kill(-1, 9)"),
    "a fork bomb": DAEMON.format(does="fork()"),
    "full of threads": """
import threading, time
try:
    while True: threading.Thread(target=time.sleep, args=(1000,)).start()
except RuntimeError: pass""",
    "full folders": """
import os
for folder in ('/tmp', '/branches', '/dev/shm'):
    try:
        for n in range(10**6): os.mknod(f'{folder}/{n}')
    except OSError: pass
    try: open(folder + '/full', 'wb').write(bytes(300 << 20))
    except OSError: pass""",
    "locked folders": """
import os
os.makedirs('a/b', exist_ok=True)
for path in ('a', '.', '/branches'):
    try: os.chmod(path, 0)
    except OSError: pass""",
    "a deep folder": """
import os
here = os.getcwd()
try:
    for n in range(3000): os.mkdir('d' * 100); os.chdir('d' * 100)
except OSError: pass
os.chdir(here)""",
    "names that are not text": r"for n in (b'\xff', b'a\nb', b'\xed\xa0\x80', b'-rf'): open(n, 'w').close()",
    "no limits left": """
import resource
for what in range(16):
    try: resource.setrlimit(what, (0, 0))
    except (OSError, ValueError): pass""",
    "files under lease": """
import fcntl, signal
signal.signal(signal.SIGIO, signal.SIG_IGN)
for name, kind in (('f', fcntl.F_RDLCK), ('g', fcntl.F_WRLCK)):
    open(name, 'w').close()
    fcntl.fcntl(open(name, 'r' if kind == fcntl.F_RDLCK else 'r+'), fcntl.F_SETLEASE, kind)""",
    "files that change": """
import os
if os.fork() == 0:
    os.setsid()
    while True:
        try:
            os.mkdir('v'); os.rmdir('v')
            os.symlink('/usr', 'v'); os.unlink('v')
            open('v', 'w').close(); os.unlink('v')
        except OSError: pass""",
}


def small_archive() -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("q/w"))
    return out.getvalue()


async def in_a_shell(sandbox: Sandbox | Branch) -> None:
    async with sandbox.shell() as shell:
        await shell.run("kill -STOP $$", timeout_s=0.5)


async def in_the_background(sandbox: Sandbox | Branch) -> None:
    async with sandbox.start("sleep 1000") as process:
        await process.kill()


async def in_a_branch(sandbox: Sandbox) -> None:
    async with await sandbox.fork() as branch:
        await branch.python("1", timeout_s=1.0)


def calls(sandbox: Sandbox, folder: Path) -> list[Callable[[], Awaitable[object]]]:
    (folder / "small.tar").write_bytes(small_archive())
    return [
        lambda: sandbox.read("f"),
        lambda: sandbox.list(),
        lambda: sandbox.write({"new/f": "x"}),
        lambda: in_a_shell(sandbox),
        lambda: in_the_background(sandbox),
        lambda: in_a_branch(sandbox),
        lambda: sandbox.archive(),
        lambda: sandbox.unpack(small_archive()),
        lambda: sandbox.snapshot(folder / "it.tar"),
        lambda: sandbox.restore(folder / "small.tar"),
        lambda: sandbox.get(".", folder / "got"),
        lambda: sandbox.put(folder / "small.tar"),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("kind", ["bubblewrap", pytest.param("docker", marks=[pytest.mark.docker, pytest.mark.proof])])
async def test_every_call_ends_as_documented_whatever_state_the_sandbox_is_in(
    kind: str, state: str, tmp_path: Path
) -> None:
    async with make(kind).open(1) as sandboxes, sandboxes.lease() as sandbox:
        for call in calls(sandbox, tmp_path):
            await sandbox.python(STATES[state], timeout_s=2.0)
            with suppress(*DOCUMENTED):
                await call()
            await sandbox.exec("echo said", timeout_s=2.0)
            await sandbox.verify(command="true", timeout_s=5.0)
        assert isinstance(sandbox, RemoteSandbox)
        assert sandbox.broken is None or (await sandbox.python("1")).status == "sandbox_killed"
