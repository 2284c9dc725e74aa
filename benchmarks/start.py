"""CPU seconds of a start: importing the package and the names that an env needs, and the whole quickstart.

`python -m benchmarks.start [--json] [--quick]`

Each import is a separate process, and the least of several counts; the processes take turns. The floor imports only the
packages that every env needs: numpy, pydantic and asyncio. The quickstart is what `make quickstart` runs once
everything is installed, with sandboxes that are its child processes: bubblewrap, or none. With `--quick` it is left
out.
"""

import subprocess
import sys
from resource import RUSAGE_CHILDREN, getrusage
from tempfile import TemporaryDirectory

from agentgym.sandboxes.local.local import why_no_bubblewrap
from benchmarks.harness import Goal, at_most, report, report_parser

ROUNDS = 10
CODES = {
    "python": "pass",
    "floor": "import asyncio, numpy, pydantic",
    "import": "import agentgym",
    "env": "from agentgym import Limits, Task, ToolEnv, reward, tool; from agentgym.scheduling import run_groups",
}


def cpu_s(command: list[str]) -> float:
    """Return the CPU seconds of a command and of the processes it starts.

    Raises:
        CalledProcessError: If the command fails.
    """
    before = getrusage(RUSAGE_CHILDREN)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    after = getrusage(RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def imports() -> dict[str, float]:
    """Return the CPU seconds of each import beyond those of Python itself."""
    least = dict.fromkeys(CODES, float("inf"))
    for _ in range(ROUNDS):
        for name, code in CODES.items():
            least[name] = min(least[name], cpu_s([sys.executable, "-c", code]))
    bare = least.pop("python")
    return {"python_cpu_s": bare} | {f"{name}_cpu_s": value - bare for name, value in least.items()}


def quickstart() -> tuple[dict[str, float], dict[str, float | str]]:
    """Return the CPU seconds of the quickstart, its sandboxes included, and its command."""
    sandbox = "unsafe" if why_no_bubblewrap() else "bubblewrap"
    with TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "recipes.chase_grpo", "--sandbox", sandbox, "--output-dir", f"{folder}/run"]
        return {"quickstart_cpu_s": cpu_s(command)}, {"quickstart": " ".join(command[1:-2])}


def goals(figures: dict[str, float]) -> dict[str, Goal]:
    """Return the goals."""
    return {
        "import agentgym, CPU s": at_most(figures["import_cpu_s"], 0.15),
        "quickstart, CPU s": at_most(figures.get("quickstart_cpu_s"), 20),
    }


def main() -> None:
    parser = report_parser(__doc__ or "")
    parser.add_argument("--quick", action="store_true", help="leave out the quickstart")
    args = parser.parse_args()
    figures = imports()
    reference: dict[str, float | str] = {}
    if not args.quick:
        spent, reference = quickstart()
        figures |= spent
    report("start", figures=figures, reference=reference, goals=goals(figures), as_json=args.json)


if __name__ == "__main__":
    main()
