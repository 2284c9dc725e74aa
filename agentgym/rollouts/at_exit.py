"""Work at the end of a rollout; if it fails, its error never hides an earlier one."""

from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, TypeVar

from agentgym.environments.task_sandboxes import lease_for
from agentgym.errors import AgentGymError, EnvError, SandboxError, boundary
from agentgym.machine.time_limits import TimeLimit
from agentgym.sandboxes.protocol import Sandbox, SandboxPool, SandboxSpec

T = TypeVar("T")


class at_exit:
    """Run `work` at the end of an `async with`.

    If the body of the `async with` has raised an AgentGymError and the work fails, too, the work's error becomes a
    note of the body's error.

    Args:
        kind: The type of error that errors of the work are converted to, as in `boundary`.
        where: The start of the error's message.
        work: The work.
    """

    __slots__ = ("_edge", "_work")

    def __init__(self, kind: type[AgentGymError], where: str, work: Callable[[], Awaitable[None]]) -> None:
        self._edge, self._work = boundary(kind, where), work

    async def __aenter__(self) -> None:
        """Do nothing; all work happens on exit."""

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            with self._edge:
                await self._work()
        except AgentGymError as failure:
            if not isinstance(error, AgentGymError):
                raise
            error.add_note(str(failure))


class leased:
    """Lease a sandbox until the end of the `async with`; raise SandboxError if it can't be leased or returned."""

    __slots__ = ("_lease", "_sandboxes", "_spec")

    def __init__(self, sandboxes: SandboxPool, spec: SandboxSpec) -> None:
        self._sandboxes, self._spec = sandboxes, spec

    async def __aenter__(self) -> Sandbox:
        with boundary(SandboxError, "lease"):
            self._lease = lease_for(self._sandboxes, self._spec)
            return await self._lease.__aenter__()

    async def __aexit__(self, *error: Any) -> None:
        with boundary(SandboxError, "the return of the sandbox"):
            await self._lease.__aexit__(*error)


async def within_limit(where: str, seconds: float, work: Callable[[], Awaitable[T]]) -> T:
    """Run an env's own code after the last turn, such as `score` or `close`, for at most `seconds`.

    Raises:
        EnvError: If the code fails, or takes longer than `seconds`; the message names `limits.seconds`.
    """
    limit = TimeLimit(seconds)

    async def awaited() -> T:
        return await work()

    with boundary(EnvError, where):
        try:
            return await limit.bound(awaited())
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise too_slow(seconds) from error


def too_slow(seconds: float) -> TimeoutError:
    """Return the error for an env that exceeded its time limit."""
    return TimeoutError(f"not finished after {seconds:g} s (limits.seconds)")
