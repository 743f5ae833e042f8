"""Lossless conversion of reports to and from XML, the format of the paper.

The schema is published as ``docs/schemas/report.xsd``; its namespace contains the version.  Unknown
elements and attributes are ignored, as in all messages.

XML cannot represent every character of a name, such as most control characters; such a character is written
``\\uXXXX``, and a backslash ``\\\\``.

Input is parsed as UTF-8, without document types, entities or network access, and with bounded size and depth.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeAlias

import msgspec
from lxml import etree

from muster.core import messages
from muster.core.reports import columns

NAMESPACE = "urn:muster:report:1"
MAX_BYTES = 8 << 20

Report: TypeAlias = messages.ServiceReport | messages.NodeReport | columns.GroupReport | columns.SystemReport

_NO_XML = "\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff"
_TO_ESCAPE = re.compile(rf"[{_NO_XML}\\]")
_ESCAPED = re.compile(r"\\(?:u([0-9a-f]{4})|\\)")
_DECLARES = re.compile(r"<!(?:DOCTYPE|ENTITY)")

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
    element = _element(report)
    element.set("xmlns", NAMESPACE)
    data = etree.tostring(element, encoding="utf-8", xml_declaration=True)
    if len(data) > MAX_BYTES:
        raise messages.MessageTooLarge(f"a report of {len(data)} bytes of XML is over {MAX_BYTES}")
    return data


def decode(data: bytes) -> Report:
    """Decode a report. The ``code`` of an error is too-large, malformed, wrong-version or unknown-kind."""
    if len(data) > MAX_BYTES:
        raise messages.MessageTooLarge(f"{len(data)} bytes of XML are over {MAX_BYTES}")
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise messages.MalformedMessage("XML that is not UTF-8") from error
    if _DECLARES.search(text):
        raise messages.MalformedMessage("XML with a document type or entities is not accepted")
    try:
        root = etree.fromstring(data, _parser())
    except (etree.LxmlError, ValueError) as error:
        raise messages.MalformedMessage(f"not XML: {str(error)[:200]}") from error
    name = etree.QName(root)
    if name.namespace != NAMESPACE:
        raise columns.ReportVersionMismatch(
            f"XML of the namespace {str(name.namespace)[:80]!r}, not {NAMESPACE!r}"
        )
    if name.localname not in _ELEMENTS:
        raise messages.UnknownMessageKind(
            f"no report: {name.localname[:60]!r}; there are {', '.join(_ELEMENTS)}"
        )
    kind = _ELEMENTS[name.localname]
    try:
        return msgspec.convert(_fields(root, name.localname), kind, strict=False)
    except msgspec.ValidationError as error:
        raise messages.MalformedMessage(f"no {name.localname}: {str(error)[:200]}") from error


def _parser() -> Any:
    return etree.XMLParser(
        encoding="utf-8",
        resolve_entities=False,
        load_dtd=False,
        no_network=True,
        huge_tree=False,
        remove_comments=True,
        remove_pis=True,
        collect_ids=False,
    )


def _element(report: Report) -> Any:
    element = etree.Element(_NAMES[type(report)])
    for field in report.__struct_fields__:
        value = getattr(report, field)
        if field == "metrics":
            for name, figure in value.items():
                _metric(element, name, figure)
        elif field == "top":
            for name, ranking in value.items():
                for entry in ranking:
                    facts = {"machine": _escape(entry.machine), "value": _text(entry.value)}
                    etree.SubElement(element, "ranked", {"metric": _escape(name), **facts})
        elif field in ("states", "dropped") and isinstance(value, Mapping):
            child, key = ("state", "name") if field == "states" else ("dropped", "reason")
            for name, count in value.items():
                etree.SubElement(element, child, {key: _escape(name), "count": str(count)})
        elif isinstance(value, tuple):
            element.extend([_element(nested) for nested in value])
        elif value is not None:
            element.set(field.replace("_", "-"), _text(value))
    return element


def _metric(parent: Any, name: str, figure: float | columns.MetricRollup) -> None:
    child = etree.SubElement(parent, "metric", {"name": _escape(name)})
    if isinstance(figure, columns.MetricRollup):
        for field in figure.__struct_fields__:
            if (value := getattr(figure, field)) is not None:
                child.set(field, _text(value))
    else:
        child.text = repr(float(figure))


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _escape(value)
    if isinstance(value, (int, float)):
        return repr(value)
    return str(value.value)  # a state


def _fields(element: Any, name: str) -> dict[str, Any]:
    fields: dict[str, Any] = {
        key.replace("-", "_"): _unescape(value) for key, value in element.attrib.items()
    }
    rolled = name in ("group-report", "system-report")
    metrics: dict[str, Any] = {}
    for child in element:
        tag = etree.QName(child).localname
        if tag == "metric":
            figures: dict[str, Any] = {key: _unescape(value) for key, value in child.attrib.items()}
            metrics[figures.pop("name", "")] = figures if rolled else child.text or ""
        elif tag in _COUNTS and rolled:
            field, key = _COUNTS[tag]
            counts = fields.setdefault(field, {})
            counts[_unescape(child.get(key, ""))] = child.get("count", "")
        elif tag == "ranked":
            facts = {key: _unescape(value) for key, value in child.attrib.items()}
            fields.setdefault("top", {}).setdefault(facts.pop("metric", ""), []).append(facts)
        elif tag in _LISTS:
            fields.setdefault(_LISTS[tag], []).append(_fields(child, tag))
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
