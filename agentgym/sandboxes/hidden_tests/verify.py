"""Hidden tests over the files of a sandbox: their run in a copy that no process of the episode reaches."""

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
"""The folder of hidden files, which is read-only for all in a place of its own."""
ENTRANCE = 4
"""The descriptor by which the harness lays files there; the server gives it."""
MARGIN_S = 2
"""Seconds for the copy and the start, beside the time of the cases."""


Run = Callable[[str, Mapping[str, HostFunction], float], Awaitable[ExecResult]]
"""How a sandbox runs a cell in a fresh process: its code, its host functions and its limit in seconds."""


async def verify(run: Run, tests: HiddenTests, timeout_s: float, *, copied: bool) -> Verdict:
    """Run hidden tests in fresh processes of a sandbox, and judge what they say; see `Sandbox.verify`.

    `copied` is whether a fresh process runs in a copy of the working folder already.
    """
    code, command, expect = tests.code, tests.command, tests.expect
    check_timeout(timeout_s, MAX_SECONDS - MARGIN_S)
    orders = plan(code, command, expect)
    judging = Judging(orders["kind"], orders["names"], expect)
    hidden = hidden_files(tests.files)
    if len(hidden) + len(orders["names"]) > MAX_ASKS:
        raise WrongContent(f"files: {len(hidden)} files and {len(orders['names'])} cases are over {MAX_ASKS} together")
    orders |= {"files": list(hidden), "seconds": timeout_s, "case": case_program(), "copied": copied}
    orders |= {"sealed": SEALED if copied else "", "entrance": ENTRANCE}
    # On two lines: where the second one fails, a traceback shows it, and what is hidden is not in it.
    cell = f"{program('harness')}\norders = {orders!r}\nverify(orders, hidden, report)"
    if len(cell.encode()) > MAX_CODE:
        field = "command" if code is None and expect is None else "expect" if expect is not None else "code"
        raise WrongContent(
            f"{field}: the tests have {len(cell.encode())} bytes, the limit is {MAX_CODE}; put some in files="
        )
    contents = list(hidden.values())
    result = await run(cell, {"hidden": contents.__getitem__, "report": judging.report}, timeout_s + MARGIN_S)
    return note(judging.verdict(result))


@functools.cache
def program(name: str) -> str:
    """Return the text of a program that runs in the sandbox."""
    return Path(__file__).with_name(f"{name}.py").read_text()


@functools.cache
def case_program() -> str:
    """Return the text of the program that runs a case, with the runners and the finder of modules of fresh cells."""
    finder = server_files()["imports.py"].decode()
    return f"{finder}\n{program('runners')}\n{program('case')}\nmain(OwnImports)\n"
