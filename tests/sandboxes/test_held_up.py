"""Code that blocks its server or leaves it no resources: every call still ends, and the episode is scored."""

import asyncio
import io
import os
import signal
import tarfile
from pathlib import Path

import pytest

from agentgym.errors import SandboxKilledError
from agentgym.sandboxes.protocol import Sandbox
from agentgym.sandboxes.protocol.arguments import MAX_PATH
from agentgym.sandboxes.remote import process
from agentgym.sandboxes.remote.sandbox import RemoteSandbox
from tests.sandboxes.conftest import make

pytestmark = pytest.mark.asyncio(loop_scope="module")

LONG = "d/" * 700_000 + "f"
WHEN_TOLD = """
import os
if os.fork() == 0:
    os.setsid()
    while not os.path.exists('go'): pass
    while True:
        try: os.kill(-1, {signal})
        except OSError: pass
"""
NAMED = "import ctypes\nctypes.CDLL(None).prctl(15, {name!r}, 0, 0, 0)"
FULL = """
import os, time
for _ in range(5000):
    try:
        if os.fork() == 0: time.sleep(1000)
    except OSError: break
"""
# Many timers, since one whose signal is still pending when the process is stopped never fires again.
WOKEN = """
import ctypes, os, signal, struct, time
if os.path.exists("pid"): os.unlink("pid")
if os.fork() == 0:
    os.setsid()
    signal.signal(signal.SIGCONT, lambda *_: None)
    libc, number = ctypes.CDLL(None), ctypes.c_void_p()
    for n in range(1, 6):
        libc.timer_create(1, ctypes.create_string_buffer(struct.pack('Pii', 0, 18, 0), 64), ctypes.byref(number))
        libc.timer_settime(number, 0, struct.pack('4q', 0, 100_000_000, 0, n * 20_000_000), None)
    open('pid', 'w').write(str(os.getpid()))
    while True: time.sleep(60)
while not os.path.exists('pid'): pass
for n in range(8): open(f'part{n}', 'wb').write(os.urandom(4 << 20))
"""
ALIVE = """
import time
def alive():
    try: return ') Z ' not in open(f"/proc/{open('pid').read()}/stat").read()
    except OSError: return False
while alive(): time.sleep(0.001)  # one that is killed ends when a processor is free
alive()
"""
FILLER = """
import os, sys, time
shell = int(sys.argv[1])
while not os.path.exists('go'): time.sleep(0.001)
os.kill(shell, 19)
end = os.open(f'/proc/{shell}/fd/0', os.O_WRONLY | os.O_NONBLOCK)
try:
    while True: os.write(end, b'\\n' * 4096)
except BlockingIOError: pass
open('full', 'w').close()
"""
IN_THE_WAY = {
    "nothing": "",
    "a link": "os.symlink('/usr', folder)",
    "a file": "open(folder, 'w').close()",
    "a pipe": "os.mkfifo(folder)",
}


def archive_of(name: str, size: int) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        entry = tarfile.TarInfo(name)
        entry.size = size
        archive.addfile(entry, io.BytesIO(bytes(size)))
    return out.getvalue()


async def test_a_path_over_4096_bytes_is_refused_on_both_sides(sandbox: Sandbox, tmp_path: Path) -> None:
    assert isinstance(sandbox, RemoteSandbox)
    (tmp_path / "f").write_text("x")
    for path in (LONG, "é" * (MAX_PATH // 2) + "f"):
        for call in (
            lambda path: sandbox.read(path),
            lambda path: sandbox.list(path),
            lambda path: sandbox.write({path: "x"}),
            lambda path: sandbox.put(tmp_path, path),
            lambda path: sandbox.get(path, tmp_path / "got"),
            lambda path: sandbox.archive(path),
            lambda path: sandbox.unpack(archive_of("f", 1), path),
        ):
            with pytest.raises(ValueError, match="the limit is 4096"):
                await call(path)
    with pytest.raises(ValueError, match="over 4096 bytes"):
        await sandbox.link.call("list", b"", 10.0, path="d" * (MAX_PATH + 1), timeout_s=10.0)
    with pytest.raises(ValueError, match="too large"):
        await sandbox.link.call("list", b"", 10.0, path=LONG, timeout_s=10.0)
    assert (await sandbox.python("6 * 7")).stdout == "42\n"


async def test_many_long_paths_are_written_at_once(sandbox: Sandbox) -> None:
    folder = "/".join(["\N{SNOWMAN}" * 80] * 15)
    await sandbox.write({f"{folder}/{n}": str(n) for n in range(180)})
    assert len(await sandbox.list(folder)) == 180


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
async def test_a_command_starts_even_if_code_stops_or_kills_every_new_process(
    isolated_sandbox: Sandbox, number: int
) -> None:
    await isolated_sandbox.python(WHEN_TOLD.format(signal=int(number)))
    await isolated_sandbox.write({"go": ""})
    result = await isolated_sandbox.exec("echo said", timeout_s=1.0)
    assert result.status in ("ok", "error", "timeout", "killed")
    assert (await isolated_sandbox.python("6 * 7", timeout_s=5.0)).status != "sandbox_killed"
    assert (await isolated_sandbox.python("6 * 7", fresh=True)).stdout == "42\n"


@pytest.mark.parametrize("name", [b"NSpid:\t1 1", b"a\nNSpid:\t1", b") R 1 (x"])
async def test_a_process_named_like_a_line_of_proc_status_can_be_forked(sandbox: Sandbox, name: bytes) -> None:
    await sandbox.python(NAMED.format(name=name))
    async with await sandbox.fork() as branch:
        assert (await branch.python("import os\nos._exit(3)")).exit_code == 3
        assert (await branch.python("6 * 7")).stdout == "42\n"


async def test_a_verifier_has_room_in_a_sandbox_that_is_full_of_processes(isolated_sandbox: Sandbox) -> None:
    for _ in range(2):
        await isolated_sandbox.write({"answer.py": "value = 42\n"})
        await isolated_sandbox.python(FULL)
        verdict = await isolated_sandbox.verify(
            code="def test_it():\n    import answer\n    assert answer.value == 42\n"
        )
        assert verdict.passed, verdict
        await isolated_sandbox.python(FULL)
        assert (await isolated_sandbox.python("import os\nos.system('echo said')", fresh=True)).stdout == "said\n0\n"
        assert (await isolated_sandbox.exec("echo said")).stdout == "said\n"


async def test_a_process_that_a_timer_wakes_during_a_copy_is_killed(isolated_sandbox: Sandbox, tmp_path: Path) -> None:
    for call in (lambda: isolated_sandbox.snapshot(tmp_path / "it.tar"), isolated_sandbox.fork):
        await isolated_sandbox.python(WOKEN)
        try:
            made = await call()
        except ValueError as error:
            assert "woken" in str(error)  # noqa: PT017
        else:
            if made is not None:
                await made.close()
        assert (await isolated_sandbox.python(ALIVE)).stdout == "False\n"
        await isolated_sandbox.snapshot(tmp_path / "again.tar")
    await isolated_sandbox.python(WOKEN)
    assert (await isolated_sandbox.python("import os\nlen(os.listdir())", fresh=True)).stdout == "9\n"
    assert (await isolated_sandbox.python(ALIVE)).stdout == "False\n"


async def test_a_signal_right_after_the_start_reaches_the_program(sandbox: Sandbox) -> None:
    for _ in range(5):
        async with sandbox.start(["sleep", "1000"]) as process:
            await process.kill(signal.SIGTERM)
            assert await process.wait(timeout_s=30) == -signal.SIGTERM


async def test_a_stopped_shell_whose_input_is_full_restarts(sandbox: Sandbox) -> None:
    await sandbox.write({"filler.py": FILLER})
    async with sandbox.shell() as shell:
        await shell.run("x=1; python3 filler.py $$ > /dev/null 2>&1 &")
        await sandbox.write({"go": ""})
        assert (await sandbox.python("import os, time\nwhile not os.path.exists('full'): time.sleep(0.001)")).ok
        result = await shell.run("echo ${x-gone}")
        assert (result.stdout, result.state_lost) == ("gone\n", True)


@pytest.mark.parametrize("what", IN_THE_WAY)
async def test_a_branch_that_removed_its_folder_gets_an_empty_one(sandbox: Sandbox, tmp_path: Path, what: str) -> None:
    remove = f"import os, shutil\nfolder = os.getcwd()\nshutil.rmtree(folder)\n{IN_THE_WAY[what]}"
    await sandbox.write({"f": "x"})
    async with await sandbox.fork() as branch:
        for call in (
            lambda: branch.list(),
            lambda: branch.python("import os\nos.listdir()", fresh=True),
            lambda: branch.verify(command="test ! -e f"),
            lambda: branch.exec("ls"),
            lambda: branch.snapshot(tmp_path / "it.tar"),
        ):
            await branch.write({"f": "x"})
            await branch.python(f"import os\nos.chdir({(await branch.exec('pwd')).stdout.strip()!r})")
            assert (await branch.python(remove)).status == "ok"
            said = await call()
            assert getattr(said, "stdout", "") in ("", "[]\n")
        await branch.python(
            "import os\nos.chdir('/')\n"
            + remove.replace("os.getcwd()", repr((await branch.exec("pwd")).stdout.strip()))
        )
        async with await branch.fork() as inner:
            assert await inner.list() == []


async def test_a_restored_snapshot_that_does_not_fit_raises_a_readable_error(
    isolated_sandbox: Sandbox, tmp_path: Path
) -> None:
    (tmp_path / "large.tar").write_bytes(archive_of("large", 200 << 20))
    with pytest.raises(ValueError, match=r"^(No space left on device|File too large)"):
        await isolated_sandbox.restore(tmp_path / "large.tar")


async def test_a_bubblewrap_sandbox_shows_certificates_and_no_private_keys() -> None:
    names = {path.name for path in await asyncio.to_thread(lambda: [*Path("/etc/ssl/certs").glob("*")])}
    async with make("bubblewrap").open(1) as sandboxes, sandboxes.lease() as sandbox:
        assert set((await sandbox.exec("ls /etc/ssl")).stdout.split()) <= {"certs", "openssl.cnf"}
        assert set((await sandbox.exec("ls /etc/ssl/certs")).stdout.split()) == names


async def test_a_program_whose_code_delays_its_end_ends_the_sandbox_as_killed_by_its_code(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(process, "MARGIN_S", 0.0)
    async with make("unsafe").open(1) as sandboxes, sandboxes.lease() as sandbox:
        supervisor = int((await sandbox.python("import os; os.getppid()")).stdout)
        async with sandbox.start("sleep 1000", timeout_s=1.0):
            os.kill(supervisor, signal.SIGSTOP)  # As code does if it can, or a fork bomb by its load.
        assert (await sandbox.exec("true")).status == "sandbox_killed"
        with pytest.raises(SandboxKilledError, match="a program in it did not end"):
            await sandbox.read("f")
