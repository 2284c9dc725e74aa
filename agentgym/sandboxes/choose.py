"""Which box: by name, or the best that runs here."""

from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Literal, TypeAlias

from agentgym.types import Boxes

Kind: TypeAlias = Literal["auto", "docker", "bubblewrap", "unsafe"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AnyBox:
    """The best box that runs here: Docker where its engine and our image are there, else bubblewrap.

    It never falls back to running code unprotected: "unsafe" must be asked for by name.
    """

    kind: Kind = "auto"

    def open(self, size: int) -> AbstractAsyncContextManager[Boxes]:
        """A pool of at most `size` boxes; SandboxError says what to install where none can be had."""
        from agentgym.sandboxes import named

        return named(self.kind).open(size)
