"""Metrics, log records and spans in the format of OTLP (JSON over HTTP), for collectors. Pure.

Counters become monotonic sums and histograms cumulative ones, each since ``start_ns``; labels become
attributes, and the process is described in the resource. Ids of traces and spans are hexadecimal, and 64-bit
integers are text, as the encoding requires.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from muster.core import errors
from muster.core.telemetry import trace

CUMULATIVE = 2  # the OTLP aggregation temporality
SCOPE = {"name": "muster"}
SEVERITIES = {"debug": 5, "info": 9, "warning": 13, "error": 17}
_FAILED = 2  # the status of a span


class SpanKind(enum.IntEnum):
    INTERNAL = 1
    SERVER = 2
    CLIENT = 3


@dataclass(frozen=True, slots=True)
class FinishedSpan:
    """``problem``: the error that it ended with."""

    context: trace.TraceContext
    parent_id: str
    name: str
    kind: SpanKind
    start_ns: int
    end_ns: int
    facts: Mapping[str, Any]
    problem: str = ""


@dataclass(frozen=True, slots=True)
class LogEntry:
    """``severity``: a key of `SEVERITIES`; ``trace_id`` and ``span_id`` are empty outside of a trace."""

    at_ns: int
    severity: str
    text: str
    facts: Mapping[str, Any]
    trace_id: str = ""
    span_id: str = ""


class MetricSample(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def labels(self) -> Mapping[str, str]: ...
    @property
    def value(self) -> float: ...


class MetricFamily(Protocol):
    name: str
    documentation: str
    type: str

    @property
    def samples(self) -> Iterable[MetricSample]: ...


def encode(
    families: Iterable[MetricFamily], resource: Mapping[str, str], *, start_ns: int, now_ns: int
) -> bytes:
    """The body of ``POST /v1/metrics``."""
    times = {"startTimeUnixNano": str(start_ns), "timeUnixNano": str(now_ns)}
    metrics = [_metric(family, times) for family in families]
    scope = {"scope": SCOPE, "metrics": [metric for metric in metrics if metric is not None]}
    return _encode("Metrics", resource, scope)


def encode_logs(entries: Iterable[LogEntry], resource: Mapping[str, str]) -> bytes:
    """The body of ``POST /v1/logs``."""
    records = [
        {
            "timeUnixNano": str(entry.at_ns),
            "observedTimeUnixNano": str(entry.at_ns),
            "severityNumber": SEVERITIES[entry.severity],
            "severityText": entry.severity.upper(),
            "body": _value(entry.text),
            "attributes": _attributes(entry.facts),
            **({"traceId": entry.trace_id} if entry.trace_id else {}),
            **({"spanId": entry.span_id} if entry.span_id else {}),
        }
        for entry in entries
    ]
    return _encode("Logs", resource, {"scope": SCOPE, "logRecords": records})


def encode_spans(spans: Iterable[FinishedSpan], resource: Mapping[str, str]) -> bytes:
    """The body of ``POST /v1/traces``."""
    encoded = [
        {
            "traceId": span.context.trace_id,
            "spanId": span.context.span_id,
            **({"parentSpanId": span.parent_id} if span.parent_id else {}),
            **({"traceState": span.context.state} if span.context.state else {}),
            "name": errors.sendable(span.name),
            "kind": int(span.kind),
            "startTimeUnixNano": str(span.start_ns),
            "endTimeUnixNano": str(span.end_ns),
            "attributes": _attributes(span.facts),
            **(
                {"status": {"code": _FAILED, "message": errors.sendable(span.problem)}}
                if span.problem
                else {}
            ),
        }
        for span in spans
    ]
    return _encode("Spans", resource, {"scope": SCOPE, "spans": encoded})


def _encode(signal: str, resource: Mapping[str, str], scope: Mapping[str, Any]) -> bytes:
    described = {"attributes": _attributes(resource)}
    return msgspec.json.encode({f"resource{signal}": [{"resource": described, f"scope{signal}": [scope]}]})


def _metric(family: MetricFamily, times: Mapping[str, str]) -> dict[str, Any] | None:
    named = {"name": family.name, "description": family.documentation}
    if family.type == "histogram":
        return named | {
            "histogram": {"dataPoints": _histograms(family, times), "aggregationTemporality": CUMULATIVE}
        }
    if family.type == "counter":
        points = [_point(sample, times) for sample in family.samples if sample.name.endswith("_total")]
        return named | {
            "sum": {"dataPoints": points, "isMonotonic": True, "aggregationTemporality": CUMULATIVE}
        }
    if family.type in ("gauge", "unknown"):
        return named | {"gauge": {"dataPoints": [_point(sample, times) for sample in family.samples]}}
    return None


def _point(sample: MetricSample, times: Mapping[str, str]) -> dict[str, Any]:
    return {"attributes": _attributes(sample.labels), **times, "asDouble": _double(sample.value)}


def _histograms(family: MetricFamily, times: Mapping[str, str]) -> list[dict[str, Any]]:
    """Convert the running totals of Prometheus to one point for each combination of labels."""
    points: dict[tuple[tuple[str, str], ...], dict[str, Any]] = {}
    for sample in family.samples:
        labels = dict(sample.labels)
        bound = labels.pop("le", None)
        point = points.setdefault(
            tuple(sorted(labels.items())),
            {"attributes": _attributes(labels), **times, "bounds": [], "totals": [], "sum": 0.0},
        )
        if bound is not None:
            point["bounds"].append(float(bound))
            point["totals"].append(int(sample.value))
        elif sample.name.endswith("_sum"):
            point["sum"] = _double(sample.value)
    for point in points.values():
        bounds, totals = point.pop("bounds"), point.pop("totals")
        counts = [now - before for before, now in zip([0, *totals], totals, strict=False)]
        point |= {
            "count": str(totals[-1] if totals else 0),
            "explicitBounds": bounds[:-1],  # the last is infinity
            "bucketCounts": [str(count) for count in counts],
        }
    return list(points.values())


def _attributes(facts: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{"key": errors.sendable(key), "value": _value(value)} for key, value in facts.items()]


def _value(value: Any) -> dict[str, Any]:
    match value:
        case bool():
            return {"boolValue": value}
        case int() if -(1 << 63) <= value < 1 << 63:
            return {"intValue": str(value)}
        case float():
            return {"doubleValue": _double(value)}
    return {"stringValue": errors.sendable(value if isinstance(value, str) else str(value))}


def _double(value: float) -> float | str:
    """JSON has no numbers that are not finite: protobuf's JSON names them."""
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
