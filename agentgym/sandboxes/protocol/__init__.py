"""The interfaces of sandboxes: the sandbox itself, the programs that run in it, and its network connections."""

from agentgym.sandboxes.protocol.lifetime import Lifetime
from agentgym.sandboxes.protocol.network import LocalAddress, NetworkRequest, RequestOutcome, SandboxService
from agentgym.sandboxes.protocol.programs import (
    OUTPUT_LIMIT,
    ExecResult,
    SandboxProcess,
    SandboxShell,
    SandboxStream,
    Status,
    Verdict,
    cut_middle,
)
from agentgym.sandboxes.protocol.sandbox import (
    FILE_LIMIT,
    Branch,
    Expected,
    HiddenTests,
    HostFunction,
    Progress,
    Sandbox,
    SandboxPool,
    SandboxSpec,
)

__all__ = [
    "FILE_LIMIT",
    "OUTPUT_LIMIT",
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
    "SandboxPool",
    "SandboxProcess",
    "SandboxService",
    "SandboxShell",
    "SandboxSpec",
    "SandboxStream",
    "Status",
    "Verdict",
    "cut_middle",
]
