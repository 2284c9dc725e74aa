"""Checks of programs in a sandbox: commands, cells, hidden tests, background programs, and shells."""

import asyncio
import hashlib

from agentgym.errors import ClosedError
from agentgym.sandboxes.protocol import Sandbox, SandboxProcess, Verdict
from agentgym.testing.sandbox_checks.claims import holds, raises, result, same
from agentgym.testing.sandbox_checks.files import CONTENT

SECRET = "kept on this side"
TESTS = """
from work import double

def test_two():
    assert double(2) == 4

def test_none():
    assert double(0) == 1
"""
READ_LARGE = "import hashlib\ndef read(): return hashlib.sha256(open('large', 'rb').read()).hexdigest()\n"
MANY = 17 << 20
"""Bytes of output, more than a program may write."""


async def exec_(sandbox: Sandbox) -> None:
    """Check a command's streams, exit code, folder, variables and input; a list of words runs without a shell."""
    failed = await sandbox.exec("echo out; echo err >&2; exit 7")
    result("a command that fails", failed, status="error", exit_code=7, stdout="out\n", stderr="err\n")
    done = await sandbox.exec(["printf", "%s", "a b; $HOME"])
    result("a program and its arguments", done, status="ok", exit_code=0, stdout="a b; $HOME", stderr="")
    await sandbox.exec("mkdir -p below")
    given = await sandbox.exec('basename "$PWD"; echo "$GIVEN"; cat', cwd="below", env={"GIVEN": "x"}, stdin="input")
    result("cwd, env and stdin", given, stdout="below\nx\ninput")
    same("stdin without one", (await sandbox.exec("cat")).stdout, "")
    same("a variable of an earlier command", (await sandbox.exec('echo "$GIVEN"')).stdout, "\n")
    raw = await sandbox.exec(r"printf '\377\001'")
    same("the bytes of stdout", raw.stdout_bytes, b"\xff\x01")
    result("a program that does not exist", await sandbox.exec(["no-such-program"]), status="error", exit_code=127)
    result("a program that is killed", await sandbox.exec(["sh", "-c", "kill -9 $$"]), status="killed", exit_code=-9)


async def output_limits(sandbox: Sandbox) -> None:
    """Check that a stream's head and tail are kept up to the limit, and that endless output ends the program."""
    cut = await sandbox.exec("printf begin; head -c 100000 /dev/zero | tr '\\0' x; printf end", output_limit=1000)
    result("output over its limit", cut, status="ok", truncated=True)
    holds("the head and the tail are kept", cut.stdout.startswith("begin") and cut.stdout.endswith("end"))
    holds("cut output is within its limit, but for a note", len(cut.stdout) < 2000)
    result("output within its limit", await sandbox.exec("echo x"), truncated=False)
    endless = await sandbox.exec(f"head -c {MANY} /dev/zero", timeout_s=60)
    result("output over 16 MiB", endless, status="output_limit")


async def time_limits(sandbox: Sandbox) -> None:
    """Check that a call past its limit is terminated, its output is returned, and the sandbox stays usable."""
    for name, ended in (
        ("exec", await sandbox.exec("echo begun; sleep 60", timeout_s=1.0)),
        ("python", await sandbox.python("import time\nprint('begun')\ntime.sleep(60)", timeout_s=1.0)),
    ):
        result(f"{name} past its limit", ended, status="timeout", stdout="begun\n")
    same("a cell after time-outs", (await sandbox.python("6 * 7")).stdout, "42\n")
    for limit in (0.0, float("nan")):
        await raises(f"exec with timeout_s={limit}", ValueError, sandbox.exec("true", timeout_s=limit))


async def cancellations(sandbox: Sandbox) -> None:
    """Check that a cancelled call is terminated in the sandbox, and that the sandbox stays usable."""
    begun = asyncio.Event()
    code = "import subprocess\nsleeper = subprocess.Popen(['sleep', '74.25'])\nbegun()\nsleeper.wait()"
    running = asyncio.create_task(sandbox.python(code, functions={"begun": begun.set}, timeout_s=60))
    waiting = asyncio.create_task(begun.wait())
    await asyncio.wait({running, waiting}, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    holds("a waiting cell runs until it is cancelled", not running.done())
    running.cancel()
    try:
        await running
        raise AssertionError("a cancelled cell: expected CancelledError, got a result")
    except asyncio.CancelledError:
        pass
    same("a cell after a cancelled one", (await sandbox.python("6 * 7")).stdout, "42\n")


async def python(sandbox: Sandbox) -> None:
    """Check that names persist between cells, a last expression is printed by repr, and an exception is a result."""
    await sandbox.python("x = 'a'")
    result("a cell", await sandbox.python("x * 2"), status="ok", exit_code=0, stdout="'aa'\n", stderr="")
    raised = result("a cell that raises", await sandbox.python("1 / 0"), status="error", exit_code=1)
    holds("the traceback is in stderr", "ZeroDivisionError" in raised.stderr)
    fresh = await sandbox.python("'x' in globals()", fresh=True)
    same("a fresh cell", fresh.stdout, "False\n")
    same("the cell after it", (await sandbox.python("x")).stdout, "'a'\n")
    result("a cell that exits", await sandbox.python("import os; os._exit(3)"), exit_code=3, state_lost=True)
    holds("a name of a lost session", "NameError" in (await sandbox.python("x")).stderr)


async def functions(sandbox: Sandbox) -> None:
    """Check that code in the sandbox calls functions of the host, whose errors become exceptions there."""

    async def ask(number: int) -> int:
        if number < 0:
            raise ValueError(SECRET)
        return 2 * number

    asked = await sandbox.python("ask(20) + 1", functions={"ask": ask})
    same("a host function", asked.stdout, "41\n")
    failed = await sandbox.python("ask(-1)", functions={"ask": ask})
    result("a host function that fails", failed, status="error", exit_code=1)
    holds("the text of a host function's error is kept from the sandbox", SECRET not in failed.stderr)
    gone = await sandbox.python("ask(1)")
    holds("a function of an earlier cell is gone", "NameError" in gone.stderr)


async def verify(sandbox: Sandbox) -> None:
    """Check that hidden tests return a verdict per case, an early exit can't forge one, and no test files remain."""
    await sandbox.write({"work.py": "def double(number): return 2 * number\n"})
    verdict = _verdict("verify(code=)", await sandbox.verify(code=TESTS))
    same("the cases", sorted(verdict.cases), ["test_none", "test_two"])
    same("the case that passed", verdict.cases["test_two"], None)
    holds("the case that failed has a reason", bool(verdict.cases["test_none"]))
    compared = await sandbox.verify(code="from work import double", expect={"double(2)": 4, "double(3)": 7})
    same("verify(code=, expect=)", _verdict("verify(expect=)", compared).fraction, 0.5)
    await sandbox.write({"echo.py": "print(input())\n"})
    printed = await sandbox.verify(command="python3 echo.py", expect={"a\n": "a\n", "b\n": "a\n"})
    same("verify(command=, expect=)", _verdict("verify(command=)", printed).fraction, 0.5)
    await sandbox.write({"large": CONTENT * 64})
    read = await sandbox.verify(code=READ_LARGE, expect={"read()": hashlib.sha256(CONTENT * 64).hexdigest()})
    same("a large file that verify reads", _verdict("verify(expect=)", read).fraction, 1.0)
    await sandbox.exec("rm large")
    hidden = await sandbox.verify(command="python3 hidden.py", files={"hidden.py": "import work\n"})
    same("verify(files=)", _verdict("verify(files=)", hidden).fraction, 1.0)
    await sandbox.write({"work.py": "import os\nos._exit(0)\n"})
    same("code that exits early", _verdict("verify", await sandbox.verify(code=TESTS)).passed, 0)
    same("the files after it", await sandbox.list(), ["echo.py", "work.py"])
    await raises("verify without code and command", ValueError, sandbox.verify())


def _verdict(what: str, got: object) -> Verdict:
    if not isinstance(got, Verdict):
        raise AssertionError(f"{what}: expected a Verdict, got {got!r:.300}")
    return got


async def start(sandbox: Sandbox) -> None:
    """Check that a program runs next to other calls, that its streams work, and that it is closed at the end."""
    async with sandbox.start(["cat"]) as cat:
        await cat.write("hello\n")
        same("the output of a program", await _read(cat, 6), b"hello\n")
        same("a call while it runs", (await sandbox.python("1")).stdout, "1\n")
        same("the exit code while it runs", cat.exit_code, None)
        await raises("wait past its limit", TimeoutError, cat.wait(timeout_s=0.1))
        await cat.close_stdin()
        same("its exit code", await cat.wait(timeout_s=30), 0)
        same("the end of its output", await cat.stdout.read(timeout_s=30), b"")
    async with sandbox.start("echo err >&2; exit 7", cwd=".", env={"A": "b"}) as failing:
        same("the stderr of a program", b"".join([piece async for piece in failing.stderr]), b"err\n")
        same("the exit code of a program that fails", await failing.wait(timeout_s=30), 7)
    async with sandbox.start(["sleep", "60"]) as killed:
        await killed.kill()
        same("the exit code of a program that is killed", await killed.wait(timeout_s=30), -9)
    async with sandbox.start(["cat"]) as left:
        pass
    await raises("a program after its `async with` block", ClosedError, left.write("x"))


async def _read(program: SandboxProcess, size: int) -> bytes:
    got = b""
    while len(got) < size and (piece := await program.stdout.read(timeout_s=30)):
        got += piece
    return got


async def shell(sandbox: Sandbox) -> None:
    """Check that a shell keeps its folder and variables between commands, and is closed after its `async with`."""
    async with sandbox.shell(env={"GIVEN": "x"}) as opened:
        result("a shell's command", await opened.run("mkdir -p a; cd a; NAME=y"), status="ok", exit_code=0)
        shown = await opened.run('basename "$PWD"; echo "$NAME$GIVEN"; echo err >&2; (exit 7)')
        result("a shell's next command", shown, exit_code=7, stdout="a\nyx\n", stderr="err\n")
        result("a shell's command past its limit", await opened.run("sleep 60", timeout_s=1.0), status="timeout")
        same("a shell after a time-out", (await opened.run("echo z")).stdout, "z\n")
    await raises("a shell after its `async with` block", ClosedError, opened.run("true"))
