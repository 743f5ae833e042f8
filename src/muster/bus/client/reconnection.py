"""Where and when a client tries to reconnect, and how long an attempt may take.

After a broker restart all clients of a fleet connect at once. Together they come back if none of their work
is wasted:

- The delay before an attempt doubles, half of it is random, and it is short again only after a connection has
  lasted for `STABLE_S`. A broker that is overloaded accepts connections and closes them soon after; clients
  that then started with short delays again would keep it overloaded.
- A broker to which the network connection succeeds, but which has not completed the handshake, has a queue.
  A client that gives up loses its place and adds work. So after failed attempts it waits longer for the
  handshake. The network connection itself keeps the short timeout: an address that does not respond is
  unreachable, not busy.
- A process with many connections starts a limited number of attempts at a time (`AttemptSlots`). Otherwise
  they would delay each other until all of them time out.
"""

from __future__ import annotations

import asyncio
import contextlib
import urllib.parse
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from muster.core import errors
from muster.core.net import hosts

BASE_S = 0.05
CAP_S = 5.0
STABLE_S = 10.0  # a connection that lasted so long ends a series of attempts
HANDSHAKE_S_MAX = 15.0
QUICK_ATTEMPTS = 2  # a frozen broker must not hold up the way to another one
ATTEMPTS_AT_ONCE = 32  # in one process
SLOT_S = 1.0  # an attempt that takes longer waits for its broker, and other attempts may begin
_PORTS = {"nats": 4222, "tls": 4222, "ws": 80, "wss": 443}


@dataclass(frozen=True, slots=True)
class ServerAddress:
    scheme: str
    host: str
    port: int
    path: str = ""
    tls_name: str = ""  # the name in its certificate, where that is not the host

    @property
    def is_websocket(self) -> bool:
        return self.scheme in ("ws", "wss")

    def demands_tls(self, tls: object) -> bool:
        """Whether a client with this TLS context talks to it over TLS only, also if the broker offers none:
        anyone on the path can remove the offer. On the loopback interface it need not."""
        return self.scheme in ("tls", "wss") or (tls is not None and not hosts.is_loopback(self.host))

    @property
    def place(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_server(server: str) -> ServerAddress:
    """``HOST``, ``HOST:PORT`` or a URL with the scheme nats, tls, ws or wss."""
    try:
        parts = urllib.parse.urlsplit(server if "://" in server else f"nats://{server}")
        port = parts.port
    except ValueError as error:
        raise errors.InvalidInput(
            f"not the URL of a broker: {_without_password(server)} ({error})"
        ) from error
    if parts.scheme not in _PORTS or not parts.hostname:
        raise errors.InvalidInput(
            f"not the URL of a broker: {_without_password(server)!r} (expected nats://HOST:PORT)"
        )
    return ServerAddress(parts.scheme, parts.hostname, port or _PORTS[parts.scheme], parts.path)


def _without_password(server: str) -> str:
    return server[server.rfind("@") + 1 :][:200]


class ServerPool:
    """The brokers that a connection knows: those it was given, and those that its brokers report."""

    def __init__(self, first: ServerAddress) -> None:
        self.current = first  # the last one that a connection was attempted to
        self._known = {(first.host, first.port, first.tls_name): first}

    def __len__(self) -> int:
        return len(self._known)

    def add(self, addresses: Iterable[ServerAddress]) -> None:
        for address in addresses:
            self._known.setdefault((address.host, address.port, address.tls_name), address)

    def discover(self, info: dict[str, Any]) -> None:
        """Add the brokers that the current one reports. The certificate of one with an IP address has that,
        or only a name: if the current one is known by a name, that is tried as well."""
        reported = info.get("connect_urls")
        for place in reported if isinstance(reported, list) else ():
            try:
                address = parse_server(f"{self.current.scheme}://{place}")
            except errors.InvalidInput:
                continue
            name = self.current.tls_name or self.current.host
            names = [""]
            if info.get("tls_required") and hosts.is_address(address.host) and not hosts.is_address(name):
                names.append(name)
            self.add(
                ServerAddress(address.scheme, address.host, address.port, self.current.path, tls_name)
                for tls_name in names
            )

    def candidates(self) -> Sequence[ServerAddress]:
        """For the next attempt: all but the last, if there are others."""
        known, here = self._known.values(), self.current.place
        return [address for address in known if address.place != here] or [self.current]


class ReconnectionPlan:
    """The attempts of one connection since it was last stable. Pure: times are those of one clock."""

    def __init__(self) -> None:
        self.attempts = 0
        self._connected_at_s: float | None = None

    def connected(self, now_s: float) -> None:
        self._connected_at_s = now_s

    def next_delay_s(self, now_s: float, random: float) -> float:
        """Count another attempt, and return the time before it. ``random``: from 0 to 1."""
        if self._connected_at_s is not None:
            if now_s - self._connected_at_s >= STABLE_S:
                self.attempts = 0
            self._connected_at_s = None
        longest_s = min(CAP_S, BASE_S * 2.0 ** min(self.attempts, 20))
        self.attempts += 1
        return longest_s * (0.5 + random / 2)

    def handshake_s(self, connect_s: float) -> float:
        """How long this attempt waits for each reply of the broker; ``connect_s``: the first ones."""
        doubled = max(0, min(self.attempts - QUICK_ATTEMPTS, 20))
        return max(connect_s, min(HANDSHAKE_S_MAX, connect_s * 2.0**doubled))


class AttemptSlots:
    """Limits the attempts to reconnect that the connections of one event loop make at a time."""

    _by_loop: ClassVar[weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, AttemptSlots]] = (
        weakref.WeakKeyDictionary()
    )

    def __init__(self, number: int) -> None:
        self._free = asyncio.Semaphore(number)

    @classmethod
    def of_loop(cls) -> AttemptSlots:
        return cls._by_loop.setdefault(asyncio.get_running_loop(), cls(ATTEMPTS_AT_ONCE))

    async def take(self) -> Callable[[], None]:
        """Wait for a free slot. Returns what releases it, which may be called several times."""
        await self._free.acquire()
        release = contextlib.ExitStack()
        release.callback(self._free.release)
        timer = asyncio.get_running_loop().call_later(SLOT_S, release.close)
        release.callback(timer.cancel)
        return release.close
