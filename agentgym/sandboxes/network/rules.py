"""The network rules of a sandbox: allowed hosts and ports, and addresses that no name may resolve to."""

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
"""All IPv6 addresses that are allocated. Mapped IPv4, gateways to IPv4, and site-local addresses lie outside."""
_NOT_PUBLIC = tuple(
    map(
        ipaddress.ip_network,
        (
            *("168.63.129.16/32", "192.0.0.0/24"),  # Clouds serve their own machines at these addresses.
            "192.88.99.0/24",  # The nearest gateway between IPv4 and IPv6.
            *("2001::/23", "2002::/16"),  # Teredo and 6to4, which carry IPv4 addresses, and other special ones.
            *("3ffe::/16", "3fff::/20"),
        ),
    )
)
"""Addresses that are not hosts on the internet, but that Python may consider public."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of an `Allow` list: a name, `*.` and a name, or an address, with the ports that may be reached."""

    host: str
    ports: tuple[int, ...]
    tunnels: tuple[int, ...]
    """The ports to which a tunnel may lead.

    By default, 80 is not one of them, because a tunnel to it could request any host at that address.
    """

    def covers(self, host: str, port: int, *, tunnel: bool = False) -> bool:
        """Return whether the entry covers this host and port.

        `*.a.org` covers all names below a.org, but not a.org itself.
        """
        if port not in (self.tunnels if tunnel else self.ports):
            return False
        return host.endswith(self.host[1:]) if self.host.startswith("*.") else host == self.host


@dataclass(frozen=True, init=False)
class Allow:
    """The only hosts that code in a sandbox may reach, such as `Allow("pypi.org")`.

    Requests go through a proxy that logs them. https and other tunnels lead to port 443, or to the port given for the
    host. A name that resolves to a private, local or metadata address is refused, unless that address is listed, too.

    Args:
        *hosts: The hosts, each a name, `*.` and a name for all names below it, or an address. `:port` after a host
            replaces the default ports 80 and 443.
        mb: Maximum number of MB that one episode sends and receives in total.
        requests: Maximum number of requests in one episode.

    Raises:
        ValueError: If a host, `mb` or `requests` is invalid.
    """

    hosts: tuple[str, ...]
    mb: int
    requests: int

    def __init__(self, *hosts: str, mb: int = 1024, requests: int = 10_000) -> None:
        for text in hosts:
            if not isinstance(text, str):
                raise ValueError(f"hosts: {text!r} is not a string; give each host by itself: Allow('a.org', 'b.org')")
        for name, value in (("mb", mb), ("requests", requests)):
            if type(value) is not int or value < 1:
                raise ValueError(f"{name}: must be a whole number of at least 1, got {value!r}")
        object.__setattr__(self, "hosts", hosts)
        object.__setattr__(self, "mb", mb)
        object.__setattr__(self, "requests", requests)
        self.entries()

    def entries(self) -> tuple[Entry, ...]:
        """Return the parsed hosts.

        Raises:
            ValueError: If one is not a host.
        """
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
        raise ValueError(
            f"hosts: expected a host name, '*.' and a name, or an address, got {text!r}: {error}"
        ) from error
    if wildcard and parse_address(known) is not None:
        raise ValueError(f"hosts: {text!r} is not a host: '*.' must be followed by a name, not an address")
    return Entry(wildcard + known, ports, tunnels)


def parse_authority(text: str, default_port: int | None = None) -> tuple[str, int]:
    """Return the host and port in `host:port`, with an IPv6 address in brackets.

    Raises:
        ValueError: If the text has another form.
    """
    host, colon, port = _split(text)
    if not colon and default_port is None:
        raise ValueError("the port is missing")
    return parse_host(host), parse_port(port) if colon else default_port or 0


def _split(text: str) -> tuple[str, str, str]:
    if not text.startswith("["):
        host, colon, port = text.partition(":")
        return host, colon, port
    host, end, port = text[1:].partition("]")
    if not end or (port and not port.startswith(":")) or ":" not in host:
        raise ValueError("the brackets do not contain an IPv6 address")
    return host, port[:1], port[1:]


def parse_port(text: str) -> int:
    """Return a port that is written in plain digits.

    Raises:
        ValueError: If the text has another form.
    """
    if not _PORT.fullmatch(text) or int(text) > 65535:
        raise ValueError(f"{text!r} is not a port")
    return int(text)


def parse_host(text: str) -> str:
    """Return a host in its canonical form: lower case, no final dot, an address in its usual notation.

    Raises:
        ValueError: If the text is not a host, or is an address in an unusual notation, such as hexadecimal, which a
            resolver could take for another host.
    """
    address = parse_address(text)
    if address is not None:
        return str(address)
    name = text.lower().removesuffix(".")
    labels = name.split(".")
    if len(name) > MAX_HOST or not all(map(_LABEL.fullmatch, labels)):
        raise ValueError(f"{text[:80]!r} is not a host name")
    if re.fullmatch(r"[0-9]+|0x[0-9a-f]*", labels[-1], re.ASCII):
        raise ValueError(f"{text[:80]!r} is an address in an unusual form")
    return name


def parse_address(text: str) -> Address | None:
    """Return the parsed address, or None if the text is not an address or is an IPv6 address with a zone."""
    try:
        return None if "%" in text else ipaddress.ip_address(text)
    except ValueError:
        return None


def is_public(address: Address) -> bool:
    """Return whether this is an internet address: not private, local, shared, multicast, reserved or a cloud's own.

    An IPv6 address that carries an IPv4 address is not public either, because the gateway decides where it leads.
    """
    if isinstance(address, ipaddress.IPv6Address) and address not in _GLOBAL_IPV6:
        return False
    if any(address in network for network in _NOT_PUBLIC):
        return False
    return address.is_global and not (address.is_multicast or address.is_reserved or address.is_unspecified)


class Rule:
    """Checks the proxy's requests against an `Allow` list."""

    def __init__(self, allow: Allow) -> None:
        self.allow = allow
        self.entries = allow.entries()

    def lists(self, host: str, port: int, *, tunnel: bool = False) -> bool:
        """Return whether the list covers this host and port."""
        return any(entry.covers(host, port, tunnel=tunnel) for entry in self.entries)

    def why_not(self, host: str, port: int, *, tunnel: bool) -> str | None:
        """Return why a request may not go to this host and port, or None if it may."""
        if self.lists(host, port, tunnel=tunnel):
            return None
        if tunnel and self.lists(host, port):
            return f"no tunnel to {host}:{port}: request the full URL (http://{host}/), or list '{host}:{port}'"
        return f"{host}:{port} is not allowed; allowed: {self.allow}"

    def may_connect(self, address: Address, port: int) -> bool:
        """Return whether a listed host may be reached at this address, given that the host's name resolves to it."""
        return is_public(address) or self.lists(str(address), port)
