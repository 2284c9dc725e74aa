"""Sandbox images: their content, the things that never reach them, and the leftovers of a build."""

import hashlib
import json
import logging
import secrets
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from agentgym.errors import SandboxError
from agentgym.machine.process_identity import owner
from agentgym.sandboxes.docker.client import address, connect
from agentgym.sandboxes.docker.docker import Docker, why_no_docker
from agentgym.sandboxes.docker.images import build as image
from agentgym.sandboxes.docker.images.folder import build_folder, folder_digest
from agentgym.sandboxes.docker.images.former import former_images, remove_former
from agentgym.sandboxes.docker.images.names import IMAGE, SERVER_LABEL, default_image, find
from agentgym.sandboxes.docker.images.ready import ready_image, server_tag
from agentgym.sandboxes.protocol import Sandbox
from tests.sandboxes.conftest import SECRET

pytestmark = pytest.mark.docker


@pytest.fixture
def engine() -> Iterator[Any]:
    """Yield a client of the engine that runs here."""
    if (why_not := why_no_docker()) is not None:
        pytest.skip(f"docker: {why_not}")
    with ExitStack() as stack:
        client = connect()
        stack.callback(client.close)
        yield client


@pytest.fixture
def proxies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Create the user's docker settings with proxies and their password."""
    settings = {"proxies": {"default": {"httpProxy": SECRET, "httpsProxy": SECRET, "noProxy": "hush"}}}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))


async def test_the_users_proxies_do_not_reach_a_sandbox(engine: Any, proxies: None) -> None:
    async with Docker().open(1) as sandboxes, sandboxes.lease() as sandbox:
        assert (await sandbox.python("import os\n[n for n in os.environ if 'proxy' in n.lower()]")).stdout == "[]\n"
        assert "hush" not in (await sandbox.exec("cat /proc/*/environ; env")).stdout


WITHOUT_SERVER = f"""
FROM {default_image()}
USER 0:0
RUN rm -rf /agentgym
LABEL {SERVER_LABEL}=""
ENTRYPOINT []
ENV MARK=kept
"""
WITHOUT_PYTHON = f"{WITHOUT_SERVER}RUN rm -f $(command -v -a python3) /usr/bin/python3* /usr/local/bin/python3*\n"
WITH_A_VOLUME = f"{WITHOUT_SERVER}RUN mkdir /kept && echo old > /kept/file && chmod -R 777 /kept\nVOLUME /kept\n"
BUSYBOX = """
FROM scratch
COPY busybox /bin/busybox
COPY busybox /bin/sh
"""


@pytest.fixture
def images(engine: Any, tmp_path: Path) -> Iterator[Callable[[str, str], str]]:
    """Yield a function that builds an image from a Dockerfile.

    The image and all images built on it are removed at the end.
    """
    made: list[str] = []

    def make(name: str, dockerfile: str) -> str:
        tag = f"agentgym-test-{name}:{secrets.token_hex(4)}"
        made.append(tag)
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        (folder / "Dockerfile").write_text(dockerfile)
        build_folder(engine, folder, tag=tag)
        return tag

    yield make
    for tag in made:
        remove_with_children(engine, tag)


def remove_with_children(engine: Any, tag: str) -> None:
    """Remove the image and the tagged images that were built on it."""
    base = engine.inspect_image(tag)["Id"]
    if (with_server := find(engine, server_tag(base))) is not None and with_server["Id"] != base:
        remove_with_children(engine, server_tag(base))
    for found in engine.images():
        names = [name for name in found["RepoTags"] or () if name.startswith(f"{IMAGE}:")]
        if names and found["Id"] != base and base in parents(engine, found["Id"]):
            engine.remove_image(found["Id"], force=True)
    engine.remove_image(tag)


def parents(engine: Any, child: str) -> Iterator[str]:
    while child := engine.inspect_image(child)["Parent"]:
        yield child


def untagged(engine: Any) -> set[str]:
    return {found["Id"] for found in engine.images(filters={"dangling": True})}


async def test_an_image_with_a_python_gets_the_server_once(engine: Any, images: Callable[[str, str], str]) -> None:
    spec = Docker(image=images("python", WITHOUT_SERVER))
    before = untagged(engine)
    ids = [ready_image(address(), spec) for _ in range(2)]
    assert ids[0] == ids[1]
    assert untagged(engine) <= before
    async with spec.open(1) as sandboxes, sandboxes.lease() as sandbox:
        assert sandbox.digest.startswith(ids[0])
        assert (await sandbox.python("import os\nos.environ['MARK'], os.getuid()")).stdout == "('kept', 65534)\n"
        assert (await sandbox.exec("python3 -c 'print(6 * 7)'; test -w /agentgym/server || echo closed")).stdout == (
            "42\nclosed\n"
        )


@pytest.mark.slow
async def test_an_image_without_python_gets_one_that_only_the_sandbox_runs(
    engine: Any, images: Callable[[str, str], str]
) -> None:
    async with Docker(image=images("debian", WITHOUT_PYTHON)).open(1) as sandboxes, sandboxes.lease() as sandbox:
        await what_every_sandbox_does(sandbox)
        assert (await sandbox.exec("command -v python3")).exit_code == 127 or not (await sandbox.exec("python3 -V")).ok


@pytest.fixture
def busybox(tmp_path: Path) -> None:
    """Put Debian's static busybox into the folder of the image's Dockerfile."""
    folder = tmp_path / "package"
    folder.mkdir()
    fetched = subprocess.run(["apt-get", "download", "busybox-static"], cwd=folder, capture_output=True, text=True)
    if fetched.returncode:
        pytest.skip(f"busybox-static: {fetched.stderr[-200:]}")
    (package,) = folder.glob("*.deb")
    subprocess.run(["dpkg-deb", "--extract", str(package), str(folder / "files")], check=True)
    (tmp_path / "busybox").mkdir()
    (folder / "files/bin/busybox").rename(tmp_path / "busybox/busybox")


@pytest.mark.slow
async def test_an_image_of_one_static_program_works_as_a_sandbox(
    engine: Any, images: Callable[[str, str], str], busybox: None
) -> None:
    async with Docker(image=images("busybox", BUSYBOX)).open(1) as sandboxes, sandboxes.lease() as sandbox:
        await what_every_sandbox_does(sandbox)
        assert (await sandbox.exec("busybox | busybox head -1")).stdout.startswith("BusyBox")


async def what_every_sandbox_does(sandbox: Sandbox) -> None:
    assert (await sandbox.python("import json, ssl, sqlite3, ctypes, hashlib\nx = 6\nx * 7")).stdout == "42\n"
    assert (await sandbox.exec("echo héllo; exit 3")).stdout == "héllo\n"
    await sandbox.write({"a/f": "text"})
    assert await sandbox.read("a/f") == b"text"
    assert (await sandbox.python("open('a/f').read() + 'é'", fresh=True)).stdout == "'texté'\n"
    async with await sandbox.fork() as branch:
        assert (await branch.python("x, open('a/f').read()")).stdout == "(6, 'text')\n"


@pytest.mark.slow
async def test_a_volume_that_an_image_declares_carries_nothing_between_sandboxes(
    engine: Any, images: Callable[[str, str], str]
) -> None:
    async with Docker(image=images("volume", WITH_A_VOLUME)).open(1) as sandboxes:
        for _ in range(2):
            async with sandboxes.lease() as sandbox:
                assert (await sandbox.exec("cat /kept/file; echo new > /kept/file; echo $MARK")).stdout == "old\nkept\n"


@pytest.mark.slow
def test_a_build_on_a_base_is_tagged_and_leaves_no_untagged_image(
    engine: Any, images: Callable[[str, str], str]
) -> None:
    before, tag = untagged(engine), f"agentgym-test-built:{secrets.token_hex(4)}"
    ids = []
    try:
        for name in ("one", "two"):
            ids.append(image.build(tag, base=images(name, f"{WITHOUT_SERVER}ENV NAME={name}\n")))
            assert engine.inspect_image(tag)["Id"] == ids[-1]
    finally:
        engine.remove_image(tag)
    assert ids[0] != ids[1]
    assert untagged(engine) <= before


def test_a_base_and_a_folder_together_are_refused() -> None:
    with pytest.raises(SandboxError, match="base, dockerfile: give only one of them"):
        image.build(base="a", dockerfile="b")
    with pytest.raises(ValueError, match="image, dockerfile: give only one of them"):
        Docker(image="a", dockerfile="b")


async def test_a_missing_image_error_names_the_pull_command(engine: Any) -> None:
    with pytest.raises(
        SandboxError, match=r"no image 'agentgym-nowhere:1'; run `docker pull agentgym-nowhere:1`, or build"
    ):
        async with Docker(image="agentgym-nowhere:1").open(1):
            pass


FOLDER = f"""
FROM {default_image()}
USER 0:0
COPY data /data
RUN echo building; cat /data
"""


def a_folder(tmp_path: Path, dockerfile: str) -> Path:
    folder = tmp_path / "folder"
    folder.mkdir(exist_ok=True)
    (folder / "data").write_text(secrets.token_hex(8))
    (folder / "Dockerfile").write_text(dockerfile)
    return folder


@pytest.fixture
def built(engine: Any) -> Iterator[list[str]]:
    """Yield a list for ids of images, which are removed with their tags at the end."""
    ids: list[str] = []
    yield ids
    for made in ids:
        engine.remove_image(made, force=True)


async def test_a_folder_is_built_once_per_content_and_logs_its_progress(
    engine: Any, tmp_path: Path, built: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    folder = a_folder(tmp_path, FOLDER)
    spec = Docker(dockerfile=str(folder))
    with caplog.at_level("INFO", logger="agentgym.sandboxes"):
        async with spec.open(1) as sandboxes, sandboxes.lease() as sandbox:
            assert (await sandbox.exec("cat /data")).stdout == (folder / "data").read_text()
        assert "building" in caplog.messages
        caplog.clear()
        built.append(ready_image(address(), spec))
        assert caplog.messages == []
    first = folder_digest(folder)
    (folder / "data").chmod(0o755)
    assert folder_digest(folder) != first


async def test_a_build_that_fails_reports_why_and_leaves_nothing(engine: Any, tmp_path: Path) -> None:
    folder = a_folder(tmp_path, FOLDER + "RUN echo the last words >&2; exit 9\n")
    before = untagged(engine)
    with pytest.raises(SandboxError, match=r"(?s)failed: .*\b9\b.*the last words"):
        async with Docker(dockerfile=str(folder)).open(1):
            pass
    assert untagged(engine) <= before


STAGES = f"""
FROM {default_image()} AS one
USER 0:0
COPY data /data
RUN echo made in one > /made
FROM {default_image()}
USER 0:0
COPY --from=one /made /made
"""


@pytest.mark.parametrize("last", ["", "RUN echo the last words >&2; exit 9\n"], ids=["built", "failed"])
def test_the_stages_of_a_build_leave_no_untagged_image(
    engine: Any, tmp_path: Path, built: list[str], last: str
) -> None:
    folder, before = a_folder(tmp_path, STAGES + last), untagged(engine)
    if last:
        with pytest.raises(SandboxError, match=r"(?s)failed: .*the last words"):
            build_folder(engine, folder, tag="agentgym-test-stages:1")
    else:
        built.append(build_folder(engine, folder, tag="agentgym-test-stages:1"))
    assert untagged(engine) <= before


class InterruptAt(logging.Handler):
    """Raises KeyboardInterrupt as soon as a build has logged something."""

    def __init__(self, words: str) -> None:
        super().__init__()
        self.words = words

    def emit(self, record: logging.LogRecord) -> None:
        if record.getMessage() == self.words:
            raise KeyboardInterrupt


@pytest.fixture
def interrupted(request: pytest.FixtureRequest) -> Iterator[None]:
    log, handler = logging.getLogger("agentgym.sandboxes"), InterruptAt(request.param)
    level = log.level
    log.setLevel("INFO")
    log.addHandler(handler)
    yield
    log.removeHandler(handler)
    log.setLevel(level)


@pytest.mark.parametrize("interrupted", ["said in the second step"], indirect=True)
def test_a_build_that_is_interrupted_leaves_nothing(engine: Any, tmp_path: Path, interrupted: None) -> None:
    dockerfile = (
        f"FROM {default_image()}\nUSER 0:0\nRUN echo {secrets.token_hex(4)}\nRUN echo said in the second step\n"
    )
    folder, before = a_folder(tmp_path, dockerfile + "RUN sleep 600\n"), untagged(engine)
    with pytest.raises(KeyboardInterrupt):
        image.build("agentgym-test-interrupted:1", dockerfile=str(folder))
    assert (untagged(engine) <= before, own_containers(engine)) == (True, [])


def test_an_image_has_its_tag_from_its_first_moment(
    engine: Any, images: Callable[[str, str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interrupt right after the engine's answer leaves no untagged image."""
    docker = pytest.importorskip("docker")
    commit = docker.APIClient.commit

    def interrupts(self: Any, *args: Any, **kwargs: Any) -> None:
        commit(self, *args, **kwargs)
        raise KeyboardInterrupt

    monkeypatch.setattr(docker.APIClient, "commit", interrupts)
    base, before = images("python", WITHOUT_SERVER), untagged(engine)
    with pytest.raises(KeyboardInterrupt):
        image.build("agentgym-test-interrupted:1", base=base)
    assert (untagged(engine) <= before, own_containers(engine)) == (True, [])
    assert find(engine, server_tag(engine.inspect_image(base)["Id"])) is not None


def test_images_of_other_versions_are_found_and_removed(engine: Any, tmp_path: Path) -> None:
    names = [f"{IMAGE}:test-{secrets.token_hex(4)}", f"agentgym-test-mine:{secrets.token_hex(4)}"]
    for name in names:
        dockerfile = f"FROM {default_image()}\nLABEL {SERVER_LABEL}=0123456789ab\nENV NAME={name}\n"
        build_folder(engine, a_folder(tmp_path, dockerfile), tag=name)
    try:
        found = [former for former in former_images(engine) if not set(names).isdisjoint(former.names)]
        assert [former.names for former in found] == [(names[0],)]
        assert found[0].size_mb > 10
        assert default_image() not in str(former_images(engine))
        remove_former(engine, found[0])
        assert find(engine, names[0]) is None
        remove_former(engine, found[0])
    finally:
        engine.remove_image(names[1])


@pytest.mark.slow
def test_an_untagged_image_that_a_failed_build_was_based_on_is_kept(
    engine: Any, tmp_path: Path, built: list[str]
) -> None:
    tag = f"agentgym-test-nameless:{secrets.token_hex(4)}"
    # The second one takes the tag of the first.
    built.extend(build_folder(engine, a_folder(tmp_path, FOLDER), tag=tag) for _ in range(2))
    base = built[0]
    with pytest.raises(SandboxError, match="failed"):
        build_folder(engine, a_folder(tmp_path, f"FROM {base}\nRUN exit 9\n"), tag=tag)
    assert find(engine, base) is not None


@pytest.mark.slow
async def test_a_build_whose_packages_fail_keeps_its_folders_image(
    engine: Any, tmp_path: Path, index: Path, built: list[str]
) -> None:
    folder = a_folder(tmp_path, FOLDER)
    before, containers = untagged(engine), own_containers(engine)
    with pytest.raises(SandboxError, match=r"(?s)pip failed .*No matching distribution found for agentgym-nowhere"):
        image.build("agentgym-test-none:1", dockerfile=str(folder), pip=["agentgym-nowhere"])
    assert find(engine, "agentgym-test-none:1") is None
    assert (untagged(engine) <= before, own_containers(engine)) == (True, containers)
    built.append(ready_image(address(), Docker(dockerfile=str(folder))))


async def test_a_folder_that_lost_its_dockerfile_is_named(engine: Any, tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").touch()
    spec = Docker(dockerfile=str(tmp_path))
    (tmp_path / "Dockerfile").unlink()
    with pytest.raises(SandboxError, match=f"'{tmp_path}' is not a folder that contains a Dockerfile"):
        async with spec.open(1):
            pass


@pytest.mark.slow
async def test_pip_uses_the_users_index_and_keeps_its_settings_out_of_the_sandbox(
    engine: Any, index: Path, built: list[str]
) -> None:
    spec = Docker(pip=(index.name,))
    before = untagged(engine)
    async with spec.open(1) as sandboxes, sandboxes.lease() as sandbox:
        assert (await sandbox.python(f"import {index.name} as p\np.word")).stdout == "'said'\n"
        assert (await sandbox.exec(f"python3 -c 'import {index.name} as p; print(p.word)'")).stdout == "said\n"
        assert (await sandbox.exec("env; cat /proc/*/environ; cat /etc/pip.conf; ls /run")).stdout.count("hush") == 0
    built.append(ready_image(address(), spec))
    assert "hush" not in json.dumps([engine.inspect_image(built[0]), engine.history(built[0])])
    assert untagged(engine) <= before


@pytest.mark.slow
async def test_the_error_for_an_unknown_package_quotes_pip(engine: Any, index: Path) -> None:
    before, containers = untagged(engine), own_containers(engine)
    with pytest.raises(SandboxError, match=r"(?s)pip failed .*No matching distribution found for agentgym-nowhere"):
        async with Docker(pip=("agentgym-nowhere",)).open(1):
            pass
    assert (untagged(engine) <= before, own_containers(engine)) == (True, containers)


CONTROL = """\
Package: {name}
Version: 1.0
Architecture: all
Maintainer: nobody <nobody@example.org>
Description: a word
"""
WITH_A_REPOSITORY = f"""
FROM {default_image()}
USER 0:0
COPY repository /repository
RUN rm -rf /etc/apt/sources.list.d/* && echo 'deb [trusted=yes] file:/repository ./' > /etc/apt/sources.list
"""


@pytest.fixture
def debian(images: Callable[[str, str], str], tmp_path: Path) -> tuple[str, str]:
    """Return an image whose only Debian mirror is a folder in it, and the name of the package there."""
    if shutil.which("dpkg-deb") is None:
        pytest.skip("dpkg-deb is not installed")
    name = f"said-{secrets.token_hex(4)}"
    files, repository = tmp_path / "files", tmp_path / "debian" / "repository"
    for folder in (files / "DEBIAN", files / "usr/bin", repository):
        folder.mkdir(parents=True)
    (files / "DEBIAN/control").write_text(CONTROL.format(name=name))
    (files / "usr/bin" / name).write_text("#!/bin/sh\necho said\n")
    (files / "usr/bin" / name).chmod(0o755)
    package = repository / f"{name}.deb"
    subprocess.run(["dpkg-deb", "--root-owner-group", "--build", files, package], check=True, capture_output=True)
    data = package.read_bytes()
    where = f"Filename: ./{package.name}\nSize: {len(data)}\nSHA256: {hashlib.sha256(data).hexdigest()}\n"
    (repository / "Packages").write_text(CONTROL.format(name=name) + where)
    return images("debian", WITH_A_REPOSITORY), name


@pytest.mark.slow
async def test_debian_packages_are_installed_once_and_leave_nothing_else_of_the_build(
    engine: Any, debian: tuple[str, str], built: list[str], proxies: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, name = debian
    monkeypatch.setenv("HTTP_PROXY", SECRET)
    before, containers = untagged(engine), own_containers(engine)
    spec = Docker(image=base, apt=(name,))
    async with spec.open(1) as sandboxes, sandboxes.lease() as sandbox:
        assert (await sandbox.exec(name)).stdout == "said\n"
        assert (await sandbox.exec("ls /var/lib/apt/lists /run; env; cat /proc/*/environ")).stdout.count("hush") == 0
        left = await sandbox.exec("find /var/lib/apt/lists /var/cache/apt -type f -size +0; ls -d /run/agentgym-build")
        assert left.stdout == ""
    built.append(ready_image(address(), spec))
    assert ready_image(address(), spec) == built[0]
    assert ready_image(address(), Docker(image=base)) != built[0]
    assert "hush" not in json.dumps([engine.inspect_image(built[0]), engine.history(built[0])])
    assert (untagged(engine) <= before, own_containers(engine)) == (True, containers)


@pytest.mark.slow
async def test_pip_and_debian_packages_are_in_one_image(
    engine: Any, debian: tuple[str, str], index: Path, built: list[str]
) -> None:
    base, name = debian
    tag = f"agentgym-test-both:{secrets.token_hex(4)}"
    built.append(image.build(tag, base=base, pip=(index.name,), apt=(name,)))
    async with Docker(image=tag).open(1) as sandboxes, sandboxes.lease() as sandbox:
        assert (await sandbox.exec(name)).stdout == "said\n"
        assert (await sandbox.python(f"import {index.name} as p\np.word")).stdout == "'said'\n"


@pytest.mark.slow
async def test_the_error_for_an_unknown_package_quotes_apt(engine: Any, debian: tuple[str, str]) -> None:
    before, containers = untagged(engine), own_containers(engine)
    with pytest.raises(SandboxError, match=r"(?s)apt-get failed .*Unable to locate package agentgym-nowhere"):
        async with Docker(image=debian[0], apt=("agentgym-nowhere",)).open(1):
            pass
    assert (untagged(engine) <= before, own_containers(engine)) == (True, containers)


@pytest.mark.slow
async def test_an_image_without_apt_raises_an_error_that_names_apt_get(
    engine: Any, images: Callable[[str, str], str]
) -> None:
    other = images("other", f"FROM {default_image()}\nUSER 0:0\nRUN rm /usr/bin/apt-get\n")
    before, containers = untagged(engine), own_containers(engine)
    with pytest.raises(SandboxError, match=r'(?s)apt-get failed .*"apt-get": executable file not found'):
        async with Docker(image=other, apt=("hello",)).open(1):
            pass
    assert (untagged(engine) <= before, own_containers(engine)) == (True, containers)


@pytest.mark.slow
async def test_a_package_comes_from_the_mirror_that_the_image_names(engine: Any, built: list[str]) -> None:
    mirror = "deb.debian.org"
    try:
        socket.create_connection((mirror, 80), timeout=10).close()
    except OSError as error:
        pytest.skip(f"{mirror} cannot be reached from here: {error}")
    spec = Docker(apt=("hello",))
    async with spec.open(1) as sandboxes, sandboxes.lease() as sandbox:
        assert (await sandbox.exec("hello")).stdout == "Hello, world!\n"
    built.append(ready_image(address(), spec))


def own_containers(engine: Any) -> list[str]:
    return [found["Id"] for found in engine.containers(all=True, filters={"label": f"agentgym.owner={owner()}"})]


@pytest.mark.slow
async def test_pip_packages_are_installed_for_the_python_that_we_add(
    engine: Any, images: Callable[[str, str], str], index: Path
) -> None:
    spec = Docker(image=images("bare", WITHOUT_PYTHON), pip=(index.name,))
    async with spec.open(1) as sandboxes, sandboxes.lease() as sandbox:
        assert (await sandbox.python(f"import {index.name} as p\np.word")).stdout == "'said'\n"


async def test_volumes_are_read_and_never_written(engine: Any, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data/f").write_text("read me")
    for folder in (tmp_path / "data", *tmp_path.parents[:3]):
        if folder != Path("/tmp"):
            folder.chmod(0o777)
    async with Docker(volumes={"/data": str(tmp_path / "data")}).open(1) as sandboxes, sandboxes.lease() as sandbox:
        assert (await sandbox.exec("cat /data/f")).stdout == "read me"
        assert not (await sandbox.exec("echo x > /data/f")).ok
        assert not (await sandbox.exec("touch /data/g")).ok
    spec = Docker(volumes={"/data": str(tmp_path / "data")})
    (tmp_path / "data").rename(tmp_path / "gone")
    with pytest.raises(SandboxError, match="data"):
        async with spec.open(1) as sandboxes, sandboxes.lease():
            pass
    assert not (tmp_path / "data").exists()


@pytest.mark.skipif(find_spec("setuptools") is None, reason="setuptools is not installed")
def test_setuptools_can_be_imported_after_the_search_for_pip() -> None:
    code = "from agentgym.sandboxes.docker.images.packages import _own_pip; print(_own_pip()); import setuptools"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, Path(done.stdout.strip()).name) == (0, "pip"), done.stderr


def test_the_minimal_debian_is_built_once_for_each_set_of_inputs(
    engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, runs = tmp_path / "debootstrap", tmp_path / "runs"
    script.write_text(f'echo "$1" >> {runs}\nmkdir -p "$2/etc"\n')
    monkeypatch.setattr(image, "DEBOOTSTRAP", ("sh", str(script)))
    made = []
    try:
        for suite in ("bookworm", "bookworm", "trixie"):
            monkeypatch.setattr(image, "SUITE", suite)
            made.append(image._debian(engine))
        assert runs.read_text().split() == ["bookworm", "trixie"]
        assert made[0] == made[1] != made[2]
    finally:
        for name in {*made}:
            engine.remove_image(name)
