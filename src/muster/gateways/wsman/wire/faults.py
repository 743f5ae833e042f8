"""The faults of WS-Management, and their mapping from errors."""

from __future__ import annotations

from collections.abc import Sequence

from muster.core import errors
from muster.core.formats import xml
from muster.gateways.soap import addresses, callbacks, faults
from muster.gateways.wsman.wire import namespaces

SENDER, RECEIVER = faults.SoapFaultCode.SENDER, faults.SoapFaultCode.RECEIVER
Fault = faults.SoapFault
public_message = faults.public_message


def fault(
    subcode: str,
    reason: str,
    detail: str = "",
    *,
    blame: faults.SoapFaultCode = SENDER,
    more: Sequence[xml.XmlElement] = (),
) -> faults.SoapFault:
    """``detail``: the last part of the fault detail of the standard."""
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
    """The fault of WS-Management for an error."""
    message = faults.public_message(error)
    match error:
        case faults.SoapFault():
            return error
        case xml.MalformedXml(reason="charset"):
            return encoding(message, "CharacterSet")
        case xml.MalformedXml():
            return schema(message)
        case callbacks.CallbackNotAllowed() | errors.Forbidden():
            return fault(namespaces.WSMAN("AccessDenied"), message)
        case errors.NotFound():
            return unreachable(message, "InvalidResourceURI")
        case errors.AlreadyExists():
            return fault(namespaces.WSMAN("AlreadyExists"), message)
        case errors.Conflict() | errors.StaleEpoch():
            return fault(namespaces.WSMAN("Concurrency"), message)
        case errors.LimitExceeded():
            return encoding(message, "ServiceEnvelopeLimit")
        case errors.InvalidInput():
            return parameter(message)
        case errors.Refused():
            return fault(namespaces.WSMAN("AccessDenied"), message)
        case errors.TimedOut():
            return fault(namespaces.WSMAN("TimedOut"), message, blame=RECEIVER)
        case errors.Overloaded():
            return fault(namespaces.WSMAN("QuotaLimit"), message)
        case errors.Unavailable():
            return fault(namespaces.WSA("EndpointUnavailable"), message, "ResourceOffline", blame=RECEIVER)
    return fault(
        namespaces.WSMAN("InternalError"),
        "internal error; see the log of the server",
        blame=RECEIVER,
    )


def headers(wsa: addresses.Addressing | None, error: faults.SoapFault) -> list[xml.XmlElement]:
    """The headers of a response with this fault; its action depends on the namespace of the subcode."""
    namespace = error.subcode.rpartition("}")[0][1:] if error.subcode else namespaces.WSA
    action = namespaces.FAULT_ACTIONS.get(
        xml.XmlNamespace(namespace), namespaces.FAULT_ACTIONS[namespaces.WSA]
    )
    return (wsa or addresses.Addressing()).reply_headers(action)
