"""The worker's end of `benchmarks.peers.turns`: it does one piece of work for each line on stdin."""

import gc
import hashlib
import json
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from benchmarks.harness import cost

Ways = Mapping[str, tuple[Callable[[], Any], Callable[[Any], Any]]]
"""A worker's ways by name: each is the measured work, and a function that reports on its result in JSON's types."""


def work() -> Any:
    """Return the work that the worker was started with."""
    return json.loads(sys.argv[1])


def serve(ways: Ways) -> None:
    """Print the names of the ways, then run the one that each line of stdin names, until stdin ends.

    The answer to a line `NAME` is the CPU seconds of one call and how far it raised the resident memory. The answer to
    a line `tell NAME` is the report on the result of another call.
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
    """Return a digest of these parts that doesn't depend on their order."""
    return hashlib.sha256(b"".join(sorted(hashlib.sha256(part).digest() for part in parts))).hexdigest()
