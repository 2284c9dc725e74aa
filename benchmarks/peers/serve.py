"""The worker's end of `benchmarks.peers.turns`: it does one piece of work each time that a line asks for it."""

import gc
import hashlib
import json
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from benchmarks.harness import cost

Ways = Mapping[str, tuple[Callable[[], Any], Callable[[Any], Any]]]
"""What a worker can do: the work that is measured, and what is told of its result, in terms of JSON."""


def work() -> Any:
    """Return what the worker was started with."""
    return json.loads(sys.argv[1])


def serve(ways: Ways) -> None:
    """Say which ways there are, then do the one that each line of stdin names, until there is no more.

    A line `NAME` is answered with the CPU seconds of one call and how far it raised the resident memory, a line
    `tell NAME` with what is told of the result of another call.
    """
    answers, sys.stdout = sys.stdout, sys.stderr
    print(json.dumps(sorted(ways)), file=answers, flush=True)
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        *tell, name = line.split()
        do, about = ways[name]
        if tell:
            answer = about(do())
        else:
            spent = cost(do, runs=1)
            answer = {"cpu_s": spent.cpu_s, "peak_mib": spent.peak_mib}
        print(json.dumps(answer), file=answers, flush=True)


def digest(parts: Iterable[bytes]) -> str:
    """A digest of these parts, whatever their order."""
    return hashlib.sha256(b"".join(sorted(hashlib.sha256(part).digest() for part in parts))).hexdigest()
