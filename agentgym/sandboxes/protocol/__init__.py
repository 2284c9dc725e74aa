"""The protocols of boxes: the box itself, the programs that run in it, and what it is connected to."""

from agentgym.sandboxes.protocol.box import (
    FILE_LIMIT,
    Box,
    Boxes,
    Branch,
    Expected,
    HiddenTests,
    HostFunction,
    Progress,
    Sandbox,
)
from agentgym.sandboxes.protocol.lifetime import Lifetime
from agentgym.sandboxes.protocol.network import BoxService, LocalAddress, NetworkRequest, RequestOutcome
from agentgym.sandboxes.protocol.programs import (
    OUTPUT_LIMIT,
    BoxProcess,
    BoxShell,
    BoxStream,
    ExecResult,
    Status,
    Verdict,
    cut_middle,
)

__all__ = [
    "FILE_LIMIT",
    "OUTPUT_LIMIT",
    "Box",
    "BoxProcess",
    "BoxService",
    "BoxShell",
    "BoxStream",
    "Boxes",
    "Branch",
    "ExecResult",
    "Expected",
    "HiddenTests",
    "HostFunction",
    "Lifetime",
    "LocalAddress",
    "NetworkRequest",
    "Progress",
    "RequestOutcome",
    "Sandbox",
    "Status",
    "Verdict",
    "cut_middle",
]
