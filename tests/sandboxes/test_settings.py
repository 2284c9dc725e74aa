"""Settings of sandboxes and pools: invalid ones are refused by name before anything starts."""

import math
from collections.abc import Callable
from typing import Any

import pytest

import agentgym as ag
from agentgym.errors import SandboxError
from agentgym.sandboxes.docker.client import engine_errors
from agentgym.sandboxes.docker.images import build as image
from agentgym.sandboxes.docker.images.folder import declared_arguments, without_values
from agentgym.sandboxes.docker.settings import named_refusals


def shop(name: str = "shop", ready: str | None = None) -> ag.Docker:
    return ag.Docker(network="loopback", services={name: ag.Service(image="x", ready=ready)})


KINDS: list[Callable[..., Any]] = [ag.Docker, ag.Bubblewrap, ag.AnySandbox]
NUMBERS = ["memory_mb", "disk_mb", "pids"]


@pytest.mark.parametrize("size", [0, -1, 1.5, math.nan, "3", True, None])
@pytest.mark.parametrize("spec", [ag.Docker(), ag.Bubblewrap(), ag.AnySandbox(), ag.Process(unsafe=True)], ids=repr)
def test_an_invalid_pool_size_is_refused_before_anything_is_opened(spec: Any, size: Any) -> None:
    with pytest.raises(ValueError, match=f"size: must be a whole number of sandboxes, at least 1, got {size!r}"):
        spec.open(size)


@pytest.mark.parametrize("value", [0, -1, 1.5, math.nan, "512", True])
@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("kind", KINDS)
def test_limits_of_sandboxes_must_be_positive_whole_numbers(kind: Callable[..., Any], name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{name}: must be .*, got "):
        kind(**{name: value})


@pytest.mark.parametrize(
    "wrong",
    [
        {"pip": 3},
        {"pip": (3,)},
        {"pip": "numpy"},
        {"pip": ("",)},
        {"network": 3},
        {"network": None},
        {"volumes": ["/a"]},
        {"volumes": {"/a": 3}},
        {"volumes": {3: "/a"}},
    ],
    ids=repr,
)
@pytest.mark.parametrize("kind", KINDS)
def test_a_setting_of_another_type_is_refused_by_name(kind: Callable[..., Any], wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"^{next(iter(wrong))}"):
        kind(**wrong)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: ag.AnySandbox(kind="podman"), "kind: must be 'auto', 'docker', 'bubblewrap' or 'unsafe'"),  # type: ignore[arg-type]
        (lambda: ag.Bubblewrap(python=3), "python: must be"),  # type: ignore[arg-type]
        (lambda: ag.Docker(cpus=math.nan), "cpus: must be a finite number"),
        (lambda: ag.Docker(cpus=0), "cpus: must be above 0"),
        (lambda: ag.Docker(image=3), "image: must be"),  # type: ignore[arg-type]
        (lambda: ag.Docker(apt=(3,)), "apt.0: must be"),  # type: ignore[arg-type]
        (lambda: ag.Docker(hosts=(3,)), "hosts.0: must be"),  # type: ignore[arg-type]
        (lambda: ag.Docker(services={"a": 3}, network="loopback"), "services: 'a' must be"),  # type: ignore[dict-item]
        (lambda: ag.Process(unsafe="no"), "unsafe: must be"),  # type: ignore[arg-type]
        (lambda: ag.Process(unsafe=True, memory_mb=-1), "memory_mb: must be at least 1"),
        (lambda: ag.Service(image="x", memory_mb=-1), "memory_mb: must be at least 1"),
        (lambda: ag.Service(image="x", cpus=math.nan), "cpus: must be a finite number"),
        (lambda: ag.Service(image="x", ready=99999), "ready: must be at most 65535"),
        (lambda: ag.Service(image="x", ready_s=math.inf), "ready_s: must be a finite number"),
        (lambda: ag.Service(image="x", command="./serve"), "command: "),
        (lambda: ag.Service(image="x", env={"a": 3}), "env: 'a' must be"),  # type: ignore[dict-item]
        (lambda: ag.Docker(dockerfile="nofolder"), "dockerfile: 'nofolder' is not a folder that contains a Dockerfile"),
        (lambda: ag.Docker(hosts=("ssh://a",)), "hosts.0: 'ssh://a': only unix:// and tcp:// are supported"),
        (lambda: ag.Docker(memory_mb=1), "memory_mb: must be at least 32"),
        (lambda: ag.Bubblewrap(memory_mb=1), "memory_mb: must be at least 32"),
        (
            lambda: shop(ready="http://shpo:8000/"),
            r"services\['shop'\].ready: 'shpo' is not a service; the services are 'shop'",
        ),
        (lambda: shop(name="localhost"), "services: 'localhost' is the name of the sandbox itself"),
        (lambda: ag.Allow(3), "hosts: 3 is not a string"),  # type: ignore[arg-type]
        (lambda: ag.Allow("a.org", mb=math.nan), "mb: must be a whole number"),  # type: ignore[arg-type]
        (lambda: ag.Allow("a.org", requests=0), "requests: must be a whole number"),
    ],
)
def test_each_kind_of_setting_is_checked(make: Callable[[], object], name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name}"):
        make()


OPTIONS: dict[str, Callable[[], object]] = {
    "pip.0": lambda: ag.Docker(pip=("-r/etc/shadow",)),
    "pip.1": lambda: ag.Bubblewrap(pip=("numpy", "--index-url=http://x/")),
    "pip.0 of AnySandbox": lambda: ag.AnySandbox(pip=[" -e/x"]),  # type: ignore[arg-type]
    "apt.0": lambda: ag.Docker(apt=("-oAPT::Update::Pre-Invoke::=id",)),
    "image": lambda: ag.Docker(image="--privileged"),
    "network": lambda: ag.Docker(network="--host"),
    "runtime": lambda: ag.Docker(runtime="-runc"),
    "image of a service": lambda: ag.Service(image="-v/:/host"),
    "user": lambda: ag.Service(image="x", user="-u0"),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_a_name_that_a_command_would_parse_as_an_option_is_refused_by_its_field(name: str) -> None:
    with pytest.raises(
        ValueError, match=f"^{name.partition(' ')[0]}: must not start with '-', which would make it an option"
    ):
        OPTIONS[name]()


@pytest.mark.parametrize("field", ["tag", "base", "pip", "apt"])
def test_an_image_build_refuses_options_as_names(field: str) -> None:
    value: Any = ("-x",) if field in ("pip", "apt") else "-x"
    with pytest.raises(SandboxError, match=f"^{field}: '-x' begins with '-'"):
        image.build(**{field: value})


REFUSALS = {
    "cpus": (ag.Docker(cpus=64), "range of CPUs is from 0.01 to 2.00, as there are only 2 CPUs available"),
    "runtime": (ag.Docker(runtime="runcs"), "unknown or invalid runtime name: runcs"),
    "network": (ag.Docker(network="looback"), "network looback not found"),
    "memory_mb": (ag.Docker(), "Minimum memory limit allowed is 6MB"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_refusal_of_the_engine_names_the_setting(name: str) -> None:
    spec, said = REFUSALS[name]
    with (
        pytest.raises(SandboxError, match=f"^{name}: .* was refused: the Docker engine: {said}"),
        named_refusals(spec),
    ):
        raise SandboxError(f"the Docker engine: {said}")


def test_an_engine_refusal_has_its_own_text_without_the_request_url() -> None:
    errors, requests = pytest.importorskip("docker.errors"), pytest.importorskip("requests")
    response = requests.Response()
    response.status_code, response.url = 400, "http+docker://localhost/build?buildargs=me%3ASECRET%40example.org"
    with pytest.raises(SandboxError) as caught, engine_errors():
        raise errors.APIError("400 Client Error", response=response, explanation="unknown instruction: FORM")
    assert str(caught.value) == "the Docker engine: unknown instruction: FORM"


def test_an_engine_is_sent_only_declared_build_arguments() -> None:
    declared = declared_arguments("FROM x\nARG A=1 PIP_INDEX_URL\n# ARG B\narg C\nARG D \\\n  E\nRUN ARG F\n")
    assert declared == {"A", "PIP_INDEX_URL", "C", "D", "E"}


def test_build_output_is_logged_without_passwords() -> None:
    given = {"PIP_EXTRA_INDEX_URL": "https://me:SECRET@a.org/x https://b.org", "HTTP_PROXY": "http://u:OTHER@p:1"}
    said = "cannot reach https://me:SECRET@a.org/x by http://u:OTHER@p:1 (me%3ASECRET%40a.org)"
    assert without_values(said, given) == "cannot reach https://***@a.org/x by http://***@p:1 (***@a.org)"
