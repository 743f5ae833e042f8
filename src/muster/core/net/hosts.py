"""Hosts, ports and URLs as settings name them."""

from __future__ import annotations

import ipaddress
import re
from typing import Annotated
from urllib import parse

import msgspec

from muster.core import errors

EVERYWHERE = ("0.0.0.0", "::")  # a server with such a host listens on all addresses
NAME_LENGTH_MAX = 200  # for a client without an IP address
Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]

_LOOPBACK = re.compile(r"(localhost|127(\.\d{1,3}){3}|::1|\[::1\])\Z")
_HOST = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,252}")


def is_loopback(host: str) -> bool:
    return bool(_LOOPBACK.match(host))


def is_address(host: str) -> bool:
    """Whether it is an IP address, and no name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def host_of_url(url: str, field: str) -> tuple[str, int | None]:
    """The host and the port that a URL names; `errors.InvalidInput` if it names none."""
    try:
        parts = parse.urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise errors.InvalidInput(f"{field}: {url[:200]!r} is no URL: {error}") from error
    if not host:
        raise errors.InvalidInput(f"{field}: {url[:200]!r} names no host")
    return host, port


def check_host(host: str, field: str) -> None:
    """`errors.InvalidInput` unless ``host`` alone is a name or an address, as in a URL before its port."""
    try:
        ipaddress.IPv6Address(host)
    except ValueError:
        if not _HOST.fullmatch(host):
            raise errors.InvalidInput(
                f"{field}: {host[:100]!r} is neither an address nor a host name",
                hint="name the host only, without a port",
            ) from None
    if "%" in host:
        raise errors.InvalidInput(f"{field}: {host[:100]!r} is valid on one machine only")


def without_password(url: str, field: str, instead: str) -> None:
    """Refuse a URL that holds a password: it would be printed, logged and saved in the clear."""
    try:
        password = parse.urlsplit(url).password
    except ValueError as error:
        raise errors.InvalidInput(f"{field}: not a URL: {error}") from error
    if password is not None:
        raise errors.InvalidInput(f"{field}: a URL must not hold a password; {instead}")


def network(address: str) -> str:
    """The address of a client; for IPv6 its network, because a client may use all addresses of it."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address[:NAME_LENGTH_MAX]
    if isinstance(parsed, ipaddress.IPv6Address):
        if parsed.ipv4_mapped is not None:
            return str(parsed.ipv4_mapped)
        return str(ipaddress.ip_network((parsed, 64), strict=False))
    return str(parsed)


def forwarded_for(peer: str, header: str) -> str:
    """The client's address, where a proxy states it in ``header`` (the value of the configured one).

    A proxy appends the address of its client, so only the last entry is reliable; earlier entries are claims
    of the client.
    """
    last = header.rpartition(",")[2].strip().strip('"')
    if last.startswith("["):
        last = last[1:].partition("]")[0]
    elif last.count(":") == 1:
        last = last.partition(":")[0]
    try:
        return str(ipaddress.ip_address(last))
    except ValueError:
        return peer
