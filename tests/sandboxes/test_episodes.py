"""Nothing carries over between episodes or from a session to a verifier; a sandbox that its code ended is a result."""

import ast
import asyncio
import logging
import os
import shutil
import tempfile
import urllib.request
from collections.abc import AsyncIterator, Collection
from contextlib import AsyncExitStack, suppress
from pathlib import Path

import pytest
import pytest_asyncio

import agentgym as ag
from agentgym.errors import SandboxError, SandboxKilledError
from agentgym.sandboxes.docker.settings import DockerSettings, sandbox_user
from agentgym.sandboxes.local import local
from agentgym.sandboxes.local.local import Bubblewrap, Process
from agentgym.sandboxes.protocol import Sandbox, SandboxPool
from agentgym.sandboxes.remote import link
from agentgym.sandboxes.remote.sandbox import RemoteSandbox
from agentgym.sandboxes.server_files import SANDBOX_USERS, arena
from agentgym.testing import Scripted, call
from tests.sandboxes.conftest import as_user_without_rights, containers_of, make

KINDS: list[object] = [
    "unsafe",
    "bubblewrap",
    pytest.param("docker", marks=pytest.mark.docker),
    pytest.param("runsc", marks=[pytest.mark.docker, pytest.mark.slow]),
]
ISOLATED = KINDS[1:]
PLACED = KINDS[1:3]
"""Kinds of sandboxes in which each episode has its own namespaces."""

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool(request: pytest.FixtureRequest) -> AsyncIterator[SandboxPool]:
    async with make(request.param).open(2) as sandboxes:
        yield sandboxes


def of(kinds: list[object]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("pool", kinds, indirect=True)


SCAN = """
import re
found = set()
pattern = re.compile(('can' + 'ary').encode() + rb'[a-z]{4}X[0-9]{4}')
for line in open('/proc/self/maps'):
    span, mode = line.split()[:2]
    if mode.startswith('rw'):
        start, end = (int(x, 16) for x in span.split('-'))
        with open('/proc/self/mem', 'rb', 0) as memory:
            memory.seek(start)
            try: found |= set(pattern.findall(memory.read(end - start)))
            except OSError: pass
print(sorted(found))
"""


async def say_names(sandbox: Sandbox, number: int) -> None:
    await sandbox.write({f"canarywritX{number:04d}.py": f"canarycontX{number:04d}"})
    await sandbox.exec(f"echo canaryexecX{number:04d} > /dev/null; mkdir canarylistX{number:04d}")
    await sandbox.python(
        f"'canarycodeX{number:04d}'", functions={f"canaryfuncX{number:04d}": lambda: 0}, fresh=number == 1
    )
    with pytest.raises(FileNotFoundError):
        await sandbox.read(f"canaryreadX{number:04d}")
    await sandbox.list()


@of(KINDS)
async def test_no_name_of_an_earlier_episode_is_in_the_memory_of_the_next(pool: SandboxPool) -> None:
    async with pool.lease() as sandbox:
        for number in range(3):
            await say_names(sandbox, number)
        await sandbox.reset()
        assert (await sandbox.python(SCAN)).stdout == "[]\n"


@of(PLACED)
async def test_no_kernel_counter_tells_the_next_episode_anything(pool: SandboxPool) -> None:
    count = """
import ctypes, os
open('f', 'w').close()
shm = ctypes.CDLL(None).shmget(0, 4096, 0o600)
(os.stat('f').st_ino, os.getpid(), os.posix_spawn('/bin/true', ['true'], {}), shm)
"""
    busy = """
import os
for n in range(90):
    open(str(n), 'w').close()
    if not os.fork(): os._exit(0)
    os.wait()
"""
    async with pool.lease() as sandbox:
        await sandbox.reset()
        quiet = (await sandbox.python(count)).stdout
        await sandbox.python(busy)
        await sandbox.reset()
        assert (await sandbox.python(count)).stdout == quiet
        assert (await sandbox.exec("ls /sys/fs/cgroup 2>/dev/null")).stdout == ""


@of(PLACED)
async def test_flags_of_the_folders_end_with_their_episode(pool: SandboxPool) -> None:
    flags = """
import fcntl, os, struct
def flags(path, value=None):
    fd = os.open(path, os.O_RDONLY)
    try:
        if value is not None: fcntl.ioctl(fd, 0x40086602, struct.pack('l', value))
        return struct.unpack('l', fcntl.ioctl(fd, 0x80086601, bytes(8)))[0]
    except OSError as error: return error.errno
    finally: os.close(fd)
places = ['/tmp', '/dev/shm', '/branches']
"""
    async with pool.lease() as sandbox:
        before = (await sandbox.python(flags + "[flags(p) for p in places]")).stdout
        await sandbox.python(flags + "[flags(p, 0x40 | 0x80) for p in places]")
        await sandbox.reset()
        assert (await sandbox.python(flags + "[flags(p) for p in places]")).stdout == before


@of(PLACED)
async def test_things_in_the_way_of_a_wipe_and_very_many_files_do_not_fail_a_reset(pool: SandboxPool) -> None:
    async with pool.lease() as sandbox:
        await sandbox.python(
            "import os\nos.makedirs('/tmp/.lifted-1-1/d')\nfor n in range(8000): os.mknod(f'/tmp/{n}')"
        )
        await sandbox.reset()
        assert await sandbox.list() == []


@of(PLACED)
async def test_inodes_and_folders_in_memory_are_bounded(pool: SandboxPool) -> None:
    fill = """
import os
n = 0
try:
    while True: os.mknod(f'/tmp/{n}'); n += 1
except OSError as error: print(error.errno, n < 70_000)
"""
    async with pool.lease() as sandbox:
        assert (await sandbox.python(fill, timeout_s=60.0)).stdout == "28 True\n"
        assert (await sandbox.exec("echo 1")).stdout == "1\n"
        assert (await sandbox.python("6 * 7", fresh=True, timeout_s=60.0)).stdout == "42\n"


TICKING = """
import ctypes, os, signal, time
libc = ctypes.CDLL(None, use_errno=True)
if os.fork() == 0:
    os.setsid()
    signal.signal(signal.SIGCONT, lambda *_: None)
    class sigevent(ctypes.Structure):
        _fields_ = [('value', ctypes.c_void_p), ('signo', ctypes.c_int), ('notify', ctypes.c_int)]
        _fields_ += [('pad', ctypes.c_byte * 48)]
    class itimerspec(ctypes.Structure):
        _fields_ = [(name, ctypes.c_long) for name in ('is_', 'ins', 'vs', 'vns')]
    for k in range(500):
        event, timer = sigevent(None, signal.SIGCONT, 0), ctypes.c_void_p()
        libc.timer_create(1, ctypes.byref(event), ctypes.byref(timer))
        at = 0.02 * (k + 1)
        libc.timer_settime(timer, 0, ctypes.byref(itimerspec(0, 0, int(at), int(at % 1 * 1e9))), None)
    n = 0
    while True:
        n += 1
        for pid in map(int, filter(str.isdigit, os.listdir('/proc'))):
            if pid not in (1, os.getpid(), os.getppid()):
                try: os.kill(pid, 9)
                except OSError: pass
        with open('solution.py', 'w') as file: file.write(f'ticks = {n}')
while not os.path.exists('solution.py'): time.sleep(0.01)
"""


@of(PLACED)
async def test_a_verifier_is_out_of_reach_of_a_process_that_cannot_be_stopped(pool: SandboxPool) -> None:
    watch = """
import time
seen = set()
for _ in range(30):
    seen.add(open('solution.py').read())
    time.sleep(0.02)
len(seen)
"""
    async with pool.lease() as sandbox:
        await sandbox.python(TICKING)
        said = await sandbox.python(watch, fresh=True, timeout_s=20.0)
        assert (said.status, said.stdout, said.stderr) == ("ok", "1\n", "")


@of(PLACED)
async def test_a_verifier_tells_the_session_nothing_through_a_socket_without_a_file(pool: SandboxPool) -> None:
    listen = "import socket\nserver = socket.socket(socket.AF_UNIX)\nserver.bind('\\0told')\nserver.listen()"
    tell = "import socket\nsocket.socket(socket.AF_UNIX).connect('\\0told')"
    async with pool.lease() as sandbox:
        await sandbox.python(listen)
        assert (await sandbox.python(tell)).ok
        assert "ConnectionRefusedError" in (await sandbox.python(tell, fresh=True)).stderr


@of(KINDS)
async def test_no_compiled_file_replaces_one_that_the_host_writes(pool: SandboxPool) -> None:
    plant = """
import importlib.util, os, py_compile
open('evil.py', 'w').write('print("forged")')
cached = importlib.util.cache_from_source('hidden.py')
os.makedirs('__pycache__', exist_ok=True)
py_compile.compile('evil.py', cached, invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
"""
    async with pool.lease() as sandbox:
        await sandbox.reset()
        await sandbox.python(plant)
        await sandbox.write({"hidden.py": "print('real')"})
        assert (await sandbox.exec("python3 -c 'import hidden'")).stdout == "real\n"
        await sandbox.python(plant)  # After the write too.
        assert (await sandbox.python("import hidden", fresh=True)).stdout == "real\n"


@of(KINDS)
async def test_an_old_handle_or_link_does_not_see_files_that_the_host_writes(pool: SandboxPool) -> None:
    async with pool.lease() as sandbox:
        await sandbox.reset()
        await sandbox.python("import os\nf = open('t.py', 'w+'); os.link('t.py', 'link')")
        await sandbox.write({"t.py": "secret"})
        assert (await sandbox.python("f.seek(0); f.read() + open('link').read()")).stdout == "''\n"
        await sandbox.python("f.write('evil'); f.flush()")
        assert await sandbox.read("t.py") == b"secret"


@of(KINDS)
async def test_fresh_code_runs_no_start_up_file_of_the_session(pool: SandboxPool) -> None:
    plant = """
import os, sys
folder = os.path.expanduser(f'~/.local/lib/python3.{sys.version_info[1]}/site-packages')
os.makedirs(folder)
open(folder + '/usercustomize.py', 'w').write('import os; os._exit(0)')
"""
    run = "import subprocess\nsubprocess.run(['python3', '-c', 'raise SystemExit(3)']).returncode"
    async with pool.lease() as sandbox:
        await sandbox.reset()
        assert (await sandbox.python(plant)).status == "ok"
        assert (await sandbox.python(run, fresh=True)).stdout == "3\n"


def mode_of_null() -> int:
    return Path("/dev/null").stat().st_mode & 0o777


async def test_bubblewrap_sandboxes_cannot_interact_through_this_machines_folders() -> None:
    hold = "import fcntl\nf = open('/usr/bin/env'); fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)"
    async with make("bubblewrap").open(2) as sandboxes, sandboxes.lease() as one, sandboxes.lease() as other:
        assert (await one.python(hold)).status == "ok"
        assert (await other.python(hold)).status == "ok"
        assert (await other.exec("chmod 600 /dev/null")).exit_code != 0
    assert await asyncio.to_thread(mode_of_null) == 0o666


@pytest.mark.docker
@pytest.mark.skipif(os.geteuid() != 0, reason="checks for a change that only root can undo")
async def test_gvisor_leaves_this_machines_devices_to_root() -> None:
    await asyncio.to_thread(os.chown, "/dev/null", 0, 0)
    async with make("runsc").open(1) as sandboxes, sandboxes.lease() as sandbox:
        assert (await sandbox.exec("echo x > /dev/null")).exit_code == 0
    null = await asyncio.to_thread(os.stat, "/dev/null")
    assert (null.st_uid, null.st_gid) == (0, 0)


@of(PLACED)
async def test_nothing_tells_an_episode_how_long_the_previous_one_took(pool: SandboxPool) -> None:
    ages = """
import os, time
with open('/proc/uptime') as file: up = float(file.read().split()[0])
folders = ['/tmp', '/branches', '/dev/shm', '/dev/mqueue', '/dev/pts', '/proc/self']
found = [time.time() - getattr(os.stat(path), name) for path in folders for name in ('st_mtime', 'st_ctime')]
for pid in ('1', 'self'):
    with open(f'/proc/{pid}/stat') as file: begun = int(file.read().rpartition(')')[2].split()[19])
    found.append(up - begun / os.sysconf('SC_CLK_TCK'))
max(found)
"""
    async with pool.lease() as sandbox:
        await sandbox.reset()
        await sandbox.python("import time\ntime.sleep(4)")
        began = asyncio.get_running_loop().time()
        await sandbox.reset()
        oldest = float((await sandbox.python(ages)).stdout)
        now = asyncio.get_running_loop().time()
    assert oldest < now - began + 2  # Some file systems take their times from the kernel's last tick.


TAKE_ALL = """
import ctypes, resource
libc = ctypes.CDLL(None)
resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
watches = queues = 0
while libc.inotify_init1(0) >= 0: watches += 1
while libc.mq_open(b'/%d' % queues, 0o102, 0o600, None) >= 0: queues += 1
watches, queues
"""


@pytest.mark.parametrize("kind", PLACED)
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give each sandbox its own user")
async def test_no_sandbox_uses_up_resources_that_another_needs(kind: str) -> None:
    limit = int(await asyncio.to_thread(Path("/proc/sys/fs/inotify/max_user_instances").read_text))
    async with make(kind).open(1 + limit // 64) as sandboxes, AsyncExitStack() as leases:
        taken = []
        for _ in range(1 + limit // 64):
            sandbox = await leases.enter_async_context(sandboxes.lease())
            taken.append((await sandbox.python(TAKE_ALL)).stdout)
    watches, queues = ast.literal_eval(taken[0])
    assert 0 < watches <= 64
    assert queues > 0
    assert set(taken) == {taken[0]}


def users_of_containers(before: Collection[int]) -> list[int]:
    """Return the users of this process's containers that were started after those in `before`."""
    return [Path(f"/proc/{pid}").stat().st_uid for pid in containers_of(os.getpid()) if pid not in before]


async def test_a_sandbox_runs_as_nobody_under_gvisor_and_if_the_engine_maps_users() -> None:
    assert sandbox_user(DockerSettings(), engine_maps_users=True) == "65534:65534"
    assert sandbox_user(DockerSettings(runtime="runsc"), engine_maps_users=False) == "65534:65534"
    one, other = (sandbox_user(DockerSettings(), engine_maps_users=False) for _ in range(2))
    assert one != other


@pytest.mark.docker
async def test_each_docker_sandbox_has_its_own_user_and_its_code_runs_as_nobody() -> None:
    before = await asyncio.to_thread(containers_of, os.getpid())
    async with make("docker").open(2) as sandboxes, sandboxes.lease() as one, sandboxes.lease() as other:
        for sandbox in (one, other):
            assert (await sandbox.exec("id -un; touch f; stat -c %U f /tmp")).stdout == "nobody\nnobody\nnobody\n"
        users = await asyncio.to_thread(users_of_containers, before)
    assert len(set(users)) == len(users) >= 2
    assert set(users) <= set(SANDBOX_USERS)


@pytest.mark.docker
async def test_code_has_a_lower_priority_than_the_server_that_shares_its_processor() -> None:
    async with make("docker").open(1) as sandboxes, sandboxes.lease() as sandbox:
        for fresh in (False, True):
            assert (await sandbox.python("import os; os.nice(0)", fresh=fresh)).stdout == "19\n"
        assert (await sandbox.exec("nice; nice -n -5 nice 2>/dev/null")).stdout == "19\n19\n"
        async with sandbox.start("nice") as process:
            assert await process.stdout.read() == b"19\n"


async def test_bubblewrap_gives_each_episode_its_own_place_for_an_unprivileged_user_too(code_for_all: Path) -> None:
    make("bubblewrap")
    code = (
        "import asyncio, logging\nfrom agentgym.sandboxes.local.local import Bubblewrap\nlogging.basicConfig()\n"
        "async def main():\n"
        "    async with Bubblewrap().open(1) as sandboxes, sandboxes.lease() as sandbox:\n"
        "        await sandbox.write({'f': 'x'})\n"
        "        await sandbox.reset()\n"
        "        print(await sandbox.list(), (await sandbox.python('6 * 7', fresh=True)).stdout)\n"
        "asyncio.run(main())\n"
    )
    done = await asyncio.to_thread(as_user_without_rights, code_for_all, "-c", code)
    assert (done.stdout, done.stderr) == ("[] 42\n\n", "")


async def test_without_namespaces_a_sandbox_is_reset_in_place_and_keeps_its_network(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    make("bubblewrap")
    monkeypatch.setattr(
        local, "arena", lambda *given, **named: {**arena(*given, **named), "users": True, "bytes": "many"}
    )
    async with Bubblewrap(network="loopback").open(1) as sandboxes, sandboxes.lease() as sandbox:
        for _ in range(2):
            async with sandbox.start(["python3", "-m", "http.server", "8000"]), sandbox.port(8000) as there:
                with await asyncio.to_thread(urllib.request.urlopen, there.url) as answer:
                    assert answer.status == 200
            await sandbox.write({"f": "x"})
            await sandbox.reset()
            assert await sandbox.list() == []
            assert isinstance(sandbox, RemoteSandbox)
            assert sandbox.reset_in_place
            async with await sandbox.fork() as branch:
                assert isinstance(branch, RemoteSandbox)
                assert branch.reset_in_place
    assert "episodes are reset in place" in caplog.text


@pytest.mark.parametrize("kind", KINDS)
async def test_a_sandbox_and_the_log_report_whether_episodes_have_their_own_place(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "agentgym.sandboxes")
    link._tell_once.cache_clear()
    async with make(kind).open(1) as sandboxes, sandboxes.lease() as sandbox:
        assert isinstance(sandbox, RemoteSandbox)
        assert sandbox.reset_in_place is (kind in ("unsafe", "runsc"))
    said = "episodes are reset in place" if sandbox.reset_in_place else "each episode has its own namespaces"
    assert sum(said in record.getMessage() for record in caplog.records) == 1


async def test_a_python_in_a_users_home_is_refused() -> None:
    make("bubblewrap")
    with tempfile.TemporaryDirectory(dir=Path.home()) as folder:
        python = shutil.copy("/usr/bin/true", Path(folder, "python3"))  # like HOME/bin/python3
        with pytest.raises(SandboxError, match="home is in it"):
            async with Bubblewrap(python=str(python)).open(1) as sandboxes, sandboxes.lease():
                pass


async def test_an_interpreter_that_cannot_run_the_server_is_refused_when_the_pool_opens() -> None:
    make("bubblewrap")
    with pytest.raises(SandboxError, match="python: the sandboxes' interpreter"):
        async with Bubblewrap(python="/usr/bin/false").open(1):
            pass


@of(KINDS)
async def test_a_module_in_the_working_folder_may_be_named_server(pool: SandboxPool) -> None:
    look = "import importlib.util\nimportlib.util.find_spec('server')"
    async with pool.lease() as sandbox:
        assert (await sandbox.python(look)).stdout == ""
        await sandbox.write(
            {"server.py": "import sys\nmodules = [name for name in sys.modules if 'supervisor' in name]"}
        )
        said = await sandbox.python("import server\nserver.modules")
        assert (said.stdout, said.stderr) == ("[]\n", "")


BAD_PATHS = ["\ud800", "a\0b", "n" * 5000, "d/" * 300 + "f", "..", "/etc/passwd", "", "\x7f\n\u202e", "a/../../b"]


@of(KINDS)
@pytest.mark.parametrize("path", BAD_PATHS, ids=range(len(BAD_PATHS)))
async def test_no_path_ends_a_sandbox(pool: SandboxPool, path: str, tmp_path: Path) -> None:
    (tmp_path / "source").write_text("x")
    async with pool.lease() as sandbox:
        calls = [
            sandbox.read(path),
            sandbox.list(path),
            sandbox.write({path: "x"}),
            sandbox.put(tmp_path / "source", path),
        ]
        for made in (*calls, sandbox.get(path or ".", tmp_path / "target")):
            with suppress(OSError, ValueError):
                await made
        assert (await sandbox.python("6 * 7")).stdout == "42\n"


# ---------------------------------------------------------------------------------------------- the end of a sandbox


async def each_call_says_so(sandbox: Sandbox) -> None:
    for ended in (await sandbox.python("1"), await sandbox.exec("true")):
        assert (ended.status, ended.exit_code, ended.state_lost) == ("sandbox_killed", -9, True)
    for other in (sandbox.read("f"), sandbox.list(), sandbox.write({"f": "x"}), sandbox.fork()):
        with pytest.raises(SandboxKilledError):
            await other


async def test_every_call_reports_a_sandbox_that_was_ended_by_its_code() -> None:
    async with Process(unsafe=True).open(1) as sandboxes:
        async with sandboxes.lease() as sandbox:
            assert (await sandbox.python("import os; os.kill(os.getppid(), 9)")).status == "sandbox_killed"
            await each_call_says_so(sandbox)
        async with sandboxes.lease() as sandbox:
            assert (await sandbox.python("1")).stdout == "1\n"


async def test_a_background_program_that_ends_its_sandbox_is_reported() -> None:
    async with (
        Process(unsafe=True).open(1) as sandboxes,
        sandboxes.lease() as sandbox,
        sandbox.start("read word; kill -9 $PPID") as process,
    ):
        with pytest.raises(SandboxKilledError):  # noqa: PT012  the sandbox may end before its server answers `write`
            await process.write("go\n")
            await process.wait()
        with pytest.raises(SandboxKilledError):
            await process.write("x")


class Ended(ag.ToolEnv[ag.Task]):
    """An env whose model ends its sandbox."""

    sandbox_spec = Process(unsafe=True)
    limits = ag.Limits(turns=4, seconds=60, context_tokens=8192)

    @ag.tool
    async def python(self, code: str) -> str:
        """Run code."""
        return (await self.sandbox.python(code)).text()

    @ag.tool
    async def read(self, path: str) -> str:
        """Read a file."""
        return (await self.sandbox.read(path)).decode()

    @ag.reward
    async def solved(self) -> float:
        """Return 1.0 if the sandbox still has the file."""
        return float("f" in await self.sandbox.list())


async def test_a_rollout_whose_code_ended_its_sandbox_is_scored() -> None:
    task = ag.Task(id="t", prompt=(ag.Message(role="user", content="x"),))
    said: list[ag.Message | str] = [
        call("python", code="import os; os.kill(os.getppid(), 9)"),
        call("read", path="f"),
        "done",
    ]
    rollout = await ag.rollout(Ended, task, Scripted(said))
    assert (rollout.reward, rollout.failure) == (0.0, None)
    assert rollout.metrics["sandbox_killed"] == 1
    assert rollout.metrics["tool_errors"] == 1
    assert "sandbox_killed" in str(rollout) or "[sandbox terminated by your code]" in str(rollout)
