"""Choose a kind of sandbox by name, or the best one that runs here; `python -m agentgym.sandboxes.choose` prints it."""

import argparse
import functools
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import field, fields, replace
from typing import Any, ClassVar, Literal, TypeAlias

from agentgym.config_fields import Positive, Words, config
from agentgym.errors import SandboxError
from agentgym.sandboxes.docker.docker import Docker, why_no_docker
from agentgym.sandboxes.local.local import Bubblewrap, Process, why_no_bubblewrap
from agentgym.sandboxes.network.modes import NONE
from agentgym.sandboxes.network.rules import Allow
from agentgym.sandboxes.protocol import SandboxPool, SandboxSpec
from agentgym.sandboxes.protocol.arguments import check_size
from agentgym.sandboxes.remote.sandbox import RemoteSandbox

_log = logging.getLogger("agentgym.sandboxes")
Kind: TypeAlias = Literal["auto", "docker", "bubblewrap", "unsafe"]


@config(frozen=True, slots=True, kw_only=True)
class AnySandbox:
    """The best sandbox that runs here: Docker if its engine and the sandbox image are available, else bubblewrap.

    If the choice isn't Docker, a warning is logged once, with what the choice lacks compared with Docker. Code never
    runs unprotected as a fallback: "unsafe" must be selected by name.

    The settings are those that Docker and bubblewrap share. They mean the same for both, except for the differences
    noted below. An "unsafe" sandbox only has `memory_mb`.
    """

    ELSEWHERE: ClassVar = (Docker, Bubblewrap)
    kind: Kind = "auto"
    memory_mb: Positive | None = None
    """Memory limit in MB: for all programs of a sandbox together with Docker, for each process with bubblewrap.

    Files don't count toward it. None uses the default of the chosen kind, as in the other settings.
    """
    disk_mb: Positive | None = None
    """Size in MB of each in-memory folder of the sandbox.

    A sandbox may use four times as much for its files: for the working folder, for its branches, for the copy that
    `verify` judges, and for /dev/shm.
    """
    pids: Positive | None = None
    """Maximum number of processes."""
    pip: Words = ()
    """Packages that code in the sandbox can import, installed once, when a pool of such sandboxes is first opened."""
    volumes: Mapping[str, str] = field(default_factory=dict, hash=False)
    """Folders and files of the host, keyed by their path in the sandbox, where they are read-only."""
    network: str | Allow = NONE
    """What the sandbox may reach: "none", "loopback" for only itself, or `Allow(...)` for the listed hosts.

    For the Docker engine's own networks or for services, use `Docker` itself.
    """

    def __post_init__(self) -> None:
        given = self._given()
        if self.kind == "docker":
            Docker(**given)
            given.pop("volumes", None)  # With Docker, the volumes may be on a remote engine's machine.
        Bubblewrap(**given)  # Raises ValueError unless both kinds accept the settings.
        more = sorted(self._given().keys() - {"memory_mb"})
        if self.kind == "unsafe" and more:
            raise ValueError(
                f"{more[0]}: the sandbox 'unsafe' is a plain process on this machine and has no such setting"
            )

    def open(self, size: int) -> AbstractAsyncContextManager[SandboxPool]:
        """Open a pool of sandboxes.

        Args:
            size: Maximum number of sandboxes leased at once.

        Raises:
            SandboxError: If no kind of sandbox runs here; the message says what to install.
            ValueError: If `size` is not an int of at least 1.
        """
        check_size(size)
        return replace(named(self.kind), **self._given()).open(size)

    def _given(self) -> dict[str, Any]:
        """Return the settings that override the chosen kind's defaults."""
        settings = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "kind"}
        return {name: value for name, value in settings.items() if value not in (None, (), {}, NONE)}


def as_kind(spec: SandboxSpec, kind: Kind) -> AnySandbox:
    """Return an AnySandbox of the given kind, with the settings of `spec` if that is an AnySandbox too.

    Raises:
        ValueError: If the kind doesn't have one of the settings; the message names the setting.
    """
    return replace(spec, kind=kind) if isinstance(spec, AnySandbox) else AnySandbox(kind=kind)


LACKS: Mapping[type[SandboxSpec], tuple[str, ...]] = {
    Docker: (),
    Bubblewrap: (
        "no limit on a sandbox's total memory, only on the memory of each process and folder",
        "no limit on CPU time other than the time limits of calls",
        "programs and Python come from this machine's /usr instead of an image",
    ),
    Process: ("no isolation: the model's code runs as this user, unprotected",),
}
"""Drawbacks of each kind of sandbox compared with the best one, Docker."""
NAMES: Mapping[type[SandboxSpec], Kind] = {Docker: "docker", Bubblewrap: "bubblewrap", Process: "unsafe"}


def named(kind: Kind) -> Docker | Bubblewrap | Process:
    """Return the given kind of sandbox with default settings.

    Only "auto" checks that the sandbox runs here.
    """
    made: Mapping[Kind, Callable[[], Docker | Bubblewrap | Process]]
    made = {"auto": auto, "docker": Docker, "bubblewrap": Bubblewrap, "unsafe": lambda: Process(unsafe=True)}
    return made[kind]()


def auto() -> Docker | Bubblewrap:
    """Return the strongest sandbox that runs here, never an unsafe one.

    Raises:
        SandboxError: If none runs here; the message says why, for each kind.
    """
    no_docker = why_no_docker()
    if no_docker is None:
        return Docker()
    no_bubblewrap = why_no_bubblewrap()
    if no_bubblewrap is None:
        _say_once(lacking(Bubblewrap(), no_docker))
        return Bubblewrap()
    raise SandboxError(
        f"no sandbox runs here. Docker: {no_docker}. Bubblewrap: {no_bubblewrap}. "
        "Code that you trust can run unprotected in the sandbox 'unsafe'."
    )


async def how_it_resets(spec: SandboxSpec) -> str:
    """Start a sandbox and return a phrase that says how it is reset: in place, or with new namespaces per episode.

    Raises:
        SandboxError: If no sandbox starts.
    """
    async with spec.open(1) as sandboxes, sandboxes.lease() as sandbox:
        in_place = isinstance(sandbox, RemoteSandbox) and sandbox.reset_in_place
        return "episodes are reset in place" if in_place else "each episode has its own namespaces"


def lacking(spec: SandboxSpec, why: str) -> str:
    """Return a warning that names the kind of sandbox, why it isn't Docker, and what it lacks compared with Docker."""
    kind = type(spec)
    return (
        f"using {NAMES[kind]} sandboxes, because Docker is unavailable: {why}. "
        f"Differences from Docker: {'; '.join(LACKS[kind])}"
    )


@functools.cache
def _say_once(text: str) -> None:
    _log.warning("%s", text)


def main(args: Sequence[str] | None = None) -> int:
    """Print the name of the best kind of sandbox that runs here, and return the exit code.

    If no kind runs here, the reasons are printed to stderr and the exit code is 1. With --or-unsafe, "unsafe" is
    printed in that case, with a warning on stderr, and the exit code is 0.
    """
    parser = argparse.ArgumentParser(prog="python -m agentgym.sandboxes.choose", description=__doc__)
    parser.add_argument(
        "--or-unsafe", action="store_true", help="print 'unsafe' if no sandbox runs here; only for code that you trust"
    )
    asked = parser.parse_args(args)
    try:
        spec: SandboxSpec = auto()
    except SandboxError as error:
        sys.stderr.write(f"{error}\n")
        if not asked.or_unsafe:
            return 1
        spec = Process(unsafe=True)
        sys.stderr.write(f"--or-unsafe was given: using the sandbox 'unsafe' ({'; '.join(LACKS[Process])})\n")
    sys.stdout.write(f"{NAMES[type(spec)]}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
