"""A real SGLang server of a run on Ray: launched on a node, and started again where it is lost."""

import os
import signal
from pathlib import Path

import pytest

from tests.cluster.conftest import TwoNodes
from tests.cluster.test_runs import ended, figures, wait_for_step
from tests.engines.sglang.server.conftest import real_config

pytestmark = [pytest.mark.ray, pytest.mark.sglang, pytest.mark.slow, pytest.mark.proof]


def test_a_run_on_ray_goes_on_when_its_server_and_the_actor_of_its_server_are_killed(
    two_nodes: TwoNodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGENTGYM_SGLANG", real_config().command)
    out = tmp_path / "run"
    words = (
        "--engine",
        "sglang",
        "--engine.slots",
        "16",
        "--engine.startup-s",
        "1200",
        "--engine.server-wait-s",
        "600",
    )
    run = two_nodes.recipe("chase_grpo", out, "--steps", "5", "--eval-tasks", "8", "--save-every", "1", *words)
    wait_for_step(run, out, 1)
    assert two_nodes.kill("ServerActor")
    wait_for_step(run, out, 3)
    [server, *_] = servers()
    os.kill(server, signal.SIGKILL)
    summary, said = ended(run)
    assert "is lost, and is started again" in said
    assert summary["steps"] == 5
    assert summary["failed"] == 0
    for row in figures(out):
        assert row["sync/logprob_gap"] < 1e-3
    assert servers() == [], "a server's process is left"


def servers() -> list[int]:
    """The main processes of the SGLang servers that run on this machine."""
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
