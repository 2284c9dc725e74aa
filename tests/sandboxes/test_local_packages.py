"""Packages and folders of this machine in bubblewrap sandboxes."""

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentgym.errors import SandboxError
from agentgym.sandboxes.docker.docker import Docker, why_no_docker
from agentgym.sandboxes.docker.images import package_folder
from agentgym.sandboxes.local.local import Bubblewrap, why_no_bubblewrap
from agentgym.sandboxes.protocol import SandboxSpec
from tests.sandboxes.conftest import make


@pytest.fixture(autouse=True)
def bubblewrap() -> None:
    if (why_not := why_no_bubblewrap()) is not None:
        pytest.skip(f"bubblewrap: {why_not}")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield a separate package cache that the user in a sandbox can reach."""
    open_ = Path("/var/tmp", f"agentgym-test-{tmp_path.name}")
    monkeypatch.setattr(package_folder, "cache_folder", lambda: open_ / "packages")
    package_folder.package_binds.cache_clear()
    yield open_
    package_folder.package_binds.cache_clear()
    shutil.rmtree(open_, ignore_errors=True)


async def test_packages_are_installed_once_and_imported_by_cells_and_scripts(index: Path, cache: Path) -> None:
    spec = Bubblewrap(pip=(index.name,))
    async with spec.open(1) as sandboxes, sandboxes.lease() as sandbox:
        assert (await sandbox.python(f"import {index.name} as p\np.word")).stdout == "'said'\n"
        assert (await sandbox.exec(f"python3 -c 'import {index.name} as p; print(p.word)'")).stdout == "said\n"
        assert not (await sandbox.python(f"open({index.name}.__file__, 'w')".replace(index.name, "p"))).ok
        assert "hush" not in (await sandbox.exec("env; cat /proc/self/environ")).stdout
    (made,) = (cache / "packages").iterdir()
    shutil.rmtree(index.parent)  # So it comes from the cache.
    package_folder.package_binds.cache_clear()
    async with spec.open(1) as sandboxes, sandboxes.lease() as sandbox:
        assert (await sandbox.python(f"import {index.name}")).ok
    async with Bubblewrap().open(1) as sandboxes, sandboxes.lease() as sandbox:
        assert "ModuleNotFoundError" in (await sandbox.python(f"import {index.name}")).stderr
    assert [path.name for path in (cache / "packages").iterdir()] == [made.name]


async def test_the_error_quotes_pip_and_no_folder_is_left(index: Path, cache: Path) -> None:
    with pytest.raises(SandboxError, match=r"(?s)pip failed .*No matching distribution found for agentgym-nowhere"):
        async with Bubblewrap(pip=("agentgym-nowhere",)).open(1):
            pass
    assert list((cache / "packages").iterdir()) == []


INSTALL = """
import sys
from pathlib import Path
from agentgym.sandboxes.docker.images import package_folder
package_folder.cache_folder = lambda: Path(sys.argv[1])
package_folder.package_binds(("agentgym-nowhere",), sys.executable)
"""


@pytest.mark.slow
def test_a_killed_client_takes_its_pip_along_and_the_next_removes_its_folder(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as index:  # This index never answers: pip waits for it.
        settings = {"PIP_INDEX_URL": f"http://127.0.0.1:{index.getsockname()[1]}/", "PIP_DEFAULT_TIMEOUT": "600"}
        client = subprocess.Popen(
            [sys.executable, "-c", INSTALL, str(cache / "packages")],
            env={**os.environ, **settings, "PIP_NO_INDEX": "0", "PIP_CONFIG_FILE": os.devnull},
            stderr=subprocess.DEVNULL,
        )
        with index.accept()[0] as pip:
            pip.settimeout(60)  # Times out if pip keeps running.
            assert pip.recv(65536)
            client.kill()
            client.wait()
            assert pip.recv(65536) == b""
    assert len(list((cache / "packages").iterdir())) == 1
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(SandboxError, match="agentgym-nowhere"):
        package_folder.package_binds(("agentgym-nowhere",), sys.executable)
    assert list((cache / "packages").iterdir()) == []


async def test_volumes_are_read_and_never_written(cache: Path) -> None:
    (cache / "data").mkdir(parents=True)
    (cache / "data/f").write_text("read me")
    (cache / "data").chmod(0o777)
    async with Bubblewrap(volumes={"/data": str(cache / "data")}).open(1) as sandboxes, sandboxes.lease() as sandbox:
        assert (await sandbox.exec("cat /data/f")).stdout == "read me"
        assert not (await sandbox.exec("touch /data/g")).ok
    spec = Bubblewrap(volumes={"/data": str(cache / "data")})
    (cache / "data").rename(cache / "gone")
    async with spec.open(1) as sandboxes:
        with pytest.raises(SandboxError, match="data"):
            async with sandboxes.lease():
                pass


async def sandboxes_do_not_meet(spec: SandboxSpec) -> None:
    hold = "import fcntl\nf = open('/data/f'); fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)"
    async with spec.open(2) as sandboxes, sandboxes.lease() as one, sandboxes.lease() as other:
        assert [(await sandbox.python(hold)).status for sandbox in (one, other)] == ["ok", "ok"]
        await one.reset()
        assert (await one.exec("cat /data/f /usr/local/share/f /usr/bin/env")).stdout == "read me" * 3
        assert not (await one.exec("touch /data/g || touch /usr/local/share/g")).ok


async def test_sandboxes_cannot_interact_through_a_volume_and_one_in_usr_is_visible(cache: Path) -> None:
    await sandboxes_do_not_meet(Bubblewrap(volumes=data(cache)))


@pytest.mark.docker
async def test_containers_cannot_interact_through_a_volume_and_one_in_usr_is_visible(cache: Path) -> None:
    if why_not := why_no_docker():
        pytest.skip(why_not)
    await sandboxes_do_not_meet(Docker(volumes=data(cache)))


def data(cache: Path) -> dict[str, str]:
    """Return the same folder as two volumes, and a file in it as another."""
    (cache / "data").mkdir(parents=True)
    (cache / "data/f").write_text("read me")
    return {"/data": f"{cache}/data", "/usr/local/share": f"{cache}/data", "/usr/bin/env": f"{cache}/data/f"}


def test_an_invalid_volume_is_refused_by_its_path(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/")
    for kind in (Bubblewrap, Docker):
        for volumes, why in (
            ({"data": "/x"}, "'data' is not an absolute path"),
            ({"/data": "x"}, "'x' is not an absolute path"),
            ({"/data": "/x/../y"}, "'/x/../y' is not an absolute path"),
            ({"/tmp/data": "/x"}, "'/tmp/data' is reserved by the sandbox"),
            ({"/": "/x"}, "'/' is reserved by the sandbox"),
            ({"/data": "/"}, "'/' would expose '/' of this machine"),
            ({"/data": "/usr/../"}, "'/usr/../' is not an absolute path"),
            ({"/data": "/./"}, "'/./' would expose '/' of this machine"),
            ({"/data": str(tmp_path / "link")}, "link' would expose '/' of this machine"),
            ({"/data": "/proc/self/root"}, "'/proc/self/root' would expose '/' of this machine"),
            ({"/data": "/proc/1"}, "'/proc/1' would expose '/proc' of this machine"),
            ({"/data": "/sys/kernel"}, "'/sys/kernel' would expose '/sys' of this machine"),
            ({"/data": "/dev"}, "'/dev' would expose '/dev' of this machine"),
        ):
            with pytest.raises(ValueError, match=why):
                kind(volumes=volumes)


@pytest.mark.parametrize("kind", ["bubblewrap", pytest.param("docker", marks=pytest.mark.docker)])
async def test_a_volume_that_holds_a_socket_is_refused_when_a_pool_opens(kind: str, cache: Path) -> None:
    (cache / "data/below").mkdir(parents=True)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(f"{cache}/data/below/s.sock")
        spec = make(kind, volumes={"/data": f"{cache}/data"})
        with pytest.raises(ValueError, match=r"volumes: '.*/data' contains the socket '.*/data/below/s.sock'"):
            async with spec.open(1):
                pass
    (cache / "data/below/s.sock").unlink()
    (cache / "data/loop").symlink_to(cache / "data")
    async with spec.open(1):
        pass


def test_a_string_instead_of_a_tuple_of_packages_is_refused() -> None:
    for kind in (Bubblewrap, Docker):
        with pytest.raises(ValueError, match=r"pip: must be a tuple of texts, such as \('numpy',\)"):
            kind(pip="numpy")  # type: ignore[arg-type]


def test_specs_with_volumes_are_hashable_and_equal_by_value(tmp_path: Path) -> None:
    for kind in (Bubblewrap, Docker):
        one, two = (kind(volumes={"/data": str(tmp_path)}) for _ in range(2))
        assert one == two
        assert len({one, two}) == 1
        assert one != kind(volumes={"/data": str(tmp_path.parent)})
