"""Hidden tests for a sandbox's files, run in a copy that no process of the episode reaches."""

import functools
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

from agentgym.sandboxes.hidden_tests.judging import Judging
from agentgym.sandboxes.hidden_tests.plan import hidden_files, plan
from agentgym.sandboxes.protocol import ExecResult, HiddenTests, HostFunction, Verdict
from agentgym.sandboxes.protocol.arguments import MAX_SECONDS, check_timeout
from agentgym.sandboxes.protocol.content import WrongContent
from agentgym.sandboxes.protocol.verdicts import note
from agentgym.sandboxes.remote.calls import MAX_CODE
from agentgym.sandboxes.remote.host_functions import MAX_ASKS
from agentgym.sandboxes.server_files import BRANCHES, server_files

SEALED = f"{BRANCHES}/hidden"
"""Folder of the hidden files if tests run in a copy of the working folder; it is read-only for every process."""
ENTRANCE = 4
"""Descriptor, opened by the server, through which the harness writes the hidden files into SEALED."""
MARGIN_S = 2
"""Seconds for the copy and the start, in addition to the time of the cases."""


Run = Callable[[str, Mapping[str, HostFunction], float], Awaitable[ExecResult]]
"""Runs a cell in a fresh process of a sandbox, given the code, the host functions and the time limit in seconds."""


async def verify(run: Run, tests: HiddenTests, timeout_s: float, *, copied: bool) -> Verdict:
    """Run hidden tests in fresh processes of a sandbox and judge their reports; see `Sandbox.verify`.

    Args:
        run: Runs a cell in the sandbox.
        tests: The arguments of `Sandbox.verify`.
        timeout_s: Time limit in seconds for all cases together.
        copied: Whether a fresh process already runs in a copy of the working folder.

    Raises:
        ValueError: If an argument is invalid, or if the tests exceed a limit.
    """
    code, command, expect = tests.code, tests.command, tests.expect
    check_timeout(timeout_s, MAX_SECONDS - MARGIN_S)
    orders = plan(code, command, expect)
    judging = Judging(orders["kind"], orders["names"], expect)
    hidden = hidden_files(tests.files)
    if len(hidden) + len(orders["names"]) > MAX_ASKS:
        raise WrongContent(
            f"files: {len(hidden)} files and {len(orders['names'])} cases exceed the limit of {MAX_ASKS} together"
        )
    orders |= {"files": list(hidden), "seconds": timeout_s, "case": case_program(), "copied": copied}
    orders |= {"sealed": SEALED if copied else "", "entrance": ENTRANCE}
    # In separate lines: a traceback shows only the last one, which contains nothing hidden.
    cell = f"{program('harness')}\norders = {orders!r}\nverify(orders, hidden, report)"
    if len(cell.encode()) > MAX_CODE:
        field = "command" if code is None and expect is None else "expect" if expect is not None else "code"
        raise WrongContent(
            f"{field}: the tests have {len(cell.encode())} bytes, but the limit is {MAX_CODE}; put some in files="
        )
    contents = list(hidden.values())
    result = await run(cell, {"hidden": contents.__getitem__, "report": judging.report}, timeout_s + MARGIN_S)
    return note(judging.verdict(result))


@functools.cache
def program(name: str) -> str:
    """Return the source of a program that runs in the sandbox."""
    return Path(__file__).with_name(f"{name}.py").read_text()


@functools.cache
def case_program() -> str:
    """Return the source of the program that runs a case, with the runners and the import finder of fresh cells."""
    finder = server_files()["imports.py"].decode()
    return f"{finder}\n{program('runners')}\n{program('case')}\nmain(OwnImports)\n"
