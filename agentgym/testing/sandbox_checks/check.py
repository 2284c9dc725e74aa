"""The check of a sandbox: all its parts in order, and a line for each one that fails."""

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
"""The checks of one sandbox by name, each in a separate lease: one for each method, and for each limit."""


async def check_sandbox(spec: SandboxSpec, timeout_s: float) -> list[str]:
    """Run all checks, and return a line for each that failed; raise SandboxError if no sandbox can be started."""
    found: list[str] = []
    digests: set[object] = set()
    async with spec.open(1) as sandboxes:
        async with sandboxes.lease():
            pass
        for name, check in CHECKS.items():
            found += await _broken(name, _in_a_lease(sandboxes, check, digests), timeout_s)
    if len(digests) > 1:
        found.append(f"digest: expected the same text for all sandboxes of one spec, got {digests}")
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
            return [f"{name}: did not end within {timeout_s:g} s"]
        return [f"{name}: {type(error).__name__}: {error}"]
    return []


async def _sizes(spec: SandboxSpec) -> None:
    """Check that a pool of no sandboxes raises ValueError."""

    async def opened() -> None:
        async with spec.open(0):
            pass

    await raises("open(0)", ValueError, opened())


async def _leases(spec: SandboxSpec) -> None:
    """Check that there are at most `size` leases at once, each clean, and that a cancelled one returns its sandbox."""
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
    """Check that a sandbox is closed at the end of its lease, and a pool at the end of its `async with`."""
    async with spec.open(1) as sandboxes:
        async with sandboxes.lease() as sandbox:
            pass
        await raises("a call of a sandbox after its lease", ClosedError, sandbox.python("1"))
        async with sandboxes.lease():
            await raises("a call of a sandbox after another lease took its slot", ClosedError, sandbox.list())
    await raises("a lease of a closed pool", ClosedError, _first(sandboxes))


POOL: Mapping[str, Callable[[SandboxSpec], Awaitable[None]]] = {"open": _sizes, "lease": _leases, "close": _ends}
"""The checks of a pool by name, each with a separate pool."""


async def _first(sandboxes: SandboxPool) -> list[str]:
    async with sandboxes.lease() as sandbox:
        return await sandbox.list()


async def _busy(sandboxes: SandboxPool, busy: asyncio.Event) -> None:
    async with sandboxes.lease() as sandbox:
        await sandbox.write({"left": "x"})
        await sandbox.python("busy()\nwhile True: pass", functions={"busy": busy.set}, timeout_s=60)
