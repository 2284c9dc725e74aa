"""A two-node Ray cluster on this machine, and runs whose driver is a separate process."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
ENDS_S = 2400
"""Seconds after which a run counts as hung, even on a loaded machine."""
GONE_S = 120
"""Seconds until an actor that Ray was told to kill counts as hung. Ray's kill returns before the actor has ended."""


def metrics(folder: Path) -> list[dict[str, float]]:
    """Return the metrics of a run's finished steps."""
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    rows = [json.loads(line) for line in lines if line.endswith("\n")]
    return [row for row in rows if "eval/reward" not in row]


class Run:
    """A run whose driver is a separate process; its output goes to a file next to its folder."""

    def __init__(self, command: list[str], environment: dict[str, str], out: Path) -> None:
        self.out, self.log = out, out.with_suffix(".log")
        with self.log.open("a") as said:
            self.process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=said, text=True
            )

    @property
    def said(self) -> str:
        return self.log.read_text()

    def ended(self) -> dict[str, Any]:
        """Wait until it has ended successfully and return its summary."""
        out, _ = self.process.communicate(timeout=ENDS_S)
        assert self.process.returncode == 0, self.said[-4000:]
        summary: dict[str, Any] = json.loads(out.splitlines()[-1])
        return summary

    def metrics(self) -> list[dict[str, float]]:
        """Return the metrics of its finished steps."""
        return metrics(self.out)

    def wait_for_step(self, step: int) -> None:
        """Return when this many steps are finished. Raises AssertionError if the run ends before that."""
        while len(self.metrics()) < step:
            assert self.process.poll() is None, self.said[-4000:]
            time.sleep(0.05)

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


class TwoNodes:
    """Two nodes of a Ray cluster, each with its own raylet, and the processes that run on them."""

    def __init__(self, cluster: Any) -> None:
        self.cluster = cluster

    @property
    def address(self) -> str:
        return str(self.cluster.address)

    def environment(self) -> dict[str, str]:
        return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "RAY_ADDRESS": self.address}

    def recipe(self, name: str, out: Path, *words: str) -> Run:
        """Start a recipe whose parts run on the cluster, or resume it if its folder exists."""
        command = [sys.executable, "-m", f"recipes.{name}", "--ray", self.address, "--sandbox", "unsafe", *words]
        where = ["--resume", str(out)] if (out / "settings.json").exists() else ["--output-dir", str(out)]
        return Run([*command, *where], self.environment(), out)

    def raylets(self) -> set[int]:
        """Return the parent processes of Ray's workers on these nodes."""
        nodes = self.cluster.list_all_nodes()
        return {each.process.pid for node in nodes for each in node.all_processes.get("raylet", [])}

    def actors(self, kind: str) -> list[int]:
        """Return the processes of this class's actors, in the order of their start."""
        raylets, found = self.raylets(), []  # sorted by start time, since process ids wrap around
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit():
                try:
                    title = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    fields = (folder / "stat").read_text().rpartition(")")[2].split()
                except OSError:
                    continue
                if title.startswith(f"ray::{kind}") and int(fields[1]) in raylets:
                    found.append((int(fields[19]), int(folder.name)))
        return [pid for _, pid in sorted(found)]

    def gone(self, kind: str) -> bool:
        """Return whether all actors of this class end, waiting for them: Ray reports a kill before they have ended."""
        deadline = time.monotonic() + GONE_S
        while self.actors(kind) and time.monotonic() < deadline:
            time.sleep(0.05)
        return not self.actors(kind)

    def lose_node(self) -> None:
        """Kill the node that is not the head, with all its processes, and let a new one join."""
        self.cluster.remove_node(self.cluster.list_all_nodes()[-1], allow_graceful=False)
        self.cluster.add_node(num_cpus=3)

    def kill(self, kind: str) -> bool:
        """Kill one of these actors and return whether there was one."""
        for pid in self.actors(kind)[:1]:
            os.kill(pid, signal.SIGKILL)
            return True
        return False


@pytest.fixture
def two_nodes() -> Iterator[TwoNodes]:
    pytest.importorskip("ray", reason="Ray is not installed: pip install '.[ray]'")
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 3})
    try:
        cluster.add_node(num_cpus=3)
        cluster.wait_for_nodes()
        yield TwoNodes(cluster)
    finally:
        cluster.shutdown()
