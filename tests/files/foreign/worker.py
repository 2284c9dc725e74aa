"""A process that runs commands on run folders, and says of each its exit, its words, its memory and its time.

It reads lines of JSON, each a list of commands, and answers each with a line of JSON, a list of what became of them.
A command that begins with "GET" asks the viewer's server on the folder that is named behind it.
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
"""The address space of the process: what takes more is stopped before it takes the machine's memory."""
ADDRESSES = (
    *("", "/metrics", "/state", "/rollouts", "/rollouts?sort=tokens&descending=1", "/rollouts?q=said", "/rollouts/1"),
    *("/rollouts?suspicious=1", "/rollouts/2", "/rollouts/3", "/rollouts/1/tokens", "/groups?task=task0&step=0"),
    *("/tasks", "/tasks?sort=gain", "/task?task=task0", "/failures", "/reward-histogram"),
)
"""What is asked of the viewer about a run."""


def ran(words: Sequence[str]) -> dict[str, Any]:
    """Run a command; `code` is its exit, or "traceback" for an error that no command should end with."""
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
    """Return the most memory that this process has held; `ru_maxrss` would begin with that of the process before it."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) // 1024


def asked(folder: Path) -> int | str:
    """Ask the viewer everything about the runs in a folder; 0 where each answer is one that the page knows."""
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
