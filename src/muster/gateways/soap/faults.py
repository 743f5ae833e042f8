"""SOAP faults, and their mapping from errors.

A handler raises a `SoapFault` or any `errors.MusterError`; `from_error` decides whether the sender or the
receiver is responsible.  The versions differ: SOAP 1.1 has one code and unqualified elements, 1.2 a code,
subcodes and reasons by language.  SOAP 1.1 has no place for a subcode, so endpoints repeat it in the detail.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

from muster.core import errors
from muster.core.formats import xml

SOAP11 = xml.XmlNamespace("http://schemas.xmlsoap.org/soap/envelope/")
SOAP12 = xml.XmlNamespace("http://www.w3.org/2003/05/soap-envelope")


class SoapFaultCode(enum.Enum):
    """The codes of SOAP 1.2."""

    SENDER = "Sender"
    RECEIVER = "Receiver"
    MUST_UNDERSTAND = "MustUnderstand"
    VERSION_MISMATCH = "VersionMismatch"


_IN_11 = {SoapFaultCode.SENDER: "Client", SoapFaultCode.RECEIVER: "Server"}


class SoapFault(errors.Refused):
    """``details`` go into the detail of the fault, ``headers`` into the header of the response."""

    code = "soap-fault"

    def __init__(
        self,
        blame: SoapFaultCode,
        reason: str,
        *,
        subcode: str | None = None,
        details: Sequence[xml.XmlElement] = (),
        headers: Sequence[xml.XmlElement] = (),
    ) -> None:
        super().__init__(reason)
        self.blame = blame
        self.subcode = subcode
        self.details = tuple(details)
        self.headers = tuple(headers)

    @property
    def reason_word(self) -> str:
        """The label of the fault in a counter."""
        return self.subcode.rpartition("}")[2] if self.subcode else self.blame.value


def from_error(error: errors.MusterError) -> SoapFault:
    """An error as a fault without a subcode. Bugs are reported without details."""
    if isinstance(error, SoapFault):
        return error
    is_senders = isinstance(
        error, errors.InvalidInput | errors.Refused | errors.NotFound | errors.AlreadyExists
    )
    if isinstance(error, errors.InvariantViolation):
        return SoapFault(SoapFaultCode.RECEIVER, "internal error; see the log of the server")
    return SoapFault(SoapFaultCode.SENDER if is_senders else SoapFaultCode.RECEIVER, public_message(error))


def public_message(error: errors.MusterError) -> str:
    return f"{error.message} ({error.hint})" if error.hint else error.message


def element11(fault: SoapFault) -> xml.XmlElement:
    return xml.XmlElement(
        SOAP11("Fault"),
        xml.XmlElement("faultcode", xml.QName(SOAP11(_IN_11.get(fault.blame, fault.blame.value)))),
        xml.XmlElement("faultstring", fault.message),
        xml.XmlElement("detail", *fault.details) if fault.details else None,
    )


def element12(fault: SoapFault) -> xml.XmlElement:
    subcode = None
    if fault.subcode:
        subcode = xml.XmlElement(SOAP12("Subcode"), xml.XmlElement(SOAP12("Value"), xml.QName(fault.subcode)))
    return xml.XmlElement(
        SOAP12("Fault"),
        xml.XmlElement(
            SOAP12("Code"),
            xml.XmlElement(SOAP12("Value"), xml.QName(SOAP12(fault.blame.value))),
            subcode,
        ),
        xml.XmlElement(
            SOAP12("Reason"), xml.XmlElement(SOAP12("Text"), fault.message, attributes={xml.LANG: "en"})
        ),
        xml.XmlElement(SOAP12("Detail"), *fault.details) if fault.details else None,
    )
