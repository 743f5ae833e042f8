"""Contexts, their versions and replicas, and service entries, as users see them.

The REST API, the command line and the dashboard derive their fields from these types.  A value is text if it
is valid UTF-8, else base64.
"""

from __future__ import annotations

import base64
from typing import Any

import msgspec

from muster.inform import activities, protocol, service_entries


class ContextRow(msgspec.Struct, frozen=True, kw_only=True):
    """A context. The value is text if it is valid UTF-8, else base64.

    ``expires_at_ms`` is by the clock of the log, ``lease_left_s`` the time until then; None: no end.
    """

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
    lease_left_s: float | None = None


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


class ActivityRow(msgspec.Struct, frozen=True, kw_only=True):
    """An activity (session), its contents, and the time until it ends."""

    id: str
    status: str
    parent: str | None = None
    value: str | None = None
    value_base64: str | None = None
    timeout_s: float
    version: int


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


def render_value(value: bytes) -> tuple[str | None, str | None]:
    """Bytes for JSON: text if valid UTF-8, else base64."""
    try:
        return value.decode(), None
    except UnicodeDecodeError:
        return None, base64.b64encode(value).decode()


def context_row(context: protocol.Context) -> ContextRow:
    text, encoded = render_value(context.value)
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
        lease_left_s=round(context.lease_left_s, 3) if context.expires_at_ns else None,
    )


def change_row(change: protocol.ContextChange) -> ContextChangeRow:
    text, encoded = (None, None) if change.value is None else render_value(change.value)
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
    text, encoded = render_value(entry.description)
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


def activity_row(activity: activities.Activity, now_s: float) -> ActivityRow:
    text, encoded = render_value(activity.contents)
    return ActivityRow(
        id=activity.id,
        status=activity.status.value,
        parent=activity.parent or None,
        value=text,
        value_base64=encoded,
        timeout_s=round(activity.expires_at_ns / 1e9 - now_s, 3),
        version=activity.version,
    )


def replica_row(replica: protocol.ReplicaInfo) -> ReplicaRow:
    return ReplicaRow(**msgspec.structs.asdict(replica))
