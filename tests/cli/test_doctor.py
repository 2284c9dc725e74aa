"""What `agentgym doctor` reports about a machine and about a model's tokenizer."""

import os
import platform
import socketserver
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

import agentgym
from agentgym import hub as models
from agentgym.cli import doctor, main as cli
from agentgym.errors.extras import install_line
from agentgym.sandboxes import choose
from agentgym.sandboxes.docker import client as docker_client
from agentgym.sandboxes.docker.docker import why_no_docker
from agentgym.sandboxes.docker.settings import GVISOR_LACKS
from agentgym.sandboxes.local import local

ROOT = Path(__file__).parents[2]


def say(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str]:
    code = cli.main(args)
    return code, capsys.readouterr().out


@pytest.fixture
def no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere/docker.sock")


def test_doctor_reports_what_a_tokenizer_does_to_a_conversation(capsys: pytest.CaptureFixture[str]) -> None:
    code, out = say(capsys, "doctor", "--model", str(ROOT / "recipes/checkpoints/chase"))
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == ["ok"] * 6
    assert "read as hermes" in out


def test_doctor_names_a_model_that_does_not_exist(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert cli.main(["doctor", "--model", str(tmp_path)]) == 1
    assert f"model {str(tmp_path)!r}" in capsys.readouterr().err


def test_doctor_says_how_to_install_missing_parts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, no_engine: None
) -> None:
    monkeypatch.setattr(local, "why_no_bubblewrap", lambda: "bwrap is not installed")
    monkeypatch.setattr(choose, "why_no_bubblewrap", lambda: "bwrap is not installed")
    monkeypatch.setenv("PATH", "/nowhere")
    code, said = say(capsys, "doctor")
    assert code == 1
    assert said.startswith(f"ok       agentgym        {version('agentgym-kit')}")
    for name, how in (("docker engine", "install Docker"), ("bubblewrap", "apt-get install"), ("runsc", "gVisor")):
        line, hint = said[said.index(f"missing  {name}") :].splitlines()[:2]
        assert how in hint, line
    assert said.rstrip().endswith("-> either Docker with its image, or bubblewrap")


def test_doctor_succeeds_if_a_sandbox_is_available(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, no_engine: None
) -> None:
    monkeypatch.setattr(choose, "why_no_bubblewrap", lambda: None)
    code, said = say(capsys, "doctor")
    assert code == 0
    assert said.splitlines()[-1].split() == ["ok", "a", "sandbox", "Bubblewrap"]


@pytest.mark.docker
def test_doctor_finds_the_engine_and_its_image(capsys: pytest.CaptureFixture[str]) -> None:
    if (why_not := why_no_docker()) is not None:
        pytest.skip(f"docker: {why_not}")
    code, said = say(capsys, "doctor")
    assert code == 0
    assert "ok       docker engine" in said
    assert "ok       sandbox image" in said
    assert "; each episode has its own namespaces\n" in said[said.index("sandbox image") :]
    client = docker_client.connect()
    try:
        known = "runsc" in client.info()["Runtimes"]
    finally:
        client.close()
    assert ("ok       runsc" in said) == known
    assert (GVISOR_LACKS in said) == known


def test_runsc_counts_as_missing_if_the_engine_does_not_know_it(
    monkeypatch: pytest.MonkeyPatch, no_engine: None
) -> None:
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    finding = doctor._runsc()
    assert (finding.ok, finding.detail) == (
        False,
        "/usr/bin/runsc, but the Docker engine does not have it as a runtime",
    )
    assert "register it with the engine" in finding.get


def test_a_missing_extra_is_named_with_its_install_command() -> None:
    finding = doctor._package("no-such-package-anywhere", install_line("train"))
    assert str(finding).splitlines()[1].strip() == f"-> {install_line('train')}"


def test_doctor_prints_the_versions_that_a_bug_report_needs(
    capsys: pytest.CaptureFixture[str], no_engine: None
) -> None:
    said = say(capsys, "doctor")[1]
    lines = {line.split()[1]: line for line in said.splitlines() if not line.startswith(" ")}
    assert f"{len(os.sched_getaffinity(0))} cores" in lines["machine"]
    assert "GiB of memory" in lines["machine"]
    assert platform.python_version() in lines["python"]
    assert version("torch") in lines["torch"]
    assert ("for CUDA" in lines["torch"]) != ("for the CPU" in lines["torch"])
    assert version("pytest-asyncio") in lines["pytest-asyncio"]
    assert {"sglang", "gpus"} <= set(lines)


def test_doctor_says_if_only_the_docker_package_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "docker.sock"
    code = "import sys; sys.modules['docker'] = None; from agentgym.cli import main; main.main(['doctor'])"
    with socketserver.UnixStreamServer(str(path), socketserver.BaseRequestHandler):  # It only accepts connections.
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", code],
            cwd=ROOT, capture_output=True, text=True, check=True, env={**os.environ, "DOCKER_HOST": f"unix://{path}"},
        )  # fmt: skip
    line, hint = done.stdout[done.stdout.index("missing  docker engine") :].splitlines()[:2]
    assert f"one responds at unix://{path}, but the docker package is missing" in line
    assert hint.strip() == f"-> {install_line('docker')}"
    assert "install Docker" not in done.stdout


def test_an_unreachable_hub_is_named_in_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    with socketserver.TCPServer(("127.0.0.1", 0), socketserver.BaseRequestHandler) as free:
        port = free.server_address[1]
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{port}")
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    assert cli.main(["doctor", "--model", "nobody/no-such-model"]) == 1
    said = capsys.readouterr().err
    assert said == (
        "agentgym: model 'nobody/no-such-model': no folder here, not in the hub's cache, and "
        f"http://127.0.0.1:{port} cannot be reached (Connection refused)\n"
    )
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert models.why_no_hub() == "HF_HUB_OFFLINE is set"


def test_doctor_knows_the_name_of_the_shipped_model(capsys: pytest.CaptureFixture[str]) -> None:
    code, out = say(capsys, "doctor", "--model", "tiny")
    assert code == 0
    assert "separators" in out


def test_a_path_that_does_not_exist_is_not_looked_up_on_the_hub(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--model", "./nowhere"]) == 1
    assert capsys.readouterr().err.startswith("agentgym: model: there is no folder ./nowhere; give one that exists")


def test_doctor_prints_where_the_library_is_installed() -> None:
    assert str(next(doctor.findings())).endswith(f"in {Path(agentgym.__file__).parent}")
