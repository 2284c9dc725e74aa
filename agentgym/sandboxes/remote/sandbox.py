"""A sandbox over a connection, with the same calls for every kind of sandbox."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping

from agentgym.errors import ClosedError, SandboxContentError, SandboxError, WireError
from agentgym.machine.finished import finished
from agentgym.sandboxes.hidden_tests.verify import verify
from agentgym.sandboxes.network.sandbox_network import SandboxNetwork, release
from agentgym.sandboxes.protocol import Branch, ExecResult, HiddenTests, HostFunction, Lifetime, Verdict
from agentgym.sandboxes.protocol.content import WrongContent
from agentgym.sandboxes.remote.calls import MARGIN_S
from agentgym.sandboxes.remote.files import Files
from agentgym.sandboxes.remote.link import TRUNK, Link, WhyItEnded, tell_of_place
from agentgym.sandboxes.remote.refusals import SANDBOX_LOST, with_advice
from agentgym.sandboxes.remote.surroundings import Surroundings
from agentgym.sandboxes.remote.wire import Wire

PROTOCOL = 2
RESET_S = 10.0
START_S = 30.0


class RemoteSandbox(Files, Surroundings, Branch):
    """One session of a sandbox at the other end of a connection; a fork is another session."""

    def __init__(
        self,
        link: Link,
        *,
        digest: str,
        end: Callable[[], Awaitable[None]],
        session: int = TRUNK,
        network: SandboxNetwork | None = None,
        reset_in_place: bool = False,
        lifetime: Lifetime | None = None,
    ) -> None:
        super().__init__(link, session, lifetime)
        self.network = network or SandboxNetwork()
        self.reset_s = 0.0
        """Seconds that the last reset of the sandbox itself took, without its services."""
        self.reset_in_place = reset_in_place
        """Whether a reset wipes the sandbox in place, because episodes can't have their own namespaces."""
        self._digest = digest
        self._end = end

    @classmethod
    async def open(
        cls,
        wire: Wire,
        *,
        digest: str,
        end: Callable[[], Awaitable[None]],
        network: SandboxNetwork | None = None,
        why_it_ended: WhyItEnded | None = None,
    ) -> "RemoteSandbox":
        """Wait for the server's first message and return the sandbox.

        Args:
            wire: The connection to the server.
            digest: The image's digest or the kind of sandbox; the version of the sandbox's Python is appended to it.
            end: Called after the connection was closed, to end the sandbox.
            network: The client's access to the sandbox's network; None for no access.
            why_it_ended: Returns how the code in the sandbox ended the sandbox; None if that can't be determined.

        Raises:
            SandboxError: If it is not the expected message, in which case the connection is closed.
        """
        try:
            frame = await wire.receive(asyncio.get_running_loop().time() + START_S)
            if frame.envelope.get("hello") != PROTOCOL:
                raise SandboxError(f"the sandbox does not speak protocol {PROTOCOL}; rebuild its image")
        except BaseException as error:
            wire.close()
            if isinstance(error, WireError | TimeoutError):
                raise SandboxError(f"the sandbox did not start: {error}") from error
            raise
        in_place = frame.envelope.get("place") == "old"
        tell_of_place(frame.envelope, digest)
        digest = f"{digest}+python{frame.envelope.get('python')}"
        return cls(Link(wire, why_it_ended), digest=digest, end=end, network=network, reset_in_place=in_place)

    @property
    def digest(self) -> str:
        """The image's digest or the kind of sandbox, and the version of its Python."""
        return self._digest

    async def _verify(self, tests: HiddenTests, timeout_s: float) -> Verdict:
        async def run(cell: str, functions: Mapping[str, HostFunction], limit_s: float) -> ExecResult:
            try:
                return await self._python(cell, limit_s, functions, fresh=True, hides=True)
            except SandboxContentError as error:  # For example, the code removed its folder, which also fails the test.
                why = f"the working folder cannot be copied: {error}"
                return ExecResult(status="error", exit_code=1, stdout="", stderr=why)

        return await verify(run, tests, timeout_s, copied=not self.reset_in_place)

    async def fork(self, *, timeout_s: float = 30.0) -> "RemoteSandbox":
        """Create a branch that continues from the current state; see `Sandbox.fork`."""
        branch = self.link.new_number()
        try:
            await self._call("fork", b"", timeout_s, branch=branch)
            lifetime = Lifetime("the branch", self.lifetime)
        except SandboxContentError as error:
            raise WrongContent(with_advice(str(error))) from error
        except (asyncio.CancelledError, ClosedError):
            self.link.end_later("end", branch=branch)
            raise

        async def end() -> None:
            await self.link.finish("end", RESET_S + MARGIN_S, branch=branch, timeout_s=RESET_S)

        return self._twin(lifetime, end, branch)

    def leased(self, within: Lifetime) -> "RemoteSandbox":
        """Return this sandbox for one lease within a pool's lifetime; its calls raise ClosedError after the lease."""
        return self._twin(Lifetime("the sandbox", within), self._end)

    def _twin(self, lifetime: Lifetime, end: Callable[[], Awaitable[None]], session: int = TRUNK) -> "RemoteSandbox":
        return RemoteSandbox(
            self.link,
            digest=self._digest,
            end=end,
            session=session,
            network=self.network,
            reset_in_place=self.reset_in_place,
            lifetime=lifetime,
        )

    async def reset(self, *, timeout_s: float = RESET_S) -> None:
        """Reset the sandbox to the state of a new one, and end every branch; a branch itself can't be reset.

        Raises:
            SandboxError: If something is left over, in which case the sandbox is broken.
            ValueError: If this is a branch.
        """
        if self._session != TRUNK:
            raise ValueError("a branch cannot be reset, only closed")
        self.lifetime.check()
        self.lifetime.end_inner("the sandbox was reset")
        await self.network.end()
        self.link.lose_processes()
        began = asyncio.get_running_loop().time()
        try:
            frame = await self.link.call("reset", b"", timeout_s, timeout_s=timeout_s)
        except (OSError, ValueError) as error:
            self.link.cut(f"it could not be reset: {error}")
            raise SandboxError(f"{SANDBOX_LOST}: {self.broken}") from error
        if frame.envelope.get("clean") is not True:
            why = frame.envelope.get("why")
            self.link.cut(f"something from the last episode could not be removed{f': {why}' if why else ''}")
            raise SandboxError(f"{SANDBOX_LOST}: {self.broken}")
        self.reset_s = asyncio.get_running_loop().time() - began
        try:
            await self.begin_surroundings()
        except SandboxError as error:
            raise SandboxError(f"{SANDBOX_LOST}: {error}") from error

    @property
    def broken(self) -> str | None:
        """The reason why no more calls are possible, or None while the sandbox works."""
        return self.link.broken

    def cut(self) -> None:
        """Cut the connection at once, without waiting; the sandbox then ends by itself."""
        self.lifetime.end("its close() was called")
        self.link.cut("it was closed")

    async def close(self) -> None:
        """End the sandbox and everything in it, or only this branch, however often this task is cancelled meanwhile.

        Closing twice is harmless.
        """
        if self._session != TRUNK and self.lifetime.is_over:
            return  # It ended with the sandbox's lease, or was closed.
        self.lifetime.end("its close() was called")
        if self._session == TRUNK:
            self.cut()
            await release(self.network, self._end)
        else:
            await finished(self._end())
