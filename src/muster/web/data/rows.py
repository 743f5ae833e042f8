"""The rows of pages and REST that are not those of a service, and their conversion from replies. Pure."""

from __future__ import annotations

import base64
import datetime
import math
from typing import Any

import msgspec

from muster.core import errors
from muster.inform import protocol as inform_protocol
from muster.inform import service_entries
from muster.message import destinations
from muster.message import messages as jms
from muster.message import protocol as message_protocol
from muster.monitor import protocol as monitor_protocol


class ContextRow(msgspec.Struct, frozen=True, kw_only=True):
    """A context. The value is text if it is valid UTF-8, else base64."""

    key: str
    value: str | None = None
    value_base64: str | None = None
    attributes: dict[str, Any] = {}
    version: int
    stamp: str
    writer: str = ""
    source: str
    replica_kind: str
    age_s: float
    expires_at_ms: int | None = None


class ContextChangeRow(msgspec.Struct, frozen=True, kw_only=True):
    """A version of a context; without a value if it was deleted or has expired."""

    key: str
    version: int
    stamp: str
    value: str | None = None
    value_base64: str | None = None
    attributes: dict[str, Any] = {}
    writer: str = ""
    reason: str


class ServiceEntryRow(msgspec.Struct, frozen=True, kw_only=True):
    """A service entry. ``source``: where it was read, in a list."""

    id: str
    name: str
    access: list[str] = []
    categories: list[str] = []
    metadata: dict[str, Any] = {}
    description: str | None = None
    description_base64: str | None = None
    version: int = 0
    owner: str = ""
    source: str = ""


class BrowsedMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A message of a queue that was read without removing it."""

    sequence: int
    id: str | None
    type: str
    priority: int
    timestamp_ms: int
    expiration_ms: int
    redelivered: bool
    properties: dict[str, Any] = {}
    body: Any = None


class QueuePurged(msgspec.Struct, frozen=True, kw_only=True):
    """The number of messages that were discarded."""

    queue: str
    purged: int


class ScheduledCancelled(msgspec.Struct, frozen=True, kw_only=True):
    """The message that was cancelled."""

    number: int


class QueueMoved(msgspec.Struct, frozen=True, kw_only=True):
    """The number of messages that were moved."""

    queue: str
    moved: int


class IssuedToken(msgspec.Struct, frozen=True, kw_only=True):
    """A bearer token of a login. ``until``: its expiry in seconds since 1970."""

    token: str
    name: str
    role: str
    until: int


class CurrentUser(msgspec.Struct, frozen=True, kw_only=True):
    """The login of a request, and the kind of its token."""

    name: str
    role: str
    kind: str
    until: int


class LoginRow(msgspec.Struct, frozen=True, kw_only=True):
    """A login. Times are in seconds since 1970; ``expires_at`` None: it does not expire."""

    name: str
    role: str
    created_at: int
    expires_at: int | None = None


class SentEvent(msgspec.Struct, frozen=True, kw_only=True):
    """The id of an event that was sent, and its sender."""

    id: str
    sender: str


class SearchPage(msgspec.Struct, frozen=True, kw_only=True):
    """A page of search results, and the parts of the domain that are missing in it."""

    next: str | None = None
    silent: list[str] = []
    failed: dict[str, str] = {}
    cut: list[str] = []


class ContextPage(SearchPage, frozen=True, kw_only=True):
    items: list[ContextRow] = []


class ServiceEntryPage(SearchPage, frozen=True, kw_only=True):
    items: list[ServiceEntryRow] = []


class ContextHistoryPage(msgspec.Struct, frozen=True, kw_only=True):
    """Versions, oldest first. ``complete``: none of them was removed from the log."""

    items: list[ContextChangeRow] = []
    complete: bool
    next: str | None = None


class ReplicaRow(msgspec.Struct, frozen=True, kw_only=True):
    """A replica. ``demand``: requests in this interval by node of origin, and from all others."""

    node: str
    replica_kind: str
    version: int
    age_s: float
    demand: dict[str, int] = {}
    demand_others: int = 0


class ReplicaPage(msgspec.Struct, frozen=True, kw_only=True):
    """The replicas of a context, the primary first. ``silent``: information nodes that did not reply."""

    items: list[ReplicaRow] = []
    next: str | None = None
    silent: list[str] = []


class MachineRow(msgspec.Struct, frozen=True, kw_only=True):
    """A machine: its state, the age of its last report, and the standard metrics."""

    machine: str
    group: str
    zone: str
    state: str
    age_s: float
    period_s: float
    services: int
    cpu_percent: float | None = None
    memory_percent: float | None = None
    load_1m: float | None = None
    disk_percent: float | None = None


class GroupRow(msgspec.Struct, kw_only=True):
    """A group: the number of machines by state, and the means of the standard metrics."""

    group: str
    machines: int = 0
    states: dict[str, int] = {}
    oldest_s: float = 0.0
    cpu_percent: float | None = None
    memory_percent: float | None = None
    load_1m: float | None = None
    disk_percent: float | None = None


class MachineSummary(msgspec.Struct, frozen=True, kw_only=True):
    """All machines: counts, and the ages of their last reports."""

    machines: int = 0
    stale: int = 0
    states: dict[str, int] = {}
    groups: list[GroupRow] = []
    oldest_s: float | None = None
    median_s: float | None = None


class ArrivalRow(msgspec.Struct, frozen=True, kw_only=True):
    """The ages of the reports that arrived within a second."""

    at_ms: int
    rows: int
    p50_s: float
    max_s: float


class CapacityView(msgspec.Struct, frozen=True, kw_only=True):
    """The age of reports: the worst case of the model, and the measurements of the last minutes."""

    levels: int
    channels: list[monitor_protocol.ReportProducer] = []
    predicted_max_s: float
    measured: list[ArrivalRow] = []
    measured_max_s: float | None = None
    ratio: float | None = None
    within_20_percent: bool | None = None


def decode_value(value: bytes) -> tuple[str | None, str | None]:
    """Bytes for JSON: text if valid UTF-8, else base64."""
    try:
        return value.decode(), None
    except UnicodeDecodeError:
        return None, base64.b64encode(value).decode()


def context_row(context: inform_protocol.Context) -> ContextRow:
    text, encoded = decode_value(context.value)
    return ContextRow(
        key=context.key,
        value=text,
        value_base64=encoded,
        attributes=dict(context.attributes),
        version=context.version,
        stamp=context.stamp,
        writer=context.writer,
        source=context.source,
        replica_kind=context.replica_kind,
        age_s=round(context.age_s, 6),
        expires_at_ms=context.expires_at_ns // 1_000_000 or None,
    )


def change_row(change: inform_protocol.ContextChange) -> ContextChangeRow:
    text, encoded = (None, None) if change.value is None else decode_value(change.value)
    return ContextChangeRow(
        key=change.key,
        version=change.version,
        stamp=change.stamp,
        value=text,
        value_base64=encoded,
        attributes=dict(change.attributes),
        writer=change.writer,
        reason=change.reason,
    )


def entry_row(entry: service_entries.ServiceEntry, source: str = "") -> ServiceEntryRow:
    text, encoded = decode_value(entry.description)
    return ServiceEntryRow(
        id=entry.id,
        name=entry.name,
        access=list(entry.access),
        categories=list(entry.categories),
        metadata=dict(entry.metadata),
        description=text,
        description_base64=encoded,
        version=entry.version,
        owner=entry.owner,
        source=source,
    )


def message_row(delivery: message_protocol.MessageDelivery, queue: str) -> BrowsedMessage:
    meta, place = jms.decode_meta(delivery.meta), destinations.queue(queue)
    try:
        message = jms.message_from_meta(meta, delivery.data, place)
    except errors.MusterError:  # an unreadable message must not hide the others
        message = jms.message_from_meta(jms.unreadable(meta), delivery.data, place)
    return BrowsedMessage(
        sequence=delivery.sequence,
        id=message.message_id,
        type=type(message).__name__,
        priority=message.priority,
        timestamp_ms=message.timestamp_ms,
        expiration_ms=message.expiration_ms,
        redelivered=message.redelivered,
        properties={name: to_json(value) for name, value in message.properties.items()},
        body=to_json(message.body()),
    )


def to_json(value: Any) -> Any:
    """Convert a value to JSON types."""
    match value:
        case bytes():
            return base64.b64encode(value).decode()
        case datetime.datetime():
            return value.isoformat(timespec="milliseconds")
        case float():
            return value if math.isfinite(value) else None
        case dict():
            return {str(name): to_json(item) for name, item in value.items()}
        case list() | tuple():
            return [to_json(item) for item in value]
        case None | str() | bool() | int():
            return value
    return str(value)
