"""Rollout workers on Ray are measured as a run uses them; the simulation of many has the expected limits."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.scale.measure import Costs, descendants
from benchmarks.scale.simulation import makespan, simulated

ROOT = Path(__file__).parents[2]
FREE = Costs(collect=0.0, step=0.0, workers=0.0, ray=0.0)
ENDS_S = 600


def test_if_the_driver_costs_nothing_rollouts_arrive_as_fast_as_they_are_run() -> None:
    found = simulated([2.0], FREE, at_once=640, slots=64)
    assert (found.rate, found.busy) == (320.0, 0.0)


def test_a_saturated_driver_handles_as_many_rollouts_as_its_core_allows() -> None:
    found = simulated([0.001], Costs(collect=0.4, step=0.6, workers=9.0, ray=1.0), at_once=6400)
    assert found.rate == pytest.approx(1000, rel=0.01)
    assert found.busy == pytest.approx(1, rel=0.01)


def test_workers_that_run_ahead_do_not_wait_for_the_driver() -> None:
    costs = Costs(collect=0.0, step=5.0, workers=0.0, ray=0.0)
    ahead, waiting = (simulated([1.0], costs, at_once=128, ahead=ahead).rate for ahead in (True, False))
    assert waiting == pytest.approx(128 / (1 + 0.64), rel=0.01)
    assert ahead == pytest.approx(128, rel=0.05)


def test_the_next_rollout_takes_the_first_free_slot() -> None:
    assert makespan([3.0, 1.0, 1.0, 1.0], 2) == 3.0
    assert makespan([1.0, 1.0, 3.0], 2) == 4.0


def test_processes_are_found_as_descendants_of_their_starter() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as started:
        assert Path(f"/proc/{started.pid}") in set(descendants(os.getpid()))
        assert Path(f"/proc/{os.getpid()}") not in set(descendants(started.pid))
        started.communicate(b"\n")


@pytest.mark.ray
@pytest.mark.slow
def test_the_benchmark_counts_all_rollouts_and_leaves_no_process(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="Ray is not installed: pip install '.[ray]'")
    (tmp_path / "waits.py").write_text("def turn_seconds(seed):\n    return [0.01, 0.02]\n")
    command = [sys.executable, "-m", "benchmarks.scale", "--json", "--quick", "--at-once", "64"]
    environment = os.environ | {"SCALE_TEST": str(tmp_path), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, "--workloads", str(tmp_path / "waits.py")],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=ENDS_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    said = json.loads(done.stdout.splitlines()[-1])
    figures, goals = said["figures"], said["goals"]
    assert figures["at_once"] == 64
    assert figures["object_store_bytes_a_rollout"] > 13 * 2000  # an id, its mask and its log-probability take 13 bytes
    costs = [figures[f"{name}_ms_{count}"] for name in ("driver_collect", "driver_step", "workers") for count in (1, 2)]
    assert min(costs) > 0
    assert goals["CPU ms of the driver a rollout"]["value"] == pytest.approx(
        max(figures[f"driver_collect_ms_{count}"] + figures[f"driver_step_ms_{count}"] for count in (1, 2))
    )
    deadline = time.monotonic() + ENDS_S  # Ray's processes end on their own when their raylet has ended
    while (left := started_with(f"SCALE_TEST={tmp_path}")) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left == []


def started_with(setting: str) -> list[str]:
    """Return the processes with this variable in their environment, as the benchmark's Ray processes have it."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                if setting.encode() in (folder / "environ").read_bytes().split(b"\0"):
                    found.append((folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"))
            except OSError:
                continue
    return found
