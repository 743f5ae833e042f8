"""The types of the answers to queries about receivers, models, policies and grants (`queries`).

REST schemas, columns of the command line and tables of the dashboard derive from them.
"""

from __future__ import annotations

from typing import Any

import msgspec


class ReceiverRow(msgspec.Struct, frozen=True, kw_only=True):
    """A receiver. ``delivery``: durable or transient."""

    receiver: str
    model: str = ""
    state: dict[str, Any] = {}
    policy: str = ""
    delivery: str = "transient"


class ReceiverList(msgspec.Struct, frozen=True, kw_only=True):
    """A page of receivers. ``count``: all that match; ``next``: continue after this name, None at the end."""

    count: int
    receivers: list[ReceiverRow] = []
    next: str | None = None


class NearMiss(msgspec.Struct, frozen=True, kw_only=True):
    """A receiver that fails exactly one condition, and the reason."""

    receiver: str
    why: list[str] = []


class ReceiverMatches(msgspec.Struct, frozen=True, kw_only=True):
    """The number of matching receivers, the first names, and near misses."""

    count: int
    receivers: list[str] = []
    near: list[NearMiss] = []


class ModelRow(msgspec.Struct, frozen=True, kw_only=True):
    """A model of receivers or of events (``of``), with the types of its attributes."""

    name: str
    of: str
    attributes: dict[str, str] = {}


class GrantRow(msgspec.Struct, frozen=True, kw_only=True):
    """A grant. ``status``: valid, or the reason why it is not in force."""

    serial: str
    mandates: list[str] = []
    holder: str
    attributes: dict[str, Any] = {}
    tier: int
    authority: str
    scope: dict[str, Any] = {}
    expires_at: float
    status: str


class ConditionVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """Whether a condition holds, and the decisive clauses."""

    holds: bool
    because: list[str] = []


class HeldGrant(msgspec.Struct, frozen=True, kw_only=True):
    """A granted attribute: value, issuer, validity period in seconds since 1970, and scope."""

    name: str
    value: Any
    by: str
    tier: int
    since: float
    until: float
    within: dict[str, Any] = {}


class DeliveryExplanation(msgspec.Struct, frozen=True, kw_only=True):
    """Why an event would or would not reach a receiver.

    ``granted``: restricted attributes of the sender; ``since_ms``: the last change of the receiver's state.
    """

    delivered: bool
    address: ConditionVerdict
    event: ConditionVerdict
    sender: ConditionVerdict
    granted: dict[str, HeldGrant] = {}
    receiver_granted: dict[str, HeldGrant] = {}
    state: dict[str, Any] = {}
    since_ms: float = 0.0


class PolicyCheck(msgspec.Struct, frozen=True, kw_only=True):
    """A policy in canonical form and its cost. ``conjunctions``: index entries, None if not indexed."""

    canonical: str
    clauses: int
    depth: int
    cost: str
    conjunctions: int | None = None
    indexed: bool
