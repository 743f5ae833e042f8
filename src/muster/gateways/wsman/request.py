"""A request as the handlers get it, and the form of their responses."""

from __future__ import annotations

from collections.abc import Sequence

from muster.core.formats import xml
from muster.gateways.soap import endpoint, xsd_types
from muster.gateways.wsman.wire import faults, headers, namespaces, representations
from muster.trust.login import passwords

TIMEOUT_S = 60.0  # of an operation without an OperationTimeout

#: The body and further headers of a response.
ResponseParts = tuple[Sequence[xml.XmlElement], Sequence[xml.XmlElement]]


def build_response(*body: xml.XmlElement, more: Sequence[xml.XmlElement] = ()) -> ResponseParts:
    return body, more


class WsManRequest:
    """A SOAP request with its WS-Management headers."""

    def __init__(
        self, call: endpoint.SoapRequest, read: headers.WsManHeaders, caller: passwords.PasswordLogin
    ) -> None:
        self.call = call
        self.headers = read
        self.caller = caller
        # CIM clients add the namespace of the server.
        self.selectors = {name: text for name, text in read.selectors.items() if name != "__cimnamespace"}

    @property
    def kind(self) -> xml.XmlNamespace:
        for kind in namespaces.KINDS:
            if self.headers.resource == kind:
                return kind
        raise faults.unreachable(
            f"unknown resource {self.headers.resource[:200]!r}; use one of {', '.join(namespaces.KINDS)}",
            "InvalidResourceURI",
        )

    @property
    def body(self) -> xml.XmlElement | None:
        if len(self.call.envelope.body) > 1:
            raise faults.schema("the body has more than one element")
        return self.call.envelope.first

    def element(self, name: str) -> xml.XmlElement:
        if self.body is None or self.body.name != name:
            raise faults.schema(f"the body must have one <{name.rpartition('}')[2]}>")
        return self.body

    def only_resources(self) -> None:
        if self.kind != namespaces.RESOURCE:
            raise faults.fault(
                namespaces.WSA("ActionNotSupported"),
                f"{namespaces.KINDS[self.kind].lower()}s are read-only",
            )

    def method(self) -> str:
        """The method of a custom action, ``{ResourceURI}/{Method}``."""
        before, _, method = self.headers.action.rpartition("/")
        if before != self.headers.resource or not xml.NCNAME.match(method):
            raise faults.fault(
                namespaces.WSA("ActionNotSupported"), f"unknown action {self.headers.action[:200]!r}"
            )
        return method

    def reference(self, name: str, tag: str) -> xml.XmlElement:
        return representations.endpoint(self.call.location, self.kind, name, tag)


def granted_expiry(requested: xml.XmlElement | None, ends_at_s: float, now_s: float) -> str:
    """The expiry in the form of the request: a duration or a time."""
    if requested is not None and requested.text and not requested.text.startswith("P"):
        return xsd_types.format_datetime(ends_at_s)
    return xsd_types.duration(ends_at_s - now_s)
