"""The parts of a domain and what they are connected to. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from muster.bus.brokers import control
from muster.inform import protocol as inform_protocol
from muster.manage import rows
from muster.monitor import protocol as monitor_protocol

BUS = "bus"
#: The kind of a component of the domain and what it does; others are shown by what they announce themselves.
SERVICES = {
    "amqp": ("gateway", "JMS clients by AMQP"),
    "soap": ("gateway", "UDDI, WS-Context, WS-Management"),
    "udp": ("gateway", "datagrams"),
    "message": ("dispatcher", "queues, subscriptions"),
    "notify": ("notifier", "events"),
}


class DomainPart(msgspec.Struct, frozen=True, kw_only=True):
    """A process of the domain, or another domain. ``id`` is unique; ``about``: what it does now."""

    id: str
    kind: str  # broker, channel, manager, information node, gateway, pipeline, domain, machines, …
    name: str
    state: str = "up"
    about: str = ""


class PartLink(msgspec.Struct, frozen=True, kw_only=True):
    """What a part sends to; ``bus``: any broker."""

    near: str
    far: str
    up: bool = True
    about: str = ""


class DomainTopology(msgspec.Struct, frozen=True, kw_only=True):
    """``missing``: the kinds of parts that are unknown now, with the reason."""

    parts: list[DomainPart]
    links: list[PartLink]
    missing: dict[str, str] = {}


def topology(
    *,
    brokers: Sequence[control.BrokerRow] = (),
    links: Sequence[control.LinkRow] = (),
    producers: Sequence[monitor_protocol.ReportProducer] = (),
    managers: Sequence[rows.ManagerRow] = (),
    nodes: Sequence[inform_protocol.NodeInfo] = (),
    components: Sequence[control.ComponentRow] = (),
    machines: int = 0,
    pipeline: str = "",
    missing: dict[str, str] | None = None,
) -> DomainTopology:
    parts = [
        DomainPart(
            id=f"broker {row.name}",
            kind="broker",
            name=row.name,
            state=row.state,
            about=f"{row.connections or 0} clients",
        )
        for row in brokers
    ]
    made = [_link(link, {row.name for row in brokers}) for link in links]
    outside = {link.far for link in made if not link.far.startswith("broker ")}
    parts += [DomainPart(id=name, kind="domain", name=name.partition(" ")[2]) for name in sorted(outside)]
    channels = {row.name for row in producers}
    for row in sorted(producers, key=lambda row: (row.level, row.name)):
        about = f"level {row.level}, holds {row.hold_s:g} s"
        parts.append(DomainPart(id=f"channel {row.name}", kind="channel", name=row.name, about=about))
        above = [f"channel {name}" for name in row.parents if name in channels] or [BUS]
        made += [PartLink(near=f"channel {row.name}", far=far, about="reports") for far in above]
    if machines:
        parts.append(
            DomainPart(id="machines", kind="machines", name="machines", about=f"{machines:,} report")
        )
        first = [f"channel {row.name}" for row in producers if row.level == 1] or [BUS]
        made += [PartLink(near="machines", far=far, about="reports") for far in first]
    for manager in managers:
        state = "draining" if manager.leaving else "up" if manager.expires_in_s > 0 else "late"
        about = f"{manager.resources:,} resources"
        parts.append(
            DomainPart(
                id=f"manager {manager.name}", kind="manager", name=manager.name, state=state, about=about
            )
        )
    for node in nodes:
        about = f"{node.load.contexts:,} contexts"
        parts.append(DomainPart(id=f"node {node.node}", kind="information node", name=node.node, about=about))
    parts += [
        DomainPart(
            id=f"{kind} {row.name}", kind=kind, name=row.name, state=row.state, about=row.reason or words
        )
        for row in components
        for kind, words in [SERVICES.get(row.name, ("", ""))]
        if kind
    ]
    if pipeline:
        parts.append(
            DomainPart(id="pipeline", kind="pipeline", name="pipeline", state=pipeline, about="Spark")
        )
    linked = {link.near for link in made}
    made += [
        PartLink(near=part.id, far=BUS)
        for part in parts
        if part.kind not in ("broker", "domain") and part.id not in linked
    ]
    return DomainTopology(parts=parts, links=made, missing=missing or {})


def _link(link: control.LinkRow, brokers: Iterable[str]) -> PartLink:
    far = f"broker {link.far}" if link.far in brokers else f"domain {link.far}"
    trip = "" if link.round_trip_ms is None else f", {link.round_trip_ms:.3g} ms"
    return PartLink(near=f"broker {link.near}", far=far, up=link.up, about=f"{link.kind}{trip}")
