"""The contract of `Sandbox.fork`, which every kind of sandbox fulfills."""

import asyncio

import pytest

from agentgym.errors import ClosedError
from agentgym.sandboxes.protocol import Sandbox, SandboxPool
from tests.sandboxes.conftest import cut_after, one_more_minute

pytestmark = pytest.mark.asyncio(loop_scope="module")

SLEEPERS = """
import glob
def count():
    found = 0
    for path in glob.glob('/proc/[0-9]*/cmdline'):
        try: found += b'{0}' in open(path, 'rb').read()
        except OSError: pass  # It ended meanwhile.
    return found
import time
end = time.monotonic() + 20
while count() < {1} and time.monotonic() < end: time.sleep(0.01)
count()"""
FACTS = "f\n0\n700\n1000000000\n"
DAEMON = """
import os, time
if os.fork() == 0:
    os.setsid()
    time.sleep(0.1)  # It forks once more after the call has ended.
    if os.fork() == 0: os.execvp('sleep', ['sleep', '{0}'])
    os._exit(0)
"""


async def test_a_branch_continues_from_the_same_names_and_shares_none(sandbox: Sandbox) -> None:
    await sandbox.python("x = [1]")
    async with await sandbox.fork() as branch:
        assert (await branch.python("x.append(2); x")).stdout == "[1, 2]\n"
        assert (await sandbox.python("x.append(3); x")).stdout == "[1, 3]\n"
        assert (await branch.python("x")).stdout == "[1, 2]\n"
    assert (await sandbox.python("x")).stdout == "[1, 3]\n"


async def test_a_branch_draws_the_same_random_numbers(sandbox: Sandbox) -> None:
    await sandbox.python("import random\nrandom.seed(5)")
    async with await sandbox.fork() as branch:
        assert (await branch.python("random.random()")).stdout == (await sandbox.python("random.random()")).stdout


async def test_a_branch_has_its_own_files(sandbox: Sandbox) -> None:
    await sandbox.write({"a/f": "old", "m.py": "value = 1"})
    await sandbox.exec("ln -s f a/link; chmod 000 a/f; mkdir a/b; mkfifo a/pipe; touch -d @1000000000 a/f; chmod 700 a")
    async with await sandbox.fork() as branch:
        await branch.write({"a/new": "branch", "m.py": "value = 2"})
        await sandbox.write({"m.py": "value = 3"})
        assert await sandbox.list("a") == ["b/", "f", "link", "pipe"]
        assert await branch.list("a") == ["b/", "f", "link", "new"]
        for each, value in ((branch, 2), (sandbox, 3)):
            assert (await each.python("import m; m.value")).stdout == f"{value}\n"
            assert (await each.python("m.value", fresh=True)).stderr.endswith("name 'm' is not defined\n")
            assert (await each.python("import m; m.value", fresh=True)).stdout == f"{value}\n"
            assert (await each.exec("readlink a/link; stat -c %a a/f a; stat -c %Y a/f")).stdout == FACTS
            assert (await each.exec('test "$HOME" = "$PWD" && test "$TMPDIR" = "$PWD" && cat m.py')).ok
    assert (await sandbox.exec("ls -d /branches/* 2>/dev/null")).stdout == ""


async def test_a_branch_starts_in_the_sessions_current_folder(sandbox: Sandbox) -> None:
    await sandbox.write({"a/f": "x"})
    await sandbox.python("import os\nos.chdir('a')")
    async with await sandbox.fork() as branch:
        assert (await branch.python("os.listdir('.')")).stdout == "['f']\n"
        assert (await branch.python("os.getcwd()")).stdout != (await sandbox.python("os.getcwd()")).stdout


async def test_closing_a_branch_ends_its_processes_and_no_others(sandbox: Sandbox) -> None:
    await sandbox.python("import subprocess\np = subprocess.Popen(['sleep', '66.5'], start_new_session=True)")
    branch = await sandbox.fork()
    mark = one_more_minute()
    await branch.python(f"subprocess.Popen('sleep {mark} & sleep {mark}', shell=True, start_new_session=True)")
    await branch.python(DAEMON.format(mark))
    assert (await sandbox.python(SLEEPERS.format(mark, 4) + " >= 4")).stdout == "True\n"
    await branch.close()
    await branch.close()
    assert (await sandbox.python(SLEEPERS.format(mark, 0))).stdout == "0\n"
    assert (await sandbox.python("p.poll()")).stdout == ""
    with pytest.raises(ClosedError, match=r"the branch was closed .* when its close\(\) was called"):
        await branch.python("1")


async def test_a_branch_that_is_killed_leaves_the_others_alone(sandbox: Sandbox) -> None:
    await sandbox.python("x = 1")
    async with await sandbox.fork() as one, await one.fork() as two:
        deaf = "import signal\nsignal.signal(2, 1)\nprint('deaf', flush=True)\nwhile True: pass"
        result = await cut_after("deaf", lambda: one.python(deaf, timeout_s=0.2))
        assert result.status == "timeout"
        assert result.state_lost
        assert "NameError" in (await one.python("x")).stderr
        for other in (sandbox, two):
            answer = await other.python("x")
            assert (answer.stdout, answer.state_lost) == ("1\n", False)
        lost = await sandbox.python("import os, signal\nos.kill(os.getpid(), 9)")
        assert (lost.status, lost.state_lost) == ("killed", True)
        assert (await two.python("x")).stdout == "1\n"


async def test_a_command_in_one_branch_leaves_processes_of_another_running(sandbox: Sandbox) -> None:
    async with await sandbox.fork() as branch:
        await branch.python("import subprocess\np = subprocess.Popen(['sleep', '60'])")
        assert (await sandbox.exec("sleep 60 & echo x")).ok
        assert (await branch.python("p.poll()")).stdout == ""


async def test_the_death_of_a_worker_between_two_calls_is_reported_by_its_own_session(sandbox: Sandbox) -> None:
    async with await sandbox.fork() as branch:
        pid = (await branch.python("import os\nos.getpid()")).stdout.strip()
        await sandbox.exec(f"kill -9 {pid}")
        assert not (await sandbox.python("1")).state_lost
        assert (await branch.python("1")).state_lost


async def test_a_reset_ends_every_branch(sandboxes: SandboxPool) -> None:
    async with sandboxes.lease() as sandbox:
        branch = await sandbox.fork()
        await branch.write({"f": "x"})
        with pytest.raises(ValueError, match="branch"):
            await branch.reset()
    async with sandboxes.lease() as sandbox:
        with pytest.raises(ClosedError, match=r"the branch was closed .* when its lease ended"):
            await branch.exec("true")
        await branch.close()
        async with await sandbox.fork() as other:
            assert await other.list() == []


async def test_a_cancelled_fork_leaves_no_branch(sandbox: Sandbox) -> None:
    await sandbox.python("x = 1")
    started = asyncio.create_task(sandbox.fork())
    for _ in range(2):
        await asyncio.sleep(0)
    started.cancel()
    with pytest.raises(asyncio.CancelledError):
        await started
    assert (await sandbox.python("x")).stdout == "1\n"
    left = await sandbox.python("import os\n[p for p in os.listdir('/branches')] if os.path.isdir('/branches') else []")
    assert left.stdout == "[]\n"


async def test_a_session_that_cannot_be_forked_raises_a_value_error_and_continues(sandbox: Sandbox) -> None:
    await sandbox.exec("p=$(printf 'd/%.0s' $(seq 150)); mkdir -p $p; touch $p/f")
    with pytest.raises(ValueError, match="folders deep"):
        await sandbox.fork()
    await sandbox.exec("rm -rf d")
    await sandbox.python("x = 1\nimport os\ndef no(path): raise OSError\nlistdir, os.listdir = os.listdir, no")
    with pytest.raises(ValueError, match="forked"):
        await sandbox.fork()
    assert (await sandbox.python("x")).stdout == "1\n"
    await sandbox.python("os.listdir = listdir")
    async with await sandbox.fork() as branch:
        assert (await branch.python("x")).stdout == "1\n"


async def test_a_branch_calls_host_functions_under_its_own_name(sandbox: Sandbox) -> None:
    async with await sandbox.fork() as branch:
        assert (await branch.python("f()", functions={"f": lambda: 7})).stdout == "7\n"

        async def loop() -> str:
            return (await sandbox.exec("echo hi")).stdout

        assert (
            "the host function 'loop' raised RuntimeError"
            in (await branch.python("loop()", functions={"loop": loop})).stderr
        )


FORGED = """
import os, sys
frames = [sys._getframe(i) for i in range(4)]
worker = next(v for f in frames for v in f.f_locals.values() if hasattr(v, 'branch'))
def forged(folder):
    worker.inlet.take(1, None)
    ends, worker.inlet.fds = worker.inlet.fds, []
    os.write(ends[0], b'x')
    for fd in ends: os.close(fd)
worker.branch = forged
x = 1
"""


async def test_a_session_cannot_pass_itself_off_as_its_branch(isolated_sandbox: Sandbox) -> None:
    assert (await isolated_sandbox.python(FORGED)).ok
    with pytest.raises(ValueError, match="could not be forked"):
        await isolated_sandbox.fork()
    assert (await isolated_sandbox.python("x")).stdout == "1\n"
