"""The results of programs, as parsed from a sandbox's answers."""

from collections.abc import Mapping
from typing import Any, get_args

from agentgym.errors import WireError
from agentgym.sandboxes.protocol import ExecResult, Status
from agentgym.sandboxes.remote.wire import Frame

STATUSES = frozenset(get_args(Status)) - {"sandbox_killed"}
"""The statuses that a sandbox can report; only the host can report that the sandbox itself was ended."""
MAX_SECONDS = 1e9
"""Longer than any program runs; an answer with more seconds is invalid."""
KILLED = ExecResult(status="sandbox_killed", exit_code=-9, stdout="", stderr="", state_lost=True)


def parse_result(frame: Frame) -> ExecResult:
    """Return the result in an answer, after checking types and sizes.

    Raises:
        WireError: If the answer is invalid; the message names the invalid part.
    """
    said = frame.envelope
    if (wrong := _wrong(said, len(frame.body))) is not None:
        raise WireError(f"invalid {wrong}")
    out = said["stdout"]
    stdout, stderr, raw = _texts(frame.body[:out], frame.body[out:])
    return ExecResult(
        status=said["status"],
        exit_code=said["exit_code"],
        stdout=stdout,
        stderr=stderr,
        truncated=said["truncated"],
        state_lost=said["state_lost"],
        seconds=float(said["seconds"]),
        raw=raw,
    )


def _wrong(said: Mapping[str, Any], size: int) -> str | None:
    """Return the name of the invalid part of an answer whose body has this size, or None."""
    out, err, seconds = said["stdout"], said["stderr"], said["seconds"]
    if said["status"] not in STATUSES:
        return "status"
    if type(said["exit_code"]) is not int:
        return "exit_code"
    if type(out) is not int or type(err) is not int or out < 0 or err < 0 or out + err != size:
        return "sizes"
    if type(said["truncated"]) is not bool or type(said["state_lost"]) is not bool:
        return "flags"
    if type(seconds) not in (int, float) or not 0 <= seconds < MAX_SECONDS:
        return "seconds"
    return None


def _texts(stdout: bytes, stderr: bytes) -> tuple[str, str, tuple[bytes, bytes] | None]:
    try:
        return stdout.decode(), stderr.decode(), None
    except UnicodeDecodeError:
        return stdout.decode("utf-8", "replace"), stderr.decode("utf-8", "replace"), (stdout, stderr)
