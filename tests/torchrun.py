"""Real processes that train together on this machine: torchrun, gloo."""

import os
import pickle
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

HANGS_S = 600
"""Ranks that wait for each other this long never finish."""


def torchrun(logs: Path, *, ranks: int = 2) -> list[str]:
    """Return Python's arguments that start that many processes here; torchrun's own output goes into `logs`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    place = ["--master-addr", "127.0.0.1", "--master-port", port, "--log-dir", str(logs)]
    return ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks), *place]


def run_on_ranks(script: Path, given: Any, folder: Path, *, ranks: int = 2) -> None:
    """Run `script INPUT FOLDER` on every rank to its end; INPUT is a pickle of `given`."""
    (folder / "input").write_bytes(pickle.dumps(given))
    launch = torchrun(folder / "logs", ranks=ranks)
    done = subprocess.run(
        [sys.executable, *launch, str(script), str(folder / "input"), str(folder)],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=HANGS_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]


def of_each_rank(folder: Path, ranks: int = 2) -> list[Any]:
    """Return the content of each rank's rankN.pickle."""
    return [pickle.loads((folder / f"rank{rank}.pickle").read_bytes()) for rank in range(ranks)]
