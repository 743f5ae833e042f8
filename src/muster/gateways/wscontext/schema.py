"""The messages of the WS-Context profile: names, schema, and the WSDL of its two endpoints."""

from __future__ import annotations

from muster.core.formats import xml
from muster.gateways.soap import addresses, wsdl

WSCTX = xml.XmlNamespace("http://docs.oasis-open.org/ws-caf/2005/10/wsctx")
OURS = xml.XmlNamespace("urn:muster:context:1")  # for contents that are not XML
PREFIXES: dict[str, str] = {WSCTX: "wsctx", OURS: "m", addresses.WSA04: "wsa", addresses.WSA05: "wsa5"}

FAULTS = (
    "invalidStateFault",
    "timeoutOutOfRangeFault",
    "childActivityPendingFault",
    "noActivityFault",
    "invalidActivityFault",
    "noPermissionFault",
    "validContextExpectedFault",
    "unknownContextFault",
    "generalFault",
)
REPLIES = {
    "begin": "begun",
    "complete": "completed",
    "getStatus": "status",
    "setTimeout": "timeoutSet",
    "getTimeout": "timeout",
    "getContents": "contents",
    "setContents": "contentsSet",
}
SERVICE = ("begin", "complete", "getStatus", "setTimeout", "getTimeout")
MANAGER = ("getContents", "setContents")
COMPLETION_STATUSES = ("SUCCESS", "FAIL", "FAIL_ONLY")  # of WS-CAF; an activity completes in the same way

_SCHEMA = f"""
<xsd:schema xmlns:xsd="{wsdl.XSD}" xmlns:wsctx="{WSCTX}" targetNamespace="{WSCTX}"
    elementFormDefault="qualified">
  <xsd:complexType name="ReferenceType">
    <xsd:sequence>
      <xsd:any namespace="##other" processContents="lax" minOccurs="0" maxOccurs="unbounded"/>
    </xsd:sequence>
  </xsd:complexType>
  <xsd:complexType name="ContextType">
    <xsd:sequence>
      <xsd:element name="context-identifier" type="xsd:anyURI"/>
      <xsd:element name="context-service" type="wsctx:ReferenceType" minOccurs="0"/>
      <xsd:element name="context-manager" type="wsctx:ReferenceType" minOccurs="0"/>
      <xsd:element name="parent-context" type="wsctx:ContextType" minOccurs="0"/>
      <xsd:any namespace="##other" processContents="lax" minOccurs="0" maxOccurs="unbounded"/>
    </xsd:sequence>
    <xsd:attribute name="expiresAt" type="xsd:dateTime"/>
  </xsd:complexType>
  <xsd:complexType name="EmptyType"><xsd:sequence/></xsd:complexType>
  <xsd:simpleType name="StatusType">
    <xsd:restriction base="xsd:string">
      <xsd:enumeration value="ACTIVE"/><xsd:enumeration value="COMPLETING"/>
      <xsd:enumeration value="COMPLETED"/>
      <xsd:enumeration value="NO_ACTIVITY"/><xsd:enumeration value="UNKNOWN"/>
    </xsd:restriction>
  </xsd:simpleType>
  <xsd:simpleType name="CompletionStatusType">
    <xsd:restriction base="xsd:string">
      {"".join(f'<xsd:enumeration value="{status}"/>' for status in COMPLETION_STATUSES)}
    </xsd:restriction>
  </xsd:simpleType>
  <xsd:element name="context" type="wsctx:ContextType"/>
  <xsd:element name="begin">
    <xsd:complexType>
      <xsd:sequence><xsd:element name="timeout" type="xsd:int" minOccurs="0"/></xsd:sequence>
    </xsd:complexType>
  </xsd:element>
  <xsd:element name="begun">
    <xsd:complexType><xsd:sequence><xsd:element ref="wsctx:context"/></xsd:sequence></xsd:complexType>
  </xsd:element>
  <xsd:element name="complete">
    <xsd:complexType>
      <xsd:sequence>
        <xsd:element name="completion-status" type="wsctx:CompletionStatusType" minOccurs="0"/>
      </xsd:sequence>
    </xsd:complexType>
  </xsd:element>
  <xsd:element name="completed" type="wsctx:EmptyType"/>
  <xsd:element name="getStatus" type="wsctx:EmptyType"/>
  <xsd:element name="status" type="wsctx:StatusType"/>
  <xsd:element name="setTimeout">
    <xsd:complexType>
      <xsd:sequence><xsd:element name="timeout" type="xsd:int"/></xsd:sequence>
    </xsd:complexType>
  </xsd:element>
  <xsd:element name="timeoutSet" type="wsctx:EmptyType"/>
  <xsd:element name="getTimeout" type="wsctx:EmptyType"/>
  <xsd:element name="timeout" type="xsd:int"/>
  <xsd:element name="getContents" type="wsctx:EmptyType"/>
  <xsd:element name="contents">
    <xsd:complexType><xsd:sequence><xsd:element ref="wsctx:context"/></xsd:sequence></xsd:complexType>
  </xsd:element>
  <xsd:element name="setContents" type="wsctx:ReferenceType"/>
  <xsd:element name="contentsSet" type="wsctx:EmptyType"/>
  {"".join(f'<xsd:element name="{fault}" type="xsd:string"/>' for fault in FAULTS)}
</xsd:schema>
"""


def document(operations: tuple[str, ...], name: str, location: str) -> bytes:
    """The WSDL of an endpoint with these operations."""
    return wsdl.document(
        name=name,
        namespace=WSCTX,
        schema=_without_spaces(xml.parse(_SCHEMA.strip().encode())),
        operations=[
            wsdl.WsdlOperation(operation, operation, REPLIES[operation], FAULTS, headers=("context",))
            for operation in operations
        ],
        location=location,
    )


def _without_spaces(element: xml.XmlElement) -> xml.XmlElement:
    content = [_without_spaces(child) for child in element.children]
    return xml.XmlElement(
        element.name, *content, attributes=element.attributes, namespaces=element.namespaces
    )
