"""The standard's faults, and which of them each of our errors is."""

from __future__ import annotations

from collections.abc import Sequence

from muster.core import errors
from muster.core.formats import xml
from muster.gateways.soap import addressing, callbacks, faults
from muster.gateways.wsman.wire import namespaces

SENDER, RECEIVER = faults.SoapFaultCode.SENDER, faults.SoapFaultCode.RECEIVER
Fault = faults.SoapFault
said_of = faults.public_message


def fault(
    subcode: str,
    reason: str,
    detail: str = "",
    *,
    blame: faults.SoapFaultCode = SENDER,
    more: Sequence[xml.XmlElement] = (),
) -> faults.SoapFault:
    """``detail``: the last word of the standard's fault detail."""
    details = (
        [xml.XmlElement(namespaces.WSMAN("FaultDetail"), f"{namespaces.DETAIL}{detail}")] if detail else []
    )
    return faults.SoapFault(blame, reason, subcode=subcode, details=[*details, *more])


def missing_header(name: str) -> faults.SoapFault:
    return fault(namespaces.WSA("MessageInformationHeaderRequired"), f"the header {name} is missing")


def invalid_header(reason: str, detail: str = "") -> faults.SoapFault:
    return fault(namespaces.WSA("InvalidMessageInformationHeader"), reason, detail)


def unreachable(reason: str, detail: str = "") -> faults.SoapFault:
    return fault(namespaces.WSA("DestinationUnreachable"), reason, detail)


def selectors(reason: str, detail: str) -> faults.SoapFault:
    return fault(namespaces.WSMAN("InvalidSelectors"), reason, detail)


def schema(reason: str) -> faults.SoapFault:
    return fault(namespaces.WSMAN("SchemaValidationError"), reason)


def representation(reason: str, detail: str = "InvalidValues") -> faults.SoapFault:
    return fault(namespaces.WXF("InvalidRepresentation"), reason, detail)


def unsupported(reason: str, detail: str) -> faults.SoapFault:
    return fault(namespaces.WSMAN("UnsupportedFeature"), reason, detail)


def parameter(reason: str, detail: str = "") -> faults.SoapFault:
    return fault(namespaces.WSMAN("InvalidParameter"), reason, detail)


def encoding(reason: str, detail: str) -> faults.SoapFault:
    return fault(namespaces.WSMAN("EncodingLimit"), reason, detail)


def from_error(error: errors.MusterError) -> faults.SoapFault:
    """What a client of the standard understands of our error."""
    said = faults.public_message(error)
    match error:
        case faults.SoapFault():
            return error
        case xml.MalformedXml(reason="charset"):
            return encoding(said, "CharacterSet")
        case xml.MalformedXml():
            return schema(said)
        case callbacks.CallbackNotAllowed() | errors.Forbidden():
            return fault(namespaces.WSMAN("AccessDenied"), said)
        case errors.NotFound():
            return unreachable(said, "InvalidResourceURI")
        case errors.AlreadyExists():
            return fault(namespaces.WSMAN("AlreadyExists"), said)
        case errors.Conflict() | errors.StaleEpoch():
            return fault(namespaces.WSMAN("Concurrency"), said)
        case errors.LimitExceeded():
            return encoding(said, "ServiceEnvelopeLimit")
        case errors.InvalidInput():
            return parameter(said)
        case errors.Refused():
            return fault(namespaces.WSMAN("AccessDenied"), said)
        case errors.TimedOut():
            return fault(namespaces.WSMAN("TimedOut"), said, blame=RECEIVER)
        case errors.Overloaded():
            return fault(namespaces.WSMAN("QuotaLimit"), said)
        case errors.Unavailable():
            return fault(namespaces.WSA("EndpointUnavailable"), said, "ResourceOffline", blame=RECEIVER)
    return fault(
        namespaces.WSMAN("InternalError"),
        "the door has a fault of its own; its log says more",
        blame=RECEIVER,
    )


def headers(asked: addressing.Addressing | None, told: faults.SoapFault) -> list[xml.XmlElement]:
    """Of the answer with this fault: its action follows from the namespace of the subcode."""
    namespace = told.subcode.rpartition("}")[0][1:] if told.subcode else namespaces.WSA
    action = namespaces.FAULT_ACTIONS.get(
        xml.XmlNamespace(namespace), namespaces.FAULT_ACTIONS[namespaces.WSA]
    )
    return (asked or addressing.Addressing()).reply_headers(action)
