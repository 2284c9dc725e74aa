"""Every payload in every kind of sandbox it targets: its status, the next call, the next episode, and the host."""

import asyncio
import json
import os
import re
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from agentgym.errors import SandboxError, SandboxKilledError
from agentgym.sandboxes.protocol import ExecResult, Sandbox, SandboxPool
from tests.sandboxes.conftest import KINDS, as_user_without_rights, below, containers_of, make
from tests.sandboxes.payloads import PAYLOADS, FileCall, Payload

pytestmark = pytest.mark.asyncio(loop_scope="module")

MARKS = {
    "unsafe": [pytest.mark.slow],
    "docker": [pytest.mark.docker, pytest.mark.slow],
    "runsc": [pytest.mark.docker, pytest.mark.slow],
}
PATIENT_RESET_S = 60.0
"""gVisor, or a busy machine, needs more than a pool's 10 s to remove a tree of thousands of locked folders."""
UNUSABLE: dict[str, str] = {}
"""Why no sandbox of that kind starts although it should, or "" if one starts. Checked once."""
EVERY = {"unsafe": 2, "docker": 2, "runsc": 4}
"""Outside the proof tests, a slow kind runs every n-th payload; bubblewrap runs all, a third of them in the fast
tests.
"""


def marks_of(kind: str, number: int) -> list[pytest.MarkDecorator]:
    """Return the marks of the test case for this kind and this payload number."""
    marks = MARKS.get(kind, []) if number % 3 == 0 else [*MARKS.get(kind, []), pytest.mark.slow]
    return marks if number % EVERY.get(kind, 1) == 0 else [*marks, pytest.mark.proof]


CASES = [
    pytest.param(kind, payload, id=f"{kind}-{payload.name}", marks=marks_of(kind, number))
    for kind in KINDS
    for number, payload in enumerate(payload for payload in PAYLOADS if kind in payload.kinds)
]
PROBE = (Path(__file__).parent / "payloads/shared/probe.py").read_text()
SHELL_PROBE = (
    "env | grep -v '^_=' | sed s:=$PWD:=WORK: | sort; umask; ulimit -a; ulimit -Ha; "
    "grep -E '^(Sig[BIC]|Cap|NoNew|Seccomp|Threads)' /proc/self/status"
)


# ---------------------------------------------------------------------------------------------- the host


@dataclass(frozen=True)
class Host:
    """Parts of the host that no sandbox may touch: a file and a process of the sandboxes' own user, and the machine."""

    canary: Path
    process: "subprocess.Popen[bytes]"

    def facts(self) -> dict[str, object]:
        """Return all of it for comparison."""
        return {
            "file": (
                self.canary.read_text(),
                self.canary.stat().st_mode,
                sorted(p.name for p in self.canary.parent.iterdir()),
            ),
            "process": self.name_and_state(),
            "priority": os.getpriority(os.PRIO_PROCESS, self.process.pid),
            "name": socket.gethostname(),
            "core": Path("/proc/sys/kernel/core_pattern").read_text(),
            "mounts": sorted(filter(_lasting, Path("/proc/self/mountinfo").read_text().splitlines())),
            "ipc": [key for kind in ("shm", "sem", "msg") for key in _keys(kind) if key in ("4242", "4243")],
            "evil": [place for place in ("/", "/tmp", "/usr", "/etc", "/run", "/dev/shm", "/root") if _evil(place)],
        }

    def name_and_state(self) -> list[str]:
        return Path(f"/proc/{self.process.pid}/stat").read_text().split()[1:3]


def _lasting(mount: str) -> bool:
    """Return whether the mount is permanent, not one of an engine or a build."""
    return not any(word in mount for word in ("docker", "nsfs", "agentgym-", "containerd", "/tmp/"))


def _keys(kind: str) -> list[str]:
    return [row.split()[0] for row in Path(f"/proc/sysvipc/{kind}").read_text().splitlines()[1:]]


def _evil(place: str) -> bool:
    with suppress(OSError):
        return Path(place, "agentgym-evil").exists()
    return False


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    """Yield the canaries, which the sandboxes' user could reach if it were on the host."""
    folder = Path(tempfile.mkdtemp(prefix="canary-"))
    folder.chmod(0o777)
    canary = folder / "canary"
    canary.write_text("mine")
    canary.chmod(0o666)
    drop = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups", "--"] if os.geteuid() == 0 else []
    with subprocess.Popen([*drop, "sleep", "86400"], env={"PATH": os.defpath, "CANARY": "mine"}) as process:
        try:
            made = Host(canary, process)
            while made.name_and_state() != ["(sleep)", "S"]:  # It starts as another program.
                time.sleep(0.01)
            yield made
        finally:
            process.kill()
            shutil.rmtree(folder)


# ---------------------------------------------------------------------------------------------- the battery


@dataclass(frozen=True)
class Ground:
    """A one-sandbox pool of one kind, and the state of its first sandbox before anything ran in it."""

    kind: str
    sandboxes: SandboxPool
    pristine: dict[str, object]
    baseline: int

    async def clean(self, sandbox: Sandbox) -> None:
        """Assert that the sandbox looks new, from inside and from the host."""
        assert await look(sandbox) == self.pristine
        if self.kind != "runsc":  # The host doesn't see gVisor's processes.
            assert kin(self.kind) == self.baseline


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def ground(request: pytest.FixtureRequest, host: Host) -> AsyncIterator[Ground]:
    """Yield each kind of sandbox; the canaries exist first."""
    assert host.facts()
    kind = str(request.param)
    if kind == "runsc":
        await needs_a_sandbox(kind)
    async with make(kind).open(1) as sandboxes:
        async with sandboxes.lease() as sandbox:
            pristine, baseline = await look(sandbox), kin(kind)
        yield Ground(kind, sandboxes, pristine, baseline)


async def needs_a_sandbox(kind: str) -> None:
    """Skip, with the reason, if the engine has the runtime but the server doesn't run under it."""
    if kind not in UNUSABLE:
        UNUSABLE[kind] = ""
        try:
            async with make(kind).open(1) as sandboxes, sandboxes.lease():
                pass
        except SandboxError as error:
            UNUSABLE[kind] = str(error)
    if UNUSABLE[kind]:
        pytest.skip(f"{kind}: {UNUSABLE[kind]}")


async def look(sandbox: Sandbox) -> dict[str, Any]:
    """Return everything that could carry data from one episode to the next."""
    shown = await sandbox.python(PROBE)
    assert shown.status == "ok", shown
    facts: dict[str, Any] = json.loads(shown.stdout)
    facts["shell"] = (await sandbox.exec(SHELL_PROBE)).stdout
    return facts


def kin(kind: str) -> int:
    """Return how many processes the host sees in our sandboxes of this kind."""
    if kind in ("docker", "runsc"):
        return sum(1 + len(below(pid)) for pid in containers_of(os.getpid()))
    return len(below(os.getpid()))


async def attack(sandbox: Sandbox, payload: Payload, host: Host) -> ExecResult:
    code = payload.code.replace("CANARY", str(host.canary))
    if payload.shell:
        return await sandbox.exec(code, timeout_s=payload.timeout_s)
    functions = {"f": lambda *_, **__: 0} if payload.functions else None
    return await sandbox.python(code, timeout_s=payload.timeout_s, functions=functions)


async def make_call(sandbox: Sandbox, call: FileCall) -> None:
    got: object = None
    said: str | None
    try:
        match call.op:
            case "read":
                got = await sandbox.read(call.path)
            case "write":
                await sandbox.write({call.path: call.content})
            case "list":
                got = await sandbox.list(call.path)
    except call.raises as error:
        said = str(error)
    else:
        said = None
    if said is not None:
        assert re.search(call.match, said), call
        return
    assert not call.raises or (call.may_return and got in (b"mine", b"")), (call, got)


async def goes_on(sandbox: Sandbox, payload: Payload) -> None:
    """Assert that the next calls of every kind work; a lie about the last call's end may cost at most one call."""
    following = await sandbox.python("6 * 7", timeout_s=2.0)
    assert following.status in payload.following, following
    if payload.honest:
        assert following.status != "ok" or following.stdout == "42\n", following
        if following.status != "ok":
            following = await sandbox.python("6 * 7")
        assert (following.status, following.stdout) == ("ok", "42\n"), following
    assert (await sandbox.exec("echo fine; exit 3")).exit_code == 3
    asked = await sandbox.python("print(g(2))", functions={"g": lambda x: x + 5}, fresh=True)
    assert (asked.status, asked.stdout) == ("ok", "7\n"), asked


@pytest.mark.parametrize(("ground", "payload"), CASES, indirect=["ground"])
async def test_a_sandbox_survives(ground: Ground, host: Host, payload: Payload) -> None:
    before = host.facts()
    async with ground.sandboxes.lease() as sandbox:
        await sandbox.python("x = 1")
        result = await attack(sandbox, payload, host)
        assert "ESCAPED" not in result.stdout + result.stderr, result
        assert result.status in payload.right, result
        assert (result.status == "ok") == (result.exit_code == 0)
        assert payload.lost in (None, result.state_lost), result
        for call in payload.calls:
            await make_call(sandbox, call)
        await goes_on(sandbox, payload)
        await sandbox.reset(timeout_s=PATIENT_RESET_S)
        await ground.clean(sandbox)
    async with ground.sandboxes.lease() as sandbox:
        await ground.clean(sandbox)
    assert host.facts() == before


@pytest.mark.slow
@pytest.mark.proof
async def test_bubblewrap_sandboxes_of_an_unprivileged_user_survive_all_payloads_too(code_for_all: Path) -> None:
    make("bubblewrap")
    count = sum("bubblewrap" in payload.kinds for payload in PAYLOADS)
    these = ["tests/sandboxes/test_hostile.py", "-k", "test_a_sandbox_survives and bubblewrap"]
    run = ["-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", *these]
    done = await asyncio.to_thread(as_user_without_rights, code_for_all, *run)
    if f"\n{count} skipped" in done.stdout:
        pytest.skip(f"bubblewrap for an unprivileged user: {done.stdout[-1000:]}")
    assert f"\n{count} passed" in done.stdout, done.stdout[-10_000:] + done.stderr


# ---------------------------------------------------------------------------------------------- other claims


async def test_a_batch_with_one_bad_path_is_refused(sandbox: Sandbox) -> None:
    with pytest.raises(ValueError, match="outside"):
        await sandbox.write({"good": "x", "../bad": "y"})
    assert (await sandbox.exec("cat ../bad /bad /tmp/bad 2>/dev/null")).stdout == ""


async def test_a_full_disk_is_an_os_error_of_write(isolated_sandbox: Sandbox) -> None:
    with pytest.raises(OSError, match="space"):
        await isolated_sandbox.write({f"big{i}": bytes(16 << 20) for i in range(9)})
    await isolated_sandbox.reset()
    await isolated_sandbox.write({"small": "x"})


async def test_two_episodes_draw_different_random_numbers(sandbox: Sandbox) -> None:
    code = "import random, uuid, os, tempfile; (random.random(), uuid.uuid4(), os.urandom(4), tempfile.mktemp())"
    first = (await sandbox.python(code)).stdout
    await sandbox.reset()
    assert (await sandbox.python(code)).stdout != first
    assert (await sandbox.python(code, fresh=True)).stdout != first


async def test_a_worker_finds_nothing_of_the_last_episode_in_its_memory(sandbox: Sandbox) -> None:
    canary = "canary-" + "7f3a" * 4
    scan = """
import re
hits = 0
for line in open('/proc/self/maps'):
    span, mode = line.split()[:2]
    if mode.startswith('rw'):
        start, end = (int(x, 16) for x in span.split('-'))
        with open('/proc/self/mem', 'rb', 0) as memory:
            memory.seek(start)
            try: hits += len(re.findall(rb'canary-[0-9a-f]{16}', memory.read(end - start)))
            except OSError: pass
print(hits)
"""
    await sandbox.python(f"x = '{canary}'\nprint(x)\nget()", functions={"get": lambda: canary})
    await sandbox.python(f"'{canary}' * 20_000", fresh=True)
    await sandbox.exec(f"echo {canary}")
    await sandbox.write({"f": canary * 1000})
    assert canary.encode() in await sandbox.read("f")
    assert int((await sandbox.python(scan)).stdout) > 0
    await sandbox.reset()
    assert (await sandbox.python(scan)).stdout == "0\n"


async def test_a_background_process_is_stopped_while_fresh_code_runs(sandbox: Sandbox) -> None:
    start = """
from subprocess import PIPE, Popen
p = Popen(['cat'], stdin=PIPE, stdout=PIPE, bufsize=0)
p.stdin.write(b'x'), p.stdout.read(1)  # It has started, and waits for more.
print(p.pid)
"""
    pid = (await sandbox.python(start)).stdout.strip()
    state = f"open('/proc/{pid}/stat').read().rsplit(')')[1].split()[0]"
    if "[Errno 2]" in (await sandbox.python(state, fresh=True)).stderr:
        return  # Fresh code has its own place, where no other process is visible.
    # It counts as runnable until a processor is free to deliver the signal; the call's own limit ends the loop.
    stopped = f"while (state := {state}) == 'R': pass\nstate"
    assert (await sandbox.python(stopped, fresh=True)).stdout == "'T'\n"
    assert (await sandbox.python(state)).stdout in ("'S'\n", "'R'\n")


async def test_a_session_cannot_reach_into_fresh_code(sandbox: Sandbox) -> None:
    # Only the server and its children: in an unsafe sandbox, and as root, the whole machine is in reach.
    meddle = """
import os
server, mine = os.getppid(), os.getpid()
def parent(pid):
    try: return int(open(f'/proc/{pid}/stat').read().rsplit(')', 1)[1].split()[1])
    except OSError: return 0
if os.fork() == 0:
    while True:
        for pid in map(int, filter(str.isdigit, os.listdir('/proc'))):
            for name in ('mem', 'fd/1', 'fd/3'):
                if pid in (os.getpid(), mine) or server not in (pid, parent(pid)): continue
                try: os.write(os.open(f'/proc/{pid}/{name}', os.O_RDWR | os.O_NONBLOCK), b'evil')
                except OSError: pass
"""
    await sandbox.python(meddle)
    for _ in range(20):
        result = await sandbox.python("sum(range(10**6)) and 6 * 7", fresh=True)  # long enough to be found
        assert (result.status, result.stdout, result.stderr) == ("ok", "42\n", "")


async def test_a_server_that_the_code_kills_is_a_result_and_the_sandbox_is_replaced() -> None:
    async with make("unsafe").open(1) as sandboxes:
        async with sandboxes.lease() as sandbox:
            assert (await sandbox.python("import os; os.kill(os.getppid(), 9)")).status == "sandbox_killed"
            assert (await sandbox.exec("true")).status == "sandbox_killed"
            with pytest.raises(SandboxKilledError):
                await sandbox.list()
        async with sandboxes.lease() as sandbox:
            assert (await sandbox.python("1")).stdout == "1\n"
