"""The rule of what code in a sandbox may reach: a list of hosts and ports, and the addresses that no name may lead
to."""

import ipaddress
import re
from dataclasses import dataclass
from typing import TypeAlias

Address: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address

TLS_PORT = 443
WEB_PORTS = (80, TLS_PORT)
MAX_HOST = 253
_LABEL = re.compile(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?", re.ASCII)
_PORT = re.compile(r"[1-9][0-9]{0,4}", re.ASCII)
_GLOBAL_IPV6 = ipaddress.IPv6Network("2000::/3")
"""All that is given out of IPv6. Outside are mapped IPv4 addresses, gateways to IPv4, and site-local addresses."""
_NOT_PUBLIC = tuple(
    map(
        ipaddress.ip_network,
        (
            *("168.63.129.16/32", "192.0.0.0/24"),  # Clouds answer their own machines there.
            "192.88.99.0/24",  # The nearest gateway between IPv4 and IPv6.
            *("2001::/23", "2002::/16"),  # Teredo and 6to4, which carry IPv4 addresses, and other special ones.
            *("3ffe::/16", "3fff::/20"),
        ),
    )
)
"""Addresses that are no host's of the internet, and which Python may take for public ones."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One host of the list: a name, `*.` and a name, or an address; and the ports that may be reached there."""

    host: str
    ports: tuple[int, ...]
    tunnels: tuple[int, ...]
    """Those of the ports to which a tunnel may lead: not 80, where a tunnel could ask for any host of that address."""

    def covers(self, host: str, port: int, *, tunnel: bool = False) -> bool:
        """Whether the entry names this host and port; `*.a.org` names all below a.org, and not a.org itself."""
        if port not in (self.tunnels if tunnel else self.ports):
            return False
        return host.endswith(self.host[1:]) if self.host.startswith("*.") else host == self.host


@dataclass(frozen=True, init=False)
class Allow:
    """The hosts that code in a sandbox may reach through the logging proxy, and nothing else: `Allow("pypi.org")`.

    A host is a name, `*.` and a name for all names below it, or an address; `:port` behind it takes the place of the
    ports 80 and 443. https and other tunnels lead to 443, or to the port given there. A name that leads to a private,
    local or metadata address is refused, unless that address is listed too. `mb` bounds what one episode sends and
    receives together, and `requests` how many requests it makes.
    """

    hosts: tuple[str, ...]
    mb: int
    requests: int

    def __init__(self, *hosts: str, mb: int = 1024, requests: int = 10_000) -> None:
        for text in hosts:
            if not isinstance(text, str):
                raise ValueError(f"hosts: {text!r} is no text; give each host by itself: Allow('a.org', 'b.org')")
        for name, value in (("mb", mb), ("requests", requests)):
            if type(value) is not int or value < 1:
                raise ValueError(f"{name}: must be a whole number of at least 1, got {value!r}")
        object.__setattr__(self, "hosts", hosts)
        object.__setattr__(self, "mb", mb)
        object.__setattr__(self, "requests", requests)
        self.entries()

    def entries(self) -> tuple[Entry, ...]:
        """Return the hosts as entries; ValueError for one that is no host."""
        return tuple(map(_entry, self.hosts))

    def __str__(self) -> str:
        return ", ".join(self.hosts) or "no host"


def _entry(text: str) -> Entry:
    wildcard, rest = ("*.", text[2:]) if text.startswith("*.") else ("", text)
    try:
        host, colon, port = (rest, "", "") if parse_address(rest) is not None else _split(rest)
        known = parse_host(host if host.isascii() else host.encode("idna").decode())
        ports = (parse_port(port),) if colon else WEB_PORTS
        tunnels = ports if colon else (TLS_PORT,)
    except ValueError as error:
        raise ValueError(f"hosts: {text!r} is no host, '*.' and a name, or an address: {error}") from error
    if wildcard and parse_address(known) is not None:
        raise ValueError(f"hosts: {text!r} is no host: '*.' stands before a name, not an address")
    return Entry(wildcard + known, ports, tunnels)


def parse_authority(text: str, default_port: int | None = None) -> tuple[str, int]:
    """Return the host and the port in `host:port`, an IPv6 address in brackets; ValueError for anything else."""
    host, colon, port = _split(text)
    if not colon and default_port is None:
        raise ValueError("no port")
    return parse_host(host), parse_port(port) if colon else default_port or 0


def _split(text: str) -> tuple[str, str, str]:
    if not text.startswith("["):
        host, colon, port = text.partition(":")
        return host, colon, port
    host, end, port = text[1:].partition("]")
    if not end or (port and not port.startswith(":")) or ":" not in host:
        raise ValueError("brackets that do not hold an IPv6 address")
    return host, port[:1], port[1:]


def parse_port(text: str) -> int:
    """Return a port in plain digits; ValueError for anything else."""
    if not _PORT.fullmatch(text) or int(text) > 65535:
        raise ValueError(f"{text!r} is no port")
    return int(text)


def parse_host(text: str) -> str:
    """Return a host in the one form that is compared: lower case, no last dot, an address as it is usually written.

    ValueError for what is no name, such as an address in hexadecimal: a resolver could take it for another host.
    """
    address = parse_address(text)
    if address is not None:
        return str(address)
    name = text.lower().removesuffix(".")
    labels = name.split(".")
    if len(name) > MAX_HOST or not all(map(_LABEL.fullmatch, labels)):
        raise ValueError(f"{text[:80]!r} is no host name")
    if re.fullmatch(r"[0-9]+|0x[0-9a-f]*", labels[-1], re.ASCII):
        raise ValueError(f"{text[:80]!r} is an address in an unusual form")
    return name


def parse_address(text: str) -> Address | None:
    """Return the address that the text is; None where it is none. An IPv6 address with a zone is none."""
    try:
        return None if "%" in text else ipaddress.ip_address(text)
    except ValueError:
        return None


def is_public(address: Address) -> bool:
    """Whether an address is one of the internet: not private, local, shared, multicast, reserved or a cloud's own.

    An IPv6 address that carries an IPv4 address is none: what it leads to is up to the gateway.
    """
    if isinstance(address, ipaddress.IPv6Address) and address not in _GLOBAL_IPV6:
        return False
    if any(address in network for network in _NOT_PUBLIC):
        return False
    return address.is_global and not (address.is_multicast or address.is_reserved or address.is_unspecified)


class Rule:
    """The list of an `Allow`, as the proxy asks it."""

    def __init__(self, allow: Allow) -> None:
        self.allow = allow
        self.entries = allow.entries()

    def lists(self, host: str, port: int, *, tunnel: bool = False) -> bool:
        """Whether the list names this host and port."""
        return any(entry.covers(host, port, tunnel=tunnel) for entry in self.entries)

    def why_not(self, host: str, port: int, *, tunnel: bool) -> str | None:
        """Return why a request may not go there; None where it may."""
        if self.lists(host, port, tunnel=tunnel):
            return None
        if tunnel and self.lists(host, port):
            return f"no tunnel to {host}:{port}: ask with a whole address (http://{host}/), or list '{host}:{port}'"
        return f"{host}:{port} is not allowed; allowed: {self.allow}"

    def may_connect(self, address: Address, port: int) -> bool:
        """Whether a listed host may be reached at this address of its own."""
        return is_public(address) or self.lists(str(address), port)
