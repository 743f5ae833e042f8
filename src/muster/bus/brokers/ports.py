"""Ports that are held for a broker: bound, and not listened on (see `broker`); and addresses of links."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterable
from urllib.parse import urlsplit

from muster.bus.brokers import config, diagnosis, topology

LOOK_UP_S = 3.0  # for resolving a host name

Held = dict[str, socket.socket]  # by listener


def reserve(settings: config.BrokerConfig, held: Held) -> config.BrokerConfig:
    """Bind every listener that is not in ``held`` yet, and add it; return the settings with the assigned
    ports."""
    for listener, host, port in tuple(config.ports(settings)):
        if listener in held and port not in (0, held[listener].getsockname()[1]):
            held.pop(listener).close()  # the settings name another now
        if listener not in held:
            try:
                held[listener] = _bound(host, port)
            except OSError as error:
                raise diagnosis.unbindable(settings.name, config.authority(host, port), error) from error
        settings = config.with_port(settings, listener, held[listener].getsockname()[1])
    return settings


def _bound(host: str, port: int) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    made = socket.socket(family, kind, protocol)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
    except OSError:
        made.close()
        raise
    return made


def release(held: Held) -> None:
    for reserved in held.values():
        reserved.close()
    held.clear()


async def resolve(urls: Iterable[str]) -> set[topology.Address]:
    """The IP addresses of these URLs. A name that cannot be resolved in time has none."""
    addresses: set[topology.Address] = set()
    for url in urls:
        parts = urlsplit(url)
        with contextlib.suppress(OSError, UnicodeError):  # the latter: it cannot be a name
            async with asyncio.timeout(LOOK_UP_S):
                results = await asyncio.get_running_loop().getaddrinfo(
                    parts.hostname, parts.port or 7422, type=socket.SOCK_STREAM
                )
            addresses |= {(str(address[0]), int(address[1])) for _, _, _, _, address in results}
    return addresses
