"""The kind of sandbox that is chosen, and the messages if none runs."""

import gc
import logging
import os
import re
import socketserver
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, get_args

import pytest

import agentgym as ag
from agentgym.errors import SandboxError
from agentgym.machine.process_identity import owner, state_of
from agentgym.sandboxes import choose
from agentgym.sandboxes.choose import AnySandbox, Kind, as_kind, auto, named
from agentgym.sandboxes.docker import docker
from agentgym.sandboxes.docker.client import connect, translated
from agentgym.sandboxes.docker.docker import Docker, why_no_docker
from agentgym.sandboxes.docker.images import build as image
from agentgym.sandboxes.docker.settings import GVISOR_LACKS
from agentgym.sandboxes.local import local
from agentgym.sandboxes.local.local import Bubblewrap, Process, why_no_bubblewrap
from agentgym.sandboxes.network.rules import Allow
from agentgym.sandboxes.server_files import image_folder
from agentgym.scheduling import run_groups
from agentgym.testing import Scripted


def test_a_plain_process_must_be_asked_for_as_unsafe() -> None:
    with pytest.raises(ValueError, match="unsafe: a plain process isolates nothing"):
        Process()
    assert named("unsafe") == Process(unsafe=True)


async def test_unsafe_sandboxes_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    local._warn_once.cache_clear()
    with caplog.at_level(logging.WARNING, logger="agentgym.sandboxes"):
        for _ in range(2):
            async with named("unsafe").open(1):
                pass
    assert len(caplog.records) == 1


async def test_sandboxes_under_gvisor_log_the_limits_of_a_verdict(
    caplog: pytest.LogCaptureFixture,
) -> None:
    docker._warn_once.cache_clear()
    with caplog.at_level(logging.WARNING, logger="agentgym.sandboxes"):
        for _ in range(2):
            Docker(runtime="runsc").open(1)
    assert [record.getMessage() for record in caplog.records] == [GVISOR_LACKS]


def test_auto_is_the_strongest_that_runs_and_never_unsafe() -> None:
    if why_no_docker() is None:
        assert auto() == Docker()
    elif why_no_bubblewrap() is None:
        assert auto() == Bubblewrap()
    else:
        with pytest.raises(SandboxError, match="unsafe"):
            auto()


async def test_any_sandbox_logs_once_its_kind_and_its_limits(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if why_no_bubblewrap() is not None:
        pytest.skip(f"bubblewrap: {why_no_bubblewrap()}")
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere/docker.sock")
    choose._say_once.cache_clear()
    with caplog.at_level(logging.WARNING, logger="agentgym.sandboxes"):
        for _ in range(2):
            async with AnySandbox().open(1):
                pass
    (said,) = caplog.messages
    assert said.startswith(
        "using bubblewrap sandboxes, because Docker is unavailable: no Docker engine answers at unix:///nowhere"
    )
    assert "total memory" in said
    assert "CPU time" in said


@pytest.mark.parametrize("kind", ["bubblewrap", pytest.param("docker", marks=pytest.mark.docker)])
async def test_settings_of_any_sandbox_apply_to_the_kind_that_it_chooses(kind: Kind, tmp_path: Path) -> None:
    why_not = why_no_docker() if kind == "docker" else why_no_bubblewrap()
    if why_not is not None:
        pytest.skip(f"{kind}: {why_not}")
    for folder in (tmp_path, *tmp_path.parents[:3]):
        folder.chmod(0o755) if folder != Path("/tmp") else None
    (tmp_path / "f").write_text("shown")
    wanted = AnySandbox(kind=kind, memory_mb=300, disk_mb=20, volumes={"/data": str(tmp_path)}, network="loopback")
    async with wanted.open(1) as sandboxes, sandboxes.lease() as sandbox:
        assert (await sandbox.exec("cat /data/f")).stdout == "shown"
        assert (await sandbox.python("import socket\nsocket.create_server(('127.0.0.1', 8000)).close()")).ok
        assert not (await sandbox.exec("head -c 21000000 /dev/zero > f")).ok
        assert (await sandbox.exec("rm f; head -c 20000000 /dev/zero > f")).ok
        assert not (await sandbox.python("x = b'x' * (400 << 20)")).ok


def test_any_sandbox_opens_each_kind_with_the_given_settings_and_defaults(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened: list[object] = []
    for kind in (Docker, Bubblewrap, Process):
        monkeypatch.setattr(kind, "open", lambda spec, size: opened.append(spec))
    shared: dict[str, Any] = {"memory_mb": 300, "disk_mb": 20, "pids": 9, "pip": ("x",), "volumes": {"/d": "/usr"}}
    shared["network"] = Allow("a.org")
    AnySandbox(kind="docker", **shared).open(1)
    AnySandbox(kind="bubblewrap", **shared).open(1)
    AnySandbox(kind="unsafe", memory_mb=300).open(1)
    assert opened == [Docker(**shared), Bubblewrap(**shared), Process(unsafe=True, memory_mb=300)]
    opened.clear()
    AnySandbox(kind="docker").open(1)
    AnySandbox(kind="bubblewrap").open(1)
    assert opened == [Docker(), Bubblewrap()]


def test_settings_that_not_every_kind_of_sandbox_supports_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"network: 'bridge' is not \"none\", \"loopback\" or Allow"):
        AnySandbox(network="bridge")
    with pytest.raises(ValueError, match=r"pip: must be a tuple of texts"):
        AnySandbox(pip="numpy")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"volumes: '/tmp' is reserved by the sandbox"):
        AnySandbox(volumes={"/tmp": "/x"})
    with pytest.raises(ValueError, match=r"network: the sandbox 'unsafe' is a plain process"):
        AnySandbox(kind="unsafe", network="loopback")


def test_another_kind_of_sandbox_keeps_the_settings_of_an_any_sandbox() -> None:
    assert as_kind(AnySandbox(network="loopback"), "docker") == AnySandbox(kind="docker", network="loopback")
    assert as_kind(Docker(), "bubblewrap") == AnySandbox(kind="bubblewrap")
    with pytest.raises(ValueError, match="network: the sandbox 'unsafe'"):
        as_kind(AnySandbox(network="loopback"), "unsafe")


def test_every_kind_of_sandbox_has_a_line_about_its_limits() -> None:
    assert set(choose.LACKS) == set(choose.NAMES)
    assert {*choose.NAMES.values(), "auto"} == set(get_args(Kind))
    assert [kind for kind, lacks in choose.LACKS.items() if not lacks] == [Docker]


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Simulate a machine with neither Docker nor bubblewrap."""
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere/docker.sock")
    monkeypatch.setenv("PATH", "/nowhere")
    local._check_bubblewrap.cache_clear()
    yield
    local._check_bubblewrap.cache_clear()


@pytest.mark.usefixtures("bare")
def test_auto_names_everything_that_is_missing() -> None:
    with pytest.raises(SandboxError, match=r"Docker: .* Bubblewrap: bwrap is not installed .* the sandbox 'unsafe'"):
        auto()


@pytest.mark.usefixtures("bare")
def test_a_script_gets_an_unsafe_sandbox_only_if_it_requests_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert choose.main([]) == 1
    said = capsys.readouterr()
    assert (said.out, "no sandbox runs here" in said.err) == ("", True)
    assert choose.main(["--or-unsafe"]) == 0
    said = capsys.readouterr()
    assert (said.out, "unprotected" in said.err) == ("unsafe\n", True)


NEITHER = [
    (Bubblewrap(), r"bubblewrap sandboxes cannot run here: bwrap is not installed \(apt-get install bubblewrap\)"),
    (Docker(), r"(no Docker engine answers at unix:///nowhere/docker.sock.*|the docker package is missing.*)"),
]


@pytest.mark.usefixtures("bare")
@pytest.mark.parametrize(("spec", "why"), NEITHER, ids=["bubblewrap", "docker"])
async def test_a_sandbox_that_cannot_run_here_is_explained_in_one_line_before_a_rollout(
    spec: Bubblewrap | Docker, why: str
) -> None:
    class Declares(ag.ToolEnv[ag.Task]):
        pass

    Declares.sandbox_spec = spec
    with pytest.raises(SandboxError) as error:
        await ag.rollout(Declares, ag.Task(id="t", prompt="p"), Scripted([]))
    assert re.fullmatch(why, str(error.value)), error.value


@pytest.mark.usefixtures("bare")
@pytest.mark.parametrize(("spec", "why"), NEITHER, ids=["bubblewrap", "docker"])
async def test_a_tasks_sandbox_that_cannot_run_is_explained_in_failure_and_batch_error(
    spec: Bubblewrap | Docker, why: str
) -> None:
    class Chooses(ag.ToolEnv[ag.Task]):
        limits = ag.Limits(retries=0)

        @classmethod
        def sandbox_for(cls, task: ag.Task) -> Bubblewrap | Docker:
            return spec

    tasks = [ag.Task(id=name, prompt="p") for name in "ab"]
    rollout = await ag.rollout(Chooses, tasks[0], Scripted([]))
    assert re.fullmatch(f"SandboxError: {why}", str(rollout.failure)), rollout.failure
    with pytest.raises(SandboxError) as error:
        await run_groups(Chooses, tasks, Scripted([]), n=2)
    assert re.fullmatch(f"all 4 rollouts failed; the first one: SandboxError: {why}", str(error.value)), error.value


def test_a_missing_bubblewrap_is_looked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    if why_no_bubblewrap() is not None:
        pytest.skip(f"bubblewrap: {why_no_bubblewrap()}")
    local._check_bubblewrap.cache_clear()
    with monkeypatch.context() as without:
        without.setenv("PATH", "/nowhere")
        assert "not installed" in str(why_no_bubblewrap())
    assert why_no_bubblewrap() is None


class Passing(socketserver.StreamRequestHandler):
    """An engine that answers one request and then disappears."""

    def handle(self) -> None:
        while self.rfile.readline().strip():
            pass
        body = b'{"ApiVersion": "1.41", "Version": "20"}'
        head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
        self.wfile.write(head % len(body) + body)


def no_socket_is_left_open(attempt: Callable[[], object], open_before: int) -> None:
    """Assert that no socket stays open while the error is kept, as by a log or a chained exception."""
    with pytest.raises(SandboxError, match=r"Docker engine") as kept:
        attempt()
    assert kept.value is not None
    assert sockets() == open_before


def sockets() -> int:
    """Return how many sockets this process has open."""
    gc.collect()
    links = [str(fd.resolve()) for fd in Path("/proc/self/fd").iterdir()]
    return sum("socket:" in link for link in links)


def test_an_engine_that_is_gone_leaves_no_socket_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("docker")
    path = tmp_path / "docker.sock"
    before = sockets()
    monkeypatch.setenv("DOCKER_HOST", f"unix://{path}")
    for ask in (connect, image.build):
        no_socket_is_left_open(ask, before)  # The file does not exist.
    with socketserver.UnixStreamServer(str(path), Passing) as engine:

        def serve() -> None:
            for _ in range(2):  # One of them is the probe.
                engine.handle_request()

        serving = threading.Thread(target=serve)
        serving.start()
        client = connect()
        serving.join()
    try:
        for ask in (connect, image.build, partial(translated, client.containers)):
            no_socket_is_left_open(ask, before)  # The file exists, but nobody listens.
    finally:
        client.close()


def test_ssh_engines_are_refused_and_engines_that_do_not_answer_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for host, why in (
        ("ssh://nowhere", "only unix:// and tcp://"),
        ("tcp://127.0.0.1:1", "answers at tcp://127.0.0.1:1"),
    ):
        monkeypatch.setenv("DOCKER_HOST", host)
        assert why in str(why_no_docker())


async def test_a_missing_engine_is_a_sandbox_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere/docker.sock")
    with pytest.raises(SandboxError, match=r"Docker engine|docker package"):
        async with Docker().open(1):
            pass


@pytest.mark.docker
async def test_a_missing_image_error_names_the_build_command() -> None:
    why_not = why_no_docker()
    if why_not is not None:
        pytest.skip(f"docker: {why_not}")
    with pytest.raises(SandboxError, match=r"agentgym sandbox build"):
        async with Docker(image="agentgym-no-such-image").open(1):
            pass


def test_an_owner_is_dead_once_its_process_has_ended() -> None:
    host, boot, namespace, pid, started = owner().split("/")
    assert state_of(owner()) == "alive"
    assert state_of(f"{host}/{boot}/{namespace}/{pid}/{int(started) + 1}") == "ended"
    assert state_of(f"another-host/{boot}/{namespace}/{pid}/1") == "ended"


def test_an_owner_that_cannot_be_seen_from_here_is_not_considered_dead() -> None:
    host, boot, namespace, pid, started = owner().split("/")
    for who in (
        f"{host}/another-boot/{namespace}/{pid}/{started}",
        f"{host}/{boot}/{int(namespace) + 1}/{pid}/1",
        f"{host}/{boot}//{pid}/1",
        "nonsense",
    ):
        assert state_of(who) == "unknown"


def test_the_image_folder_holds_the_server() -> None:
    assert (image_folder() / "server/__main__.py").is_file()
    assert (image_folder() / "Dockerfile").is_file()


def test_importing_every_module_of_the_sandboxes_loads_no_docker_client() -> None:
    folder = Path(choose.__file__).parent
    sent_as_files = {"hidden_tests", "watchman", "tied"}  # programs that run inside
    paths = [path.relative_to(folder).with_suffix("").parts for path in folder.rglob("*.py")]
    modules = [".".join(("agentgym.sandboxes", *parts)) for parts in paths if not sent_as_files & {*parts}]
    assert {"agentgym.sandboxes.docker.docker", "agentgym.sandboxes.docker.images.build", "agentgym.sandboxes.pool"} < {
        *modules
    }
    code = f"import sys, {', '.join(modules)}; print([name for name in ('docker', 'requests') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_a_server_wipes_only_its_own_folders() -> None:
    config = '{"ends": [0], "work": "/", "wipe": ["/"], "limits": {}}'
    done = subprocess.run(
        [sys.executable, str(image_folder() / "server"), config], capture_output=True, text=True, cwd=os.sep
    )
    assert done.returncode == 1
    assert "not one of our folders" in done.stderr
