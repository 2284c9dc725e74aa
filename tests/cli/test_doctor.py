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


def test_the_doctor_says_what_a_tokenizer_does_to_a_conversation(capsys: pytest.CaptureFixture[str]) -> None:
    code, out = say(capsys, "doctor", "--model", str(ROOT / "recipes/checkpoints/chase"))
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == ["ok"] * 6
    assert "read as hermes" in out


def test_the_doctor_names_a_model_that_is_not_there(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert cli.main(["doctor", "--model", str(tmp_path)]) == 1
    assert f"model {str(tmp_path)!r}" in capsys.readouterr().err


def test_the_doctor_says_how_to_get_what_is_missing(
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


def test_the_doctor_is_content_where_a_sandbox_can_be_had(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, no_engine: None
) -> None:
    monkeypatch.setattr(choose, "why_no_bubblewrap", lambda: None)
    code, said = say(capsys, "doctor")
    assert code == 0
    assert said.splitlines()[-1].split() == ["ok", "a", "sandbox", "Bubblewrap"]


@pytest.mark.docker
def test_the_doctor_sees_the_engine_and_its_image(capsys: pytest.CaptureFixture[str]) -> None:
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


def test_a_runsc_that_no_engine_knows_is_missing(monkeypatch: pytest.MonkeyPatch, no_engine: None) -> None:
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    finding = doctor._runsc()
    assert (finding.ok, finding.detail) == (
        False,
        "/usr/bin/runsc, but the Docker engine does not have it as a runtime",
    )
    assert "register it with the engine" in finding.get


def test_an_extra_that_is_not_installed_is_named_with_its_command() -> None:
    finding = doctor._package("no-such-package-anywhere", install_line("train"))
    assert str(finding).splitlines()[1].strip() == f"-> {install_line('train')}"


def test_the_doctor_says_the_versions_that_a_question_needs(
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


def test_the_doctor_says_so_where_an_engine_answers_and_only_the_package_is_missing(tmp_path: Path) -> None:
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


def test_a_hub_that_cannot_be_reached_is_asked_once_and_named(
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


def test_the_model_that_comes_with_the_library_has_its_name_here_too(capsys: pytest.CaptureFixture[str]) -> None:
    code, out = say(capsys, "doctor", "--model", "tiny")
    assert code == 0
    assert "separators" in out


def test_a_path_at_which_there_is_nothing_is_not_asked_of_the_hub(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--model", "./nowhere"]) == 1
    assert "model: there is no folder ./nowhere; give one that exists" in capsys.readouterr().err


def test_the_library_is_said_to_be_where_it_is() -> None:
    assert str(next(doctor.findings())).endswith(f"in {Path(agentgym.__file__).parent}")
