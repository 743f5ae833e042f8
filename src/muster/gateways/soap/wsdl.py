"""WSDL 1.1 of an endpoint from a table of its operations: document/literal, for SOAP 1.1 and 1.2.

The types are the schema of the service.  Each operation has one element of it as input and one as output, and
lists the elements of its faults.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from muster.core.formats import xml
from muster.gateways.soap import envelope

WSDL = xml.XmlNamespace("http://schemas.xmlsoap.org/wsdl/")
XSD = xml.XmlNamespace("http://www.w3.org/2001/XMLSchema")
_HTTP = "http://schemas.xmlsoap.org/soap/http"
_BINDINGS = {
    envelope.SoapVersion.V11: ("Soap11", "soap11", xml.XmlNamespace("http://schemas.xmlsoap.org/wsdl/soap/")),
    envelope.SoapVersion.V12: (
        "Soap12",
        "soap12",
        xml.XmlNamespace("http://schemas.xmlsoap.org/wsdl/soap12/"),
    ),
}


@dataclass(frozen=True, slots=True)
class WsdlOperation:
    """``takes``, ``gives`` and ``faults``: local names of elements of the target namespace."""

    name: str
    takes: str
    gives: str
    faults: Sequence[str] = ()
    headers: Sequence[str] = ()  # elements of the request's header


def document(
    *,
    name: str,
    namespace: str,
    schema: xml.XmlElement,
    operations: Sequence[WsdlOperation],
    location: str,
    versions: Iterable[envelope.SoapVersion] = tuple(envelope.SoapVersion),
    action: str = "",
) -> bytes:
    """``action``: the prefix of each soapAction, before the name of the operation."""
    action = action or f"{namespace}/"
    scope = {"tns": namespace}
    used = sorted(
        {element for op in operations for element in (op.takes, op.gives, *op.faults, *op.headers)},
    )
    messages = [
        _named("message", element, _element("part", name="parameters", element=f"tns:{element}"))
        for element in used
    ]
    port_type = _named("portType", name, *(_abstract(op) for op in operations))
    chosen = [(version, *_BINDINGS[version]) for version in versions]
    bindings = [
        _named(
            "binding",
            f"{name}{suffix}",
            xml.XmlElement(soap("binding"), attributes={"style": "document", "transport": _HTTP}),
            *(_concrete(op, soap, action) for op in operations),
            type=f"tns:{name}",
        )
        for _, suffix, _, soap in chosen
    ]
    ports = [
        _named(
            "port",
            f"{name}{suffix}Port",
            xml.XmlElement(soap("address"), attributes={"location": location}),
            binding=f"tns:{name}{suffix}",
        )
        for _, suffix, _, soap in chosen
    ]
    root = xml.XmlElement(
        WSDL("definitions"),
        xml.XmlElement(WSDL("types"), schema),
        *messages,
        port_type,
        *bindings,
        _named("service", f"{name}Service", *ports),
        attributes={"name": name, "targetNamespace": namespace},
        namespaces={**scope, "wsdl": str(WSDL), "xsd": str(XSD), **{p: str(ns) for _, _, p, ns in chosen}},
    )
    return b'<?xml version="1.0" encoding="UTF-8"?>\n' + xml.write(root)


def _element(local: str, *content: xml.XmlElement, **attributes: str) -> xml.XmlElement:
    return xml.XmlElement(WSDL(local), *content, attributes=attributes)


def _named(local: str, name: str, *content: xml.XmlElement, **attributes: str) -> xml.XmlElement:
    return _element(local, *content, name=name, **attributes)


def _abstract(op: WsdlOperation) -> xml.XmlElement:
    return _named(
        "operation",
        op.name,
        _element("input", message=f"tns:{op.takes}"),
        _element("output", message=f"tns:{op.gives}"),
        *(_named("fault", fault, message=f"tns:{fault}") for fault in op.faults),
    )


def _concrete(op: WsdlOperation, soap: xml.XmlNamespace, action: str) -> xml.XmlElement:
    def body(*more: xml.XmlElement) -> Iterator[xml.XmlElement]:
        yield from more
        yield xml.XmlElement(soap("body"), attributes={"use": "literal"})

    headers = [
        xml.XmlElement(
            soap("header"), attributes={"message": f"tns:{header}", "part": "parameters", "use": "literal"}
        )
        for header in op.headers
    ]
    return _named(
        "operation",
        op.name,
        xml.XmlElement(
            soap("operation"), attributes={"soapAction": f"{action}{op.name}", "style": "document"}
        ),
        _element("input", *body(*headers)),
        _element("output", *body()),
        *(
            _named(
                "fault", fault, xml.XmlElement(soap("fault"), attributes={"name": fault, "use": "literal"})
            )
            for fault in op.faults
        ),
    )
