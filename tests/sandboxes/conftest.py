"""Fixtures that run the same tests on every kind of sandbox that this machine supports; others are skipped."""

import functools
import os
import resource
import secrets
import select
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from agentgym.sandboxes.docker.client import EngineDown, connect
from agentgym.sandboxes.docker.docker import Docker, why_no_docker
from agentgym.sandboxes.local.local import Bubblewrap, Process, why_no_bubblewrap
from agentgym.sandboxes.protocol import ExecResult, Sandbox, SandboxPool, SandboxSpec

KINDS = ["unsafe", "bubblewrap", "docker", "runsc"]
ROOT = Path(__file__).parents[2]
MANY_FILES = 520
ISOLATED = ["bubblewrap", pytest.param("docker", marks=pytest.mark.docker)]


FAST_ON_ALL = {"test_contract.py", "test_pool.py", "test_descriptors.py"}
"""Files whose fast tests run on each kind of sandbox; other files' fast tests run on one kind only."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests as slow if they repeat bubblewrap's tests (without bubblewrap: the unsafe kind's) on another kind."""
    repeating = {"docker", "unsafe"} if why_no_bubblewrap() is None else {"docker"}
    for item in items:
        if not item.path.is_relative_to(Path(__file__).parent) or item.path.name in FAST_ON_ALL:
            continue
        parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
        if any(isinstance(value, str) and value in repeating for value in parameters):
            item.add_marker(pytest.mark.slow)


def others_slow(names: Iterable[str], *fast: str) -> list[Any]:
    """Return all names as parameter values; those not in `fast` are marked slow."""
    return [name if name in fast else pytest.param(name, marks=pytest.mark.slow) for name in names]


def make(kind: str, **settings: Any) -> SandboxSpec:
    """Return settings for a sandbox of that kind; skip the test, with the reason, if it can't run here."""
    if kind == "unsafe":
        return Process(unsafe=True, **settings)
    why_not = why_no_bubblewrap() if kind == "bubblewrap" else why_no_docker()
    if why_not is None and kind == "runsc":
        why_not = why_no_gvisor()
    if why_not is not None:
        pytest.skip(f"{kind}: {why_not}")
    if kind == "bubblewrap":
        return Bubblewrap(**settings)
    return Docker(runtime="runsc" if kind == "runsc" else None, **settings)


@functools.cache
def why_no_gvisor() -> str | None:
    """Return why the engine can't run containers under gVisor, or None if it can."""
    client = connect()
    try:
        return None if "runsc" in client.info()["Runtimes"] else "the Docker engine has no runtime 'runsc'"
    finally:
        client.close()


@pytest.fixture(scope="module", params=["unsafe", *ISOLATED])
def spec(request: pytest.FixtureRequest) -> SandboxSpec:
    """Return the settings of each kind of sandbox."""
    return make(request.param)


@pytest.fixture(scope="module", params=ISOLATED)
def isolated(request: pytest.FixtureRequest) -> SandboxSpec:
    """Return the settings of each kind of sandbox that isolates malicious code."""
    return make(request.param)


@pytest.fixture(params=["unsafe", *ISOLATED])
def kind(request: pytest.FixtureRequest) -> str:
    """Return the name of each kind of sandbox that runs here."""
    make(request.param)
    return str(request.param)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sandboxes(spec: SandboxSpec) -> AsyncIterator[SandboxPool]:
    """Yield a one-sandbox pool of each kind, shared by a module's tests.

    Each test starts from the state that the previous one left.
    """
    async with spec.open(1) as pool:
        yield pool


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def isolated_sandboxes(isolated: SandboxSpec) -> AsyncIterator[SandboxPool]:
    """Yield a one-sandbox pool of each kind that isolates malicious code."""
    async with isolated.open(1) as pool:
        yield pool


@pytest_asyncio.fixture(loop_scope="module")
async def sandbox(sandboxes: SandboxPool) -> AsyncIterator[Sandbox]:
    """Yield a clean sandbox of each kind."""
    async with sandboxes.lease() as leased:
        yield leased


@pytest_asyncio.fixture(loop_scope="module")
async def isolated_sandbox(isolated_sandboxes: SandboxPool) -> AsyncIterator[Sandbox]:
    """Yield a clean sandbox of each kind that isolates malicious code."""
    async with isolated_sandboxes.lease() as leased:
        yield leased


@contextmanager
def with_many_files_open() -> Iterator[None]:
    """Keep as many files open as a client that holds data, HTTP connections and other sandboxes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, MANY_FILES + 400), hard))
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(MANY_FILES)]
    try:
        yield
    finally:
        for fd in held:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture
def many_files() -> Iterator[None]:
    """Keep many files open in this process."""
    with with_many_files_open():
        yield


def below(pid: int) -> list[int]:
    """Return all descendants of the process `pid`."""
    found: list[int] = []
    try:
        for thread in Path(f"/proc/{pid}/task").iterdir():
            for child in map(int, (thread / "children").read_text().split()):
                found += [child, *below(child)]
    except (FileNotFoundError, ProcessLookupError):
        return found  # It ended in the meantime.
    return found


def containers_of(pid: int) -> list[int]:
    """Return the first processes of this client's containers."""
    pytest.importorskip("docker")
    try:
        client = connect()
    except EngineDown:
        return []
    try:
        owned = client.containers(filters={"label": "agentgym.owner"})
        mine = [c["Id"] for c in owned if c["Labels"]["agentgym.owner"].split("/")[3:4] == [str(pid)]]
        return [client.inspect_container(c)["State"]["Pid"] for c in mine]
    finally:
        client.close()


@pytest.fixture
def code_for_all() -> Iterator[Path]:
    """Yield a copy of the code and its tests that every user can read; pytest's own folders are closed to others."""
    with tempfile.TemporaryDirectory(prefix="copy-") as name:
        folder = Path(name)
        for part in ("agentgym", "sandbox", "tests"):
            shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", folder)
        folder.chmod(0o755)
        yield folder


def as_user_without_rights(folder: Path, *python: str) -> "subprocess.CompletedProcess[str]":
    """Run Python on that copy as an unprivileged user who owns nothing."""
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(folder), "HOME": "/nonexistent"}
    return subprocess.run(
        ["setpriv", "--reuid", "1234", "--regid", "1234", "--clear-groups", "--", sys.executable, "-B", *python],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def one_more_minute() -> str:
    """Return a number of seconds that no other test or test run sleeps: an unsafe sandbox sees every process here."""
    return f"60.{secrets.randbelow(10**9):09d}"


async def cut_after(said: str, run: Callable[[], Awaitable[ExecResult]]) -> ExecResult:
    """Return the result of a run that its limit cut after this output; a loaded machine may cut runs before it."""
    while said not in (result := await run()).stdout:
        assert result.status == "timeout"
    return result


def descriptors() -> int:
    """Return how many descriptors this process has open, except of /proc: the clock's thread opens its own there."""
    links = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # It was closed in the meantime.
            links.append(str(descriptor.readlink()))
    return sum(not link.startswith("/proc/") for link in links)


def wait_for_end(pids: list[int], seconds: float = 20.0) -> list[int]:
    """Return the processes that still run after `seconds`."""
    left = []
    for pid in pids:
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            if not select.select([fd], [], [], seconds)[0]:
                left.append(pid)
        finally:
            os.close(fd)
    return left


SECRET = "http://someone:hush@proxy.invalid:3128"
"""A proxy URL with a password that no sandbox may see."""


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create a folder of wheels, known only from the user's pip.conf, that holds the package `said`."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    wheel = f"said_{secrets.token_hex(4)}"
    with zipfile.ZipFile(folder / f"{wheel}-1.0-py3-none-any.whl", "w") as made:
        made.writestr(f"{wheel}.py", "word = 'said'\n")
        made.writestr(f"{wheel}-1.0.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {wheel}\nVersion: 1.0\n")
        made.writestr(f"{wheel}-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        made.writestr(f"{wheel}-1.0.dist-info/RECORD", "")
    settings = tmp_path / "pip.conf"
    settings.write_text(f"[global]\nno-index = true\nfind-links = {folder}\ntrusted-host = hush.invalid\n")
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", str(settings))
    monkeypatch.setenv("HTTP_PROXY", SECRET)
    return folder / wheel
