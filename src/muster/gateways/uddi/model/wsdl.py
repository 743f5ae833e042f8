"""XML Schema and WSDL of the UDDI endpoints, made from the table of elements."""

from __future__ import annotations

import functools
import html
from collections.abc import Iterator

from muster.core.formats import xml
from muster.gateways.uddi.model import schema

XSD = xml.XmlNamespace("http://www.w3.org/2001/XMLSchema")
WSDL = xml.XmlNamespace("http://schemas.xmlsoap.org/wsdl/")
WSDL_SOAP = xml.XmlNamespace("http://schemas.xmlsoap.org/wsdl/soap/")
TARGET = xml.XmlNamespace("urn:uddi-org:v3_service")
PREFIXES = {**schema.PREFIXES, str(XSD): "xsd", str(WSDL): "wsdl", str(WSDL_SOAP): "soap"}


_ADDRESS = "address.invalid"


def wsdl(address: str) -> bytes:
    """The description of all endpoints, each at ``address`` and its name."""
    # Cached without the address, because clients choose it with the header Host.
    quoted = html.escape(address, quote=True).encode("ascii", "xmlcharrefreplace")
    return _wsdl(_ADDRESS).replace(_ADDRESS.encode(), quoted)


@functools.lru_cache(maxsize=1)
def _wsdl(address: str) -> bytes:

    def named(tag: str, name: str, *inside: xml.XmlElement, **more: str) -> xml.XmlElement:
        return xml.XmlElement(WSDL(tag), *inside, attributes={"name": name, **more})

    def message(name: str, element: str) -> xml.XmlElement:
        part = [named("part", "body", element=f"uddi:{element}")] if element else []
        return named("message", name, *part)

    messages_by_name = {operation: operation for port in schema.PORTS.values() for operation in port}
    messages_by_name |= {
        response: response for port in schema.PORTS.values() for response in port.values() if response
    }
    messages = [message(f"{name}Message", name) for name in (*messages_by_name, "dispositionReport")]
    messages.append(message("successMessage", ""))
    literal = xml.XmlElement(WSDL_SOAP("body"), attributes={"use": "literal"})
    fault = xml.XmlElement(WSDL_SOAP("fault"), attributes={"name": "error", "use": "literal"})
    kinds, bindings, ports = [], [], []
    for port, operations in schema.PORTS.items():
        kinds.append(
            named(
                "portType",
                f"UDDI_{port}_PortType",
                *(
                    named(
                        "operation",
                        name,
                        xml.XmlElement(WSDL("input"), attributes={"message": f"tns:{name}Message"}),
                        xml.XmlElement(
                            WSDL("output"), attributes={"message": f"tns:{response or 'success'}Message"}
                        ),
                        named("fault", "error", message="tns:dispositionReportMessage"),
                    )
                    for name, response in operations.items()
                ),
            )
        )
        bindings.append(
            named(
                "binding",
                f"UDDI_{port}_SoapBinding",
                xml.XmlElement(
                    WSDL_SOAP("binding"),
                    attributes={"style": "document", "transport": "http://schemas.xmlsoap.org/soap/http"},
                ),
                *(
                    named(
                        "operation",
                        name,
                        xml.XmlElement(WSDL_SOAP("operation"), attributes={"soapAction": name}),
                        xml.XmlElement(WSDL("input"), literal),
                        xml.XmlElement(WSDL("output"), literal),
                        named("fault", "error", fault),
                    )
                    for name in operations
                ),
                type=f"tns:UDDI_{port}_PortType",
            )
        )
        where = xml.XmlElement(WSDL_SOAP("address"), attributes={"location": f"{address}/{port.lower()}"})
        ports.append(named("port", f"UDDI_{port}_Port", where, binding=f"tns:UDDI_{port}_SoapBinding"))
    root = xml.XmlElement(
        WSDL("definitions"),
        xml.XmlElement(WSDL("types"), uddi_schema(f"{address}?xsd")),
        *messages,
        *kinds,
        *bindings,
        named("service", "UDDI_Service", *ports),
        attributes={"name": "UDDI_Service", "targetNamespace": str(TARGET)},
        namespaces={"tns": str(TARGET), "uddi": str(schema.UDDI)},
    )
    return b'<?xml version="1.0" encoding="UTF-8"?>' + xml.write(root, PREFIXES)


def xml_schema() -> bytes:
    """The part of the XML namespace that UDDI refers to, served here so that clients need not download it."""
    language = xml.XmlElement(XSD("attribute"), attributes={"name": "lang", "type": "xsd:string"})
    root = xml.XmlElement(
        XSD("schema"), language, attributes={"targetNamespace": xml.XML}, namespaces={"xsd": str(XSD)}
    )
    return b'<?xml version="1.0" encoding="UTF-8"?>' + xml.write(root, PREFIXES)


def uddi_schema(xml_location: str) -> xml.XmlElement:
    """The schema of UDDI's messages and data."""
    imported = {"namespace": xml.XML, "schemaLocation": xml_location}
    return xml.XmlElement(
        XSD("schema"),
        xml.XmlElement(XSD("import"), attributes=imported),
        *_simple_types(),
        *(made for declaration in schema.BY_NAME.values() for made in _declarations(declaration)),
        attributes={"targetNamespace": str(schema.UDDI), "elementFormDefault": "qualified"},
        namespaces={"xsd": str(XSD), "uddi": str(schema.UDDI)},
    )


def _type(name: str) -> str:
    if name == "text":
        return "xsd:string"
    return f"uddi:{name}" if name in schema.TEXTS or name in schema.ENUMERATIONS else f"xsd:{name}"


def _simple_types() -> Iterator[xml.XmlElement]:
    def facet(name: str, value: object) -> xml.XmlElement:
        return xml.XmlElement(XSD(name), attributes={"value": str(value)})

    def declared(name: str, base: str, facets: list[xml.XmlElement]) -> xml.XmlElement:
        limits = xml.XmlElement(XSD("restriction"), *facets, attributes={"base": f"xsd:{base}"})
        return xml.XmlElement(XSD("simpleType"), limits, attributes={"name": name})

    for name, text in schema.TEXTS.items():
        if name == "text":
            continue
        facets = [facet("minLength", text.shortest)] if text.shortest else []
        facets.append(facet("maxLength", text.longest))
        if text.collapses:
            facets.append(facet("whiteSpace", "collapse"))
        yield declared(name, text.base, facets)
    for name, values in schema.ENUMERATIONS.items():
        yield declared(name, "token", [facet("enumeration", value) for value in values])


def _declarations(declared: schema.ElementDeclaration) -> Iterator[xml.XmlElement]:
    if declared.simple and not declared.attributes:
        properties = {"name": declared.name, "type": _type(declared.simple)}
        yield xml.XmlElement(XSD("element"), attributes=properties)
        return
    yield xml.XmlElement(XSD("element"), attributes={"name": declared.name, "type": f"uddi:{declared.name}"})
    attributes = []
    for name in declared.attributes:
        if name == "lang":
            attributes.append(xml.XmlElement(XSD("attribute"), attributes={"ref": "xml:lang"}))
            continue
        properties = {"name": name, "type": _type(schema.ATTRIBUTES[name])}
        if name in declared.required:
            properties["use"] = "required"
        attributes.append(xml.XmlElement(XSD("attribute"), attributes=properties))
    if declared.simple:
        base = {"base": _type(declared.simple)}
        inside: list[xml.XmlElement] = [
            xml.XmlElement(
                XSD("simpleContent"), xml.XmlElement(XSD("extension"), *attributes, attributes=base)
            )
        ]
    else:
        inside = attributes
        if declared.content is not None:
            part = declared.content
            if part.kind != "sequence" or part.often:
                part = schema.SchemaPart("sequence", parts=(part,))
            inside = [_content(part), *attributes]
    yield xml.XmlElement(XSD("complexType"), *inside, attributes={"name": declared.name})


def _content(part: schema.SchemaPart) -> xml.XmlElement:
    attributes: dict[str, str] = {}
    if part.often and part.often in "?*":
        attributes["minOccurs"] = "0"
    if part.often and part.often in "*+":
        attributes["maxOccurs"] = "unbounded"
    if part.kind != "element":
        inner = [_content(child) for child in part.parts]
        return xml.XmlElement(XSD(part.kind), *inner, attributes=attributes)
    if part.name == "Signature":
        wildcard = {"namespace": str(schema.SIGNATURE), "processContents": "skip", **attributes}
        return xml.XmlElement(XSD("any"), attributes=wildcard)
    return xml.XmlElement(XSD("element"), attributes={"ref": f"uddi:{part.name}", **attributes})
