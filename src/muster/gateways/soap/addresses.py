"""WS-Addressing in both namespaces: reply addresses, and message ids that relate a reply to its request.

WS-Management uses the submission of August 2004; other clients use the recommendation of 2005.  A reply uses
the namespace of its request.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from muster.core import errors
from muster.core.formats import xml
from muster.gateways.soap import envelope, faults

WSA04 = xml.XmlNamespace("http://schemas.xmlsoap.org/ws/2004/08/addressing")
WSA05 = xml.XmlNamespace("http://www.w3.org/2005/08/addressing")
ANONYMOUS = {WSA04: f"{WSA04}/role/anonymous", WSA05: f"{WSA05}/anonymous"}
NONE = f"{WSA05}/none"
PARAMETERS_MAX = 64
PARAMETERS_BYTES_MAX = 32 << 10

_SINGLE = ("To", "From", "ReplyTo", "FaultTo", "Action", "MessageID")


@dataclass(frozen=True, slots=True)
class EndpointReference:
    """An endpoint reference. Messages to it carry ``parameters`` as headers."""

    address: str
    parameters: Sequence[xml.XmlElement] = ()

    @classmethod
    def read(cls, element: xml.XmlElement) -> EndpointReference:
        wsa = xml.XmlNamespace(next((child.namespace for child in element.children), ""))
        parameters = [
            child
            for holder in ("ReferenceProperties", "ReferenceParameters")  # the first exists in 2004 only
            for group in element.all(wsa(holder))
            for child in group.children
        ]
        if len(parameters) > PARAMETERS_MAX:
            raise invalid_header(wsa, f"more than {PARAMETERS_MAX} reference parameters")
        try:  # each is written with all its namespace prefixes
            xml.write(xml.XmlElement("parameters", *parameters), bytes_max=PARAMETERS_BYTES_MAX)
        except errors.LimitExceeded:
            raise invalid_header(
                wsa, f"reference parameters of more than {PARAMETERS_BYTES_MAX} bytes"
            ) from None
        return cls(element.text_of(wsa("Address")), parameters)

    def element(self, name: str, wsa: xml.XmlNamespace = WSA04) -> xml.XmlElement:
        return xml.XmlElement(
            name,
            xml.XmlElement(wsa("Address"), self.address),
            xml.XmlElement(wsa("ReferenceParameters"), *self.parameters) if self.parameters else None,
        )

    def headers(self, wsa: xml.XmlNamespace) -> list[xml.XmlElement]:
        """The headers of a message to it besides ``To``."""
        if wsa == WSA04:
            return list(self.parameters)
        mark = {wsa("IsReferenceParameter"): "true"}
        return [
            xml.XmlElement(
                parameter.name,
                *parameter.content,
                attributes={**parameter.attributes, **mark},
                namespaces=parameter.namespaces,
            )
            for parameter in self.parameters
        ]


@dataclass(frozen=True, slots=True)
class Addressing:
    wsa: xml.XmlNamespace = WSA04
    to: str = ""
    action: str = ""
    message_id: str = ""
    reply_to: EndpointReference | None = None
    fault_to: EndpointReference | None = None
    repeated: Sequence[str] = field(default=())  # headers that occur more than once

    def replies_on_connection(self, *, fault: bool = False) -> bool:
        """Whether the reply is sent on the connection of the request."""
        endpoint = self.endpoint(fault=fault)
        return endpoint is None or endpoint.address in ("", ANONYMOUS[self.wsa])

    def endpoint(self, *, fault: bool = False) -> EndpointReference | None:
        return (self.fault_to or self.reply_to) if fault else self.reply_to

    def reply_headers(
        self, action: str, *, fault: bool = False, new_id: Callable[[], str] = lambda: f"uuid:{uuid.uuid4()}"
    ) -> list[xml.XmlElement]:
        endpoint = self.endpoint(fault=fault)
        address = endpoint.address if endpoint and endpoint.address else ANONYMOUS[self.wsa]
        headers = [
            xml.XmlElement(self.wsa("To"), address),
            xml.XmlElement(self.wsa("Action"), action),
            xml.XmlElement(self.wsa("MessageID"), new_id()),
        ]
        if self.message_id:
            headers.append(xml.XmlElement(self.wsa("RelatesTo"), self.message_id))
        return [*headers, *(endpoint.headers(self.wsa) if endpoint else ())]


def read(message: envelope.SoapEnvelope) -> Addressing | None:
    """None if the message has no header of either namespace."""
    for wsa in (WSA04, WSA05):
        headers: dict[str, list[xml.XmlElement]] = {}
        for header in message.headers:
            if header.namespace == wsa:
                headers.setdefault(header.local, []).append(header)
        if not headers:
            continue

        def text(name: str, headers: dict[str, list[xml.XmlElement]] = headers) -> str:
            return headers[name][0].text if name in headers else ""

        def endpoint(
            name: str, headers: dict[str, list[xml.XmlElement]] = headers
        ) -> EndpointReference | None:
            return EndpointReference.read(headers[name][0]) if name in headers else None

        return Addressing(
            wsa,
            text("To"),
            text("Action"),
            text("MessageID"),
            endpoint("ReplyTo"),
            endpoint("FaultTo"),
            [name for name in _SINGLE if len(headers.get(name, ())) > 1],
        )
    return None


_UNDERSTOOD = frozenset(wsa(name) for wsa in (WSA04, WSA05) for name in (*_SINGLE, "RelatesTo"))


def understood(name: str) -> bool:
    return name in _UNDERSTOOD


def invalid_header(wsa: xml.XmlNamespace, reason: str) -> faults.SoapFault:
    local = "InvalidMessageInformationHeader" if wsa == WSA04 else "InvalidAddressingHeader"
    return faults.SoapFault(faults.SoapFaultCode.SENDER, reason, subcode=wsa(local))
