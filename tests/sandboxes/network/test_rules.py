"""The hosts that an allow-list permits, and the addresses that no name may resolve to."""

import ipaddress
import math
from typing import Any

import pytest

from agentgym.sandboxes.choose import AnySandbox
from agentgym.sandboxes.docker.docker import Docker
from agentgym.sandboxes.docker.settings import DockerSettings
from agentgym.sandboxes.local.local import Bubblewrap, Process
from agentgym.sandboxes.network.rules import Allow, Rule, is_public, parse_authority, parse_host
from agentgym.sandboxes.network.services import Service

BAD: tuple[Any, ...] = (0, -1, "512", True, None, math.nan, math.inf)
BAD_VOLUMES: tuple[Any, ...] = (
    *({"/data": "/no/such/folder"}, {"/data": "usr"}, {"data": "/usr"}, {"/data/../tmp": "/usr"}, {"/data": 1}),
    *({"//tmp": "/usr"}, {"/tmp/x": "/usr"}, {"/": "/usr"}, {"/run": "/usr"}, ["/usr"], {"/data": "/usr\0"}),
)
SERVICE = Service(image="x")


@pytest.mark.parametrize(
    ("listed", "host", "port", "allowed"),
    [
        ("pypi.org", "pypi.org", 443, True),
        ("pypi.org", "pypi.org", 80, True),
        ("pypi.org", "pypi.org", 22, False),
        ("pypi.org", "evil.pypi.org", 443, False),
        ("pypi.org", "pypi.org.evil.com", 443, False),
        ("PyPI.org", "pypi.org", 443, True),
        ("pypi.org:8443", "pypi.org", 8443, True),
        ("pypi.org:8443", "pypi.org", 443, False),
        ("*.debian.org", "deb.debian.org", 80, True),
        ("*.debian.org", "a.b.debian.org", 80, True),
        ("*.debian.org", "debian.org", 80, False),
        ("*.debian.org", "evildebian.org", 80, False),
        ("*.debian.org:81", "a.debian.org", 81, True),
        ("10.0.0.5:5432", "10.0.0.5", 5432, True),
        ("10.0.0.5:5432", "10.0.0.6", 5432, False),
        ("[fd00::5]:81", "fd00::5", 81, True),
        ("fd00:0:0::5", "fd00::5", 443, True),
        ("bücher.example", "xn--bcher-kva.example", 443, True),
    ],
)
def test_an_allow_list_names_hosts_and_ports(listed: str, host: str, port: int, allowed: bool) -> None:
    assert Rule(Allow(listed)).lists(host, port) is allowed


@pytest.mark.parametrize(
    ("listed", "port", "allowed"),
    [("a.org", 443, True), ("a.org", 80, False), ("a.org:80", 80, True), ("*.org:81", 81, True), ("*.org", 80, False)],
)
def test_an_allow_list_names_the_ports_of_tunnels(listed: str, port: int, allowed: bool) -> None:
    assert Rule(Allow(listed)).lists("a.org", port, tunnel=True) is allowed


@pytest.mark.parametrize(
    "listed", ["", "*", "*.", "a b", "http://a.org", "a.org/", "a..org", "a.org:", "a.org:0", "*.10.0.0.1", "0x7f.1"]
)
def test_invalid_hosts_are_refused_when_the_list_is_created(listed: str) -> None:
    with pytest.raises(ValueError, match="hosts: "):
        Allow(listed)


@pytest.mark.parametrize(
    "text",
    [
        *("2130706433", "127.1", "0x7f000001", "0x7f.0.0.1", "127.0.0.0x1", "017700000001", "a.0x", "1.2.3.4.5"),
        *(
            "",
            ".",
            "a..b",
            "-a.org",
            "a_\u0661.org",
            "a\0.org",
            "a@b.org",
            "a%00.org",
            "a b",
            "fe80::1%lo",
            "\u24d0.org",
        ),
    ],
)
def test_a_host_in_a_form_that_resolvers_read_differently_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"host name|unusual form"):
        parse_host(text)


@pytest.mark.parametrize(
    "text",
    ["a.org", "a.org:", "a.org:+1", "a.org:1_0", "a.org:99999", "a.org:80:80", "[a.org]:80", "[::1]80", "::1:80"],
)
def test_an_authority_is_one_host_and_one_port(text: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        parse_authority(text)


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1", "127.255.0.1", "0.0.0.0", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254"),
        *("100.64.0.1", "100.100.100.200", "192.0.0.192", "198.18.0.1", "224.0.0.1", "240.0.0.1", "255.255.255.255"),
        *("168.63.129.16", "203.0.113.9", "::", "::1", "fe80::1", "fd00:ec2::254", "fc00::1", "ff02::1"),
        *("::ffff:127.0.0.1", "::ffff:169.254.169.254", "64:ff9b::a9fe:a9fe", "2002:7f00:1::", "2001:0:1::1"),
        *("fec0::1", "64:ff9b::101:101", "64:ff9b:1::1", "::ffff:1.1.1.1", "2002:101:101::1", "::101:101", "4000::1"),
        *("100.64.0.1", "100.100.100.200", "198.18.0.1", "192.88.99.1", "240.0.0.1", "255.255.255.255"),
    ],
)
def test_an_address_that_is_not_on_the_internet_is_reached_only_if_listed(address: str) -> None:
    assert not is_public(ipaddress.ip_address(address))
    assert not Rule(Allow("example.org")).may_connect(ipaddress.ip_address(address), 443)
    assert Rule(Allow("example.org", address)).may_connect(ipaddress.ip_address(address), 443)


@pytest.mark.parametrize("address", ["1.1.1.1", "2606:4700::1111", "2a00:1450:4001::1"])
def test_internet_addresses_may_be_reached(address: str) -> None:
    assert is_public(ipaddress.ip_address(address))


def test_limits_of_an_allow_list_must_be_positive() -> None:
    with pytest.raises(ValueError, match="mb: must be"):
        Allow("a.org", mb=0)
    with pytest.raises(ValueError, match="requests: must be"):
        Allow("a.org", requests=0)
    with pytest.raises(ValueError, match="mb: must be"):
        Allow("a.org", mb=math.nan)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="hosts: "):
        Allow(["a.org"])  # type: ignore[arg-type]


def test_allow_lists_are_compared_by_their_content() -> None:
    assert Allow("a.org") == Allow("a.org")
    assert hash(Allow("a.org")) == hash(Allow("a.org"))
    assert Allow("a.org") != Allow("a.org", mb=1)
    assert str(Allow("a.org", "b.org:81")) == "a.org, b.org:81"


SETTINGS: list[tuple[type, dict[str, Any], str]] = [
    *((kind, {name: bad}, name) for kind in (Docker, Bubblewrap) for name in ("memory_mb", "pids") for bad in BAD),
    *(
        (Service, {"image": "x", name: bad}, name)
        for name in ("memory_mb", "disk_mb", "cpus", "ready_s")
        for bad in BAD
    ),
    *((kind, {"pip": bad}, "pip") for kind in (Docker, Bubblewrap, AnySandbox) for bad in ("numpy", None, [1], [""])),
    *((kind, {"volumes": bad}, "volumes") for kind in (Docker, Bubblewrap, AnySandbox) for bad in BAD_VOLUMES),
    *((Docker, {"network": bad}, "network") for bad in ("", "host", "container:x", None, ["a.org"])),
    *((Docker, {"network": "loopback", "services": bad}, "services") for bad in (["x"], {"db": "x"}, {"A": SERVICE})),
    *((Docker, {name: ""}, name) for name in ("image", "dockerfile", "runtime")),
    (Docker, {"cpus": math.nan}, "cpus"),
    *((Bubblewrap, {"python": bad}, "python") for bad in ("", "/nope", "python3", 3)),
    (AnySandbox, {"kind": "dokcer"}, "kind"),
    (AnySandbox, {"memory_mb": 0}, "memory_mb"),
    (Process, {"unsafe": True, "memory_mb": 0}, "memory_mb"),
    *(
        (Service, {"image": "x", "ready": bad}, "ready")
        for bad in (0, 65536, True, "http://a:0/", "http://a:x/", "a b")
    ),
    *((Service, {"image": "x", name: "sh"}, name) for name in ("command", "entrypoint", "writable")),
    *((Service, {"image": "x", "env": bad}, "env") for bad in ({"A=": "b"}, {"A": 1}, {"": "b"}, {"A": "\0"}, "A=b")),
    *((Service, {"image": "x", "writable": [bad]}, "writable") for bad in ("tmp", "/", "/a/../b", "/a:ro")),
]


@pytest.mark.parametrize(("made", "settings", "field"), SETTINGS)
def test_invalid_settings_raise_value_errors_that_name_the_field(
    made: type, settings: dict[str, Any], field: str
) -> None:
    with pytest.raises(ValueError, match=rf"^{field}(\.0)?: "):
        made(**settings)


def test_volumes_of_a_remote_engine_are_not_checked_on_this_machine() -> None:
    assert Docker(hosts=("tcp://10.0.0.5:2376",), volumes={"/data": "/nowhere"}).volumes == {"/data": "/nowhere"}


def test_settings_that_cannot_work_are_refused_at_creation() -> None:
    with pytest.raises(ValueError, match="network: 'bridge'"):
        Bubblewrap(network="bridge")
    with pytest.raises(ValueError, match="services: the sandbox reaches them over its loopback"):
        DockerSettings(services={"db": Service(image="x")})
    with pytest.raises(ValueError, match="services: 'localhost'"):
        DockerSettings(network="loopback", services={"localhost": Service(image="x")})
    with pytest.raises(ValueError, match="runtime: 'runsc'"):
        DockerSettings(network=Allow("a.org"), runtime="runsc")
    with pytest.raises(ValueError, match="ready: 'db:80'"):
        Service(image="x", ready="db:80")
