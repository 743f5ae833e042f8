"""Lossless conversion of reports to and from XML, the format of the paper.

The schema is published as ``docs/schemas/report.xsd``; its namespace contains the version.  Unknown
elements and attributes are ignored, as in all messages.

XML cannot represent every character of a name, such as most control characters; such a character is written
``\\uXXXX``, and a backslash ``\\\\``.

Input is read with `muster.core.formats.xml`: UTF-8 without document types, with bounded size and depth.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeAlias

import msgspec

from muster.core import errors, messages
from muster.core.formats import xml
from muster.core.reports import columns

NAMESPACE = "urn:muster:report:1"
MAX_BYTES = 8 << 20
_LIMITS = xml.XmlLimits(bytes=MAX_BYTES, depth=16, elements=500_000, attributes=256)
_HEAD = b"<?xml version='1.0' encoding='utf-8'?>\n"

Report: TypeAlias = messages.ServiceReport | messages.NodeReport | columns.GroupReport | columns.SystemReport

_NO_XML = "\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff"
_TO_ESCAPE = re.compile(rf"[{_NO_XML}\\]")
_ESCAPED = re.compile(r"\\(?:u([0-9a-f]{4})|\\)")

_ELEMENTS: dict[str, type[Report]] = {
    "service-report": messages.ServiceReport,
    "node-report": messages.NodeReport,
    "group-report": columns.GroupReport,
    "system-report": columns.SystemReport,
}
_NAMES = {kind: name for name, kind in _ELEMENTS.items()}

# Repeated children: their field, and the attribute that is the key.
_COUNTS = {"state": ("states", "name"), "dropped": ("dropped", "reason")}
_LISTS = {"service-report": "services", "node-report": "nodes", "group-report": "groups"}


def encode(report: Report) -> bytes:
    data = _HEAD + xml.write(_element(report), {NAMESPACE: ""})
    if len(data) > MAX_BYTES:
        raise messages.MessageTooLarge(f"a report of {len(data)} bytes of XML is over {MAX_BYTES}")
    return data


def decode(data: bytes) -> Report:
    """Decode a report. The ``code`` of an error is too-large, malformed, wrong-version or unknown-kind."""
    if len(data) > MAX_BYTES:
        raise messages.MessageTooLarge(f"{len(data)} bytes of XML are over {MAX_BYTES}")
    try:
        root = xml.parse(data, _LIMITS)
    except (xml.MalformedXml, errors.LimitExceeded) as error:
        raise messages.MalformedMessage(f"not a report in XML: {error.message[:200]}") from error
    if root.namespace != NAMESPACE:
        raise columns.ReportVersionMismatch(
            f"XML of the namespace {root.namespace[:80]!r}, not {NAMESPACE!r}"
        )
    if root.local not in _ELEMENTS:
        raise messages.UnknownMessageKind(f"no report: {root.local[:60]!r}; there are {', '.join(_ELEMENTS)}")
    kind = _ELEMENTS[root.local]
    try:
        return msgspec.convert(_fields(root), kind, strict=False)
    except msgspec.ValidationError as error:
        raise messages.MalformedMessage(f"no {root.local}: {str(error)[:200]}") from error


def _element(report: Report) -> xml.XmlElement:
    children: list[xml.XmlElement] = []
    attributes: dict[str, str] = {}
    for field in report.__struct_fields__:
        value = getattr(report, field)
        if field == "metrics":
            children += [_metric(name, figure) for name, figure in value.items()]
        elif field == "top":
            children += [
                _child(
                    "ranked", metric=_escape(name), machine=_escape(entry.machine), value=_text(entry.value)
                )
                for name, ranking in value.items()
                for entry in ranking
            ]
        elif field in ("states", "dropped") and isinstance(value, Mapping):
            child, key = ("state", "name") if field == "states" else ("dropped", "reason")
            children += [
                _child(child, **{key: _escape(name)}, count=str(count)) for name, count in value.items()
            ]
        elif isinstance(value, tuple):
            children += map(_element, value)
        elif value is not None:
            attributes[field.replace("_", "-")] = _text(value)
    return xml.XmlElement(_name(_NAMES[type(report)]), *children, attributes=attributes)


def _metric(name: str, figure: float | columns.MetricRollup) -> xml.XmlElement:
    if not isinstance(figure, columns.MetricRollup):
        return xml.XmlElement(_name("metric"), repr(float(figure)), attributes={"name": _escape(name)})
    fields = {field: getattr(figure, field) for field in figure.__struct_fields__}
    return _child(
        "metric",
        name=_escape(name),
        **{field: _text(value) for field, value in fields.items() if value is not None},
    )


def _child(tag: str, /, **attributes: str) -> xml.XmlElement:
    return xml.XmlElement(_name(tag), attributes=attributes)


def _name(local: str) -> str:
    return f"{{{NAMESPACE}}}{local}"


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _escape(value)
    if isinstance(value, (int, float)):
        return repr(value)
    return str(value.value)  # a state


def _fields(element: xml.XmlElement) -> dict[str, Any]:
    fields: dict[str, Any] = {
        key.replace("-", "_"): _unescape(value) for key, value in element.attributes.items()
    }
    rolled = element.local in ("group-report", "system-report")
    metrics: dict[str, Any] = {}
    for child in element.children:
        tag = child.local
        if tag == "metric":
            figures: dict[str, Any] = {key: _unescape(value) for key, value in child.attributes.items()}
            metrics[figures.pop("name", "")] = figures if rolled else child.text
        elif tag in _COUNTS and rolled:
            field, key = _COUNTS[tag]
            counts = fields.setdefault(field, {})
            counts[_unescape(child.attributes.get(key, ""))] = child.attributes.get("count", "")
        elif tag == "ranked":
            facts = {key: _unescape(value) for key, value in child.attributes.items()}
            fields.setdefault("top", {}).setdefault(facts.pop("metric", ""), []).append(facts)
        elif tag in _LISTS:
            fields.setdefault(_LISTS[tag], []).append(_fields(child))
    if metrics:
        fields["metrics"] = metrics
    return fields


def _escape(text: str) -> str:
    return _TO_ESCAPE.sub(lambda match: "\\\\" if match[0] == "\\" else f"\\u{ord(match[0]):04x}", text)


def _unescape(text: str) -> str:
    return (
        _ESCAPED.sub(lambda match: chr(int(match[1], 16)) if match[1] else "\\", text)
        if "\\" in text
        else text
    )
