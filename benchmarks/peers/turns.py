"""Work of several processes, ours and other kits', measured in turns; each process has its own interpreter."""

import json
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from benchmarks.harness import ROOT, Cost, cost


class Worker:
    """A process that prints its ways first, and then answers each line with one; most of them call `peers.serve`."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process
        self.ways: list[str] | None = None

    def start(self) -> list[str]:
        """Wait until the worker has made its workload, and return its ways."""
        if self.ways is None:
            self.ways = self._read()
        return self.ways

    def once(self, way: str) -> Cost:
        """Do the work once, and return its cost."""
        return Cost(**self.ask(way))

    def tell(self, way: str) -> Any:
        """Do the work once more, and return the report on its result."""
        return self.ask(f"tell {way}")

    def ask(self, line: str) -> Any:
        """Return the answer to a line.

        Raises:
            RuntimeError: If the worker ended.
        """
        assert self._process.stdin is not None
        print(line, file=self._process.stdin, flush=True)
        return self._read()

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"a worker ended with exit code {self._process.wait()}; its output is above")
        return json.loads(line)


@contextmanager
def worker(python: Path | str, module: str, work: Mapping[str, Any]) -> Iterator[Worker]:
    """Start a module as a `Worker`, and stop it when the block ends.

    The module gets its work from `benchmarks.peers.serve.work`.
    """
    pipe = subprocess.PIPE
    command = [str(python), "-m", module, json.dumps(work)]
    with subprocess.Popen(command, cwd=ROOT, text=True, stdin=pipe, stdout=pipe) as process:
        try:
            yield Worker(process)
        finally:
            process.kill()


def peers_python(venv: Path | None) -> Path | None:
    """Return the interpreter of the environment that `make bench-peers` creates, or None if it doesn't exist."""
    python = None if venv is None else venv.absolute() / "bin" / "python"
    return python if python is not None and python.exists() else None


@contextmanager
def in_its_environment(venv: Path | None, module: str, work: Mapping[str, Any]) -> Iterator[Worker | None]:
    """Yield a worker started by the interpreter of this environment, or None if the environment doesn't exist."""
    python = peers_python(venv)
    if python is None:
        yield None
        return
    with worker(python, module, work) as started:
        yield started


def least_cpu_s(ours: Mapping[str, Callable[[], object]], peers: Worker | None, rounds: int) -> dict[str, float]:
    """Return the least CPU seconds of each way over rounds in which all ways take turns.

    Ours run in this process, the others in the worker.
    """
    spent: dict[str, list[float]] = {}
    for _ in range(rounds):
        for name, do in ours.items():
            spent.setdefault(name, []).append(cost(do, runs=1).cpu_s)
        for name in peers.start() if peers is not None else ():
            assert peers is not None
            spent.setdefault(name, []).append(peers.once(name).cpu_s)
    return {name: min(seconds) for name, seconds in spent.items()}


def in_turns(starts: Mapping[str, tuple[Path | str, str, Mapping[str, Any]]], rounds: int) -> dict[str, Any]:
    """Measure the only way of each worker, one after the other, `rounds` times, and keep the least CPU seconds.

    Args:
        starts: The interpreter, module and work of each worker, by its name.
        rounds: How many times each worker runs.

    Returns:
        `cpu_s`, `peak_mib` and `told` by name. The peak is that of the first round, before the worker reuses memory. A
        worker without a way, because its kit is missing, is left out.
    """
    with ExitStack() as stack:
        workers = {name: stack.enter_context(worker(*start)) for name, start in starts.items()}
        ready = {name: one for name, one in workers.items() if one.start()}
        spent: dict[str, list[Cost]] = {name: [] for name in ready}
        for _ in range(rounds):
            for name, one in ready.items():
                (way,) = one.start()
                spent[name].append(one.once(way))
        return {
            name: {
                "cpu_s": min(each.cpu_s for each in spent[name]),
                "peak_mib": spent[name][0].peak_mib,
                "told": one.tell(one.start()[0]),
            }
            for name, one in ready.items()
        }
