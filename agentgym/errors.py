"""Six errors, named after the boundary they crossed.

Users raise plain Python in their environments and tools; `boundary` names the crossing once.
"""

from collections.abc import Iterator
from contextlib import contextmanager


class AgentGymError(Exception):
    """The base of every error agentgym raises on purpose; bad arguments stay ValueError."""


class EngineError(AgentGymError):
    """The engine could not answer: it is closed, broken, or was asked for something impossible."""


class SandboxError(AgentGymError):
    """A box died or could not be had; infrastructure, never text for the model, never a reward."""


class ToolError(AgentGymError):
    """A tool's failure that the model should read; its text becomes the tool message."""


class EnvError(AgentGymError):
    """The user's environment raised; the cause is chained."""


class ContextOverflow(AgentGymError):
    """The first prompt alone does not fit the context; nothing can be sampled."""


class WireError(AgentGymError):
    """The other end of a wire sent what the protocol does not allow."""


@contextmanager
def boundary(kind: type[AgentGymError], where: str) -> Iterator[None]:
    """Turn any foreign exception into `kind`, chained and saying where; ours pass through unchanged."""
    try:
        yield
    except AgentGymError:
        raise
    except Exception as error:
        raise kind(f"{where}: {type(error).__name__}: {error}") from error
