"""A Docker engine's client, which raises SandboxError and closes its socket if the engine is gone."""

import functools
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, cast
from urllib.parse import urlsplit

from agentgym.errors import SandboxError
from agentgym.errors.extras import install_line
from agentgym.sandboxes.docker.attach import TCP_PORT
from agentgym.sandboxes.faults import exhausted, is_exhausted

if TYPE_CHECKING:
    import docker
    from docker.types import Ulimit
    from requests.adapters import BaseAdapter

FORWARD = "for an engine behind ssh: `ssh -NL 2375:/var/run/docker.sock HOST`, then DOCKER_HOST=tcp://127.0.0.1:2375"
PROBE_S = 10.0
P = ParamSpec("P")
T = TypeVar("T")


class EngineDown(SandboxError):
    """The Docker engine doesn't answer, but may answer again later."""


class EngineFailed(SandboxError):
    """The Docker engine reported an internal error, or a sandbox ended before it sent its first message."""


class NoDockerPackage(SandboxError):
    """The docker package is not installed here, so it is unknown whether a Docker engine runs."""


def address() -> str:
    """Return the Docker engine's address: DOCKER_HOST if that is set, else the local engine's socket."""
    return os.environ.get("DOCKER_HOST") or "unix:///var/run/docker.sock"


def connect(timeout_s: int = 60, host: str | None = None) -> "docker.APIClient":
    """Open a client of a Docker engine, local or over TCP.

    Args:
        timeout_s: Timeout of each request in seconds.
        host: The engine's address; None uses DOCKER_HOST, or else the local engine.

    Raises:
        EngineDown: If no engine answers.
        NoDockerPackage: If the docker package is not installed.
        SandboxError: If the address has an unsupported scheme, or this process can open no more files.
    """
    host = host or address()
    _probe(host)
    return _client_class()(timeout=timeout_s, **_client_settings(host))


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTraits:
    """How an engine differs from a plain Docker engine."""

    is_podman: bool
    """Whether the engine is podman's service, which implements the Docker engine's API."""
    maps_users: bool
    """Whether the engine maps the user ids of its containers to a few ids of its machine.

    This is so in rootless mode and with userns-remap.
    """
    memory_mb: int
    """Memory of the engine's machine in MB; 0 if the engine doesn't report it."""


def engine_traits(client: "docker.APIClient") -> EngineTraits:
    """Query how an engine differs from a plain Docker engine."""
    components = client.version().get("Components") or ()
    info = client.info()
    options = info.get("SecurityOptions") or ()
    return EngineTraits(
        is_podman=any("podman" in str(component.get("Name")).lower() for component in components),
        maps_users=not {"name=rootless", "name=userns"}.isdisjoint(options),
        memory_mb=int(info.get("MemTotal") or 0) >> 20,
    )


def podman_ulimits() -> "list[Ulimit]":
    """Return limits on open files and processes that podman can set.

    Podman's defaults may exceed the machine's limits.
    """
    from docker.types import Ulimit

    return [Ulimit(name="nofile", soft=1024, hard=1024), Ulimit(name="nproc", soft=4096, hard=4096)]


@contextmanager
def engine_errors() -> Iterator[None]:
    """Translate errors of the Docker engine that are raised inside the `with` statement into SandboxErrors.

    Raises:
        SandboxError: If the engine refuses a request, or this process can open no more files.
        EngineDown: If the engine does not answer.
        EngineFailed: If the engine reports an internal error.
    """
    _need_package()
    from docker.errors import APIError, DockerException
    from requests.exceptions import RequestException

    try:
        yield
    except APIError as error:
        kind = EngineFailed if error.status_code is not None and error.status_code >= 500 else SandboxError
        # Only the engine's explanation: the full text begins with a URL that contains all parameters.
        raise kind(f"the Docker engine: {error.explanation or error.status_code}") from error
    except (DockerException, RequestException) as error:
        if is_exhausted(error):
            raise SandboxError(f"the Docker engine: {exhausted()}") from error
        raise EngineDown(f"the Docker engine: {error}") from error


def translated(operation: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a function, with the engine's errors translated by `engine_errors`."""
    with engine_errors():
        return operation(*args, **kwargs)


def _need_package() -> None:
    try:
        import docker  # noqa: F401
    except ImportError as error:
        raise NoDockerPackage(f"the docker package is missing: {install_line('docker')}") from error


def _probe(host: str) -> None:
    """Connect once to check that the engine answers, before the docker package is imported.

    Raises:
        EngineDown: If the engine does not answer; the message names the engine.
        SandboxError: If the address has an unsupported scheme, or this process can open no more files.
    """
    url = urlsplit(host)
    try:
        if url.scheme == "unix":
            with socket.socket(socket.AF_UNIX) as probe:
                probe.settimeout(PROBE_S)
                probe.connect(url.path)
        elif url.scheme in ("tcp", "http", "https"):
            socket.create_connection((url.hostname or "", url.port or TCP_PORT), PROBE_S).close()
        else:
            raise SandboxError(f"the Docker engine at {host}: only unix:// and tcp:// are supported; {FORWARD}")
    except OSError as error:
        if is_exhausted(error):
            raise SandboxError(f"the Docker engine at {host}: {exhausted()}") from error
        raise EngineDown(f"no Docker engine answers at {host}: {error.strerror or error}") from error


def _client_settings(host: str) -> dict[str, Any]:
    from docker.utils import kwargs_from_env

    return {**kwargs_from_env({**os.environ, "DOCKER_HOST": host})}


@functools.cache
def _client_class() -> "type[docker.APIClient]":
    """Return the docker package's client class with two bugs fixed."""
    _need_package()
    from docker import APIClient
    from docker.transport import UnixHTTPAdapter

    class Client(APIClient):
        def merge_environment_settings(self, url: Any, proxies: Any, stream: Any, verify: Any, cert: Any) -> Any:
            """Set `verify`, because REQUESTS_CA_BUNDLE would otherwise replace the CA in DOCKER_CERT_PATH."""
            verify = self.verify if verify is None else verify
            return super().merge_environment_settings(url, proxies, stream, verify, cert)

        def mount(self, prefix: "str | bytes", adapter: "BaseAdapter") -> None:
            """Mount an adapter, but replace the library's adapter for unix sockets with ours.

            The library mounts its adapter before its first request.
            """
            if isinstance(adapter, UnixHTTPAdapter):
                adapter = self._custom_adapter = _closing_adapter(adapter)
            super().mount(prefix, adapter)

    return Client


def _closing_adapter(theirs: Any) -> Any:
    """Return a version of the library's unix socket adapter that closes the socket if connecting fails."""
    from docker.transport.unixconn import UnixHTTPAdapter, UnixHTTPConnection, UnixHTTPConnectionPool

    class Connection(UnixHTTPConnection):
        def connect(self) -> None:
            """Connect, and close the socket on failure.

            If the engine is gone, the library leaves the socket to the garbage collector.
            """
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                connection.settimeout(self.timeout)
                connection.connect(self.unix_socket)
            except BaseException:
                connection.close()
                raise
            self.sock = connection

    class Connections(UnixHTTPConnectionPool):
        def _new_conn(self) -> Any:
            return Connection(self.base_url, self.socket_path, cast("int", self.timeout))

    class Adapter(UnixHTTPAdapter):
        def get_connection(self, url: Any, proxies: Any = None) -> Any:
            with self.pools.lock:
                if (pool := self.pools.get(url)) is None:
                    pool = Connections(url, self.socket_path, self.timeout, maxsize=self.max_pool_size)
                    self.pools[url] = pool
            return pool

    return Adapter(theirs.socket_path, theirs.timeout, max_pool_size=theirs.max_pool_size)
