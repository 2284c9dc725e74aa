"""The check of a sandbox: all its parts in order, and a line for each that is broken."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping

from agentgym.errors import ClosedError
from agentgym.sandboxes.protocol import Sandbox, SandboxPool, SandboxSpec
from agentgym.testing.sandbox_checks import files, programs, sessions
from agentgym.testing.sandbox_checks.claims import holds, raises, same

CHECKS: Mapping[str, Callable[[Sandbox], Awaitable[None]]] = {
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
"""What is checked of one sandbox, each check in a lease of its own, by name: one for each method, and for each
limit."""


async def check_sandbox(spec: SandboxSpec, timeout_s: float) -> list[str]:
    """Run all checks, and return a line for each that failed; SandboxError where no sandbox can be had."""
    found: list[str] = []
    digests: set[object] = set()
    async with spec.open(1) as sandboxes:
        async with sandboxes.lease():
            pass
        for name, check in CHECKS.items():
            found += await _broken(name, _in_a_lease(sandboxes, check, digests), timeout_s)
    if len(digests) > 1:
        found.append(f"digest: sandboxes of one spec have one text that names what they are made of, got {digests}")
    for name, check_pool in POOL.items():
        found += await _broken(name, check_pool(spec), timeout_s)
    return found


async def _in_a_lease(
    sandboxes: SandboxPool, check: Callable[[Sandbox], Awaitable[None]], digests: set[object]
) -> None:
    async with sandboxes.lease() as sandbox:
        digests.add(sandbox.digest)
        await check(sandbox)


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


async def _sizes(spec: SandboxSpec) -> None:
    """A pool of no sandboxes is a ValueError."""

    async def opened() -> None:
        async with spec.open(0):
            pass

    await raises("open(0)", ValueError, opened())


async def _leases(spec: SandboxSpec) -> None:
    """At most `size` leases at once, each clean; a cancelled one gives its sandbox back."""
    async with spec.open(1) as sandboxes:
        async with sandboxes.lease() as sandbox:
            await sandbox.write({"left": "x"})
            waiting = asyncio.create_task(_first(sandboxes))
            await sandbox.python("1")
            holds("a lease beyond the size waits", not waiting.done())
        same("the files of the next lease", await waiting, [])
        busy = asyncio.Event()
        cancelled = asyncio.create_task(_busy(sandboxes, busy))
        begun = asyncio.create_task(busy.wait())
        await asyncio.wait({cancelled, begun}, return_when=asyncio.FIRST_COMPLETED)
        for task in (cancelled, begun):
            task.cancel()
        await asyncio.gather(cancelled, begun, return_exceptions=True)
        same("the files of the lease after a cancelled one", await _first(sandboxes), [])


async def _ends(spec: SandboxSpec) -> None:
    """A sandbox is closed with its lease, and a pool with its block."""
    async with spec.open(1) as sandboxes:
        async with sandboxes.lease() as sandbox:
            pass
        await raises("a call of a sandbox after its lease", ClosedError, sandbox.python("1"))
        async with sandboxes.lease():
            await raises("a call of a sandbox whose place another lease has", ClosedError, sandbox.list())
    await raises("a lease of a closed pool", ClosedError, _first(sandboxes))


POOL: Mapping[str, Callable[[SandboxSpec], Awaitable[None]]] = {"open": _sizes, "lease": _leases, "close": _ends}
"""What is checked of a pool, each check with a pool of its own, by name."""


async def _first(sandboxes: SandboxPool) -> list[str]:
    async with sandboxes.lease() as sandbox:
        return await sandbox.list()


async def _busy(sandboxes: SandboxPool, busy: asyncio.Event) -> None:
    async with sandboxes.lease() as sandbox:
        await sandbox.write({"left": "x"})
        await sandbox.python("busy()\nwhile True: pass", functions={"busy": busy.set}, timeout_s=60)
