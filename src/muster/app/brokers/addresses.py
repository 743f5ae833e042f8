"""The names and addresses of the domain's own brokers, as other machines use them."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from urllib import parse

from muster.core.net import hosts, interfaces
from muster.core.settings import bus as settings


def certified(bus: settings.BusSettings) -> list[str]:
    """All names and addresses of the brokers, for their certificate. Blocks."""
    return list(dict.fromkeys([*reachable(bus), "localhost", "127.0.0.1", "::1"]))


def reachable(bus: settings.BusSettings) -> list[str]:
    """The names and addresses under which other machines may reach the brokers. Blocks."""
    own = [bus.host]
    if bus.host in hosts.EVERYWHERE:
        own = [socket.gethostname(), *interfaces.addresses()]
    return list(dict.fromkeys([*bus.names, *own]))


def reachable_urls(bus: settings.BusSettings, urls: Sequence[str]) -> tuple[str, ...]:
    """The URLs of brokers, or of a locator, for other machines. ``urls`` are for this machine. Blocks."""
    if bus.servers or (hosts.is_loopback(bus.host) and not bus.names):
        return tuple(urls)
    names = reachable(bus)
    parts = [parse.urlsplit(url) for url in urls]
    return tuple(f"{url.scheme}://{bracketed(name)}:{url.port}" for name in names for url in parts)


def bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
