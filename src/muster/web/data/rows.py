"""The rows of pages and REST that are not those of a service. Pure."""

from __future__ import annotations

import msgspec

from muster.manage import rows as manage_rows
from muster.message import rows as message_rows
from muster.monitor import protocol
from muster.web.auth import tokens


class BrowsedMessage(message_rows.MessageRow, frozen=True, kw_only=True):
    """A message of a queue that was read without removing it."""

    sequence: int


class QueueSent(msgspec.Struct, frozen=True, kw_only=True):
    """The id of the message that was sent."""

    queue: str
    id: str


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


class IssuedToken(tokens.TokenRow, frozen=True, kw_only=True):
    """A new API token. Its text is shown only now."""

    token: str


class CurrentUser(msgspec.Struct, frozen=True, kw_only=True):
    """The login of a request, the kind of its session, and the scopes of its token."""

    name: str
    role: str
    kind: str
    until: int
    scopes: list[str] = []


class SentEvent(msgspec.Struct, frozen=True, kw_only=True):
    """The id of an event that was sent, and its sender."""

    id: str
    sender: str


class ReportedMachine(msgspec.Struct, frozen=True, kw_only=True):
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


class FleetOverview(msgspec.Struct, frozen=True, kw_only=True):
    """The state of the fleet. ``alerts``: number of firing alerts by severity. ``messages_per_s``: into the
    brokers. ``missing``: the fields that are unknown now, with the reason."""

    domain: str
    connected: bool
    machines: MachineSummary
    reports_per_s: float
    messages_per_s: float | None = None
    resources: manage_rows.FleetSummary | None = None
    alerts: dict[str, int] | None = None
    missing: dict[str, str] = {}


class ArrivalRow(msgspec.Struct, frozen=True, kw_only=True):
    """The ages of the reports that arrived within a second."""

    at_ms: int
    rows: int
    p50_s: float
    max_s: float


class CapacityView(msgspec.Struct, frozen=True, kw_only=True):
    """The age of reports: the worst case of the model, and the measurements of the last minutes."""

    levels: int
    channels: list[protocol.ReportProducer] = []
    predicted_max_s: float
    measured: list[ArrivalRow] = []
    measured_max_s: float | None = None
    ratio: float | None = None
    within_20_percent: bool | None = None
