"""WSDL 1.1 of a door, made from a table of its operations: document/literal, for SOAP 1.1 and 1.2.

The types are the service's own schema; each operation takes and gives one element of it, and names the
elements of the faults it may answer with.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from muster.core.formats import xml
from muster.gateways.soap import envelope

WSDL = xml.Namespace("http://schemas.xmlsoap.org/wsdl/")
XSD = xml.Namespace("http://www.w3.org/2001/XMLSchema")
_HTTP = "http://schemas.xmlsoap.org/soap/http"
_BINDINGS = {
    envelope.Version.V11: ("Soap11", "soap11", xml.Namespace("http://schemas.xmlsoap.org/wsdl/soap/")),
    envelope.Version.V12: ("Soap12", "soap12", xml.Namespace("http://schemas.xmlsoap.org/wsdl/soap12/")),
}


@dataclass(frozen=True, slots=True)
class Operation:
    """``takes``, ``gives`` and ``faults``: local names of the target namespace's elements."""

    name: str
    takes: str
    gives: str
    faults: Sequence[str] = ()
    headers: Sequence[str] = ()  # elements that may stand in the request's header


def document(
    *,
    name: str,
    namespace: str,
    schema: xml.Element,
    operations: Sequence[Operation],
    location: str,
    versions: Iterable[envelope.Version] = tuple(envelope.Version),
    action: str = "",
) -> bytes:
    """``action``: what stands before an operation's name in its soapAction."""
    action = action or f"{namespace}/"
    scope = {"tns": namespace}
    used = sorted(
        {one for op in operations for one in (op.takes, op.gives, *op.faults, *op.headers)},
    )
    messages = [
        _named("message", one, _element("part", name="parameters", element=f"tns:{one}")) for one in used
    ]
    port_type = _named("portType", name, *(_abstract(op) for op in operations))
    chosen = [(version, *_BINDINGS[version]) for version in versions]
    bindings = [
        _named(
            "binding",
            f"{name}{suffix}",
            xml.Element(soap("binding"), attributes={"style": "document", "transport": _HTTP}),
            *(_concrete(op, soap, action) for op in operations),
            type=f"tns:{name}",
        )
        for _, suffix, _, soap in chosen
    ]
    ports = [
        _named(
            "port",
            f"{name}{suffix}Port",
            xml.Element(soap("address"), attributes={"location": location}),
            binding=f"tns:{name}{suffix}",
        )
        for _, suffix, _, soap in chosen
    ]
    root = xml.Element(
        WSDL("definitions"),
        xml.Element(WSDL("types"), schema),
        *messages,
        port_type,
        *bindings,
        _named("service", f"{name}Service", *ports),
        attributes={"name": name, "targetNamespace": namespace},
        namespaces={**scope, "wsdl": str(WSDL), "xsd": str(XSD), **{p: str(ns) for _, _, p, ns in chosen}},
    )
    return b'<?xml version="1.0" encoding="UTF-8"?>\n' + xml.write(root)


def _element(local: str, *content: xml.Element, **attributes: str) -> xml.Element:
    return xml.Element(WSDL(local), *content, attributes=attributes)


def _named(local: str, name: str, *content: xml.Element, **attributes: str) -> xml.Element:
    return _element(local, *content, name=name, **attributes)


def _abstract(op: Operation) -> xml.Element:
    return _named(
        "operation",
        op.name,
        _element("input", message=f"tns:{op.takes}"),
        _element("output", message=f"tns:{op.gives}"),
        *(_named("fault", one, message=f"tns:{one}") for one in op.faults),
    )


def _concrete(op: Operation, soap: xml.Namespace, action: str) -> xml.Element:
    def body(*more: xml.Element) -> Iterator[xml.Element]:
        yield from more
        yield xml.Element(soap("body"), attributes={"use": "literal"})

    headers = [
        xml.Element(
            soap("header"), attributes={"message": f"tns:{one}", "part": "parameters", "use": "literal"}
        )
        for one in op.headers
    ]
    return _named(
        "operation",
        op.name,
        xml.Element(soap("operation"), attributes={"soapAction": f"{action}{op.name}", "style": "document"}),
        _element("input", *body(*headers)),
        _element("output", *body()),
        *(
            _named("fault", one, xml.Element(soap("fault"), attributes={"name": one, "use": "literal"}))
            for one in op.faults
        ),
    )
