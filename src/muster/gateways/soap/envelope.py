"""Reading and writing envelopes of SOAP 1.1 and 1.2.

The namespace of the envelope determines the version, and the response has the version of the request.  A
message with a header for this node that must be understood and is not, is rejected.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from muster.core.formats import xml
from muster.gateways.soap import faults

_NEXT = {
    "http://schemas.xmlsoap.org/soap/actor/next",
    "http://www.w3.org/2003/05/soap-envelope/role/next",
    "http://www.w3.org/2003/05/soap-envelope/role/ultimateReceiver",
    "",
}


class SoapVersion(enum.Enum):
    V11 = faults.SOAP11
    V12 = faults.SOAP12

    def __call__(self, local: str) -> str:
        return f"{{{self.value}}}{local}"

    @property
    def content_type(self) -> str:
        return "text/xml; charset=utf-8" if self is SoapVersion.V11 else "application/soap+xml;charset=UTF-8"

    @property
    def prefix(self) -> str:
        return "soap" if self is SoapVersion.V11 else "s"


_BY_NAMESPACE = {str(version.value): version for version in SoapVersion}


@dataclass(frozen=True, slots=True)
class SoapEnvelope:
    version: SoapVersion
    headers: Sequence[xml.XmlElement] = ()
    body: Sequence[xml.XmlElement] = ()

    @property
    def first(self) -> xml.XmlElement | None:
        """The first element of the body."""
        return self.body[0] if self.body else None

    def header(self, name: str) -> xml.XmlElement | None:
        return next((header for header in self.headers if header.name == name), None)


def version_of(root: xml.XmlElement) -> SoapVersion | None:
    """None if it is not an envelope, or of an unknown version."""
    return _BY_NAMESPACE.get(root.namespace) if root.local == "Envelope" else None


def read(root: xml.XmlElement, accepted: Sequence[SoapVersion] = tuple(SoapVersion)) -> SoapEnvelope:
    if root.local != "Envelope":
        raise faults.SoapFault(faults.SoapFaultCode.SENDER, f"<{root.local[:60]}> is not a SOAP envelope")
    version = version_of(root)
    if version is None or version not in accepted:
        supported = [
            xml.XmlElement(
                faults.SOAP12("SupportedEnvelope"),
                attributes={"qname": f"{supported_version.prefix}:Envelope"},
                namespaces={supported_version.prefix: str(supported_version.value)},
            )
            for supported_version in accepted
        ]
        raise faults.SoapFault(
            faults.SoapFaultCode.VERSION_MISMATCH,
            f"unsupported envelope version {root.namespace[:80]!r}; this endpoint supports "
            + " and ".join(str(supported_version.value) for supported_version in accepted),
            headers=[xml.XmlElement(faults.SOAP12("Upgrade"), *supported)],
        )
    if root.text:
        raise faults.SoapFault(faults.SoapFaultCode.SENDER, "text outside of the Header and the Body")
    parts = root.children
    names = [part.name for part in parts]
    if names not in ([version("Body")], [version("Header"), version("Body")]):
        raise faults.SoapFault(
            faults.SoapFaultCode.SENDER,
            "an envelope must have at most one Header, then one Body, and nothing else",
        )
    return SoapEnvelope(version, parts[0].children if len(parts) == 2 else (), parts[-1].children)


def check_understood(envelope: SoapEnvelope, understood: Callable[[str], bool]) -> None:
    """``understood`` returns whether the endpoint supports the header with this name."""
    version = envelope.version
    unknown = [
        header
        for header in envelope.headers
        if _attribute(header, version("mustUnderstand")) in ("1", "true")
        and _attribute(header, version("actor" if version is SoapVersion.V11 else "role")) in _NEXT
        and not understood(header.name)
    ]
    if unknown:
        headers = [
            xml.XmlElement(
                faults.SOAP12("NotUnderstood"),
                attributes={"qname": f"h:{header.local}" if header.namespace else header.local},
                namespaces={"h": header.namespace} if header.namespace else {},
            )
            for header in unknown
        ]
        raise faults.SoapFault(
            faults.SoapFaultCode.MUST_UNDERSTAND,
            f"the header {unknown[0].local[:60]!r} is not understood",
            headers=headers if version is SoapVersion.V12 else [],
        )


def _attribute(header: xml.XmlElement, name: str) -> str:
    """Without the white space around it, which is not part of a boolean or a URI."""
    return (header.get(name) or "").strip()


def write(
    version: SoapVersion,
    body: Sequence[xml.XmlElement],
    headers: Sequence[xml.XmlElement] = (),
    prefixes: Mapping[str, str] | None = None,
    *,
    bytes_max: int | None = None,
) -> bytes:
    """`errors.LimitExceeded` if the result would be longer than ``bytes_max``."""
    root = xml.XmlElement(
        version("Envelope"),
        xml.XmlElement(version("Header"), *headers) if headers else None,
        xml.XmlElement(version("Body"), *body),
    )
    known = {str(version.value): version.prefix, xml.XSI: "xsi", **(prefixes or {})}
    start = b'<?xml version="1.0" encoding="UTF-8"?>'
    return start + xml.write(root, known, bytes_max=None if bytes_max is None else bytes_max - len(start))


def write_fault(
    version: SoapVersion,
    fault: faults.SoapFault,
    headers: Sequence[xml.XmlElement] = (),
    prefixes: Mapping[str, str] | None = None,
    *,
    bytes_max: int | None = None,
) -> bytes:
    made = faults.element11(fault) if version is SoapVersion.V11 else faults.element12(fault)
    known = {str(faults.SOAP12): "s", **(prefixes or {})}
    return write(version, [made], [*headers, *fault.headers], known, bytes_max=bytes_max)
