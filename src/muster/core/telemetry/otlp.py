"""Metrics in the format of OTLP (JSON over HTTP), for collectors that receive them by push. Pure.

Counters become monotonic sums and histograms cumulative ones, each since ``start_ns``; labels become
attributes, and the process is described in the resource.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import msgspec

CUMULATIVE = 2  # the OTLP aggregation temporality


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
    scope = {"scope": {"name": "muster"}, "metrics": [metric for metric in metrics if metric is not None]}
    return msgspec.json.encode(
        {"resourceMetrics": [{"resource": {"attributes": _attributes(resource)}, "scopeMetrics": [scope]}]}
    )


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
    return {"attributes": _attributes(sample.labels), **times, "asDouble": sample.value}


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
            point["sum"] = sample.value
    for point in points.values():
        bounds, totals = point.pop("bounds"), point.pop("totals")
        counts = [now - before for before, now in zip([0, *totals], totals, strict=False)]
        point |= {
            "count": str(totals[-1] if totals else 0),
            "explicitBounds": bounds[:-1],  # the last is infinity
            "bucketCounts": [str(count) for count in counts],
        }
    return list(points.values())


def _attributes(labels: Mapping[str, str]) -> list[dict[str, Any]]:
    return [{"key": key, "value": {"stringValue": value}} for key, value in labels.items()]
