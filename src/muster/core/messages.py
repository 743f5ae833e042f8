"""Messages that more than one service reads: heartbeat, node report, alert, decision.

Each has a kind with a version (``"kind": "alert/1"``). Within a version, fields may be added, always with a
default, and readers ignore unknown fields; any other change is a new version. A message is JSON, or the same
structure in MessagePack for slow links; `decode` detects the format by the first byte.

The sender is never read from a message: the subject identifies it, which the broker enforces
(`muster.core.subjects`). Times are wall time in milliseconds since 1970, which the numbers of every language
represent exactly.

A message that is malformed, too large or of an unknown kind raises `errors.InvalidInput` or
`errors.LimitExceeded`, with a reason for a counter in ``code``.
"""

from __future__ import annotations

import enum
import math
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from muster.core import errors, health

MAX_BYTES = 1 << 20

#: The audit log: `Decision` records of all parts (``muster.<part>.log.decision.<what>``).
DECISIONS_STREAM = "decisions"
DECISIONS_SUBJECTS = "muster.*.log.decision.>"

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
Text = Annotated[str, msgspec.Meta(max_length=4096)]
Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
TIME_MS_MAX = (1 << 53) - 1
TimeMs = Annotated[int, msgspec.Meta(ge=0, le=TIME_MS_MAX)]
Metrics = Annotated[dict[Name, float], msgspec.Meta(max_length=1024)]
Labels = Annotated[dict[Name, Text], msgspec.Meta(max_length=64)]


class WireMessage(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind"):
    """Base of the messages here, and of those that services declare in their own ``protocol.py``."""


class MalformedMessage(errors.InvalidInput):
    code = "malformed"


class UnknownMessageKind(errors.InvalidInput):
    code = "unknown-kind"


class MessageTooLarge(errors.LimitExceeded):
    code = "too-large"


class ServiceReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A service on a machine, within its node report."""

    name: Name
    state: health.HealthState = health.HealthState.UP
    reason: Text = ""
    metrics: Metrics = {}

    def __post_init__(self) -> None:
        _finite(self.metrics)


class NodeReport(WireMessage, frozen=True, kw_only=True, tag="node-report/1", omit_defaults=True):
    """The observations of a sensor on its machine. It is also the heartbeat of the machine."""

    machine: Name
    group: Name = "default"
    zone: Name = "default"
    boot: Count = 0  # changes with each start of the sensor, which restarts the sequence numbers
    sequence: Count  # (machine, boot, sequence) identifies a report, so that duplicates are counted once
    at_ms: TimeMs
    period_s: Annotated[float, msgspec.Meta(gt=0, le=86400)]
    # reports of this boot that the sensor discarded because its buffer was full while disconnected
    dropped: Count = 0
    metrics: Metrics = {}
    services: Annotated[tuple[ServiceReport, ...], msgspec.Meta(max_length=256)] = ()

    def __post_init__(self) -> None:
        _finite(self.metrics)


class Severity(enum.Enum):
    INFO = "info"
    WARNING = "warning"
    CRITICAL = "critical"


class AlertState(enum.Enum):
    PENDING = "pending"  # true, not yet for long enough
    FIRING = "firing"
    RESOLVED = "resolved"
    ACKNOWLEDGED = "acknowledged"  # an operator is working on it
    SILENCED = "silenced"  # true, but contacts are not notified


class Alert(WireMessage, frozen=True, kw_only=True, tag="alert/1", omit_defaults=True):
    """A rule is true of something, or has ceased to be. (rule, about) names it; the latest message holds."""

    rule: Name
    # what the rule applies to: node:web-7, group:web, budget:reports, system; a kind and a `Name`
    about: Annotated[str, msgspec.Meta(min_length=1, max_length=300)]
    severity: Severity
    state: AlertState
    since_ms: TimeMs  # start of this state
    at_ms: TimeMs
    # the measured value; None if there is none, which may be the reason of the alert
    value: float | None = None
    reason: Text = ""
    labels: Labels = {}  # the same from its first firing to its end
    acknowledged_by: Text = ""
    condition: Text = ""  # of its rule, as it is written there; empty if there is none

    def __post_init__(self) -> None:
        if self.value is not None:
            _finite({"value": self.value})


class DecisionOutcome(enum.Enum):
    DECIDED = "decided"  # not executed yet
    DONE = "done"
    REFUSED = "refused"
    FAILED = "failed"
    IN_DOUBT = "in-doubt"  # it is unknown whether it was executed

    @classmethod
    def of(cls, error: errors.MusterError) -> DecisionOutcome:
        """The outcome of an operation that ended with ``error``."""
        if isinstance(error, (errors.TimedOut, errors.NotConnected)):
            return cls.IN_DOUBT
        return cls.REFUSED if isinstance(error, _REFUSALS) else cls.FAILED


_REFUSALS = (errors.Refused, errors.InvalidInput, errors.NotFound, errors.AlreadyExists)


class Decision(WireMessage, frozen=True, kw_only=True, tag="decision/1", omit_defaults=True):
    """Who decided or did what, to what, and why: a record of the audit log."""

    id: Name  # later records with the same id have the outcome
    who: Name  # the identity that decided
    on_behalf_of: Text = ""  # the requesting user, if there is one
    what: Name  # apply, reassign, restart, promote, grant, …
    target: Name
    why: Text
    at_ms: TimeMs
    epoch: Count = 0  # under which it was decided
    outcome: DecisionOutcome = DecisionOutcome.DECIDED
    details: Labels = {}
    trace_id: Text = ""


class _Nothing(WireMessage, frozen=True, kw_only=True, tag="nothing/0"):
    """Makes a union of every decoded type: only in a union does the decoder insist on a kind."""


class _Kind(msgspec.Struct):
    kind: str


M = TypeVar("M", bound=WireMessage)

_json, _msgpack = msgspec.json.Encoder(), msgspec.msgpack.Encoder()
_decoders: dict[Any, tuple[msgspec.json.Decoder[Any], msgspec.msgpack.Decoder[Any]]] = {}


def encode(message: WireMessage, form: Literal["json", "msgpack"] = "json") -> bytes:
    """`MessageTooLarge` or `MalformedMessage` if no reader would accept it.

    JSON replaces MessagePack where that is not possible: for integers of more than 64 bits, and for many
    short numbers, with which the message would be too large in MessagePack only.
    """
    try:
        data = _to_msgpack(message) if form == "msgpack" else None
        data = data or _json.encode(message)
    except UnicodeEncodeError as error:
        raise MalformedMessage(
            f"a {type(message).__name__} with text that is not Unicode: {error}"
        ) from error
    if len(data) > MAX_BYTES:
        raise MessageTooLarge(f"a {type(message).__name__} of {len(data)} bytes is over {MAX_BYTES}")
    return data


def _to_msgpack(message: WireMessage) -> bytes | None:
    try:
        data = _msgpack.encode(message)
    except OverflowError:
        return None
    return data if len(data) <= MAX_BYTES else None


def decode(data: bytes, kind: type[M], *, max_bytes: int = MAX_BYTES) -> M:
    """A message of this kind from JSON or MessagePack."""
    if len(data) > max_bytes:
        raise MessageTooLarge(f"a message of {len(data)} bytes is over {max_bytes}")
    if kind not in _decoders:
        either: Any = kind | _Nothing
        _decoders[kind] = (msgspec.json.Decoder(either), msgspec.msgpack.Decoder(either))
    as_json, as_msgpack = _decoders[kind]
    tag = kind.__struct_config__.tag
    try:
        # 0x7b is { in JSON, and in MessagePack a number, with which no message begins.
        message = (as_json if data[:1] in (b"{", b"") else as_msgpack).decode(data)
    except msgspec.ValidationError as error:
        fault = (
            UnknownMessageKind
            if "`$.kind`" in str(error) or "field `kind`" in str(error)
            else MalformedMessage
        )
        raise fault(_explain(data, str(tag)) or f"not a message of kind {tag}: {str(error)[:300]}") from error
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError) as error:
        raise MalformedMessage(f"neither JSON nor MessagePack: {str(error)[:300]}") from error
    if not isinstance(message, kind):
        raise UnknownMessageKind(f"not a message of kind {tag}")
    return message


def _explain(data: bytes, tag: str) -> str | None:
    """What to say about the same kind of message in another version; None for any other message."""
    try:
        coded = msgspec.json if data[:1] == b"{" else msgspec.msgpack
        kind = coded.decode(data, type=_Kind).kind
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError):
        return None
    name, _, version = kind.partition("/")
    if kind == tag or name != tag.partition("/")[0] or not version.isdecimal():
        return None
    return f"a message of kind {kind[:80]}, but this version of Muster reads {tag}"


def _finite(metrics: dict[str, float]) -> None:
    """JSON has no infinities and no NaN; a sensor that has no value leaves the metric out."""
    if not all(map(math.isfinite, metrics.values())):
        odd = next(name for name, value in metrics.items() if not math.isfinite(value))
        raise MalformedMessage(f"the metric {odd[:100]!r} is not a finite number")
