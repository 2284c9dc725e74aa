"""Run the benchmarks, store their results, and write docs/benchmarks.md and docs/benchmarks/ from them.

`python -m benchmarks.publishing [NAME ...] [--quick] [--compare] [--page] [-- ARGUMENT ...]`; all take about two
hours.

The result of a benchmark is stored as soon as it ends, so that Ctrl-C loses only the one that is running. With
`--quick` the quick forms run and are stored separately; the pages show the full ones. With `--compare` nothing is
stored: the exit status is 1 if a ratio is worse than the stored one by more than a quarter, three times in a row.
With `--page` nothing runs.
"""

import argparse
import shlex
import signal
import sys
from collections.abc import Sequence

from agentgym.errors.tracebacks import describe
from benchmarks.publishing.page import OVERVIEW, pages
from benchmarks.publishing.plans import PLANS, Plan
from benchmarks.publishing.results import comparable, falls, keep, read
from benchmarks.publishing.running import BenchmarkFailed, run

AGAIN = 2
"""Additional runs after one in which a ratio has fallen."""


def main() -> None:
    args = _arguments()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that SIGTERM also stops the running benchmark
    try:
        publish(args)
    except KeyboardInterrupt:
        sys.exit("stopped: finished benchmarks are stored, and the pages were not written")


def publish(args: argparse.Namespace) -> None:
    plans = [plan for plan in PLANS if (plan.name in args.names if args.names else plan.full is not None)]
    plans = [plan for plan in plans if plan.quick is not None] if args.quick else plans
    failed = []
    for number, plan in enumerate([] if args.page else plans, 1):
        command = plan.command(quick=args.quick) + args.extra
        say(f"[{number}/{len(plans)}] {shlex.join(command)}")
        try:
            sound = compare(plan, command, quick=args.quick) if args.compare else measure(plan, command, args.quick)
        except (BenchmarkFailed, ValueError) as error:
            say(f"{plan.name}: {error}")
            sound = False
        failed += [] if sound else [plan.name]
    if not args.compare:
        try:
            written = pages()
        except (KeyError, ValueError) as error:
            sys.exit(f"{OVERVIEW} and the pages next to it were not written: {describe(error)}")
        for path, text in written.items():
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        say(f"wrote {OVERVIEW} and {len(written) - 1} pages next to it")
    if failed:
        sys.exit(f"failed, or worse than stored: {', '.join(failed)}")


def measure(plan: Plan, command: Sequence[str], quick: bool) -> bool:
    """Run a benchmark and store its result."""
    keep(plan.kept(quick=quick), run(command))
    return True


def compare(plan: Plan, command: Sequence[str], *, quick: bool) -> bool:
    """Return whether no ratio has fallen; a fall may be noise, so it is measured again."""
    kept = read(plan.kept(quick=quick))["report"]["goals"]
    found = run(command)["report"]["goals"]
    fallen = falls(kept, found)
    for _ in range(AGAIN if fallen else 0):
        again = {fall.goal for fall in falls(kept, run(command)["report"]["goals"])}
        fallen = [fall for fall in fallen if fall.goal in again]
    compared = list(comparable(kept, found))
    left = [name for name in kept if name not in compared]
    say(f"{plan.name}: {len(compared)} of {len(kept)} goals compared, {len(fallen)} worse by more than a quarter")
    for name in left:
        say(f"{plan.name}: not compared, because it isn't measured on both sides or is in units of time: {name}")
    for fall in fallen:
        say(f"{plan.name}: {fall.goal}: {fall.found:.4g}, stored {fall.kept:.4g}")
    return not fallen


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _arguments() -> argparse.Namespace:
    own, split, extra = sys.argv[1:], "--" in sys.argv, []
    if split:
        at = own.index("--")
        own, extra = own[:at], own[at + 1 :]
    names = [plan.name for plan in PLANS]
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.publishing",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=_names_help())
    parser.add_argument("--quick", action="store_true", help="run the quick forms of those that have one")
    parser.add_argument(
        "--compare", action="store_true", help="compare with the stored results; store and write nothing"
    )
    parser.add_argument("--page", action="store_true", help="run nothing; write the pages from the stored results")
    args = parser.parse_args(own)
    unknown = [name for name in args.names if name not in names]
    if unknown:
        parser.error(f"{', '.join(unknown)}: not a published benchmark; expected one of {', '.join(names)}")
    if args.page and args.compare:
        parser.error("--page: writes the pages, but --compare writes nothing; use only one of them")
    if lacking := [plan.name for plan in PLANS if args.quick and plan.name in args.names and plan.quick is None]:
        parser.error(f"--quick: {', '.join(lacking)} has no quick form")
    if extra and len(args.names) != 1:
        parser.error("arguments after -- belong to one benchmark: name exactly one")
    args.extra = extra
    return args


def _names_help() -> str:
    """Return the help text with all names, and with those that run only if they are named."""
    named = ", ".join(plan.name for plan in PLANS if plan.full is None)
    return f"benchmarks to run: {', '.join(plan.name for plan in PLANS)}; default: all but {named}"


if __name__ == "__main__":
    main()
