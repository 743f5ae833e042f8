"""Resources as XML and back.

    <p:Resource xmlns:p="urn:muster:manage:1/Resource">
      <p:Name>web-1</p:Name><p:Type>process</p:Type><p:Agent>host-a</p:Agent><p:Group>web</p:Group>
      <p:Desired>up</p:Desired>
      <p:Labels><p:Item Name="tier">front</p:Item></p:Labels>
      <p:DependsOn>db</p:DependsOn>
      <p:Restart><p:Item Name="attempts" Type="integer">5</p:Item></p:Restart>
      <p:Config><p:Item Name="command" Type="list"><p:Item>sleep</p:Item></p:Item></p:Config>
      <p:State>up</p:State><p:Reason/>…
    </p:Resource>

A client can send back what it has read: a Put changes the properties up to ``Config`` that differ and ignores
the rest, which is read-only; ``Generation``, if present, must be the current one.

Values of a configuration are JSON values: an ``Item`` has a ``Type`` unless it is a text.  A text with
characters that XML does not allow, such as control characters, is written as a JSON string: ``Type="json"``,
or ``JsonName`` instead of ``Name``.  Pure.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec

from muster.core import errors
from muster.core.formats import xml
from muster.gateways.soap import addresses, xsd_types
from muster.gateways.wsman.wire import faults, namespaces
from muster.manage import protocol, rows

DEPTH_MAX = 20

#: The properties that a Put may change, and their fields in a manifest entry.
_TEXTS = {"Type": "type", "Agent": "agent", "Where": "where", "Group": "group", "Desired": "desired"}
_MAPS = {"Labels": "labels", "Restart": "restart", "Config": "config"}
_READ_ONLY_NAMES = (
    "State", "Reason", "Since", "Drift", "Restarts", "Manager", "Epoch", "Generation", "Applied", "AppliedBy",
    "WaitsFor",
)  # fmt: skip
READ_ONLY = frozenset(_READ_ONLY_NAMES)


def item(name: str, value: Any, p: xml.XmlNamespace, *, tag: str = "Item") -> xml.XmlElement:
    """A JSON value as an element. ``name`` empty: an item of a list, or a property named ``tag``."""
    attributes = {"Name": name} if name else {}
    if not xml.can_hold(name):
        attributes = {"JsonName": json.dumps(name)}
    content: list[xml.Content] = []
    match value:
        case None:
            attributes["Type"] = "null"
        case bool():
            attributes["Type"], content = "boolean", ["true" if value else "false"]
        case int():
            attributes["Type"], content = "integer", [str(value)]
        case float():
            attributes["Type"], content = "number", [repr(value)]
        case Mapping():
            attributes["Type"] = "map"
            content = [item(str(key), member, p) for key, member in value.items()]
        case list() | tuple():
            attributes["Type"] = "list"
            content = [item("", member, p) for member in value]
        case _ if not xml.can_hold(str(value)):
            attributes["Type"], content = "json", [json.dumps(str(value))]
        case _:
            content = [str(value)] if str(value) else []
    return xml.XmlElement(p(tag), *content, attributes=attributes)


def value(element: xml.XmlElement, depth: int = 0) -> Any:
    if depth > DEPTH_MAX:
        raise faults.representation(f"values are nested deeper than {DEPTH_MAX} levels")
    kind = element.get("Type") or "string"
    text = element.text
    try:
        match kind:
            case "string":
                if element.children:
                    raise errors.InvalidInput("a text contains elements")
                return element.exact_text
            case "integer":
                return xsd_types.parse_integer(text, minimum=-(1 << 63))
            case "number":
                return msgspec.json.decode(text, type=float)
            case "boolean":
                return xsd_types.parse_boolean(text)
            case "null":
                return None
            case "json":
                return msgspec.json.decode(text, type=str)
            case "list":
                return [value(child, depth + 1) for child in element.children]
            case "map":
                return _map(element, depth)
    except (errors.InvalidInput, msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        if isinstance(error, faults.Fault):
            raise
        raise faults.representation(f"{_named(element)}: {error}") from error
    raise faults.representation(f"{_named(element)}: unknown type {kind[:40]!r}")


def _map(element: xml.XmlElement, depth: int = 0) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for child in element.children:
        name = child.get("Name")
        escaped = child.get("JsonName")
        if escaped is not None:
            try:
                name = msgspec.json.decode(escaped, type=str)
            except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
                raise faults.representation(f"{_named(element)}: JsonName: {error}") from error
        if name is None or name in values:
            raise faults.representation(f"{_named(element)}: an item has no name or a repeated one")
        values[name] = value(child, depth + 1)
    return values


def _named(element: xml.XmlElement) -> str:
    return element.get("Name") or element.local


# A resource.


def resource(described: rows.ResourceDescription) -> xml.XmlElement:
    """A resource as XML, from the result of `ManageClient.describe`."""
    p, spec = namespaces.RESOURCE, described.spec

    def text_element(tag: str, text: object) -> xml.XmlElement:
        return xml.XmlElement(p(tag), str(text)) if text not in ("", None) else xml.XmlElement(p(tag))

    return xml.XmlElement(
        p("Resource"),
        text_element("Name", described.name),
        text_element("Type", described.type),
        text_element("Agent", described.agent),
        text_element("Group", described.group),
        text_element("Desired", described.desired),
        _plain(item("", spec.labels, p, tag="Labels")),
        *(text_element("DependsOn", dependency) for dependency in spec.depends_on),
        _plain(item("", msgspec.to_builtins(spec.restart), p, tag="Restart")),
        _plain(item("", spec.config, p, tag="Config")),
        text_element("State", described.state),
        text_element("Reason", described.reason),
        text_element("Since", xsd_types.format_datetime(described.since_ms / 1000)),
        text_element("Drift", described.drift),
        text_element("Restarts", described.restarts),
        text_element("Manager", described.manager),
        text_element("Epoch", described.epoch),
        text_element("Generation", described.generation),
        text_element("Applied", "true" if described.applied else "false"),
        text_element("AppliedBy", described.applied_by),
        *(text_element("WaitsFor", dependency) for dependency in described.waits_for),
    )


def _plain(element: xml.XmlElement) -> xml.XmlElement:
    """A property that is always a map, without its ``Type``."""
    return xml.XmlElement(element.name, *element.content)


def entry(body: xml.XmlElement | None) -> tuple[dict[str, Any], int | None]:
    """The manifest entry of a resource in XML, and the generation it was read at, if present."""
    p = namespaces.RESOURCE
    if body is None:
        raise faults.representation("the body is empty: expected a Resource", "MissingValues")
    if body.name != p("Resource"):
        detail = "InvalidNamespace" if body.local == "Resource" else "InvalidValues"
        raise faults.representation(
            f"<{body.local[:60]}> of {body.namespace[:80]!r} is not a Resource", detail
        )
    fields: dict[str, Any] = {}
    generation: int | None = None
    for child in body.children:
        if child.namespace != p:
            raise faults.representation(f"<{child.local[:60]}> has another namespace", "InvalidNamespace")
        if child.local == "DependsOn":
            fields.setdefault("depends_on", []).append(child.text)
            continue
        field = "name" if child.local == "Name" else _TEXTS.get(child.local) or _MAPS.get(child.local)
        if field is None:
            if child.local not in READ_ONLY:
                raise faults.representation(f"a resource has no property {child.local[:60]!r}")
            if child.local == "Generation" and child.text:
                generation = _integer(child)
        elif field in fields:
            raise faults.representation(f"the property {child.local} occurs twice")
        else:
            fields[field] = _map(child) if child.local in _MAPS else child.text
    if not fields.get("name"):
        raise faults.representation("the property Name is missing", "MissingValues")
    return {field: content for field, content in fields.items() if content != ""}, generation


def _integer(element: xml.XmlElement) -> int:
    try:
        return xsd_types.parse_integer(element.text)
    except errors.InvalidInput as error:
        raise faults.representation(f"{element.local}: {error.message}") from error


def changes(described: rows.ResourceDescription, desired: Mapping[str, Any]) -> dict[str, Any]:
    """The fields in which an entry differs from the current resource. Missing maps and lists are emptied."""
    now, _ = entry(resource(described))
    empty: dict[str, Any] = {"labels": {}, "depends_on": [], "config": {}}
    fields = [*_TEXTS.values(), "depends_on", *_MAPS.values()]
    changed: dict[str, Any] = {}
    for field in fields:
        if field not in desired and field not in empty:
            continue  # a missing text keeps its value
        new = desired.get(field, empty.get(field))
        if new != now.get(field, empty.get(field)):
            changed[field] = new
    return changed


# Agents, managers, events, results.


# The properties of agents and managers, and the fields of their rows. Clients know the names by the URI: one
# that changes needs a new URI, while the fields of rows may change.
_SIMPLE = {
    namespaces.AGENT: {
        "Name": "name", "State": "state", "Resources": "resources", "Zone": "zone", "Labels": "labels",
        "Facts": "facts", "Types": "types", "Machine": "machine", "Cordoned": "cordoned",
    },
    namespaces.MANAGER: {
        "Name": "name", "Resources": "resources", "ExpiresInS": "expires_in_s", "Leaving": "leaving",
    },
}  # fmt: skip


def simple(kind: xml.XmlNamespace, row: rows.AgentRow | rows.ManagerRow) -> xml.XmlElement:
    """An agent or a manager: scalars as properties, the rest as items."""
    content = []
    for tag, field in _SIMPLE[kind].items():
        cell = getattr(row, field)
        if isinstance(cell, Mapping | list | tuple):
            content.append(item("", cell, kind, tag=tag))
        elif isinstance(cell, bool):
            content.append(xml.XmlElement(kind(tag), "true" if cell else "false"))
        else:
            content.append(xml.XmlElement(kind(tag), "" if cell is None else str(cell)))
    return xml.XmlElement(kind(namespaces.KINDS[kind]), *content)


def event(source: protocol.ResourceStateChange | protocol.ResourceEvent) -> tuple[str, xml.XmlElement]:
    """The action and the body of an event."""
    p = namespaces.RESOURCE
    if isinstance(source, protocol.ResourceEvent):
        tag, facts = "Event", {"What": source.what, "Details": source.details, "At": source.at_ms}
    else:
        tag = "StateChanged"
        facts = {
            "State": source.state.value,
            "Was": source.was.value if source.was else "",
            "Reason": source.reason,
            "Manager": source.manager,
            "Epoch": source.epoch,
            "Since": source.since_ms,
        }
    content = [xml.XmlElement(p("Name"), source.resource)]
    for name, fact in facts.items():
        if name in ("At", "Since"):
            assert isinstance(fact, int)
            content.append(xml.XmlElement(p(name), xsd_types.format_datetime(fact / 1000)))
        elif isinstance(fact, Mapping):
            content.append(_plain(item("", fact, p, tag=name)))
        else:
            content.append(xml.XmlElement(p(name), str(fact)))
    return f"{p}/{tag}", xml.XmlElement(p(tag), *content)


def arguments(element: xml.XmlElement | None, method: str) -> dict[str, Any]:
    """The arguments of a method: one child for each. Values other than texts have a ``Type``."""
    if element is None:
        return {}
    if element.local != f"{method}_INPUT":
        raise faults.schema(f"<{element.local[:60]}> instead of <{method[:60]}_INPUT>")
    values: dict[str, Any] = {}
    for child in element.children:
        name = child.get("Name") or child.local
        if name in values:
            raise faults.parameter(f"the parameter {name[:60]!r} occurs twice", "InvalidName")
        try:
            values[name] = value(child)
        except faults.Fault as error:
            raise faults.parameter(error.message, "TypeMismatch") from error
    return values


def endpoint(address: str, kind: xml.XmlNamespace, name: str, tag: str) -> xml.XmlElement:
    """The reference to a resource."""
    selector = xml.XmlElement(namespaces.WSMAN("Selector"), name, attributes={"Name": "Name"})
    parameters = [
        xml.XmlElement(namespaces.WSMAN("ResourceURI"), str(kind)),
        xml.XmlElement(namespaces.WSMAN("SelectorSet"), selector),
    ]
    return addresses.EndpointReference(address, parameters).element(tag)
