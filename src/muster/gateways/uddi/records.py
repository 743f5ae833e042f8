"""UDDI entities as contexts, and contexts as entities.

Each business, service and tModel is a context.  Its value is the XML, and its attributes are those that
`find` and UDDI searches use.  A service is a service entry (`muster.inform.service_entries`) with the same
key, so both interfaces show the same data: a plain service entry is shown as a businessService of the
domain's own business, with its metadata as keywords, its location as a box and its lease as a keyed
reference.

Pure.
"""

from __future__ import annotations

import re
import urllib.parse
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from muster.core import errors
from muster.core.formats import xml
from muster.gateways.soap import xsd_types
from muster.gateways.uddi.model import entities, keys, matcher, schema
from muster.inform import protocol, service_entries

U = schema.UDDI
XML_BYTES_MAX = protocol.VALUE_BYTES_MAX
SPARE_BYTES = 64  # reserve for attributes that are added on storing

#: The business of services that were saved without one.
DOMAIN_KEY = "uddi:muster:domain"
DOMAIN_NAME = "Muster"

_KINDS = {"business": "businessEntity", "service": "businessService", "tmodel": "tModel"}
_KEYS = {"business": "businessKey", "service": "serviceKey", "tmodel": "tModelKey"}
_FOREIGN = re.compile(r"[^a-z0-9:_.,;!~*'()+\-$@=/]")
_YEAR_9999_S = 253_370_764_800
_OWN = frozenset({"names", "identifiers", "models", "bindings", "business", "created", "deleted", "uddi"})


@dataclass(frozen=True, slots=True)
class UddiRecord:
    """An entity in the registry."""

    kind: str
    key: str
    element: xml.XmlElement
    owner: str = ""
    created_at_s: float = 0.0
    modified_at_s: float = 0.0
    version: int = 0
    deleted: bool = False
    lease_left_s: float = 0.0  # when it was read; 0: no lease
    business: str = ""  # for a service
    entry: service_entries.ServiceEntry | None = None  # if it was saved without UDDI

    @property
    def names(self) -> list[entities.UddiName]:
        return entities.names(self.element)

    @property
    def first_name(self) -> str:
        return next((name.text for name in self.names), "")


def context_key(kind: str, key: str) -> str:
    if kind == "service":
        return service_entries.PREFIX + urllib.parse.unquote(key.removeprefix("uddi:"))
    return f"uddi/{kind}/{key}"


def entry_key(id: str) -> str:
    """The UDDI key of a plain entry: characters that UDDI keys cannot have, also capitals, become %xx."""
    return "uddi:" + _FOREIGN.sub(lambda match: "".join(f"%{byte:02x}" for byte in match[0].encode()), id)


def element_name(kind: str) -> str:
    return U(_KINDS[kind])


def key_name(kind: str) -> str:
    return _KEYS[kind]


def category(reference: entities.KeyedReference) -> str:
    return f"{reference.model}={reference.value}"


def attributes(
    kind: str, element: xml.XmlElement, created_at_s: float, *, deleted: bool = False
) -> protocol.Attributes:
    """The attributes for searches."""
    names = [name.text for name in entities.names(element)]
    bag = entities.bag(element)
    indexed: protocol.Attributes = {
        "kind": kind,
        "name": names[0] if names else "",
        "names": names,
        "categories": [category(reference) for reference in bag.references],
        "created": created_at_s,
        "uddi": True,
    }
    if kind == "service":
        bindings = entities.bindings(element)
        indexed |= {
            "access": [text for binding in bindings for text in entities.texts(binding, "accessPoint")],
            "business": element.get("businessKey") or "",
            "bindings": [binding.get("bindingKey") or "" for binding in bindings],
            "models": sorted({model for binding in bindings for model in entities.models(binding)}),
        }
        indexed = {**_metadata(bag), **indexed}
    else:
        indexed["identifiers"] = [
            category(reference) for reference in entities.bag(element, "identifierBag").references
        ]
    if deleted:
        indexed["deleted"] = True
    return indexed


def _metadata(bag: entities.CategoryBag) -> protocol.Attributes:
    """Name/value pairs, with numbers as numbers for predicates, and the centre of the box."""
    pairs: protocol.Attributes = {
        reference.name: number(reference.value)
        for reference in bag.references
        if reference.model == matcher.KEYWORDS
        and reference.name
        and reference.name not in service_entries.RESERVED | _OWN
    }
    return pairs | middle(bag)


def middle(bag: entities.CategoryBag) -> dict[str, protocol.Attribute]:
    """The centre of the last box in ``bag``, as metadata; empty without a box."""
    point: dict[str, protocol.Attribute] = {}
    for model, references in bag.groups:
        place = matcher.box_of(references) if model == matcher.BOX else None
        if place is not None:
            west, south, east, north = place
            lon = (west + (east if west <= east else east + 360.0)) / 2
            point = {"lon": lon if lon <= 180.0 else lon - 360.0, "lat": (south + north) / 2}
    return point


def number(text: str) -> protocol.Attribute:
    for kind in (int, float):
        try:
            value = kind(text)
        except ValueError:
            continue
        if abs(value) < 1e15 and str(value) == text:
            return value
    return text


def lease_s(element: xml.XmlElement) -> float:
    """The lease of a service in seconds; 0: none."""
    for reference in entities.bag(element).references:
        if reference.model == matcher.LEASE and reference.name == "lease_s":
            try:
                seconds = float(reference.value)
            except ValueError:
                seconds = -1.0
            if not 0 < seconds <= 100 * 365 * 86_400:
                raise schema.InvalidUddi(f"invalid lease of {reference.value[:40]!r} seconds")
            return seconds
    return 0.0


def check(kind: str, element: xml.XmlElement) -> None:
    """Raise an error if the entity cannot be stored."""
    schema.validate(element)  # a stored entity must be readable
    for model, references in entities.bag(element).groups:
        if model == matcher.BOX:
            matcher.box(references)
    if kind == "service":
        lease_s(element)
    xml.write(element, schema.PREFIXES, bytes_max=XML_BYTES_MAX)
    if len(protocol.encode(attributes(kind, element, 0.0))) > protocol.ATTRIBUTES_BYTES_MAX - SPARE_BYTES:
        raise errors.LimitExceeded(
            f"names, keys and categories have more than {protocol.ATTRIBUTES_BYTES_MAX - SPARE_BYTES} bytes"
        )


# From contexts to entities.


def read_record(context: protocol.Context) -> UddiRecord:
    """`errors.InvalidInput` or `errors.LimitExceeded` if the context is not an entity."""
    kind = str(context.attributes.get("kind", ""))
    if kind not in _KINDS:
        raise errors.InvalidInput(f"{context.key!r} is not a UDDI entity")
    entry = None
    if kind == "service" and not context.attributes.get("uddi"):
        entry = service_entries.from_context(context)
        element = from_entry(entry)
    else:
        element = xml.parse(context.value, xml.XmlLimits(bytes=XML_BYTES_MAX))
    key = element.get(_KEYS[kind]) or ""
    # Any client may write the context directly: it must not replace the entity of another key.
    if element.name != element_name(kind) or context_key(kind, key) != context.key:
        raise errors.InvalidInput(f"{context.key!r} has the entity of another key")
    if kind != "service" and keys.is_reserved(key):
        raise errors.InvalidInput(f"{context.key!r} has a reserved key")
    if len(key) > keys.LENGTH_MAX:
        raise errors.InvalidInput(f"{context.key!r} is too long for a UDDI key")
    if context.expires_at_ns:
        element = _with_lease(element, context.expires_at_ns)
    return UddiRecord(
        kind,
        key,
        element,
        context.writer,
        _seconds(context.attributes.get("created"), context.stamp_time),
        (context.stamp_time >> 16) / 1000,
        context.version,
        bool(context.attributes.get("deleted")),
        max(0.001, context.lease_left_s) if context.expires_at_ns else 0.0,
        (element.get("businessKey") or "") if kind == "service" else "",
        entry,
    )


def _seconds(created: object, stamp_time: int) -> float:
    if isinstance(created, int | float) and 0 <= created < _YEAR_9999_S:
        return float(created)
    return (stamp_time >> 16) / 1000


def from_entry(entry: service_entries.ServiceEntry) -> xml.XmlElement:
    """A plain service entry as a businessService."""
    key = entry_key(entry.id)
    bindings = [
        xml.XmlElement(
            U("bindingTemplate"),
            xml.XmlElement(U("accessPoint"), access[:4096], attributes={"useType": "endPoint"}),
            attributes={"bindingKey": f"{key}:{number}", "serviceKey": key},
        )
        for number, access in enumerate(entry.access, 1)
    ]
    pairs = [category_text.partition("=") for category_text in entry.categories]
    references = [keyed(model, value) for model, _, value in pairs]
    references += [
        keyed(matcher.KEYWORDS, _text(value), name)
        for name, value in entry.metadata.items()
        if name not in ("lon", "lat")
    ]
    groups = [_point(entry.metadata)] if {"lon", "lat"} <= set(entry.metadata) else []
    return xml.XmlElement(
        U("businessService"),
        xml.XmlElement(U("name"), entry.name[:255].strip() or "-"),
        xml.XmlElement(U("bindingTemplates"), *bindings) if bindings else None,
        xml.XmlElement(U("categoryBag"), *references, *groups) if references or groups else None,
        attributes={"serviceKey": key, "businessKey": DOMAIN_KEY},
    )


def keyed(model: str, value: str, name: str = "") -> xml.XmlElement:
    stated = {"tModelKey": model.lower()[:255], "keyName": name[:255], "keyValue": value[:255]}
    return xml.XmlElement(U("keyedReference"), attributes=stated)


def _text(value: protocol.Attribute) -> str:
    return ",".join(value) if isinstance(value, list) else str(value)


def _point(metadata: Mapping[str, protocol.Attribute]) -> xml.XmlElement:
    lon, lat = _text(metadata["lon"]), _text(metadata["lat"])
    sides = {"minX": lon, "minY": lat, "maxX": lon, "maxY": lat}
    return xml.XmlElement(
        U("keyedReferenceGroup"),
        *(keyed(matcher.BOX, value, side) for side, value in sides.items()),
        attributes={"tModelKey": matcher.BOX},
    )


def _with_lease(element: xml.XmlElement, expires_at_ns: int) -> xml.XmlElement:
    ends = keyed(matcher.LEASE, xsd_types.format_datetime(expires_at_ns / 1e9), "expires_at")
    bag = element.find(U("categoryBag"))
    inside: Iterable[xml.XmlElement] = bag.children if bag is not None else ()
    references = [child for child in inside if child.name == U("keyedReference")]
    groups = [child for child in inside if child.name != U("keyedReference")]
    kept = [
        child
        for child in references
        if (child.get("tModelKey"), child.get("keyName")) != (matcher.LEASE, "expires_at")
    ]
    return entities.with_part(
        element,
        "name description bindingTemplates categoryBag",
        xml.XmlElement(U("categoryBag"), *kept, ends, *groups),
    )


def domain_business() -> xml.XmlElement:
    return xml.XmlElement(
        U("businessEntity"),
        xml.XmlElement(U("name"), DOMAIN_NAME),
        xml.XmlElement(U("description"), "Services of this domain that were saved without a business"),
        attributes={"businessKey": DOMAIN_KEY},
    )
