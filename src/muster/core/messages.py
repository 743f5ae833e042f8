"""Messages that more than one service reads: heartbeat, node report, alert, decision.

Each has a kind with a version in it (``"kind": "alert/1"``).  Within a version, fields may be added, always
with a default, and readers ignore those they do not know; anything else is a new version.  A message is JSON,
or the same in MessagePack where a link is thin; `decode` sees which by the first byte.

Who sent a message is never read from it: the broker's subject says so (`muster.core.subjects`).  Times are
wall time in milliseconds since 1970, which every language's numbers hold exactly.

What is malformed, too large or of an unknown kind is `errors.InvalidInput` or `errors.LimitExceeded`, with a
reason fit for a counter in ``code``.
"""

from __future__ import annotations

import enum
import math
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from muster.core import errors, health

MAX_BYTES = 1 << 20

#: The audit: `Decision` records, of whichever part made them (``muster.<part>.log.decision.<what>``).
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
    """One service on a machine, within its node report."""

    name: Name
    state: health.HealthState = health.HealthState.UP
    reason: Text = ""
    metrics: Metrics = {}

    def __post_init__(self) -> None:
        _finite(self.metrics)


class NodeReport(WireMessage, frozen=True, kw_only=True, tag="node-report/1", omit_defaults=True):
    """What a sensor saw of its machine. It is also the machine's heartbeat."""

    machine: Name
    group: Name = "default"
    zone: Name = "default"
    boot: Count = 0  # differs after each start of the sensor: sequence numbers begin anew with it
    sequence: Count  # (machine, boot, sequence) names a report: whoever sees it twice counts it once
    at_ms: TimeMs
    period_s: Annotated[float, msgspec.Meta(gt=0, le=86400)]
    dropped: Count = 0  # reports of this boot that the sensor gave up, for want of room while it was cut off
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
    ACKNOWLEDGED = "acknowledged"  # somebody has it in hand
    SILENCED = "silenced"  # true, and nobody is to be told


class Alert(WireMessage, frozen=True, kw_only=True, tag="alert/1", omit_defaults=True):
    """A rule is true of something, or has ceased to be. (rule, about) names it; the latest message holds."""

    rule: Name
    about: Name  # what it is true of: node:web-7, group:web, budget:reports, system
    severity: Severity
    state: AlertState
    since_ms: TimeMs  # when this state began
    at_ms: TimeMs
    value: float | None = None  # what was measured; None where nothing was, which may be the alert
    reason: Text = ""
    labels: Labels = {}

    def __post_init__(self) -> None:
        if self.value is not None:
            _finite({"value": self.value})


class DecisionOutcome(enum.Enum):
    DECIDED = "decided"  # not carried out yet
    DONE = "done"
    REFUSED = "refused"
    FAILED = "failed"
    IN_DOUBT = "in-doubt"  # it cannot be known whether it was carried out

    @classmethod
    def of(cls, error: errors.MusterError) -> DecisionOutcome:
        """What became of an act that ended with ``error``."""
        if isinstance(error, (errors.TimedOut, errors.NotConnected)):
            return cls.IN_DOUBT
        return cls.REFUSED if isinstance(error, _REFUSALS) else cls.FAILED


_REFUSALS = (errors.Refused, errors.InvalidInput, errors.NotFound, errors.AlreadyExists)


class Decision(WireMessage, frozen=True, kw_only=True, tag="decision/1", omit_defaults=True):
    """Who decided or did what, to what, and why: the audit."""

    id: Name  # later records of the same id tell the outcome
    who: Name  # the identity that decided
    on_behalf_of: Text = ""  # the user who asked, where somebody did
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


M = TypeVar("M", bound=WireMessage)

_json, _msgpack = msgspec.json.Encoder(), msgspec.msgpack.Encoder()
_decoders: dict[Any, tuple[msgspec.json.Decoder[Any], msgspec.msgpack.Decoder[Any]]] = {}


def encode(message: WireMessage, form: Literal["json", "msgpack"] = "json") -> bytes:
    """`TooLarge` or `Malformed` where no reader would take it."""
    try:
        data = _json.encode(message) if form == "json" else _msgpack.encode(message)
    except UnicodeEncodeError as error:
        raise MalformedMessage(
            f"a {type(message).__name__} with text that is not Unicode: {error}"
        ) from error
    if len(data) > MAX_BYTES:
        raise MessageTooLarge(f"a {type(message).__name__} of {len(data)} bytes is over {MAX_BYTES}")
    return data


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
        raise fault(f"not a message of kind {tag}: {str(error)[:300]}") from error
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError) as error:
        raise MalformedMessage(f"neither JSON nor MessagePack: {str(error)[:300]}") from error
    if not isinstance(message, kind):
        raise UnknownMessageKind(f"not a message of kind {tag}")
    return message


def _finite(metrics: dict[str, float]) -> None:
    """JSON has no infinities and no NaN; a sensor that has no value leaves the metric out."""
    if not all(map(math.isfinite, metrics.values())):
        odd = next(name for name, value in metrics.items() if not math.isfinite(value))
        raise MalformedMessage(f"the metric {odd[:100]!r} is not a finite number")
