"""What every sandbox owes its users, as checks of real boxes: behind `agentgym.testing.check_sandbox`."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from pathlib import PurePosixPath

from agentgym.boxes import Box, Boxes, Sandbox
from agentgym.errors import SandboxError

SECRET = "kept on this side"


async def calls(box: Box) -> None:
    """Programs that fail are results, output and exit codes are the program's own."""
    failed = await box.exec("echo out; echo err >&2; exit 7")
    _same("exec", (failed.status, failed.exit_code, failed.stdout, failed.stderr), ("error", 7, "out\n", "err\n"))
    raised = await box.python("1 / 0")
    _same("python", (raised.status, raised.exit_code), ("error", 1))
    _true("python's traceback", "ZeroDivisionError" in raised.stderr)


async def cells(box: Box) -> None:
    """Names persist from cell to cell, a last expression is printed by repr, `fresh` sees none of it."""
    await box.python("x = 'a'")
    _same("a cell", (await box.python("x * 2")).stdout, "'aa'\n")
    fresh = await box.python("'x' in globals()", fresh=True)
    _same("a fresh cell", fresh.stdout, "False\n")
    _same("the cell after it", (await box.python("x")).stdout, "'a'\n")


async def time_limits(box: Box) -> None:
    """What runs past its limit is ended with what it printed, and the box goes on."""
    for name, result in (
        ("exec", await box.exec("echo begun; sleep 60", timeout_s=1.0)),
        ("python", await box.python("import time\nprint('begun')\ntime.sleep(60)", timeout_s=1.0)),
    ):
        _same(f"{name} past its limit", (result.status, result.stdout), ("timeout", "begun\n"))
    _same("a cell after time-outs", (await box.python("6 * 7")).stdout, "42\n")


async def files(box: Box) -> None:
    """Files go in and out whole; one that is missing is FileNotFoundError, a path that leads out ValueError."""
    content = bytes(range(256)) * 64
    await box.write({"a/b": content, "c": "é"})
    _same("read", await box.read("a/b"), content)
    _same("list", await box.list(), ["a/", "c"])
    _same("a file from the shell", (await box.exec("cat c")).stdout, "é")
    await _raises("read of a missing file", FileNotFoundError, box.read("nowhere"))
    await _raises("read over the limit", ValueError, box.read("a/b", limit=10))
    await _raises("write outside", ValueError, box.write({"../outside": "x"}))


async def functions(box: Box) -> None:
    """Code in the box calls functions of the host, whose errors are exceptions there."""

    async def ask(number: int) -> int:
        if number < 0:
            raise ValueError(SECRET)
        return 2 * number

    asked = await box.python("ask(20) + 1", functions={"ask": ask})
    _same("a host function", asked.stdout, "41\n")
    failed = await box.python("ask(-1)", functions={"ask": ask})
    _same("a host function that fails", failed.exit_code, 1)
    gone = await box.python("ask(1)")
    _true("a function of an earlier cell is gone", "NameError" in gone.stderr)


async def branches(box: Box) -> None:
    """A branch goes on from here, and neither side sees what the other does."""
    await box.write({"f": "before"})
    await box.python("x = 1")
    async with await box.fork() as branch:
        await branch.write({"f": "branch"})
        _same("a name in a branch", (await branch.python("x += 1; x")).stdout, "2\n")
        _same("a file beside a branch", await box.read("f"), b"before")
        _same("a name beside a branch", (await box.python("x")).stdout, "1\n")
    await _raises("a call of a closed branch", SandboxError, branch.python("1"))


async def resets(box: Box) -> None:
    """A reset leaves no file, no name and no process."""
    await box.write({"a/f": "x"})
    await box.python("import subprocess\nx = subprocess.Popen(['sleep', '73.25'])")
    await box.reset()
    _same("list after a reset", await box.list(), [])
    _true("a name after a reset", "NameError" in (await box.python("x")).stderr)
    left = await box.exec("cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' ' ' | grep -c '[s]leep 73.25'")
    _same("processes after a reset", left.stdout.strip(), "0")


CHECKS: Mapping[str, Callable[[Box], Awaitable[None]]] = {
    check.__name__: check for check in (calls, cells, time_limits, files, functions, branches, resets)
}
"""What is checked of one box, each check in a lease of its own, by name."""


async def check_pool(sandbox: Sandbox) -> None:
    """At most `size` leases at once, each clean; a cancelled one gives its box back; a closed pool leases nothing."""
    async with sandbox.open(1) as boxes:
        async with boxes.lease() as box:
            await box.write({"left": "x"})
            waiting = asyncio.create_task(_first(boxes))
            await box.python("1")
            _true("a lease beyond the size waits", not waiting.done())
        _same("the files of the next lease", await waiting, [])
        cancelled = asyncio.create_task(_busy(boxes))
        await asyncio.wait({cancelled}, timeout=1.0)
        cancelled.cancel()
        await asyncio.gather(cancelled, return_exceptions=True)
        _same("the lease after a cancelled one", await _first(boxes), [])
    await _raises("a lease of a closed pool", SandboxError, _first(boxes))
    await _raises("a call of a box of a closed pool", SandboxError, box.python("1"))


async def check_sandbox(sandbox: Sandbox) -> list[str]:
    """Run all checks, and return a line for each that failed."""
    found: list[str] = []
    async with sandbox.open(1) as boxes:
        digests = set()
        for name, check in CHECKS.items():
            try:
                async with boxes.lease() as box:
                    digests.add(box.digest)
                    await check(box)
            except (AssertionError, SandboxError, OSError, ValueError) as error:
                found.append(f"{name}: {type(error).__name__}: {error}".replace("AssertionError: ", ""))
        if len(digests) != 1 or not all(digests):
            found.append(f"digest: boxes of one sandbox have one text that names what they are made of, got {digests}")
    try:
        await check_pool(sandbox)
    except (AssertionError, SandboxError) as error:
        found.append(f"pool: {error}")
    return found


async def _first(boxes: Boxes) -> list[str]:
    async with boxes.lease() as box:
        return [str(PurePosixPath(name)) for name in await box.list()]


async def _busy(boxes: Boxes) -> None:
    async with boxes.lease() as box:
        await box.write({"left": "x"})
        await box.exec("sleep 60", timeout_s=60)


def _same(what: str, got: object, wanted: object) -> None:
    if got != wanted:
        raise AssertionError(f"{what}: {wanted!r} is promised, got {got!r}")


def _true(what: str, holds: bool) -> None:
    if not holds:
        raise AssertionError(f"{what}: it is not so")


async def _raises(what: str, kind: type[Exception], call: Awaitable[object]) -> None:
    try:
        await call
    except kind:
        return
    except Exception as error:
        raise AssertionError(f"{what}: {kind.__name__} is promised, got {type(error).__name__}: {error}") from error
    raise AssertionError(f"{what}: {kind.__name__} is promised, got an answer")
