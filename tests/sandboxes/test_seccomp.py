"""The system call filter: the calls that it refuses in a sandbox, and the equivalence of its two forms."""

import json
import platform
import struct

import pytest

from agentgym.errors import SandboxError
from agentgym.sandboxes import seccomp
from agentgym.sandboxes.docker.docker import Docker, why_no_docker
from agentgym.sandboxes.protocol import SandboxSpec

IN_A_SANDBOX = platform.machine() == "x86_64"
MACHINE, TABLE = seccomp.MACHINES.get(platform.machine(), seccomp.MACHINES["x86_64"])
NUMBERS = seccomp.numbers(TABLE)
NAMESPACES = (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000)
EPERM, ENOSYS = 1, 38
REFUSED = [
    *("io_uring_setup", "io_uring_enter", "io_uring_register", "keyctl", "add_key", "request_key", "ptrace", "kcmp"),
    *("mount", "umount2", "pivot_root", "chroot", "unshare", "setns", "open_tree", "move_mount", "fsopen", "acct"),
    *("bpf", "perf_event_open", "userfaultfd", "kexec_load", "init_module", "finit_module", "delete_module", "syslog"),
    *("process_vm_readv", "process_vm_writev", "process_madvise", "pidfd_getfd", "name_to_handle_at", "swapon"),
    *("open_by_handle_at", "fanotify_init", "move_pages", "mbind", "reboot", "quotactl", "lookup_dcookie"),
    *("settimeofday", "clock_settime", "iopl", "modify_ldt", "memfd_secret"),
]


def decide(program: bytes, number: int, *args: int, architecture: int = MACHINE) -> int:
    """Interpret the BPF program as the kernel would and return its decision."""
    data = struct.pack("=IIQ6Q", number, architecture, 0, *(*args, *[0] * (6 - len(args))))
    steps = list(struct.iter_unpack("=HBBI", program))
    value, at = 0, 0
    while True:
        code, yes, no, operand = steps[at]
        at += 1
        if code == seccomp.LOAD:
            (value,) = struct.unpack_from("=I", data, operand)
        elif code == seccomp.AND:
            value &= operand
        elif code == seccomp.RETURN:
            return int(operand)
        else:
            right = {
                seccomp.JUMP_EQUAL: value == operand,
                seccomp.JUMP_FROM: value >= operand,
                seccomp.JUMP_ABOVE: value > operand,
            }[code]
            at += yes if right else no


@pytest.mark.parametrize("machine", seccomp.MACHINES)
def test_the_compiled_filter_allows_exactly_what_the_list_does(machine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: machine)
    architecture, table = seccomp.MACHINES[machine]
    program = seccomp.program.__wrapped__()
    plain = {
        name
        for rule in json.loads(seccomp.profile(network=False))["syscalls"]
        if not rule["args"] and rule["action"] == "SCMP_ACT_ALLOW"
        for name in rule["names"]
    }
    names = {number: name for name, number in seccomp.numbers(table).items()}
    for number in range(600):
        allowed = decide(program, number, 1 << 40, architecture=architecture) == seccomp.ALLOW
        assert allowed == (names.get(number) in plain | {"clone"}), names.get(number)
    assert len(program) // 8 < 4096


def test_conditions_look_at_the_whole_argument() -> None:
    local, network = seccomp.program(), seccomp.program(network=True)
    for family in range(64):
        assert (decide(local, NUMBERS["socket"], family) == seccomp.ALLOW) == (family == 1)
        assert (decide(network, NUMBERS["socket"], family) == seccomp.ALLOW) == (family in (1, 2, 10))
    assert decide(local, NUMBERS["socket"], 1 << 32 | 1) == seccomp.ERRNO | EPERM
    for name in ("prlimit64", "sched_setaffinity", "sched_setscheduler", "sched_setparam", "setpriority"):
        assert decide(local, NUMBERS[name], 0, 0) == seccomp.ALLOW
        assert decide(local, NUMBERS[name], 1, 0) == seccomp.ERRNO | EPERM
    assert decide(local, NUMBERS["setpriority"], 0, 1) == seccomp.ERRNO | EPERM
    threads = 0x3D0F00
    assert decide(local, NUMBERS["clone"], threads) == seccomp.ALLOW
    for bit in NAMESPACES:
        assert decide(local, NUMBERS["clone"], threads | bit) == seccomp.ERRNO | EPERM
    assert decide(local, NUMBERS["clone3"]) == seccomp.ERRNO | ENOSYS


@pytest.mark.parametrize("name", ["getsockopt", "setsockopt"])
def test_no_socket_returns_a_pidfd_of_its_peer(name: str) -> None:
    program = seccomp.program()
    for option in range(128):
        expected = seccomp.ERRNO | seccomp.ENOPROTOOPT if option in (76, 77) else seccomp.ALLOW
        assert decide(program, NUMBERS[name], 3, 1, option) == expected
        assert decide(program, NUMBERS[name], 3, 1 << 32 | 1, 1 << 40 | option) == expected
        assert decide(program, NUMBERS[name], 3, 6, option) == seccomp.ALLOW


def test_no_socket_manages_flow_labels() -> None:
    """Flow labels outlive their sockets: the next episode of a sandbox with a network would read them."""
    program = seccomp.program(network=True)
    for option in range(128):
        expected = seccomp.ERRNO | seccomp.ENOPROTOOPT if option == 32 else seccomp.ALLOW
        assert decide(program, NUMBERS["setsockopt"], 3, 41, option) == expected
        assert decide(program, NUMBERS["setsockopt"], 3, 1 << 32 | 41, 1 << 40 | option) == expected
        assert decide(program, NUMBERS["setsockopt"], 3, 0, option) == seccomp.ALLOW
        assert decide(program, NUMBERS["getsockopt"], 3, 41, option) == seccomp.ALLOW


def test_another_architecture_ends_the_process_and_its_tables_are_refused() -> None:
    program = seccomp.program()
    assert decide(program, 0, architecture=0x40000003) == seccomp.KILL_PROCESS
    assert decide(program, seccomp.X32 + NUMBERS["read"]) == seccomp.ERRNO | EPERM


def test_a_machine_without_a_table_is_a_sandbox_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "vax")
    with pytest.raises(SandboxError, match="vax"):
        seccomp.program.__wrapped__()


CALL = """
import ctypes, errno, socket
call = ctypes.CDLL(None, use_errno=True).syscall
def refused(*args):
    ctypes.set_errno(0)
    return call(*(ctypes.c_long(a) for a in args)) == -1 and ctypes.get_errno() == {expected}
def opens(family):
    try: socket.socket(family, socket.SOCK_DGRAM).close()
    except PermissionError: return False
    return True
"""


@pytest.mark.skipif(not IN_A_SANDBOX, reason="the numbers are x86-64's")
async def test_a_sandbox_refuses_system_calls_that_reach_into_the_kernel(isolated: SandboxSpec) -> None:
    async with isolated.open(1) as sandboxes, sandboxes.lease() as sandbox:
        numbers = {name: NUMBERS[name] for name in REFUSED}
        allowed = f"[n for n, k in {numbers!r}.items() if not refused(k, -1, 0, 0, 0, 0, 0)]"
        code = CALL.format(expected=EPERM) + allowed
        assert (await sandbox.python(code)).stdout == "[]\n"
        assert (await sandbox.python("[f for f in range(46) if opens(f)]")).stdout == "[1]\n"
        cloned = f"all(refused({NUMBERS['clone']}, flag | 17, 0, 0, 0, 0) for flag in {NAMESPACES})"
        assert (await sandbox.python(cloned)).stdout == "True\n"
        assert (
            await sandbox.python(f"refused({NUMBERS['clone3']}, 0, 0), ctypes.get_errno()")
        ).stdout == "(False, 38)\n"


WORKS = """
import asyncio, concurrent.futures, multiprocessing, mmap, os, signal, socket, sqlite3, ssl, subprocess, tempfile, time
a, b = socket.socketpair()
a.send(b'x')
assert b.recv(1) == b'x'
assert asyncio.run(asyncio.sleep(0, 3)) == 3
with concurrent.futures.ThreadPoolExecutor(4) as pool: assert list(pool.map(abs, [-1])) == [1]
with multiprocessing.get_context('fork').Pool(2) as pool: assert pool.map(abs, [-1, -2]) == [1, 2]
assert subprocess.run(['sh', '-c', 'ls / | sort | tail -1'], capture_output=True).returncode == 0
with tempfile.TemporaryFile() as f:
    f.write(b'x' * 4096); f.flush()
    assert mmap.mmap(f.fileno(), 0)[:1] == b'x'
db = sqlite3.connect('f.db'); db.execute('create table t (x)'); db.commit(); db.close()
os.mkfifo('pipe'); os.sched_getaffinity(0); os.getrandom(4); os.memfd_create('x'); os.copy_file_range
time.sleep(0.001); signal.setitimer(signal.ITIMER_REAL, 0)
print('all')
"""


async def test_the_standard_library_works_under_the_filter(isolated: SandboxSpec) -> None:
    async with isolated.open(1) as sandboxes, sandboxes.lease() as sandbox:
        result = await sandbox.python(WORKS, timeout_s=30)
        assert (result.stdout, result.stderr) == ("all\n", "")


@pytest.mark.docker
async def test_a_network_opens_only_the_internet_address_families() -> None:
    why_not = why_no_docker()
    if why_not is not None:
        pytest.skip(f"docker: {why_not}")
    try:
        async with Docker(network="bridge").open(1) as sandboxes, sandboxes.lease() as sandbox:
            await sandbox.python(CALL.format(expected=EPERM))
            assert (await sandbox.python("[f for f in range(46) if opens(f)]")).stdout == "[1, 2, 10]\n"
    except SandboxError as error:
        if "network" not in str(error):
            raise
        pytest.skip(f"this engine has no network: {error}")
