"""Sandboxes on an engine that accepts only TLS, and only clients with a certificate."""

import shutil
import socket
import ssl
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from agentgym.errors import SandboxError
from agentgym.sandboxes.docker.client import connect
from agentgym.sandboxes.docker.docker import Docker
from tests.sandboxes.engines import started

pytestmark = [pytest.mark.slow, pytest.mark.docker]


@dataclass
class Secured:
    """An engine, and two folders with client certificates: one that the engine knows and one that it doesn't."""

    host: str
    known: Path
    stranger: Path


def run(*command: str, where: Path) -> None:
    subprocess.run(command, cwd=where, check=True, capture_output=True)


def authority(folder: Path) -> Path:
    """Create a certificate authority."""
    folder.mkdir()
    made = ["-subj", "/CN=agentgym test authority", "-keyout", "ca-key.pem", "-out", "ca.pem"]
    run("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *made, where=folder)
    return folder


def certificate(folder: Path, name: str, usage: str) -> None:
    """Create `<name>-key.pem` and `<name>.pem`, signed by the folder's authority and valid for 127.0.0.1."""
    request = ["-subj", f"/CN={name}", "-keyout", f"{name}-key.pem", "-out", f"{name}.csr"]
    run("openssl", "req", "-newkey", "rsa:2048", "-nodes", *request, where=folder)
    (folder / f"{name}.ext").write_text(f"subjectAltName=IP:127.0.0.1\nextendedKeyUsage={usage}\n")
    signed = ["-CA", "ca.pem", "-CAkey", "ca-key.pem", "-CAcreateserial", "-days", "2", "-extfile", f"{name}.ext"]
    run("openssl", "x509", "-req", "-in", f"{name}.csr", *signed, "-out", f"{name}.pem", where=folder)


def client_folder(folder: Path, signer: Path, authority: Path) -> Path:
    """Create a folder for DOCKER_CERT_PATH, with ca.pem, cert.pem and key.pem."""
    folder.mkdir()
    for source, name in (
        (signer / "client.pem", "cert.pem"),
        (signer / "client-key.pem", "key.pem"),
        (authority / "ca.pem", "ca.pem"),
    ):
        shutil.copy(source, folder / name)
    return folder


@pytest.fixture(scope="module")
def secured() -> Iterator[Secured]:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    with tempfile.TemporaryDirectory(prefix="tls-") as name, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        host = f"tcp://127.0.0.1:{free.getsockname()[1]}"
        free.close()
        ours, other = authority(Path(name, "ca")), authority(Path(name, "other"))
        certificate(ours, "server", "serverAuth")
        for signer in (ours, other):
            certificate(signer, "client", "clientAuth")
        flags = [f"--host={host}", "--tlsverify", f"--tlscacert={ours}/ca.pem"]
        with started(*flags, f"--tlscert={ours}/server.pem", f"--tlskey={ours}/server-key.pem"):
            yield Secured(
                host, client_folder(Path(name, "known"), ours, ours), client_folder(Path(name, "stranger"), other, ours)
            )


@pytest.mark.filterwarnings("ignore:Unverified HTTPS request")
@pytest.mark.parametrize("verify", ["1", ""])
async def test_a_sandbox_works_over_tls(secured: Secured, verify: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", secured.host)
    monkeypatch.setenv("DOCKER_TLS_VERIFY", verify)
    monkeypatch.setenv("DOCKER_CERT_PATH", str(secured.known))
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", ssl.get_default_verify_paths().openssl_cafile)
    async with Docker().open(1) as sandboxes:
        async with sandboxes.lease() as sandbox:
            assert (await sandbox.python("x = 'a'\nprint(x * 100_000)")).truncated
            await sandbox.write({"f": bytes(range(256)) * 4096})
            assert await sandbox.read("f", limit=1 << 20) == bytes(range(256)) * 4096
            assert (await sandbox.python("f()", functions={"f": lambda: 3})).stdout == "3\n"
        async with sandboxes.lease() as sandbox:
            assert await sandbox.list() == []
    client = connect()
    try:
        assert client.containers(all=True) == []
    finally:
        client.close()


async def test_a_client_with_an_unknown_certificate_is_refused(
    secured: Secured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_HOST", secured.host)
    monkeypatch.setenv("DOCKER_TLS_VERIFY", "1")
    monkeypatch.setenv("DOCKER_CERT_PATH", str(secured.stranger))
    with pytest.raises(SandboxError, match="the Docker engine"):
        async with Docker().open(1):
            pass
