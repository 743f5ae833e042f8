"""Ranks the brokers for a client. Pure.

After section 4.1 of the JMS paper, in this order:

1. A broker that is shutting down, or that the client cannot reach (it listens on the loopback of another
   machine), is not a candidate.
2. A *crowded* broker (few free connection slots, or little idle CPU) comes after all others, full ones
   last: a distant broker is better than one that rejects the client.
3. *Distance*, by address: same machine, same network, same site, elsewhere.
4. A *new* broker with fewer connections than the others comes first, so that it is used at once.
5. *Headroom*: the idle CPU times the share of free connection slots.  Clients that were sent to a broker
   since its last survey count as connected; otherwise many clients at once would all be sent to the same
   broker.

Unknown properties of a broker count as the average of the other brokers: one that did not reply to a survey
in time is not avoided until the next.
"""

from __future__ import annotations

import dataclasses
import enum
import ipaddress
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from muster.core import errors
from muster.core.net import hosts

IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address

CROWDED_SLOTS = 0.95  # of its connections in use
CROWDED_LOAD = 0.9  # of its CPU in use
NEW_S = 60.0
MESSAGES_PER_S_PER_CORE = (
    200_000.0  # assumed full load of a core, where the message rate is more significant than the CPU usage
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
    name: str  # the name for clients, which the certificate contains
    address: str  # its IP address
    port: int = 0  # 0: the broker's own


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerCandidate:
    """The known properties of a broker. None: unknown."""

    id: str
    name: str
    hosts: tuple[BrokerHost, ...]  # where it responded
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
    reached: tuple[str, int]  # where it serves NATS clients
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
    """The candidates that this client can use, best first. ``sent``: clients sent to each since its last
    survey."""
    usable: list[tuple[BrokerCandidate, BrokerHost, int, BrokerDistance]] = []
    for candidate in candidates:
        nearest = _nearest(candidate, client)
        if nearest is None or candidate.leaving:
            continue
        distance, host = nearest
        port = {
            BrokerProtocol.NATS: host.port or candidate.port,
            BrokerProtocol.WEBSOCKET: candidate.websocket_port,
            BrokerProtocol.MQTT: candidate.mqtt_port,
        }[protocol]
        if port:
            usable.append((candidate, host, port, distance))
    assumed = _assumed([candidate for candidate, _, _, _ in usable])
    taken = {id: _slots_taken(candidate, (sent or {}).get(id, 0)) for id, candidate in assumed.items()}
    mean = statistics.fmean(taken.values()) if taken else 0.0

    def key(entry: tuple[BrokerCandidate, BrokerHost, int, BrokerDistance]) -> tuple[object, ...]:
        candidate, _, _, distance = entry
        is_known = candidate.connections is not None and candidate.connections_max is not None
        full = is_known and taken[candidate.id] >= 1.0
        crowded = (is_known and taken[candidate.id] >= CROWDED_SLOTS) or load(candidate) >= CROWDED_LOAD
        new = candidate.uptime_s is not None and candidate.uptime_s < NEW_S and taken[candidate.id] < mean
        return (
            full,
            crowded,
            distance,
            not new,
            -headroom(assumed[candidate.id], taken[candidate.id]),
            (sent or {}).get(candidate.id, 0),
            candidate.name,
            candidate.id,
        )

    secure, plain = 1, 0
    return [
        BrokerChoice(
            candidate,
            host.name,
            port,
            (host.address, host.port or candidate.port),
            SCHEMES[protocol][secure if candidate.tls else plain],
            distance,
            _why(candidate, distance, taken[candidate.id]),
        )
        for candidate, host, port, distance in sorted(usable, key=key)
    ]


def _assumed(candidates: Sequence[BrokerCandidate]) -> dict[str, BrokerCandidate]:
    """The candidates by id, with the mean of the others for each property that is unknown."""
    means: dict[str, Any] = {}
    for name in ("connections", "connections_max", "cores", "cpu_share"):
        known = [value for candidate in candidates if (value := getattr(candidate, name)) is not None]
        if known:
            means[name] = statistics.fmean(known)  # exact, so the order of brokers does not matter
    return {
        candidate.id: dataclasses.replace(
            candidate, **{name: mean for name, mean in means.items() if getattr(candidate, name) is None}
        )
        for candidate in candidates
    }


def load(candidate: BrokerCandidate) -> float:
    """The used part of its CPU, from 0 to 1."""
    by_cpu = candidate.cpu_share if candidate.cpu_share is not None else 0.5
    by_messages = (candidate.messages_per_s or 0.0) / (MESSAGES_PER_S_PER_CORE * (candidate.cores or 1))
    return min(1.0, max(by_cpu, by_messages))


def headroom(candidate: BrokerCandidate, slots_taken: float) -> float:
    """Idle cores, times the share of slots that are free."""
    return (candidate.cores or 1) * (1.0 - load(candidate)) * (1.0 - min(1.0, slots_taken))


def _slots_taken(candidate: BrokerCandidate, sent: int) -> float:
    if candidate.connections is None or not candidate.connections_max:
        return 0.5
    return (candidate.connections + sent) / candidate.connections_max


def _nearest(candidate: BrokerCandidate, client: IPAddress) -> tuple[BrokerDistance, BrokerHost] | None:
    """At the same distance a name is preferred to an address: certificates are for names."""
    reached = [(_distance(candidate, parse_address(host.address), client), host) for host in candidate.hosts]
    usable = [(distance, host) for distance, host in reached if distance is not None]
    return min(usable, key=lambda entry: (entry[0], hosts.is_address(entry[1].name), entry[1]), default=None)


def _distance(candidate: BrokerCandidate, host: IPAddress, client: IPAddress) -> BrokerDistance | None:
    """None if the client cannot reach it there."""
    if host.is_loopback:
        # Only a client on the locator's machine can use a loopback address.
        return BrokerDistance.MACHINE if client.is_loopback else None
    if host == client or (client.is_loopback and candidate.beside_locator):
        return BrokerDistance.MACHINE
    for distance, prefixes in ((BrokerDistance.NETWORK, NETWORK_PREFIX), (BrokerDistance.SITE, SITE_PREFIX)):
        if host.version == client.version and _same(host, client, prefixes[host.version]):
            return distance
    return BrokerDistance.ELSEWHERE


def _same(a: IPAddress, b: IPAddress, prefix: int) -> bool:
    shift = a.max_prefixlen - prefix
    return int(a) >> shift == int(b) >> shift


def _why(candidate: BrokerCandidate, distance: BrokerDistance, slots_taken: float) -> str:
    words = [_WORDS[distance]]
    if candidate.connections is not None and candidate.connections_max:
        free = max(0, candidate.connections_max - candidate.connections)
        words.append(f"{free} of {candidate.connections_max} connections free")
    if slots_taken >= CROWDED_SLOTS or load(candidate) >= CROWDED_LOAD:
        words.append("crowded")
    if candidate.cores is not None:
        words.append(f"load {load(candidate):.0%} of {candidate.cores} cores")
    if candidate.uptime_s is not None and candidate.uptime_s < NEW_S:
        words.append("new")
    if candidate.round_trip_s is not None:
        words.append(f"response time {candidate.round_trip_s * 1000:.1f} ms")
    return "; ".join(words)


def summary(choices: Sequence[BrokerChoice]) -> list[dict[str, object]]:
    """The response of the locator."""
    return [
        {
            "name": choice.candidate.name,
            "host": choice.host,
            "port": choice.port,
            "protocol": choice.scheme,
            "url": choice.url,
            "why": choice.why,
        }
        for choice in choices
    ]
