"""What code does to hold up its server, or to leave it no room: every call ends, and the episode is scored."""

import asyncio
import io
import os
import signal
import tarfile
from pathlib import Path

import pytest

from agentgym.errors import BoxKilledError
from agentgym.sandboxes.protocol import Box
from agentgym.sandboxes.protocol.arguments import MAX_PATH
from agentgym.sandboxes.remote import process
from agentgym.sandboxes.remote.box import RemoteBox
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
# Of many timers, since one whose signal is still pending when the process is stopped never fires again.
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


async def test_a_path_over_4096_bytes_is_refused_on_both_sides(box: Box, tmp_path: Path) -> None:
    assert isinstance(box, RemoteBox)
    (tmp_path / "f").write_text("x")
    for path in (LONG, "é" * (MAX_PATH // 2) + "f"):
        for call in (
            lambda path: box.read(path),
            lambda path: box.list(path),
            lambda path: box.write({path: "x"}),
            lambda path: box.put(tmp_path, path),
            lambda path: box.get(path, tmp_path / "got"),
            lambda path: box.archive(path),
            lambda path: box.unpack(archive_of("f", 1), path),
        ):
            with pytest.raises(ValueError, match="the limit is 4096"):
                await call(path)
    with pytest.raises(ValueError, match="over 4096 bytes"):
        await box.link.call("list", b"", 10.0, path="d" * (MAX_PATH + 1), timeout_s=10.0)
    with pytest.raises(ValueError, match="too large"):
        await box.link.call("list", b"", 10.0, path=LONG, timeout_s=10.0)
    assert (await box.python("6 * 7")).stdout == "42\n"


async def test_many_long_paths_are_written_at_once(box: Box) -> None:
    folder = "/".join(["\N{SNOWMAN}" * 80] * 15)
    await box.write({f"{folder}/{n}": str(n) for n in range(180)})
    assert len(await box.list(folder)) == 180


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
async def test_a_command_begins_where_code_stops_or_kills_all_that_begins(isolated_box: Box, number: int) -> None:
    await isolated_box.python(WHEN_TOLD.format(signal=int(number)))
    await isolated_box.write({"go": ""})
    result = await isolated_box.exec("echo said", timeout_s=1.0)
    assert result.status in ("ok", "error", "timeout", "killed")
    assert (await isolated_box.python("6 * 7", timeout_s=5.0)).status != "box_killed"
    assert (await isolated_box.python("6 * 7", fresh=True)).stdout == "42\n"


@pytest.mark.parametrize("name", [b"NSpid:\t1 1", b"a\nNSpid:\t1", b") R 1 (x"])
async def test_a_process_named_like_a_line_of_the_kernels_is_forked(box: Box, name: bytes) -> None:
    await box.python(NAMED.format(name=name))
    async with await box.fork() as branch:
        assert (await branch.python("import os\nos._exit(3)")).exit_code == 3
        assert (await branch.python("6 * 7")).stdout == "42\n"


async def test_a_verifier_has_room_in_a_box_that_is_full_of_processes(isolated_box: Box) -> None:
    for _ in range(2):
        await isolated_box.write({"answer.py": "value = 42\n"})
        await isolated_box.python(FULL)
        verdict = await isolated_box.verify(code="def test_it():\n    import answer\n    assert answer.value == 42\n")
        assert verdict.passed, verdict
        await isolated_box.python(FULL)
        assert (await isolated_box.python("import os\nos.system('echo said')", fresh=True)).stdout == "said\n0\n"
        assert (await isolated_box.exec("echo said")).stdout == "said\n"


async def test_a_process_that_a_timer_wakes_during_a_copy_is_killed(isolated_box: Box, tmp_path: Path) -> None:
    for call in (lambda: isolated_box.snapshot(tmp_path / "it.tar"), isolated_box.fork):
        await isolated_box.python(WOKEN)
        try:
            made = await call()
        except ValueError as error:
            assert "woken" in str(error)  # noqa: PT017
        else:
            if made is not None:
                await made.close()
        assert (await isolated_box.python(ALIVE)).stdout == "False\n"
        await isolated_box.snapshot(tmp_path / "again.tar")
    await isolated_box.python(WOKEN)
    assert (await isolated_box.python("import os\nlen(os.listdir())", fresh=True)).stdout == "9\n"
    assert (await isolated_box.python(ALIVE)).stdout == "False\n"


async def test_a_signal_right_after_the_start_reaches_the_program(box: Box) -> None:
    for _ in range(5):
        async with box.start(["sleep", "1000"]) as process:
            await process.kill(signal.SIGTERM)
            assert await process.wait(timeout_s=30) == -signal.SIGTERM


async def test_a_stopped_shell_whose_input_is_full_begins_anew(box: Box) -> None:
    await box.write({"filler.py": FILLER})
    async with box.shell() as shell:
        await shell.run("x=1; python3 filler.py $$ > /dev/null 2>&1 &")
        await box.write({"go": ""})
        assert (await box.python("import os, time\nwhile not os.path.exists('full'): time.sleep(0.001)")).ok
        result = await shell.run("echo ${x-gone}")
        assert (result.stdout, result.state_lost) == ("gone\n", True)


@pytest.mark.parametrize("what", IN_THE_WAY)
async def test_a_branch_that_removed_its_folder_has_an_empty_one(box: Box, tmp_path: Path, what: str) -> None:
    remove = f"import os, shutil\nfolder = os.getcwd()\nshutil.rmtree(folder)\n{IN_THE_WAY[what]}"
    await box.write({"f": "x"})
    async with await box.fork() as branch:
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


async def test_what_a_restored_snapshot_meets_is_said_in_words(isolated_box: Box, tmp_path: Path) -> None:
    (tmp_path / "large.tar").write_bytes(archive_of("large", 200 << 20))
    with pytest.raises(ValueError, match=r"^(No space left on device|File too large)"):
        await isolated_box.restore(tmp_path / "large.tar")


async def test_a_bubblewrap_box_shows_certificates_and_no_private_keys() -> None:
    names = {path.name for path in await asyncio.to_thread(lambda: [*Path("/etc/ssl/certs").glob("*")])}
    async with make("bubblewrap").open(1) as boxes, boxes.lease() as box:
        assert set((await box.exec("ls /etc/ssl")).stdout.split()) <= {"certs", "openssl.cnf"}
        assert set((await box.exec("ls /etc/ssl/certs")).stdout.split()) == names


async def test_a_program_whose_code_holds_up_its_end_costs_the_box_by_its_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "MARGIN_S", 0.0)
    async with make("unsafe").open(1) as boxes, boxes.lease() as box:
        supervisor = int((await box.python("import os; os.getppid()")).stdout)
        async with box.start("sleep 1000", timeout_s=1.0):
            os.kill(supervisor, signal.SIGSTOP)  # As code does it where it can, and a fork bomb by its weight.
        assert (await box.exec("true")).status == "box_killed"
        with pytest.raises(BoxKilledError, match="a program in it did not end"):
            await box.read("f")
