"""What `agentgym doctor` reports about a machine and about a model's tokenizer."""

import os
import platform
import shutil
import socketserver
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

import agentgym
from agentgym import hub as models
from agentgym.chat.template_report import TOOLS
from agentgym.chat.tokenizer import chat_tokenizer
from agentgym.cli import doctor, main as cli, model_report
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
    findings = [line for line in out.splitlines() if not line.startswith((" ", "the prompt"))]
    assert [line.split()[0] for line in findings] == ["ok"] * 8
    assert "ok       shows tools     yes\n" in out
    assert "read as hermes" in out
    assert "ok       stop token      <|im_end|> (id 2)\n" in out


def test_doctor_prints_the_prompt_as_the_model_reads_it(capsys: pytest.CaptureFixture[str]) -> None:
    out = say(capsys, "doctor", "--model", "tiny")[1]
    tokenizer = chat_tokenizer("tiny")
    text = tokenizer.render(model_report.MESSAGES, TOOLS, generation=True)
    many = len(tokenizer.encode(text))
    shown = out[: out.index("ok       shows tools")].splitlines()
    assert shown[0] == f"the prompt of a system text, a question and the tool 'note', {many} tokens:"
    assert "\n".join(line.removeprefix("    ") for line in shown[1:]) == text
    assert "<|im_start|>system" in text
    assert '"name": "note"' in text


def model_with(tmp_path: Path, template: str | None) -> str:
    """Return a copy of the tiny model's folder with another chat template, or with none."""
    folder = shutil.copytree(ROOT / "recipes/checkpoints/chase", tmp_path / "model")
    file = folder / "chat_template.jinja"
    file.unlink() if template is None else file.write_text(template)
    return str(folder)


PLAIN = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
"""A chat template without tools, and without a token that ends a turn."""


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (None, "tokenizer: has no chat_template; give one (chat_template, --chat-template FILE.jinja), or use the"),
        ("{% for m in messages %}", "chat_template: cannot be rendered in line 1: "),
        ("{{ raise_exception('only for adults') }}", "chat_template: "),
        ("{{ messages[0].content.nothing() }}", "chat_template: "),
    ],
)
def test_a_model_whose_template_does_not_work_gives_one_line(
    template: str | None, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = model_with(tmp_path, template)
    assert cli.main(["doctor", "--model", model]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"agentgym: {said}")
    assert printed.err.count("\n") == 1
    own = str(ROOT / "recipes/checkpoints/chase/chat_template.jinja")
    assert say(capsys, "doctor", "--model", model, "--chat-template", own)[0] == 0


def test_a_folder_without_a_tokenizer_gives_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text((ROOT / "recipes/checkpoints/chase/config.json").read_text())
    assert cli.main(["doctor", "--model", str(tmp_path)]) == 1
    err = capsys.readouterr().err
    assert err.startswith(f"agentgym: model: {tmp_path} has no tokenizer.json; add ")
    assert err.count("\n") == 1


def test_doctor_says_that_a_template_shows_no_tools_and_that_nothing_stops_a_turn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = model_with(tmp_path, PLAIN)
    code, out = say(capsys, "doctor", "--model", model)
    assert code == 1
    assert "no       shows tools     no, so agentgym lists them in the system prompt" in out
    assert "no       stop token      the chat template ends a turn with '\\n', which is not a stop token" in out
    assert '"name": "note"' in out
    out = say(capsys, "doctor", "--model", model, "--tools", "template")[1]
    assert "no       shows tools     no; set --tools prompt, or give a chat template" in out
    assert '"name": "note"' not in out
    assert cli.main(["doctor", "--model", model, "--tools", "refuse"]) == 1
    assert capsys.readouterr().err.startswith("agentgym: tools: the chat template shows no tools to the model; ")


def test_doctor_reads_an_adapter_with_its_own_template(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "tiny"}')
    (tmp_path / "chat_template.jinja").write_text(f"LOUD{chat_tokenizer('tiny').tokenizer.chat_template}")
    code, out = say(capsys, "doctor", "--model", str(tmp_path))
    assert code == 0
    assert out.splitlines()[1] == "    LOUD<|im_start|>system"


def test_the_flags_of_a_models_check_need_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--tools", "prompt"]) == 1
    assert capsys.readouterr().err.startswith("agentgym: --chat-template, --tools: ")


def test_doctor_names_a_model_that_does_not_exist(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert cli.main(["doctor", "--model", str(tmp_path)]) == 1
    assert f"model: {tmp_path} cannot be loaded" in capsys.readouterr().err


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
        "agentgym: model: nobody/no-such-model cannot be loaded: there is no such folder here, it is not in the hub's "
        f"cache, and http://127.0.0.1:{port} cannot be reached (Connection refused); {models.WANTED}\n"
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


def test_a_setting_that_lists_tools_in_the_prompt_is_not_blamed_on_the_template(
    capsys: pytest.CaptureFixture[str],
) -> None:
    cli.main(["doctor", "--model", "tiny", "--tools", "prompt"])
    said = capsys.readouterr().out
    assert "yes, but --tools prompt is set, so agentgym lists them in the system prompt" in said
    assert "can't be read" not in said
