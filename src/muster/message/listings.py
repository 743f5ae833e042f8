"""The rows of a dispatcher's lists: queues, durable subscriptions and scheduled messages."""

from __future__ import annotations

from typing import Any

import msgspec


class QueueRow(msgspec.Struct, frozen=True, kw_only=True):
    """A queue: waiting messages, consumers, and messages counted since the dispatcher started.

    ``rejected``: messages that no selector of a consumer matched. ``owner``: host and process id of the
    dispatcher of its partition.
    """

    queue: str
    depth: int = 0
    consumers: int = 0
    in_flight: int = 0
    in_per_s: float = 0.0
    out_per_s: float = 0.0
    delivered: int = 0
    expired: int = 0
    matched: int = 0
    rejected: int = 0
    partition: int = 0
    owner: str = ""


class SubscriptionRow(msgspec.Struct, frozen=True, kw_only=True):
    """A durable subscription. ``behind``: messages of the log that it has not read yet."""

    subscription: str
    identity: str
    client_id: str | None = None
    topic: str
    selector: str | None = None
    shared: bool = False
    consumers: int = 0
    waiting: int = 0
    behind: int = 0
    delivered: int = 0
    matched: int = 0
    rejected: int = 0


class ScheduledRow(msgspec.Struct, frozen=True, kw_only=True):
    """A message that is delivered later. ``bytes``: of its body."""

    number: int
    id: str | None
    destination: str
    delivery_time_ms: int
    timestamp_ms: int = 0
    expiration_ms: int = 0
    priority: int = 4
    bytes: int = 0
    properties: dict[str, Any] = {}


# The columns of tables of these rows and of messages; one with ``?`` is shown if there is room.

MESSAGES = ("id", "type?", "priority", "redelivered?", "properties", "body")
QUEUES = (
    "queue",
    "depth",
    "in_per_s",
    "out_per_s",
    "consumers",
    "in_flight",
    "delivered?",
    "matched?",
    "rejected?",
    "expired?",
    "partition?",
    "owner?",
)
SUBSCRIPTIONS = (
    "subscription",
    "identity?",
    "client_id",
    "topic",
    "selector?",
    "consumers",
    "waiting",
    "behind",
    "delivered?",
    "matched?",
    "rejected?",
)
SCHEDULED = ("number", "id", "destination", "delivery_time_ms", "priority?", "bytes")
DEAD_LETTERS = ("id", "from", "reason", "body")
