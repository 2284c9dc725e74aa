"""Runs the benchmarks, keeps what they find beside them, and writes docs/benchmarks.md from it.

`python -m benchmarks.publishing [NAME ...] [--quick] [--compare] [--page] [-- ARGUMENT ...]`; all take about two hours.

What a benchmark found is kept as soon as it ends, so that Ctrl-C loses only the one that runs. With `--quick` the quick
forms run and are kept apart; the page is of the full ones. With `--compare` nothing is kept: the exit status is 1
where a ratio is worse than the kept one by more than a quarter, three times in a row.
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
"""Runs after one in which a ratio has fallen."""


def main() -> None:
    args = _arguments()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that no benchmark goes on behind its end
    try:
        publish(args)
    except KeyboardInterrupt:
        sys.exit("stopped: what ended before is kept, and the page is not written")


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
        sys.exit(f"not sound: {', '.join(failed)}")


def measure(plan: Plan, command: Sequence[str], quick: bool) -> bool:
    """Run a benchmark and keep what it found."""
    keep(plan.kept(quick=quick), run(command))
    return True


def compare(plan: Plan, command: Sequence[str], *, quick: bool) -> bool:
    """Whether no ratio has fallen; one that has may be noise, and is measured again."""
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
        say(f"{plan.name}: not compared, since not measured on both sides or in units of time: {name}")
    for fall in fallen:
        say(f"{plan.name}: {fall.goal}: {fall.found:.4g}, kept {fall.kept:.4g}")
    return not fallen


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _arguments() -> argparse.Namespace:
    own, split, extra = sys.argv[1:], "--" in sys.argv, []
    if split:
        at = own.index("--")
        own, extra = own[:at], own[at + 1 :]
    names = [plan.name for plan in PLANS]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.publishing", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=_names_help())
    parser.add_argument("--quick", action="store_true", help="the quick forms, of those that have one")
    parser.add_argument("--compare", action="store_true", help="compare with what is kept; keep and write nothing")
    parser.add_argument("--page", action="store_true", help="run nothing: write the page from what is kept")
    args = parser.parse_args(own)
    unknown = [name for name in args.names if name not in names]
    if unknown:
        parser.error(f"{', '.join(unknown)}: not a benchmark that is published; there are {', '.join(names)}")
    if args.page and args.compare:
        parser.error("--page: writes the page, and --compare writes nothing; give one of them")
    if lacking := [plan.name for plan in PLANS if args.quick and plan.name in args.names and plan.quick is None]:
        parser.error(f"--quick: {', '.join(lacking)} has no quick form")
    if extra and len(args.names) != 1:
        parser.error("arguments behind -- are of one benchmark: name it")
    args.extra = extra
    return args


def _names_help() -> str:
    """Which benchmarks there are, and which of them run only where they are named."""
    named = ", ".join(plan.name for plan in PLANS if plan.full is None)
    return f"which ones: {', '.join(plan.name for plan in PLANS)}; by default all but {named}"


if __name__ == "__main__":
    main()
