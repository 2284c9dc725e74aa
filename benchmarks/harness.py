"""What every benchmark shares: its arguments, its report, and honest CPU seconds and peak memory."""

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
"""The checkout: where `python -m benchmarks.driver` and the other kits' side of it find their modules."""
T = TypeVar("T")


class Goal(TypedDict):
    """A figure, what it should be, and whether it is; `met` is None where it was not measured."""

    value: float | None
    goal: float
    met: bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What a call took."""

    cpu_s: float
    """CPU seconds of this process, all threads; the least of the runs."""
    peak_mib: float
    """How far resident memory rose above what it was before the first run, MiB."""


def arguments(doc: str, *, seed: int = 0, quick: bool = False, peers: bool = False) -> argparse.Namespace:
    """The command line as `argument_parser` reads it."""
    return argument_parser(doc, seed=seed, quick=quick, peers=peers).parse_args()


def argument_parser(doc: str, *, seed: int = 0, quick: bool = False, peers: bool = False) -> argparse.ArgumentParser:
    """A parser of `json` (bool), `workloads` (path or None) and `seed`.

    Also, where a benchmark asks for it, `quick` (bool) and `peers`: the environment of other kits.
    """
    parser = report_parser(doc)
    parser.add_argument("--workloads", type=Path, default=None, metavar="FILE.py", help="other workloads")
    parser.add_argument("--seed", type=int, default=seed)
    if quick:
        parser.add_argument("--quick", action="store_true", help="fewer rounds and sizes")
    if peers:
        made = "the virtual environment that `make bench-peers` makes"
        parser.add_argument("--peers", type=Path, default=Path(".venv-bench-peers"), metavar="VENV", help=made)
    return parser


def report_parser(doc: str) -> argparse.ArgumentParser:
    """A parser of `json` (bool) alone."""
    parser = argparse.ArgumentParser(prog=program(), description=doc)
    parser.add_argument("--json", action="store_true", help="the last line on stdout is the report as JSON")
    return parser


def program() -> str:
    """How this process was started, for its usage: `python -m benchmarks.driver` where `-m` found the file."""
    found = sys.modules["__main__"].__spec__
    return f"python -m {found.name.removesuffix('.__main__')}" if found else Path(sys.argv[0]).name


def workloads_path(args: argparse.Namespace) -> str | None:
    """The workloads of the command line for a worker, whose working folder is another one; None: the usual ones."""
    return str(args.workloads.absolute()) if args.workloads else None


def load_workloads(path: Path | str | None) -> ModuleType:
    """The workloads module at `path`, by default the one next to this file; it may import what lies beside it.

    Ends with a sentence where the file is not there or cannot be run, and where it lacks what the benchmark asks for.
    """
    path = Path(path).absolute() if path else Path(__file__).with_name("workloads.py")
    spec = importlib.util.spec_from_file_location(f"bench_{path.stem}", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise SystemExit(f"--workloads: there is no Python file {path}")
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up by name
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise SystemExit(f"--workloads: {path} cannot be run: {type(error).__name__}: {error}") from error
    vars(module).setdefault("__getattr__", partial(_lacks, path))
    return module


def _lacks(path: Path, name: str) -> NoReturn:
    if name.startswith("_"):  # Python itself asks for such names.
        raise AttributeError(name)
    raise SystemExit(f"--workloads: {path} has no {name}; benchmarks/workloads.py has one to begin with")


def at_least(value: float | None, goal: float) -> Goal:
    """A goal that a larger figure meets; None is a figure that was not measured."""
    return {"value": value, "goal": goal, "met": None if value is None else bool(value >= goal)}


def at_most(value: float | None, goal: float) -> Goal:
    """A goal that a smaller figure meets; None is a figure that was not measured."""
    return {"value": value, "goal": goal, "met": None if value is None else bool(value <= goal)}


def over(figures: Mapping[str, float], one: str, other: str) -> float | None:
    """One figure over another; None where either was not measured."""
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
    """The function's answer from a new process, so that peaks of earlier work do not hide its own."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *values).result()


def cost(function: Callable[[], object], *, runs: int = 3) -> Cost:
    """CPU seconds and peak memory of calling it; its result is dropped before the next run."""
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
    """The most resident memory that this process has had since it began, MiB (Linux)."""
    return _peak_mib()


def _resident_mib() -> float:
    return _status_mib("VmRSS")


def _peak_mib() -> float:
    return _status_mib("VmHWM")


def _status_mib(name: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"/proc/self/status has no {name}: this measures on Linux only")


def _forget_peak() -> None:
    """Let the peak count from here (Linux); without it the peak may be an earlier one's, never too small."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        print("the peak memory may include the making of the workload", file=sys.stderr)
