"""Six errors, named after the boundary they crossed.

Users raise plain Python in their environments and tools; `boundary` names the crossing once.
"""

from types import TracebackType
from typing import Literal

from agentgym.failures import describe, place_of


class AgentGymError(Exception):
    """The base of every error agentgym raises on purpose; bad arguments stay ValueError."""


class EngineError(AgentGymError):
    """The engine could not answer: it is closed, broken, or was asked for something impossible."""


class SandboxError(AgentGymError):
    """A box died or could not be had; infrastructure, never text for the model, never a reward."""


class ToolError(AgentGymError):
    """A tool's failure that the model should read; its text becomes the tool message."""


class EnvError(AgentGymError):
    """The user's environment raised; the cause is chained, and the line of the user's code is named."""


class ContextOverflow(AgentGymError):
    """The first prompt alone does not fit the context; nothing can be sampled."""


class WireError(AgentGymError):
    """The other end of a wire sent what the protocol does not allow."""


class boundary:
    """Turn any foreign exception into `kind`, chained and saying where; ours pass through unchanged."""

    __slots__ = ("kind", "where")

    def __init__(self, kind: type[AgentGymError], where: str) -> None:
        self.kind, self.where = kind, where

    def __enter__(self) -> None:
        """Nothing to open: a class costs a quarter of a generator, and every turn crosses several."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Literal[False]:
        if isinstance(error, Exception) and not isinstance(error, AgentGymError):
            place = place_of(error) if self.kind is EnvError else ""
            raise self.kind(f"{self.where}: {describe(error)}{f', at {place}' if place else ''}") from error
        return False
