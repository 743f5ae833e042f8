"""Which broker is best for a client: the locator's judgement. Pure.

After section 4.1 of the JMS paper, in this order:

1. A broker that is leaving, or that the client cannot reach (it listens on another machine's loopback), is no
candidate at all. 2. One that is *crowded* (few free connection slots, or little computing power left) comes
after all others, full ones last: better a far broker than one that will turn the client away. 3. *Distance*,
by the addresses: same machine, same network, same site, elsewhere. 4. One that is *new* and still emptier
than the rest comes first, so that it is made use of at once. 5. *Headroom*: the computing power that is idle,
times the share of connection slots that are free.  Clients that were sent to a broker since it was last asked
count as connected, or a crowd that comes at once would all be sent the same way.

What is not known of a broker counts as middling: neither for nor against it.
"""

from __future__ import annotations

import enum
import ipaddress
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from muster.core import errors

IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address

CROWDED_SLOTS = 0.95  # of its connections taken
CROWDED_LOAD = 0.9  # of its computing power used
NEW_S = 60.0
MESSAGES_PER_S_PER_CORE = (
    200_000.0  # what we take for a core's full load, where messages say more than the CPU
)
NETWORK_PREFIX = {4: 24, 6: 64}
SITE_PREFIX = {4: 16, 6: 48}


class BrokerProtocol(enum.Enum):
    NATS = "nats"
    WEBSOCKET = "websocket"
    MQTT = "mqtt"


SCHEMES = {
    BrokerProtocol.NATS: ("nats", "tls"),
    BrokerProtocol.WEBSOCKET: ("ws", "wss"),
    BrokerProtocol.MQTT: ("mqtt", "mqtts"),
}


class BrokerDistance(enum.IntEnum):
    MACHINE = 0
    NETWORK = 1
    SITE = 2
    ELSEWHERE = 3


_WORDS = {
    BrokerDistance.MACHINE: "same machine",
    BrokerDistance.NETWORK: "same network",
    BrokerDistance.SITE: "same site",
    BrokerDistance.ELSEWHERE: "elsewhere",
}


class BrokerHost(NamedTuple):
    name: str  # as clients are told: what a certificate vouches for
    address: str  # where that leads
    port: int = 0  # 0: the broker's own


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerCandidate:
    """A broker as the locator knows it. None means: not known."""

    id: str
    name: str
    hosts: tuple[BrokerHost, ...]  # where it answered
    port: int
    tls: bool = False
    websocket_port: int | None = None
    mqtt_port: int | None = None
    beside_locator: bool = False  # on the locator's own machine
    everywhere: bool = False  # listens on all addresses of its machine
    leaving: bool = False
    connections: int | None = None
    connections_max: int | None = None
    cores: int | None = None
    cpu_share: float | None = None  # of all cores
    messages_per_s: float | None = None
    uptime_s: float | None = None
    round_trip_s: float | None = None


@dataclass(frozen=True, slots=True)
class BrokerChoice:
    candidate: BrokerCandidate
    host: str
    port: int
    reached: tuple[str, int]  # where it answers NATS clients
    scheme: str
    distance: BrokerDistance
    why: str

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}"


def parse_address(text: str) -> IPAddress:
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        raise errors.InvalidInput(
            f"{text!r} is not an address", hint="name the client by an IPv4 or IPv6 address"
        ) from None
    return getattr(address, "ipv4_mapped", None) or address


def rank(
    candidates: Iterable[BrokerCandidate],
    client: IPAddress,
    *,
    protocol: BrokerProtocol = BrokerProtocol.NATS,
    sent: Mapping[str, int] | None = None,
) -> list[BrokerChoice]:
    """The candidates that this client can use, best first. ``sent``: clients sent to each since it was
    asked."""
    usable: list[tuple[BrokerCandidate, BrokerHost, int, BrokerDistance]] = []
    for one in candidates:
        nearest = _nearest(one, client)
        if nearest is None or one.leaving:
            continue
        distance, host = nearest
        port = {
            BrokerProtocol.NATS: host.port or one.port,
            BrokerProtocol.WEBSOCKET: one.websocket_port,
            BrokerProtocol.MQTT: one.mqtt_port,
        }[protocol]
        if port:
            usable.append((one, host, port, distance))
    taken = {one.id: _slots_taken(one, (sent or {}).get(one.id, 0)) for one, _, _, _ in usable}
    mean = sum(taken.values()) / len(taken) if taken else 0.0

    def key(entry: tuple[BrokerCandidate, BrokerHost, int, BrokerDistance]) -> tuple[object, ...]:
        one, _, _, distance = entry
        full = taken[one.id] >= 1.0
        crowded = taken[one.id] >= CROWDED_SLOTS or load(one) >= CROWDED_LOAD
        new = one.uptime_s is not None and one.uptime_s < NEW_S and taken[one.id] < mean
        return full, crowded, distance, not new, -headroom(one, taken[one.id]), one.name, one.id

    secure, plain = 1, 0
    return [
        BrokerChoice(
            one,
            host.name,
            port,
            (host.address, host.port or one.port),
            SCHEMES[protocol][secure if one.tls else plain],
            distance,
            _why(one, distance, taken[one.id]),
        )
        for one, host, port, distance in sorted(usable, key=key)
    ]


def load(one: BrokerCandidate) -> float:
    """How much of its computing power is used, from 0 to 1."""
    by_cpu = one.cpu_share if one.cpu_share is not None else 0.5
    by_messages = (one.messages_per_s or 0.0) / (MESSAGES_PER_S_PER_CORE * (one.cores or 1))
    return min(1.0, max(by_cpu, by_messages))


def headroom(one: BrokerCandidate, slots_taken: float) -> float:
    """Idle cores, times the share of slots that are free."""
    return (one.cores or 1) * (1.0 - load(one)) * (1.0 - min(1.0, slots_taken))


def _slots_taken(one: BrokerCandidate, sent: int) -> float:
    if one.connections is None or not one.connections_max:
        return 0.5
    return (one.connections + sent) / one.connections_max


def _nearest(one: BrokerCandidate, client: IPAddress) -> tuple[BrokerDistance, BrokerHost] | None:
    """Of equally near ones a name rather than an address: certificates are for names."""
    reached = [(_distance(one, parse_address(host.address), client), host) for host in one.hosts]
    usable = [(distance, host) for distance, host in reached if distance is not None]
    return min(usable, key=lambda found: (found[0], _is_address(found[1].name), found[1]), default=None)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _distance(one: BrokerCandidate, host: IPAddress, client: IPAddress) -> BrokerDistance | None:
    """None if the client cannot reach it there."""
    if host.is_loopback:
        # A client on the locator's machine asks from there; anybody else cannot mean our loopback.
        return BrokerDistance.MACHINE if client.is_loopback else None
    if host == client or (client.is_loopback and one.beside_locator):
        return BrokerDistance.MACHINE
    for distance, prefixes in ((BrokerDistance.NETWORK, NETWORK_PREFIX), (BrokerDistance.SITE, SITE_PREFIX)):
        if host.version == client.version and _same(host, client, prefixes[host.version]):
            return distance
    return BrokerDistance.ELSEWHERE


def _same(a: IPAddress, b: IPAddress, prefix: int) -> bool:
    shift = a.max_prefixlen - prefix
    return int(a) >> shift == int(b) >> shift


def _why(one: BrokerCandidate, distance: BrokerDistance, slots_taken: float) -> str:
    words = [_WORDS[distance]]
    if one.connections is not None and one.connections_max:
        free = max(0, one.connections_max - one.connections)
        words.append(f"{free} of {one.connections_max} connections free")
    if slots_taken >= CROWDED_SLOTS or load(one) >= CROWDED_LOAD:
        words.append("crowded")
    if one.cores is not None:
        words.append(f"load {load(one):.0%} of {one.cores} cores")
    if one.uptime_s is not None and one.uptime_s < NEW_S:
        words.append("new")
    if one.round_trip_s is not None:
        words.append(f"answered in {one.round_trip_s * 1000:.1f} ms")
    return "; ".join(words)


def summary(choices: Sequence[BrokerChoice]) -> list[dict[str, object]]:
    """As the locator tells it to a client."""
    return [
        {
            "name": one.candidate.name,
            "host": one.host,
            "port": one.port,
            "protocol": one.scheme,
            "url": one.url,
            "why": one.why,
        }
        for one in choices
    ]
