"""Links between brokers as data: which exist, which are up, and which are not permitted. Pure.

A leaf link is maintained by one broker, its near end, to another broker or a cluster, its far end. It can be
added and removed while both run. Routes and gateways follow from the membership of a cluster or
super-cluster: NATS announces every member to all others and connects each to each, so that a single one
cannot be added or removed.

Leaf links must not form a ring: the messages of a broker would return to it. NATS detects that, but only by
closing links, and not only the newest, for half a minute. So a link that would close a ring is rejected here
in advance. Several members of one cluster may each have a link to the same far end; that is not a ring, but
redundancy.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from muster.bus.brokers import config, control
from muster.core import errors

GLOBAL_ACCOUNT = "$G"


class LinkKind(enum.StrEnum):
    LEAF = "leaf"
    ROUTE = "route"
    GATEWAY = "gateway"


Address = tuple[str, int]


def leaf_links(
    near: str,
    remotes: Sequence[config.LeafRemote],
    addresses: Mapping[str, Iterable[Address]],
    leafz: Mapping[str, Any],
) -> list[control.LinkRow]:
    """The leaf links of one broker, from its monitor page. ``addresses`` are those of each link's far end.

    A far end that is a cluster may have redirected the connection to a member that is not configured: a
    connection that matches no link by address belongs to the first link of its account without a connection.
    """
    connections = [leaf for leaf in leafz.get("leafs") or () if leaf.get("is_spoke")]
    connected: dict[str, Mapping[str, Any]] = {}
    for remote in remotes:
        for leaf in connections:
            if _account(remote) == leaf.get("account") and (leaf["ip"], leaf["port"]) in addresses[remote.id]:
                connected[remote.id] = leaf
                connections.remove(leaf)
                break
    for remote in remotes:
        for leaf in connections:
            if remote.id not in connected and _account(remote) == leaf.get("account"):
                connected[remote.id] = leaf
                connections.remove(leaf)
                break
    return [
        _row(remote.id, LinkKind.LEAF, near, remote.far or remote.urls[0], connected.get(remote.id))
        for remote in remotes
    ]


def route_links(near: str, routez: Mapping[str, Any]) -> list[control.LinkRow]:
    """One for each peer; NATS spreads the load over several connections to it."""
    peers: dict[str, dict[str, Any]] = {}
    for route in routez.get("routes") or ():
        peer = peers.setdefault(route.get("remote_name") or route["remote_id"], {"rtt": route.get("rtt", "")})
        for count in ("in_msgs", "out_msgs"):
            peer[count] = peer.get(count, 0) + route.get(count, 0)
    return [_row(route_id(near, far), LinkKind.ROUTE, near, far, peer) for far, peer in sorted(peers.items())]


def gateway_links(near: str, gatewayz: Mapping[str, Any]) -> list[control.LinkRow]:
    return [
        _row(gateway_id(near, far), LinkKind.GATEWAY, near, far, outbound.get("connection") or None)
        for far, outbound in sorted((gatewayz.get("outbound_gateways") or {}).items())
    ]


def due(brokers: Sequence[config.BrokerConfig]) -> list[control.LinkRow]:
    """All links that there should be among these, each as if it were down."""
    rows = [
        _row(remote.id, LinkKind.LEAF, broker.name, remote.far or remote.urls[0], None)
        for broker in brokers
        for remote in broker.remotes
    ]
    for broker, other in itertools.combinations(brokers, 2):
        if broker.cluster and other.cluster and broker.cluster.name == other.cluster.name:
            id = route_id(broker.name, other.name)
            rows.append(_row(id, LinkKind.ROUTE, broker.name, other.name, None))
    clusters = sorted({broker.gateway.name for broker in brokers if broker.gateway})
    rows += [
        _row(gateway_id(broker.name, far), LinkKind.GATEWAY, broker.name, far, None)
        for broker in brokers
        for far in clusters
        if broker.gateway and broker.gateway.name != far
    ]
    return rows


def gateway_id(near: str, far: str) -> str:
    return f"gateway:{near}>{far}"


def route_id(a: str, b: str) -> str:
    return "route:" + "=".join(sorted((a, b)))


def leaf_id(near: str, far: str) -> str:
    return f"{near}>{far}"


def _account(remote: config.LeafRemote) -> str:
    return remote.account or GLOBAL_ACCOUNT


def _row(
    id: str, kind: LinkKind, near: str, far: str, connection: Mapping[str, Any] | None
) -> control.LinkRow:
    if connection is None:
        return control.LinkRow(id=id, kind=kind, near=near, far=far, up=False)
    round_trip_s = seconds(connection.get("rtt", ""))
    return control.LinkRow(
        id=id,
        kind=kind,
        near=near,
        far=str(connection.get("name") or far) if kind is LinkKind.LEAF else far,
        up=True,
        round_trip_ms=None if round_trip_s is None else round(round_trip_s * 1000, 3),
        in_messages=connection.get("in_msgs", 0),
        out_messages=connection.get("out_msgs", 0),
    )


_UNITS_S = {
    "y": 365 * 86400.0,
    "d": 86400.0,
    "h": 3600.0,
    "m": 60.0,
    "s": 1.0,
    "ms": 1e-3,
    "µs": 1e-6,
    "us": 1e-6,
    "ns": 1e-9,
}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(y|d|h|ms|m|s|µs|us|ns)")


def seconds(duration: str) -> float | None:
    """The engine's way to write a duration: ``1m2.5s``, ``467µs``, ``1y2d0h0m7s``."""
    parts = _DURATION.findall(duration)
    return sum(float(number) * _UNITS_S[unit] for number, unit in parts) if parts else None


def check_new(
    near: str,
    far: str,
    account: str | None,
    sites: Mapping[str, str],
    leaves: Iterable[tuple[str, str, str | None]],
) -> None:
    """Refuse a leaf link that the engine would refuse, or cut.

    ``sites`` maps each broker to its super-cluster, its cluster, or itself. ``leaves`` are the near end, far
    end and account of the existing leaf links.
    """
    if sites[near] == sites[far]:
        raise errors.Refused(
            f"brokers {near} and {far} are joined already, as members of {sites[near]}",
            hint="routes and gateways are fixed by the engine: every member is joined to every other; "
            "leaf links join brokers that are not",
        )
    neighbours: dict[str, set[str]] = {}
    for a, b, used_by in leaves:
        if used_by == account:
            if (a, b) == (near, far):
                raise errors.AlreadyExists(f"brokers {near} and {far} are linked already")
            if (sites[a], sites[b]) == (sites[near], sites[far]) and a != near:
                return  # the same link, from another member of the same cluster
            neighbours.setdefault(sites[a], set()).add(sites[b])
            neighbours.setdefault(sites[b], set()).add(sites[a])
    path = _path(sites[near], sites[far], neighbours)
    if path is not None:
        raise errors.Refused(
            f"a link from {near} to {far} would close a ring: {' - '.join(path)}",
            hint="remove another link of the ring first, or add this one when a link fails",
        )


def _path(start: str, goal: str, neighbours: Mapping[str, set[str]]) -> list[str] | None:
    came_from = {start: start}
    queue = [start]
    for here in queue:
        for there in sorted(neighbours.get(here, ())):
            if there not in came_from:
                came_from[there] = here
                queue.append(there)
    if goal not in came_from:
        return None
    path = [goal]
    while path[-1] != start:
        path.append(came_from[path[-1]])
    return path[::-1]


# Links


def cluster_of(broker: config.BrokerConfig) -> str:
    """The name of its cluster, or its own."""
    return f"cluster {broker.cluster.name}" if broker.cluster else broker.name


def with_routes(
    broker: config.BrokerConfig, brokers: Sequence[config.BrokerConfig], outside: tuple[str, ...] = ()
) -> config.BrokerConfig:
    """Routes to all others of its cluster among ``brokers``, and to those ``outside``. Pure."""
    if broker.cluster is None:
        return broker
    inside = (
        config.peer_url(config.reachable(other.host), other.cluster.port, broker.cluster.secret)
        for other in brokers
        if other.cluster is not None
        and other.cluster.name == broker.cluster.name
        and other.name != broker.name
    )
    routes = tuple(dict.fromkeys((*outside, *inside)))
    if not routes and broker.gateway is not None and broker.storage is not None:
        # NATS lets a cluster of one store only if it has a route, which may be to itself.
        routes = (config.peer_url(config.reachable(broker.host), broker.cluster.port, broker.cluster.secret),)
    return dataclasses.replace(broker, cluster=dataclasses.replace(broker.cluster, routes=routes))


def with_gateways(broker: config.BrokerConfig, brokers: Sequence[config.BrokerConfig]) -> config.BrokerConfig:
    """The addresses of all gateways among ``brokers``, by cluster. Pure."""
    if broker.gateway is None:
        return broker
    remotes = dict(broker.gateway.remotes)
    for other in brokers:
        if other.gateway is not None:
            address = config.peer_url(config.reachable(other.host), other.gateway.port, broker.gateway.secret)
            known = remotes.get(other.gateway.name, ())
            remotes[other.gateway.name] = tuple(dict.fromkeys((*known, address)))
    return dataclasses.replace(broker, gateway=dataclasses.replace(broker.gateway, remotes=remotes))
