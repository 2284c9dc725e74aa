"""Payloads that a box must survive: each reports its status, the next call works, the next lease is clean."""

from dataclasses import dataclass

import pytest

from agentgym.errors import SandboxError
from agentgym.types import Box, Boxes, ExecResult

pytestmark = pytest.mark.asyncio(loop_scope="module")

FORGED = """
import os, struct, json
answer = json.dumps({"id": 1, "status": "ok", "exit_code": 0, "done": "0", "body": 0}).encode()
for fd in range(3, 64):
    try: os.write(fd, struct.pack(">I", len(answer)) + answer)
    except OSError: pass
"""
CHAIN = "import os\nfor _ in range(300):\n    os.mkdir('d' * 60); os.chdir('d' * 60)"
DAEMON = """
import os
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        import time
        while True: time.sleep(0.01); open('beat', 'w').write('x')
    os._exit(0)
"""


@dataclass(frozen=True, kw_only=True)
class Payload:
    """Code, and the statuses that are right for it."""

    code: str
    right: tuple[str, ...]
    lost: bool | None = None
    shell: bool = False
    timeout_s: float = 10.0

    async def run(self, box: Box) -> ExecResult:
        if self.shell:
            return await box.exec(self.code, timeout_s=self.timeout_s)
        return await box.python(self.code, timeout_s=self.timeout_s)


ANYWHERE = {
    "output flood": Payload(code="while True: print('x' * 9999)", right=("output_limit",), lost=True),
    "output flood of a shell": Payload(code="yes", right=("output_limit",), lost=False, shell=True),
    "a line without an end": Payload(
        code="import sys\nwhile True: sys.stdout.write('x' * 65536)", right=("output_limit",), lost=True
    ),
    "invalid UTF-8": Payload(code="import os; os.write(1, bytes(range(256)))", right=("ok",), lost=False),
    "a lone surrogate": Payload(code="print('\\ud800')", right=("ok",), lost=False),
    "sleep past the limit": Payload(code="import time; time.sleep(60)", right=("timeout",), lost=False, timeout_s=0.2),
    "ignored SIGINT": Payload(
        code="import signal, time\nsignal.signal(2, signal.SIG_IGN)\ntime.sleep(60)",
        right=("timeout",),
        lost=True,
        timeout_s=0.2,
    ),
    "a swallowed interrupt": Payload(
        code="import time\nwhile True:\n    try:\n        time.sleep(60)\n    except BaseException: pass",
        right=("timeout",),
        lost=True,
        timeout_s=0.2,
    ),
    "a shell that ignores signals": Payload(
        code="trap '' INT TERM HUP; sleep 60; sleep 60", right=("timeout",), shell=True, timeout_s=0.2
    ),
    "a stopped worker": Payload(
        code="import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)", right=("timeout",), lost=True, timeout_s=0.2
    ),
    "forged frames": Payload(code=FORGED, right=("protocol",), lost=True),
    "a forged length": Payload(code="import os; os.write(3, b'\\xff' * 64)", right=("protocol",), lost=True),
    "half a frame": Payload(
        code="import os; os.write(3, b'\\0\\0\\1')\nwhile True: pass", right=("protocol",), lost=True
    ),
    "closed descriptors": Payload(code="import os; os.closerange(0, 1024)", right=("protocol",), lost=True),
    "patched json": Payload(
        code="import json, builtins\njson.dumps = lambda *a, **k: '[]'\nbuiltins.len = None",
        right=("protocol",),
        lost=True,
    ),
    "an exit without an answer": Payload(code="import os; os._exit(0)", right=("error",), lost=True),
    "its own death": Payload(code="import os; os.kill(os.getpid(), 9)", right=("killed",), lost=True),
    "a crash": Payload(code="import ctypes; ctypes.string_at(0)", right=("killed",), lost=True),
    "answers of forked children": Payload(code="import os\nfor _ in range(3): os.fork()", right=("ok",), lost=False),
    "deep recursion": Payload(code="def f(): f()\nf()", right=("error",), lost=False),
    "an exception that cannot be shown": Payload(
        code="class E(Exception):\n    def __str__(self): raise self\nraise E()", right=("error",), lost=False
    ),
    "an exception of 30 MB": Payload(code="raise ValueError('x' * 30_000_000)", right=("error", "output_limit")),
    "too many open files": Payload(code="x = [open('/dev/null') for _ in range(9999)]", right=("error",), lost=False),
    "too much memory": Payload(code="x = b'x' * (3 << 30)", right=("error", "oom")),
    "a daemon": Payload(code=DAEMON, right=("ok",), lost=False),
    "a daemon of a shell": Payload(code="setsid nohup sleep 99.25 >/dev/null 2>&1 &", right=("ok",), shell=True),
    "a deep tree": Payload(code=CHAIN, right=("ok",), lost=False),
    "a locked tree": Payload(
        code="mkdir -p a/b/c; touch a/b/c/f a/f; ln -s /etc a/l; chmod 000 a/b/c a/b a", right=("ok",), shell=True
    ),
    "links out": Payload(code="ln -s / root; ln -s /etc/passwd p; ln -s .. up; mkfifo pipe", right=("ok",), shell=True),
    "a sitecustomize": Payload(
        code="d=$(python3 -c 'import site; print(site.getusersitepackages())'); mkdir -p $d; "
        "for f in $d/sitecustomize.py $d/usercustomize.py sitecustomize.py; do echo 'print(\"evil\")' > $f; done",
        right=("ok",),
        shell=True,
    ),
    "bytes for the channel after the call": Payload(
        code="import os, threading, time\nmain = threading.main_thread()\n"
        "threading.Thread(target=lambda: (time.sleep(0.05), os.write(3, b'junk'))).start()",
        right=("ok",),
    ),
}

ISOLATED = {
    "a fork bomb": Payload(
        code="import os, time\nfor _ in range(12):\n    try: os.fork()\n    except OSError: pass\ntime.sleep(60)",
        right=("timeout",),
        timeout_s=0.5,
    ),
    "a fork bomb of a shell": Payload(
        code="f() { f | f & }; f; sleep 60", right=("timeout", "error", "killed"), shell=True, timeout_s=0.5
    ),
    "sleepers that fill the box": Payload(
        code="import subprocess\nfor _ in range(300): subprocess.Popen(['sleep', '60'])", right=("error",), lost=False
    ),
    "too many threads": Payload(
        code="import threading\ngo = threading.Event()\n"
        "for _ in range(999): threading.Thread(target=go.wait, daemon=True).start()",
        right=("error",),
    ),
    "the death of the parent": Payload(code="import os; os.kill(os.getppid(), 9)", right=("ok",), lost=False),
    "a stopped parent": Payload(code="import os; os.kill(os.getppid(), 19)", right=("ok",), lost=False),
    "the death of all": Payload(code="import os; os.fork(); os.kill(-1, 9)", right=("ok", "killed", "error")),
    "signals for the parent": Payload(
        code="import os\nfor n in (1, 2, 3, 6, 10, 11, 12, 13, 14, 15): os.kill(os.getppid(), n)",
        right=("ok",),
        lost=False,
    ),
    "the parent's memory": Payload(code="import os; open(f'/proc/{os.getppid()}/mem', 'rb')", right=("error",)),
    "the parent's descriptors": Payload(code="import os; os.listdir(f'/proc/{os.getppid()}/fd')", right=("error",)),
    "a mount": Payload(code="mount -t tmpfs none /tmp", right=("error",), shell=True),
    "a namespace": Payload(code="unshare -Ur true", right=("error",), shell=True),
    "the network": Payload(
        code="import socket; socket.create_connection(('1.1.1.1', 53), timeout=5)", right=("error",), lost=False
    ),
    "a full disk": Payload(code="f = open('big', 'wb')\nwhile True: f.write(bytes(1 << 20))", right=("error", "oom")),
    "files elsewhere": Payload(
        code="for d in / /usr /etc /dev /agentgym /run /var /proc; do echo x > $d/evil && echo got $d; done; "
        "echo x > /dev/shm/evil",
        right=("ok",),
        shell=True,
    ),
    "System V memory": Payload(
        code="import ctypes; assert ctypes.CDLL(None).shmget(4242, 4096, 0o1666) >= 0", right=("ok",), lost=False
    ),
    "a queue": Payload(
        code="import ctypes; ctypes.CDLL(None).mq_open(b'/evil', 0o102, 0o666, None) >= 0", right=("ok",), lost=False
    ),
}

CLEAN = """
import os
kin = [p for p in os.listdir('/proc') if p.isdigit() and int(p) not in (1, os.getpid())] if os.getppid() == 1 else []
print(os.listdir('.'), [n for n in globals() if not n.startswith('__') and n not in ('os', 'kin')], kin)
"""
QUEUES = (
    "import os\nos.listdir('/dev/shm') + os.listdir('/dev/mqueue') + open('/proc/sysvipc/shm').read().splitlines()[1:]"
)


async def survives(boxes: Boxes, payload: Payload) -> None:
    async with boxes.lease() as box:
        await box.python("x = 1")
        result = await payload.run(box)
        assert result.status in payload.right, result
        assert result.status == "ok" or result.exit_code != 0
        if payload.lost is not None:
            assert result.state_lost == payload.lost
        assert (await box.python("6 * 7")).stdout == "42\n"
        assert (await box.exec("echo fine")).stdout == "fine\n"
    async with boxes.lease() as box:
        assert (await box.python(CLEAN)).stdout == "[] [] []\n"
        assert (await box.exec("python3 -c 'print(1)'")).stdout == "1\n"


@pytest.mark.parametrize("name", ANYWHERE)
async def test_every_box_survives(boxes: Boxes, name: str) -> None:
    await survives(boxes, ANYWHERE[name])


@pytest.mark.parametrize("name", ISOLATED)
async def test_an_isolated_box_survives(isolated_boxes: Boxes, name: str) -> None:
    await survives(isolated_boxes, ISOLATED[name])
    async with isolated_boxes.lease() as box:
        await ISOLATED[name].run(box)
    async with isolated_boxes.lease() as box:
        assert (await box.python(QUEUES)).stdout == "[]\n"


async def test_only_the_memory_file_systems_can_be_written(isolated_box: Box) -> None:
    assert "got" not in (await ISOLATED["files elsewhere"].run(isolated_box)).stdout


async def test_a_full_disk_is_an_os_error_of_write(isolated_box: Box) -> None:
    with pytest.raises(OSError, match="space"):
        await isolated_box.write({f"big{i}": bytes(16 << 20) for i in range(9)})
    await isolated_box.reset()
    await isolated_box.write({"small": "x"})


@pytest.mark.parametrize("path", ["../x", "a/../../x", "/etc/passwd", "/etc/../tmp/x", "..", "/", "", ".", "a\0b"])
async def test_no_path_leads_out(box: Box, path: str) -> None:
    with pytest.raises(ValueError, match=r"outside|is a folder"):
        await box.read(path)
    with pytest.raises(ValueError, match=r"outside|is a folder"):
        await box.write({path: "x"})


async def test_no_link_is_followed(box: Box) -> None:
    await box.exec("ln -s / root; ln -s /etc/passwd p; mkdir d; echo x > d/f; ln -s d l; mkfifo pipe")
    for path in ("p", "pipe"):
        with pytest.raises(ValueError, match=r"is a link|is not a file"):
            await box.read(path)
    for path in ("root/etc/passwd", "l/f"):
        with pytest.raises(OSError, match=r"Not a directory|symbolic"):
            await box.read(path)
        with pytest.raises(OSError, match=r"Not a directory|symbolic"):
            await box.write({path: "x"})
    with pytest.raises(ValueError, match="is a link"):
        await box.write({"p": "x"})
    with pytest.raises(OSError, match=r"No such device|not configured"):
        await box.write({"pipe": "x"})
    assert await box.list() == ["d/", "l", "p", "pipe", "root"]
    with pytest.raises(OSError, match=r"Not a directory|symbolic"):
        await box.list("root")


async def test_a_worker_finds_nothing_of_the_last_episode_in_its_memory(box: Box) -> None:
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
    await box.python(f"x = '{canary}'\nprint(x)\nget()", functions={"get": lambda: canary})
    await box.python(f"'{canary}' * 20_000", fresh=True)
    await box.exec(f"echo {canary}")
    await box.write({"f": canary * 1000})
    assert canary.encode() in await box.read("f")
    assert int((await box.python(scan)).stdout) > 0
    await box.reset()
    assert (await box.python(scan)).stdout == "0\n"


async def test_a_bystander_is_stopped_while_fresh_code_runs(box: Box) -> None:
    pid = (await box.python("import subprocess\np = subprocess.Popen(['sleep', '60'])\np.pid")).stdout.strip()
    state = f"open('/proc/{pid}/stat').read().rsplit(')')[1].split()[0]"
    assert (await box.python(state, fresh=True)).stdout == "'T'\n"
    assert (await box.python(state)).stdout in ("'S'\n", "'R'\n")


async def test_a_server_that_is_killed_is_a_sandbox_error_and_its_place_is_filled_again() -> None:
    from agentgym.sandboxes.local import Process

    async with Process(unsafe=True).open(1) as boxes:
        async with boxes.lease() as box:
            with pytest.raises(SandboxError):
                await box.python("import os; os.kill(os.getppid(), 9)")
            with pytest.raises(SandboxError):
                await box.exec("true")
        async with boxes.lease() as box:
            assert (await box.python("1")).stdout == "1\n"
