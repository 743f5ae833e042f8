"""Reads and validates the headers of a request: resource, action, selectors, and limits of the response.

Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from muster.core import errors
from muster.core.formats import xml
from muster.gateways.soap import addresses, envelope, xsd_types
from muster.gateways.soap import endpoint as soap_endpoint
from muster.gateways.wsman.wire import faults, namespaces

ENVELOPE_BYTES_MIN = 8192  # the smallest limit that a client may set
ENVELOPE_BYTES = 32_767  # of responses without a MaxEnvelopeSize
SELECTORS_MAX = 32
TIMEOUT_S_MAX = 600.0
_ANONYMOUS = addresses.ANONYMOUS[namespaces.WSA]
_ONCE = (
    namespaces.WSMAN("ResourceURI"),
    namespaces.WSMAN("SelectorSet"),
    namespaces.WSMAN("OperationTimeout"),
    namespaces.WSMAN("MaxEnvelopeSize"),
    namespaces.WSMAN("Locale"),
    namespaces.WSMAN("OptionSet"),
    namespaces.WSMAN("FragmentTransfer"),
    namespaces.WSE("Identifier"),
)
_KNOWN = {*_ONCE, namespaces.WSMAN("RequestEPR"), namespaces.WSMAN("RequestTotalItemsCountEstimate")}
_MICROSOFT = xml.XmlNamespace("http://schemas.microsoft.com/wbem/wsman/1/wsman.xsd")
#: What clients for Windows send, and what changes nothing here.
_IGNORED = frozenset(map(_MICROSOFT, ("DataLocale", "FunctionId", "OperationID", "SequenceId", "SessionId")))


@dataclass(frozen=True, slots=True)
class WsManHeaders:
    addressing: addresses.Addressing
    resource: str
    action: str
    selectors: Mapping[str, str] = field(default_factory=dict)
    timeout_s: float | None = None
    bytes_max: int = ENVELOPE_BYTES
    fragment: xml.XmlElement | None = None
    wants_epr: bool = False
    wants_count: bool = False
    subscription: str = ""


def understood(name: str) -> bool:
    return name in _KNOWN or addresses.understood(name) or name in _IGNORED


def is_identify(message: envelope.SoapEnvelope) -> bool:
    return message.first is not None and message.first.name == namespaces.WSMID("Identify")


def read(call: soap_endpoint.SoapRequest, *, bytes_max: int) -> WsManHeaders:
    """``bytes_max``: the maximum size of a response, whatever the request allows."""
    message, wsa = call.envelope, call.addressing
    if wsa is None or wsa.wsa != namespaces.WSA:
        raise faults.missing_header("wsa:Action of the namespace that WS-Management uses")
    twice = next((name for name in _ONCE if sum(header.name == name for header in message.headers) > 1), None)
    if wsa.repeated or twice:
        raise faults.invalid_header(f"the header {wsa.repeated[0] if wsa.repeated else twice} occurs twice")
    if not wsa.action:
        raise faults.missing_header("wsa:Action")
    if call.action and call.action != wsa.action:
        raise faults.fault(
            namespaces.WSA("ActionNotSupported"),
            f"SOAPAction is {call.action[:200]!r}, wsa:Action is {wsa.action[:200]!r}",
            "ActionMismatch",
        )
    if message.header(namespaces.WSA("MessageID")) is None:
        raise faults.missing_header("wsa:MessageID")
    if not wsa.message_id:
        raise faults.schema("wsa:MessageID is empty")
    if not wsa.to:
        raise faults.missing_header("wsa:To")
    if wsa.reply_to is None:
        raise faults.missing_header("wsa:ReplyTo")
    for endpoint in (wsa.reply_to, wsa.fault_to):
        if endpoint is not None and endpoint.address != _ANONYMOUS:
            raise faults.unsupported(
                "responses are sent only on the connection of the request", "AddressingMode"
            )
    resource = message.header(namespaces.WSMAN("ResourceURI"))
    subscription = message.header(namespaces.WSE("Identifier"))
    is_subscription_action = wsa.action in (
        namespaces.RENEW, namespaces.UNSUBSCRIBE, namespaces.GET_STATUS, namespaces.GET_STATUS_MISSPELT,
    )  # fmt: skip
    if resource is None and not is_subscription_action:
        raise faults.missing_header("wsman:ResourceURI")
    locale = message.header(namespaces.WSMAN("Locale"))
    if (
        locale is not None
        and _binding(locale)
        and not (locale.get(xml.LANG) or "en").lower().startswith("en")
    ):
        raise faults.unsupported("texts are available only in English", "Locale")
    _check_options(message.header(namespaces.WSMAN("OptionSet")))
    return WsManHeaders(
        addressing=wsa,
        resource=resource.text if resource is not None else "",
        action=wsa.action,
        selectors=read_selectors(message.header(namespaces.WSMAN("SelectorSet"))),
        timeout_s=_timeout(message.header(namespaces.WSMAN("OperationTimeout"))),
        bytes_max=_bytes_max(message.header(namespaces.WSMAN("MaxEnvelopeSize")), bytes_max),
        fragment=message.header(namespaces.WSMAN("FragmentTransfer")),
        wants_epr=message.header(namespaces.WSMAN("RequestEPR")) is not None,
        wants_count=message.header(namespaces.WSMAN("RequestTotalItemsCountEstimate")) is not None,
        subscription=subscription.text if subscription is not None else "",
    )


def read_selectors(selector_set: xml.XmlElement | None) -> dict[str, str]:
    values: dict[str, str] = {}
    for selector in selector_set.all(namespaces.WSMAN("Selector")) if selector_set is not None else ():
        name = (selector.get("Name") or "").strip()
        if not name:
            raise faults.schema("a selector without a name")
        if name in values:
            raise faults.selectors(f"the selector {name[:60]!r} occurs twice", "DuplicateSelectors")
        if selector.children:
            raise faults.selectors(f"the selector {name[:60]!r} is not a text", "TypeMismatch")
        values[name] = selector.text
        if len(values) > SELECTORS_MAX:
            raise faults.encoding(f"more than {SELECTORS_MAX} selectors", "SelectorLimit")
    return values


def check_selectors(values: Mapping[str, str]) -> None:
    """Raise a fault unless the only selector is ``Name``."""
    surplus = next((name for name in values if name != "Name"), None)
    if surplus is not None:
        raise faults.selectors(
            f"unknown selector {surplus[:60]!r}: the only one is Name", "UnexpectedSelectors"
        )
    if "Name" not in values:
        raise faults.selectors("the selector Name is missing", "InsufficientSelectors")
    if not values["Name"]:
        raise faults.selectors("the selector Name is empty", "InvalidValue")


def _timeout(header: xml.XmlElement | None) -> float | None:
    if header is None:
        return None
    try:
        timeout_s = xsd_types.parse_duration_s(header.text)
    except errors.InvalidInput as error:
        raise faults.invalid_header(error.message, "OperationTimeout") from error
    if timeout_s <= 0:
        raise faults.fault(
            namespaces.WSMAN("TimedOut"),
            "the timeout of the operation is not positive",
            blame=faults.RECEIVER,
        )
    return min(timeout_s, TIMEOUT_S_MAX)


def _bytes_max(header: xml.XmlElement | None, ours: int) -> int:
    if header is None:
        return min(ENVELOPE_BYTES, ours)
    try:
        requested = xsd_types.parse_integer(header.text, minimum=1)
    except errors.InvalidInput as error:
        raise faults.invalid_header(error.message) from error
    if requested < ENVELOPE_BYTES_MIN and _binding(header):
        raise faults.encoding(
            f"MaxEnvelopeSize is {requested} bytes: allow at least {ENVELOPE_BYTES_MIN}",
            "MinimumEnvelopeLimit",
        )
    return min(max(requested, ENVELOPE_BYTES_MIN), ours)


def _check_options(option_set: xml.XmlElement | None) -> None:
    """No options are supported: one with ``MustComply`` is rejected."""
    for option in option_set.all(namespaces.WSMAN("Option")) if option_set is not None else ():
        if option.get("MustComply", "false") in ("true", "1"):
            raise faults.fault(
                namespaces.WSMAN("InvalidOptions"),
                f"unsupported option {(option.get('Name') or '')[:60]!r}",
                "NotSupported",
            )


def _binding(header: xml.XmlElement) -> bool:
    return header.get(envelope.SoapVersion.V12("mustUnderstand")) in ("true", "1")
