"""Episodes whose code tries to end its sandbox, its server or its machine to avoid a reward: each is scored."""

import asyncio
import random
import sys
from collections import Counter
from collections.abc import Callable

import pytest

import agentgym as ag
from agentgym.sandboxes.protocol import SandboxPool
from agentgym.testing import Scripted, call
from tests.sandboxes.conftest import make
from tests.sandboxes.payloads import PAYLOADS

AT_ONCE = 3
FULL = 1000
SIZES = [
    pytest.param("bubblewrap", 10),
    pytest.param("docker", 10, marks=pytest.mark.docker),
    pytest.param("bubblewrap", 150, marks=pytest.mark.slow),
    pytest.param("docker", 150, marks=[pytest.mark.docker, pytest.mark.slow]),
    pytest.param("runsc", 20, marks=[pytest.mark.docker, pytest.mark.slow]),
    pytest.param("bubblewrap", FULL, marks=[pytest.mark.slow, pytest.mark.proof]),
    pytest.param("docker", FULL, marks=[pytest.mark.docker, pytest.mark.slow, pytest.mark.proof]),
]

CODE = {
    "kills its parent": "import os\nfor s in (9, 15, 6, 11, 19): os.kill(os.getppid(), s)",
    "kills process 1": "import os\nfor s in range(1, 65):\n    try: os.kill(1, s)\n    except OSError: pass",
    "kills all": "import os; os.kill(-1, 9)",
    "stops all": "import os; os.kill(-1, 19)",
    "forks": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "leaves zombies": "import os\nfor _ in range(999):\n    if os.fork() == 0: os._exit(0)",
    "starts threads": "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(60,)).start()",
    "fills memory": "kept = [bytes(1 << 20) for _ in range(10**6)]",
    "fills memory with its children": """
import os, time
for _ in range(8):
    if os.fork() == 0:
        kept = bytearray(b'x') * (150 << 20); time.sleep(60)
time.sleep(0.5)""",
    "fills the System V memory": """
import ctypes
libc = ctypes.CDLL(None)
libc.shmat.restype = ctypes.c_void_p
for _ in range(31):
    at = libc.shmat(libc.shmget(0, 16 << 20, 0o1666), None, 0)
    if at not in (None, 2**64 - 1): ctypes.memset(at, 1, 16 << 20)""",
    "asks the OOM killer to spare it": """
import os
for _ in range(6):
    if os.fork() == 0:
        try: open('/proc/self/oom_score_adj', 'w').write('0')
        except OSError: pass
        try: kept = [bytearray(b'x') * (1 << 20) for _ in range(400)]
        except MemoryError: pass
        import time; time.sleep(60)""",
    "asks the OOM killer to kill its parent": """
import os
for pid in (1, os.getppid()):
    try: open(f'/proc/{pid}/oom_score_adj', 'w').write('1000')
    except OSError: pass
kept = bytearray(b'x') * (3 << 30)""",
    "creates inodes": "import os\nn = 0\nwhile True: os.mknod(f'/tmp/{n}'); n += 1",
    "creates folders": "import os\nwhile True: os.mkdir('d' * 200); os.chdir('d' * 200)",
    "fills every folder": """
for place in ('/tmp', '/dev/shm', '/branches'):
    try: open(place + '/full', 'wb').write(bytes(200 << 20))
    except OSError: pass""",
    "opens files": "kept = []\nwhile True: kept.append(open('/dev/null'))",
    "closes all": "import os; os.closerange(0, 9999)",
    "sends frames for the worker": "import os, struct\nos.write(3, struct.pack('>I', 1 << 31) + b'{' * 9999)",
    "locks its folder": "import os; os.makedirs('a/b'); os.chmod('a', 0); os.chmod('.', 0)",
    "removes all": """
import shutil
for place in ('/tmp', '/dev/shm', '/branches', '/dev/mqueue'): shutil.rmtree(place, ignore_errors=True)""",
    "limits its parent": """
import os, resource
for pid in (1, os.getppid()):
    for what in range(16):
        try: resource.prlimit(pid, what, (0, 0))
        except (OSError, ValueError): pass""",
    "leaves a killing daemon": """
import os, signal
if os.fork() == 0:
    os.setsid()
    while True:
        for pid in filter(str.isdigit, os.listdir('/proc')):
            if int(pid) != os.getpid():
                try: os.kill(int(pid), 9)
                except OSError: pass""",
}
COMMANDS = {
    "a fork bomb in a shell": ":(){ :|:& };:; wait",
    "floods": "yes; yes >&2",
    "all kinds of signals": "for s in $(seq 1 64); do kill -$s 1 $PPID -1 2>/dev/null; done",
    "endless files": "i=0; while :; do :> $i; i=$((i+1)); done",
    "its folder removed": "rm -rf /tmp/* /tmp/.[!.]*; cd /; rmdir /tmp; mv /tmp /gone",
    "kills its process group": "kill -9 0",
}
PATHS = ["\ud800", "a\0b", "n" * 5000, "d/" * 3000 + "f", "..", "/", "", "\x7f\n\u202e", "a/../../b", "/proc/1/mem"]


class Dodges(ag.ToolEnv[ag.Task]):
    """An env whose tools pass everything that the model sends to the sandbox."""

    sandbox_spec = ag.AnySandbox()
    limits = ag.Limits(turns=6, seconds=300, context_tokens=65_536)

    @ag.tool(timeout_s=60)
    async def python(self, code: str) -> str:
        """Run code."""
        return (await self.sandbox.python(code, timeout_s=0.5)).text(limit=50)

    @ag.tool(timeout_s=60)
    async def shell(self, command: str) -> str:
        """Run a command."""
        return (await self.sandbox.exec(command, timeout_s=0.5)).text(limit=50)

    @ag.tool(timeout_s=60)
    async def read(self, path: str) -> str:
        """Read a file, and the folder of that name."""
        return f"{(await self.sandbox.read(path))[:50]!r} {(await self.sandbox.list(path))[:5]}"

    @ag.tool(timeout_s=60)
    async def write(self, path: str, size: int) -> str:
        """Write a file of that size."""
        await self.sandbox.write({path: bytes(size)})
        return "written"

    @ag.reward
    async def solved(self) -> float:
        """Return 1.0 if a verifier still runs."""
        return float((await self.sandbox.python("6 * 7", fresh=True, timeout_s=30.0)).stdout == "42\n")


def payload_of(kind: str) -> Callable[[random.Random], "tuple[str, ag.Message]"]:
    hostile = [p for p in PAYLOADS if kind in p.kinds and p.group in ("exhaustion", "escape", "persistence")]

    def draw(rng: random.Random) -> tuple[str, ag.Message]:
        payload = rng.choice(hostile)
        made = call("shell", command=payload.code) if payload.shell else call("python", code=payload.code)
        return payload.name, made

    return draw


def draw_code(rng: random.Random) -> tuple[str, ag.Message]:
    name, code = rng.choice([*CODE.items()])
    return name, call("python", code=code)


def draw_command(rng: random.Random) -> tuple[str, ag.Message]:
    name, command = rng.choice([*COMMANDS.items()])
    return name, call("shell", command=command)


def draw_path(rng: random.Random) -> tuple[str, ag.Message]:
    path = rng.choice(PATHS)
    if rng.random() < 0.5:
        return f"reads {path[:9]!r}", call("read", path=path)
    size = rng.choice([0, 1, 16 << 20])
    return f"writes {size} bytes to {path[:9]!r}", call("write", path=path, size=size)


async def attempt(kind: str, sandboxes: SandboxPool, number: int) -> tuple[list[str], ag.Rollout]:
    """Run an episode of several attempts, determined by its number alone."""
    rng = random.Random(number)
    drawn = [rng.choice([draw_code, draw_code, draw_command, draw_path, payload_of(kind)])(rng) for _ in range(3)]
    task = ag.Task(id=str(number), prompt="End your sandbox.")
    return [name for name, _ in drawn], await ag.rollout(
        Dodges, task, Scripted([*(said for _, said in drawn), "done"]), sandboxes=sandboxes
    )


@pytest.mark.parametrize(("kind", "episodes"), SIZES)
async def test_no_episode_is_without_reward_because_its_code_ended_its_sandbox(kind: str, episodes: int) -> None:
    ends: Counter[str] = Counter()
    unscored = []
    numbers = iter(range(episodes))

    async def work(sandboxes: SandboxPool) -> None:
        for number in numbers:
            names, rollout = await attempt(kind, sandboxes, number)
            ends[f"reward {rollout.reward}, sandbox_killed {rollout.metrics.get('sandbox_killed', 0)}"] += 1
            if rollout.reward is None or rollout.failure is not None:
                unscored.append((number, names, rollout.failure))

    async with make(kind).open(AT_ONCE) as sandboxes, asyncio.TaskGroup() as tasks:
        for _ in range(AT_ONCE):
            tasks.create_task(work(sandboxes))
    sys.stdout.write(f"{dict(ends)}\n")
    assert unscored == []
    assert ends.total() == episodes
