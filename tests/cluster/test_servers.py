"""A real SGLang server of a run on Ray: launched on a node, and restarted if it is lost."""

import os
import signal
from pathlib import Path

import pytest

from tests.cluster.conftest import TwoNodes
from tests.engines.sglang.server.conftest import real_config

LONG = ("--max-steps", "30", "--save-every", "2")
pytestmark = [pytest.mark.ray, pytest.mark.sglang, pytest.mark.slow, pytest.mark.proof]


def test_a_run_on_ray_learns_on_a_real_server_that_is_killed_three_times(
    two_nodes: TwoNodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGENTGYM_SGLANG", real_config().command)
    engine = {"slots": "32", "startup-s": "1200", "server-wait-s": "600"}
    words = [word for name, value in engine.items() for word in (f"--engine.{name}", value)]
    run = two_nodes.recipe("chase_grpo", tmp_path / "run", "--engine", "sglang", *words, *LONG)
    run.wait_for_step(1)
    assert two_nodes.kill("ServerActor")
    run.wait_for_step(4)
    [server, *_] = servers()
    os.kill(server, signal.SIGKILL)
    run.wait_for_step(8)
    assert two_nodes.kill("ServerActor")
    summary = run.ended()
    assert run.said.count("starting a replacement") == 3, run.said[-4000:]
    assert all("stop/seconds" not in row for row in run.metrics()), "a rollout was cut while a server was away"
    assert (summary["steps"], summary["failed"], summary["eval_after"] >= 0.85) == (30, 0, True), summary
    for row in run.metrics():
        assert row["sync/logprob_gap"] < 1e-3
    assert servers() == [], "a server process is still running"


def servers() -> list[int]:
    """Return the main processes of the SGLang servers that run on this machine."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                words = (folder / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if b"--model-path" in words and b"supervise.py" not in b"".join(words):
                found.append(int(folder.name))
    return sorted(found)
