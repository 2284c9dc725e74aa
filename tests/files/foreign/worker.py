"""A process that runs commands on run folders, and reports the exit code, output, memory and time of each.

It reads lines of JSON, each a list of commands, and responds to each with a line of JSON, the list of their results.
A command that starts with "GET" queries the viewer's server about the folder that follows.
"""

import io
import json
import re
import resource
import sys
import traceback
import warnings
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

MOST_BYTES = 4 << 30
"""The address space limit of the process, so that it can't use up the machine's memory."""
ADDRESSES = (
    *("", "/metrics", "/state", "/rollouts", "/rollouts?sort=tokens&descending=1", "/rollouts?q=said", "/rollouts/1"),
    *("/rollouts?suspicious=1", "/rollouts/2", "/rollouts/3", "/rollouts/1/tokens", "/groups?task=task0&step=0"),
    *("/tasks", "/tasks?sort=gain", "/task?task=task0", "/failures", "/reward-histogram"),
)
"""The viewer's paths that are requested for each run."""


def ran(words: Sequence[str]) -> dict[str, Any]:
    """Run a command; `code` is its exit code, or "traceback" for an unexpected error."""
    from agentgym.cli import main

    out, errors, began = io.StringIO(), io.StringIO(), resource.getrusage(resource.RUSAGE_SELF)
    code: Any
    with redirect_stdout(out), redirect_stderr(errors):
        try:
            code = asked(Path(words[1])) if words[0] == "GET" else main.main(words)
        except SystemExit as ended:
            code = ended.code
        except BaseException:
            traceback.print_exc()
            code = "traceback"
    used = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "words": list(words),
        "code": code,
        "out": out.getvalue()[-20_000:],
        "error": errors.getvalue()[-20_000:],
        "mib": _peak_mib(),
        "cpu_s": used.ru_utime + used.ru_stime - began.ru_utime - began.ru_stime,
    }


def _peak_mib() -> int:
    """Return this process's peak memory; `ru_maxrss` would include the peak of the process that forked it."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) // 1024


def asked(folder: Path) -> int | str:
    """Request everything about the runs in a folder from the viewer.

    Returns:
        0 if the page can handle every response, else "traceback".
    """
    from tests.view.made_runs import client

    with client(folder) as server:
        found = server.get("/api/runs")
        answers = [found]
        for run in found.json()["runs"] if found.status_code == 200 else ():
            answers += [server.get(f"/api/runs/{run['run']}{address}") for address in ADDRESSES]
        for answer in answers:
            sys.stdout.write(f"{answer.status_code} {answer.url.path} {answer.text[:300]}\n")
        odd = {answer.status_code for answer in answers} - {200, 400, 404, 409}
    return "traceback" if odd else 0


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
    warnings.simplefilter("ignore")
    answers = sys.stdout
    for line in sys.stdin:
        answers.write(f"{json.dumps([ran(words) for words in json.loads(line)])}\n")
        answers.flush()


if __name__ == "__main__":
    main()
