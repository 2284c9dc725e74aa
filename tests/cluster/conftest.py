"""A Ray cluster of two nodes on this machine, and runs whose driver is a process of its own."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
ENDS_S = 900
"""Seconds after which a run on a loaded machine hangs."""


class TwoNodes:
    """Two nodes of a Ray cluster, each with its own raylet, and the processes that run on them."""

    def __init__(self, cluster: Any) -> None:
        self.cluster = cluster

    @property
    def address(self) -> str:
        return str(self.cluster.address)

    def environment(self) -> dict[str, str]:
        return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "RAY_ADDRESS": self.address}

    def recipe(self, name: str, out: Path, *words: str) -> "subprocess.Popen[str]":
        """Start a recipe whose parts are on the cluster."""
        command = [sys.executable, "-m", f"recipes.{name}", "--ray", self.address, "--box", "unsafe", *words]
        where = ["--resume", str(out)] if (out / "settings.json").exists() else ["--out", str(out)]
        return subprocess.Popen(
            [*command, *where],
            cwd=ROOT,
            env=self.environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def actors(self, kind: str) -> list[int]:
        """The processes of the actors of this class, in the order of their start."""
        found = []
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit():
                try:
                    title = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                except OSError:
                    continue
                if title.startswith(f"ray::{kind}"):
                    found.append(int(folder.name))
        return sorted(found)

    def lose_node(self) -> None:
        """Kill the node that is not the head, with all that runs there, and let a new one join."""
        self.cluster.remove_node(self.cluster.list_all_nodes()[-1], allow_graceful=False)
        self.cluster.add_node(num_cpus=3)

    def kill(self, kind: str) -> bool:
        """Kill one of these actors; False where none runs."""
        for pid in self.actors(kind)[:1]:
            os.kill(pid, signal.SIGKILL)
            return True
        return False


@pytest.fixture
def two_nodes() -> Iterator[TwoNodes]:
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'agentgym[ray]'")
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 3})
    try:
        cluster.add_node(num_cpus=3)
        cluster.wait_for_nodes()
        yield TwoNodes(cluster)
    finally:
        cluster.shutdown()
