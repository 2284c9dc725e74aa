"""Code that all benchmarks share: arguments, the report, and measurements of CPU seconds and peak memory."""

import argparse
import gc
import importlib.util
import json
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn, TypedDict, TypeVar

ROOT = Path(__file__).parents[1]
"""The checkout, in which `python -m benchmarks.driver` and the other kits' side of it find their modules."""
T = TypeVar("T")


class Goal(TypedDict):
    """A measured value, its goal, and whether the value meets the goal; `met` is None if it was not measured."""

    value: float | None
    goal: float
    met: bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """The cost of a call."""

    cpu_s: float
    """CPU seconds of this process, all threads; the least of the runs."""
    peak_mib: float
    """How far resident memory rose above its value before the first run, in MiB."""


def arguments(doc: str, *, seed: int = 0, quick: bool = False, peers: bool = False) -> argparse.Namespace:
    """Parse the command line with `argument_parser`."""
    return argument_parser(doc, seed=seed, quick=quick, peers=peers).parse_args()


def argument_parser(doc: str, *, seed: int = 0, quick: bool = False, peers: bool = False) -> argparse.ArgumentParser:
    """Return a parser of `json` (bool), `workloads` (path or None) and `seed` (int).

    Args:
        doc: The program's description.
        seed: Default of `--seed`.
        quick: Whether to add `--quick`.
        peers: Whether to add `--peers`, the environment of the other kits.
    """
    parser = report_parser(doc)
    parser.add_argument("--workloads", type=Path, default=None, metavar="FILE.py", help="use these workloads")
    parser.add_argument("--seed", type=int, default=seed)
    if quick:
        parser.add_argument("--quick", action="store_true", help="run fewer rounds and sizes")
    if peers:
        made = "virtual environment of the other kits, created by `make bench-peers`"
        parser.add_argument("--peers", type=Path, default=Path(".venv-bench-peers"), metavar="VENV", help=made)
    return parser


def report_parser(doc: str) -> argparse.ArgumentParser:
    """Return a parser of only `json` (bool)."""
    parser = argparse.ArgumentParser(
        prog=program(), description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON on the last line of stdout")
    return parser


def program() -> str:
    """Return the command of this process for its usage.

    It is `python -m benchmarks.driver`, for example, if the process was started with `-m`.
    """
    found = sys.modules["__main__"].__spec__
    return f"python -m {found.name.removesuffix('.__main__')}" if found else Path(sys.argv[0]).name


def workloads_path(args: argparse.Namespace) -> str | None:
    """Return the absolute path of `--workloads` for a worker, which has a different working folder.

    None means the default workloads.
    """
    return str(args.workloads.absolute()) if args.workloads else None


def load_workloads(path: Path | str | None) -> ModuleType:
    """Return the workloads module at `path`, by default the one next to this file.

    The module may import files from its folder.

    Raises:
        SystemExit: If the file doesn't exist or can't be run, or when the benchmark uses a name that it lacks.
    """
    path = Path(path).absolute() if path else Path(__file__).with_name("workloads.py")
    spec = importlib.util.spec_from_file_location(f"bench_{path.stem}", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise SystemExit(f"--workloads: expected a Python file, got {path}")
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up by name
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise SystemExit(f"--workloads: {path} can't be run: {type(error).__name__}: {error}") from error
    vars(module).setdefault("__getattr__", partial(_lacks, path))
    return module


def _lacks(path: Path, name: str) -> NoReturn:
    if name.startswith("_"):  # Python itself looks up such names.
        raise AttributeError(name)
    raise SystemExit(f"--workloads: {path} has no {name}; benchmarks/workloads.py has one to start from")


def at_least(value: float | None, goal: float) -> Goal:
    """Return a goal that is a lower limit; the value None was not measured."""
    return {"value": value, "goal": goal, "met": None if value is None else bool(value >= goal)}


def at_most(value: float | None, goal: float) -> Goal:
    """Return a goal that is an upper limit; the value None was not measured."""
    return {"value": value, "goal": goal, "met": None if value is None else bool(value <= goal)}


def over(figures: Mapping[str, float], one: str, other: str) -> float | None:
    """Return one value divided by another, or None if either was not measured."""
    return figures[one] / figures[other] if one in figures and other in figures else None


def report(
    bench: str,
    *,
    figures: Mapping[str, float],
    reference: Mapping[str, float | str],
    goals: Mapping[str, Goal],
    as_json: bool,
) -> None:
    """Print a table, and with `as_json` the same as one JSON object on the last line of stdout."""
    out = sys.stderr if as_json else sys.stdout
    print(f"{bench}", file=out)
    for title, rows in (("figures", figures), ("reference", reference)):
        for name, value in rows.items():
            shown = value if isinstance(value, str) else f"{value:,.6g}"
            print(f"  {title:<10}{name:<44}{shown:>16}", file=out)
    for name, goal in goals.items():
        verdict = {None: "NOT MEASURED", True: "met", False: "MISSED"}[goal["met"]]
        value = "" if goal["value"] is None else f"{goal['value']:,.6g}"
        print(f"  {'goal':<10}{name:<44}{value:>16}   goal {goal['goal']:,.6g}: {verdict}", file=out)
    if as_json:
        body = {"bench": bench, "figures": figures, "reference": reference, "goals": goals}
        print(json.dumps(body), flush=True)


def fresh(function: Callable[..., T], *values: Any) -> T:
    """Return the function's result from a new process, so that peaks of earlier work don't hide its own."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *values).result()


def cost(function: Callable[[], object], *, runs: int = 3) -> Cost:
    """Return the CPU seconds and peak memory of calling a function, whose result is dropped before the next run."""
    gc.collect()
    before = _resident_mib()
    _forget_peak()
    seconds, peak = [], 0.0
    for _ in range(runs):
        began = time.process_time()
        result = function()
        seconds.append(time.process_time() - began)
        peak = peak or _peak_mib() - before
        del result
    return Cost(cpu_s=min(seconds), peak_mib=peak)


def process_peak_mib() -> float:
    """Return the most resident memory that this process has had so far, in MiB (Linux)."""
    return _peak_mib()


def _resident_mib() -> float:
    return _status_mib("VmRSS")


def _peak_mib() -> float:
    return _status_mib("VmHWM")


def _status_mib(name: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"/proc/self/status has no {name}: memory can be measured on Linux only")


def _forget_peak() -> None:
    """Reset the peak memory (Linux); if that fails, the peak may be from earlier work, but is never too small."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        print("the peak memory may include the creation of the workload", file=sys.stderr)
