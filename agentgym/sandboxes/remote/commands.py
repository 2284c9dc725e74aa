"""A command, its folder, its environment and its input, as they go over the wire; and the result that comes back."""

from collections.abc import Mapping, Sequence
from typing import Any, get_args

from agentgym.errors import WireError
from agentgym.sandboxes.protocol import OUTPUT_LIMIT, ExecResult, Status
from agentgym.sandboxes.protocol.arguments import MAX_OUTPUT, check_limit
from agentgym.sandboxes.protocol.content import WrongContent
from agentgym.sandboxes.remote.calls import MAX_CODE, encoded
from agentgym.sandboxes.remote.host_functions import MAX_FILE
from agentgym.sandboxes.remote.wire import Frame

STATUSES = frozenset(get_args(Status)) - {"box_killed"}
"""What a box can say of a program; that the box itself was ended is for the host to say."""
MAX_SECONDS = 1e9
"""More than any program takes; an answer that says more makes no sense."""
KILLED = ExecResult(status="box_killed", exit_code=-9, stdout="", stderr="", state_lost=True)


def command_frame(
    command: str | Sequence[str] | None,
    cwd: str | None = None,
    env: Mapping[str, str] | None = None,
    stdin: str | bytes | None = None,
) -> tuple[bytes, dict[str, Any]]:
    """Return the body of a frame and the fields that say what is in it; ValueError for what no program can be given.

    None in place of a command is for a shell.
    """
    if isinstance(command, str) and cwd is None and not env and stdin is None:
        return encoded(command, "command"), {}
    parts = [*_words(command), *(("env", _path(f"{name}={value}")) for name, value in (env or {}).items())]
    if cwd is not None:
        parts.append(("cwd", _path(cwd)))
    if stdin is not None:
        data = stdin.encode("utf-8", "surrogatepass") if isinstance(stdin, str) else stdin
        if len(data) > MAX_FILE:
            raise WrongContent(f"stdin: {len(data)} bytes, the limit is {MAX_FILE}: write a file, or use start()")
        parts.append(("stdin", data))
    if sum(len(part) for kind, part in parts if kind != "stdin") > MAX_CODE:
        raise WrongContent(f"command: over {MAX_CODE} bytes with its arguments and environment")
    sizes = [(kind, len(part)) for kind, part in parts]
    if len(sizes) > MAX_PARTS:
        raise WrongContent(f"command: over {MAX_PARTS} arguments and variables")
    return b"".join(part for _, part in parts), {"parts": sizes}


MAX_PARTS = 20_000


def _words(command: str | Sequence[str] | None) -> list[tuple[str, bytes]]:
    if command is None:
        return []
    if isinstance(command, str):
        return [("shell", encoded(command, "command"))]
    return [("word", _path(word)) for word in command]


def _path(text: str) -> bytes:
    """The bytes of what may be a file's name: as `list` and `get` say names that are no text."""
    return text.encode("utf-8", "surrogateescape" if _is_escaped(text) else "surrogatepass")


def _is_escaped(text: str) -> bool:
    return all("\udc80" <= letter <= "\udcff" for letter in text if "\ud800" <= letter <= "\udfff")


def limit_field(output_limit: int) -> dict[str, Any]:
    """The field of a frame that says how much output is kept; none for the usual amount."""
    check_limit("output_limit", output_limit, 2, MAX_OUTPUT)
    return {} if output_limit == OUTPUT_LIMIT else {"keep": output_limit}


def parse_result(frame: Frame) -> ExecResult:
    """Return the result in an answer; types and sizes are checked, and WireError says what is wrong."""
    said = frame.envelope
    if (wrong := _wrong(said, len(frame.body))) is not None:
        raise WireError(f"wrong {wrong}")
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
    """Return the name of what makes no sense in an answer whose body has this size."""
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
