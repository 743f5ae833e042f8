"""External metric formats, read as service reports: OTLP, Prometheus remote write and OpenMetrics text. Pure.

Attributes and labels become part of the name: ``requests{code=500}``.  A histogram is represented by its
count and its sum.  Values that are not finite are skipped.

OTLP protobuf is decoded by a minimal reader of the wire format, because only a dozen fields are needed; it
rejects inconsistent data.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Iterator
from typing import Any

from muster.core import errors, messages

MAX_BYTES = 4 << 20
SERVICE_NAME = "service.name"
NAME_MAX = 256

Figures = dict[str, dict[str, float]]  # by service, by metric


def service_reports(figures: Figures) -> list[messages.ServiceReport]:
    services = figures.items()
    return [messages.ServiceReport(name=name, metrics=metrics) for name, metrics in services if metrics]


def named(name: str, labels: Iterable[tuple[str, str]]) -> str:
    inside = ",".join(f"{key}={value}" for key, value in sorted(labels))
    return _valid(f"{name}{{{inside}}}" if inside else name)


def _valid(name: str) -> str:
    return errors.sendable(name[:NAME_MAX])  # it may be of JSON


def _put(figures: Figures, service: str, name: str, value: Any) -> None:
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return
    if name and math.isfinite(number):
        figures.setdefault(_valid(service) or "otlp", {})[name] = number


# -- OTLP, as JSON -----------------------------------------------------------------------------------------


def otlp_json(data: bytes) -> Figures:
    _bound(data)
    try:
        request = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise messages.MalformedMessage(f"not JSON: {str(error)[:100]}") from error
    figures: Figures = {}
    try:
        for resource in request.get("resourceMetrics", ()):
            attributes = dict(_attributes(resource.get("resource", {}).get("attributes", ())))
            service = attributes.get(SERVICE_NAME, "otlp")
            for scope in resource.get("scopeMetrics", ()):
                for metric in scope.get("metrics", ()):
                    _json_metric(figures, service, metric)
    except (AttributeError, TypeError, KeyError) as error:
        raise messages.MalformedMessage(f"not a request of OTLP: {str(error)[:100]}") from error
    return figures


def _json_metric(figures: Figures, service: str, metric: dict[str, Any]) -> None:
    name = str(metric["name"])
    for kind in ("gauge", "sum"):
        for point in metric.get(kind, {}).get("dataPoints", ()):
            value = point.get("asDouble", point.get("asInt"))
            _put(figures, service, named(name, _attributes(point.get("attributes", ()))), value)
    for kind in ("histogram", "exponentialHistogram", "summary"):
        for point in metric.get(kind, {}).get("dataPoints", ()):
            labels = list(_attributes(point.get("attributes", ())))
            _put(figures, service, named(f"{name}_count", labels), point.get("count"))
            _put(figures, service, named(f"{name}_sum", labels), point.get("sum"))


def _attributes(entries: Iterable[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    for entry in entries:
        value = next(iter(entry.get("value", {}).values()), "")
        yield str(entry["key"]), str(value).lower() if isinstance(value, bool) else str(value)


# -- OTLP, as protobuf -------------------------------------------------------------------------------------

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


def otlp_protobuf(data: bytes) -> Figures:
    _bound(data)
    figures: Figures = {}
    for resource in _messages(data, 1):
        attributes = {
            key: value for holder in _messages(resource, 1) for key, value in _pb_attributes(holder, 1)
        }
        service = attributes.get(SERVICE_NAME, "otlp")
        for scope in _messages(resource, 2):
            for metric in _messages(scope, 2):
                _pb_metric(figures, service, metric)
    return figures


def _pb_metric(figures: Figures, service: str, metric: bytes) -> None:
    fields = _fields(metric)
    name = _text(fields.get(1, [b""])[-1])
    for kind in (5, 7):  # gauge, sum
        for holder in _chunks(fields.get(kind, ())):
            for point in _messages(holder, 1):
                values = _fields(point)
                value: float | None = None
                if 4 in values:
                    value = struct.unpack("<d", _eight(values[4][-1]))[0]
                elif 6 in values:
                    value = float(struct.unpack("<q", _eight(values[6][-1]))[0])
                _put(figures, service, named(name, _pb_attributes(point, 7)), value)
    for kind, attributes in ((9, 9), (10, 1), (11, 7)):  # histogram, exponential histogram, summary
        for holder in _chunks(fields.get(kind, ())):
            for point in _messages(holder, 1):
                values = _fields(point)
                labels = list(_pb_attributes(point, attributes))
                if 4 in values:
                    count = struct.unpack("<Q", _eight(values[4][-1]))[0]
                    _put(figures, service, named(f"{name}_count", labels), count)
                if 5 in values:
                    total = struct.unpack("<d", _eight(values[5][-1]))[0]
                    _put(figures, service, named(f"{name}_sum", labels), total)


def _pb_attributes(holder: bytes, field: int) -> Iterator[tuple[str, str]]:
    for pair in _messages(holder, field):
        fields = _fields(pair)
        values = _chunks(fields.get(2, [b""]))
        if not values:
            raise messages.MalformedMessage("not OTLP: an attribute whose value is not a message")
        value = _fields(values[-1])
        shown = ""
        if 1 in value:
            shown = _text(value[1][-1])
        elif 2 in value:
            shown = "true" if value[2][-1] else "false"
        elif 3 in value:
            shown = str(_signed(value[3][-1]))
        elif 4 in value:
            shown = str(struct.unpack("<d", _eight(value[4][-1]))[0])
        yield _text(fields.get(1, [b""])[-1]), shown


def _fields(data: bytes) -> dict[int, list[bytes | int]]:
    """The fields of a message: integers for varints, bytes for all other types."""
    fields: dict[int, list[bytes | int]] = {}
    place = 0
    while place < len(data):
        key, place = _varint(data, place)
        number, kind = key >> 3, key & 7
        value: bytes | int
        if kind == _VARINT:
            value, place = _varint(data, place)
        else:
            if kind == _BYTES:
                size, place = _varint(data, place)
            elif kind in (_FIXED64, _FIXED32):
                size = 8 if kind == _FIXED64 else 4
            else:
                raise messages.MalformedMessage(f"not protobuf: wire type {kind}")
            value, place = data[place : place + size], place + size
            if place > len(data):
                raise messages.MalformedMessage("protobuf that ends too early")
        fields.setdefault(number, []).append(value)
    return fields


def _varint(data: bytes, place: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if place >= len(data) or shift > 63:
            raise messages.MalformedMessage("not protobuf: a number that does not end")
        byte = data[place]
        value |= (byte & 0x7F) << shift
        place, shift = place + 1, shift + 7
        if byte < 0x80:
            return value, place


def _messages(data: bytes, field: int) -> list[bytes]:
    return _chunks(_fields(data).get(field, ()))


def _chunks(values: Iterable[bytes | int]) -> list[bytes]:
    chunks = [value for value in values if isinstance(value, bytes)]
    return chunks if chunks else []


def _eight(value: bytes | int) -> bytes:
    if not isinstance(value, bytes) or len(value) != 8:
        raise messages.MalformedMessage("protobuf whose number is not of 64 bits")
    return value


def _signed(value: bytes | int) -> int:
    """A varint of type int64: negative numbers are sent as their two's complement."""
    if not isinstance(value, int):
        raise messages.MalformedMessage("protobuf whose number is not a varint")
    return value - (1 << 64) if value >= 1 << 63 else value


def _text(value: bytes | int) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


# -- Prometheus remote write -------------------------------------------------------------------------------


def remote_write(data: bytes) -> Figures:
    """The newest sample of each series of a WriteRequest; the label ``job`` is the service."""
    _bound(data)
    figures: Figures = {}
    for series in _messages(data, 1):
        labels = {}
        for label in _messages(series, 1):
            fields = _fields(label)
            labels[_text(fields.get(1, [b""])[-1])] = _text(fields.get(2, [b""])[-1])
        name, service = labels.pop("__name__", ""), labels.pop("job", "prometheus")
        if not name or name.endswith("_bucket"):
            continue
        points = [_fields(sample) for sample in _messages(series, 2)]
        if points:
            newest = max(points, key=lambda point: _signed(point.get(2, [0])[-1]))
            value = struct.unpack("<d", _eight(newest.get(1, [bytes(8)])[-1]))[0]
            _put(figures, service, named(name, labels.items()), value)
    return figures


# -- OpenMetrics and the Prometheus text format ------------------------------------------------------------


def openmetrics(text: str, service: str, *, content_type: str = "") -> Figures:
    """The samples of an exposition, as one service. Buckets and creation times are excluded."""
    from prometheus_client import parser as classic
    from prometheus_client.openmetrics import parser as strict

    parser: Any = strict if "openmetrics" in content_type else classic
    figures: Figures = {service: {}}
    try:
        for family in parser.text_string_to_metric_families(text):
            for sample in family.samples:
                if not sample.name.endswith(("_bucket", "_created")):
                    _put(figures, service, named(sample.name, sample.labels.items()), sample.value)
    except Exception as error:  # whatever that parser raises, the machine must not become silent
        raise messages.MalformedMessage(f"not OpenMetrics: {str(error)[:200]}") from error
    return figures


def _bound(data: bytes) -> None:
    if len(data) > MAX_BYTES:
        raise messages.MessageTooLarge(f"{len(data)} bytes of OTLP are over {MAX_BYTES}")
