"""The check of a sandbox: all its parts in order, and a line for each that is broken."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping

from agentgym.errors import ClosedError
from agentgym.sandboxes.protocol import Box, Boxes, Sandbox
from agentgym.testing.sandbox_checks import files, programs, sessions
from agentgym.testing.sandbox_checks.claims import holds, raises, same

CHECKS: Mapping[str, Callable[[Box], Awaitable[None]]] = {
    "digest": sessions.digest,
    "exec": programs.exec_,
    "output limits": programs.output_limits,
    "time limits": programs.time_limits,
    "cancellations": programs.cancellations,
    "python": programs.python,
    "functions": programs.functions,
    "verify": programs.verify,
    "start": programs.start,
    "shell": programs.shell,
    "write": files.write,
    "read": files.read,
    "read_text": files.read_text,
    "list": files.list_,
    "put": files.put,
    "get": files.get,
    "archive": files.archive,
    "unpack": files.unpack,
    "snapshot": files.snapshot,
    "restore": files.restore,
    "fork": sessions.fork,
    "requests": sessions.requests,
    "port": sessions.port,
    "service": sessions.service,
    "reset": sessions.reset,
}
"""What is checked of one box, each check in a lease of its own, by name: one for each method, and for each limit."""


async def check_sandbox(sandbox: Sandbox, timeout_s: float) -> list[str]:
    """Run all checks, and return a line for each that failed; SandboxError where no box can be had."""
    found: list[str] = []
    digests: set[object] = set()
    async with sandbox.open(1) as boxes:
        async with boxes.lease():
            pass
        for name, check in CHECKS.items():
            found += await _broken(name, _in_a_lease(boxes, check, digests), timeout_s)
    if len(digests) > 1:
        found.append(f"digest: boxes of one sandbox have one text that names what they are made of, got {digests}")
    for name, check_pool in POOL.items():
        found += await _broken(name, check_pool(sandbox), timeout_s)
    return found


async def _in_a_lease(boxes: Boxes, check: Callable[[Box], Awaitable[None]], digests: set[object]) -> None:
    async with boxes.lease() as box:
        digests.add(box.digest)
        await check(box)


async def _broken(name: str, check: Awaitable[None], timeout_s: float) -> list[str]:
    try:
        async with asyncio.timeout(timeout_s) as limit:
            await check
    except AssertionError as error:
        return [f"{name}: {error}"]
    except Exception as error:
        if limit.expired():
            return [f"{name}: it did not end within {timeout_s:g} s"]
        return [f"{name}: {type(error).__name__}: {error}"]
    return []


async def _sizes(sandbox: Sandbox) -> None:
    """A pool of no boxes is a ValueError."""

    async def opened() -> None:
        async with sandbox.open(0):
            pass

    await raises("open(0)", ValueError, opened())


async def _leases(sandbox: Sandbox) -> None:
    """At most `size` leases at once, each clean; a cancelled one gives its box back."""
    async with sandbox.open(1) as boxes:
        async with boxes.lease() as box:
            await box.write({"left": "x"})
            waiting = asyncio.create_task(_first(boxes))
            await box.python("1")
            holds("a lease beyond the size waits", not waiting.done())
        same("the files of the next lease", await waiting, [])
        busy = asyncio.Event()
        cancelled = asyncio.create_task(_busy(boxes, busy))
        begun = asyncio.create_task(busy.wait())
        await asyncio.wait({cancelled, begun}, return_when=asyncio.FIRST_COMPLETED)
        for task in (cancelled, begun):
            task.cancel()
        await asyncio.gather(cancelled, begun, return_exceptions=True)
        same("the files of the lease after a cancelled one", await _first(boxes), [])


async def _ends(sandbox: Sandbox) -> None:
    """A box is closed with its lease, and a pool with its block."""
    async with sandbox.open(1) as boxes:
        async with boxes.lease() as box:
            pass
        await raises("a call of a box after its lease", ClosedError, box.python("1"))
        async with boxes.lease():
            await raises("a call of a box whose place another lease has", ClosedError, box.list())
    await raises("a lease of a closed pool", ClosedError, _first(boxes))


POOL: Mapping[str, Callable[[Sandbox], Awaitable[None]]] = {"open": _sizes, "lease": _leases, "close": _ends}
"""What is checked of a pool, each check with a pool of its own, by name."""


async def _first(boxes: Boxes) -> list[str]:
    async with boxes.lease() as box:
        return await box.list()


async def _busy(boxes: Boxes, busy: asyncio.Event) -> None:
    async with boxes.lease() as box:
        await box.write({"left": "x"})
        await box.python("busy()\nwhile True: pass", functions={"busy": busy.set}, timeout_s=60)
