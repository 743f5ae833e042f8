"""The headers of a request, read and checked: what it is about, and the bounds its answer must keep.

Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from muster.core import errors
from muster.manage.wsman import faults, names
from muster.soap import addressing, datatypes, door, envelope, xml

ENVELOPE_BYTES_MIN = 8192  # nobody may ask for less
ENVELOPE_BYTES = 32_767  # of answers to those who say nothing
SELECTORS_MAX = 32
TIMEOUT_S_MAX = 600.0
_ANONYMOUS = addressing.ANONYMOUS[names.WSA]
_ONCE = (
    names.WSMAN("ResourceURI"),
    names.WSMAN("SelectorSet"),
    names.WSMAN("OperationTimeout"),
    names.WSMAN("MaxEnvelopeSize"),
    names.WSMAN("Locale"),
    names.WSMAN("OptionSet"),
    names.WSMAN("FragmentTransfer"),
    names.WSE("Identifier"),
)
_KNOWN = {*_ONCE, names.WSMAN("RequestEPR"), names.WSMAN("RequestTotalItemsCountEstimate")}
_IGNORED = "http://schemas.microsoft.com/wbem/wsman/1/wsman.xsd"  # DataLocale, SessionId


@dataclass(frozen=True, slots=True)
class Headers:
    addressing: addressing.Addressing
    resource: str
    action: str
    selectors: Mapping[str, str] = field(default_factory=dict)
    timeout_s: float | None = None
    bytes_max: int = ENVELOPE_BYTES
    fragment: xml.Element | None = None
    wants_epr: bool = False
    wants_count: bool = False
    subscription: str = ""


def understood(name: str) -> bool:
    return name in _KNOWN or addressing.understood(name) or name.startswith(f"{{{_IGNORED}}}")


def is_identify(message: envelope.Envelope) -> bool:
    return message.first is not None and message.first.name == names.WSMID("Identify")


def read(call: door.Call, *, bytes_max: int) -> Headers:
    """``bytes_max``: no answer is longer, whatever the request allows."""
    message, wsa = call.envelope, call.addressing
    if wsa is None or wsa.wsa != names.WSA:
        raise faults.missing_header("wsa:Action of the namespace that WS-Management uses")
    twice = next((name for name in _ONCE if sum(one.name == name for one in message.headers) > 1), None)
    if wsa.repeated or twice:
        raise faults.invalid_header(
            f"the header {wsa.repeated[0] if wsa.repeated else twice} stands there twice"
        )
    if not wsa.action:
        raise faults.missing_header("wsa:Action")
    if call.action and call.action != wsa.action:
        raise faults.fault(
            names.WSA("ActionNotSupported"),
            f"SOAPAction says {call.action[:200]!r}, wsa:Action {wsa.action[:200]!r}",
            "ActionMismatch",
        )
    if message.header(names.WSA("MessageID")) is None:
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
                "answers go out on the connection of the question only", "AddressingMode"
            )
    resource = message.header(names.WSMAN("ResourceURI"))
    subscription = message.header(names.WSE("Identifier"))
    about_subscription = wsa.action in (
        names.RENEW, names.UNSUBSCRIBE, names.GET_STATUS, names.GET_STATUS_MISSPELT,
    )  # fmt: skip
    if resource is None and not about_subscription:
        raise faults.missing_header("wsman:ResourceURI")
    locale = message.header(names.WSMAN("Locale"))
    if (
        locale is not None
        and _binding(locale)
        and not (locale.get(xml.LANG) or "en").lower().startswith("en")
    ):
        raise faults.unsupported("texts are in English", "Locale")
    _check_options(message.header(names.WSMAN("OptionSet")))
    return Headers(
        addressing=wsa,
        resource=resource.text if resource is not None else "",
        action=wsa.action,
        selectors=read_selectors(message.header(names.WSMAN("SelectorSet"))),
        timeout_s=_timeout(message.header(names.WSMAN("OperationTimeout"))),
        bytes_max=_bytes_max(message.header(names.WSMAN("MaxEnvelopeSize")), bytes_max),
        fragment=message.header(names.WSMAN("FragmentTransfer")),
        wants_epr=message.header(names.WSMAN("RequestEPR")) is not None,
        wants_count=message.header(names.WSMAN("RequestTotalItemsCountEstimate")) is not None,
        subscription=subscription.text if subscription is not None else "",
    )


def read_selectors(given: xml.Element | None) -> dict[str, str]:
    found: dict[str, str] = {}
    for one in given.all(names.WSMAN("Selector")) if given is not None else ():
        name = (one.get("Name") or "").strip()
        if not name:
            raise faults.schema("a selector without a name")
        if name in found:
            raise faults.selectors(f"the selector {name[:60]!r} stands there twice", "DuplicateSelectors")
        if one.children:
            raise faults.selectors(f"the selector {name[:60]!r} is no text", "TypeMismatch")
        found[name] = one.text
        if len(found) > SELECTORS_MAX:
            raise faults.encoding(f"more than {SELECTORS_MAX} selectors", "SelectorLimit")
    return found


def check_selectors(found: Mapping[str, str]) -> None:
    """That they are what selects one resource of ours: its name, and nothing else."""
    surplus = next((name for name in found if name != "Name"), None)
    if surplus is not None:
        raise faults.selectors(f"no selector {surplus[:60]!r}: the only one is Name", "UnexpectedSelectors")
    if "Name" not in found:
        raise faults.selectors("the selector Name is missing", "InsufficientSelectors")
    if not found["Name"]:
        raise faults.selectors("the selector Name is empty", "InvalidValue")


def _timeout(given: xml.Element | None) -> float | None:
    if given is None:
        return None
    try:
        timeout_s = datatypes.parse_duration_s(given.text)
    except errors.InvalidInput as error:
        raise faults.invalid_header(error.message, "OperationTimeout") from error
    if timeout_s <= 0:
        raise faults.fault(
            names.WSMAN("TimedOut"),
            "the time for the operation was over before it began",
            blame=faults.RECEIVER,
        )
    return min(timeout_s, TIMEOUT_S_MAX)


def _bytes_max(given: xml.Element | None, ours: int) -> int:
    if given is None:
        return min(ENVELOPE_BYTES, ours)
    try:
        asked = datatypes.parse_integer(given.text, minimum=1)
    except errors.InvalidInput as error:
        raise faults.invalid_header(error.message) from error
    if asked < ENVELOPE_BYTES_MIN and _binding(given):
        raise faults.encoding(
            f"answers of at most {asked} bytes: allow {ENVELOPE_BYTES_MIN}", "MinimumEnvelopeLimit"
        )
    return min(max(asked, ENVELOPE_BYTES_MIN), ours)


def _check_options(given: xml.Element | None) -> None:
    """We know no options: one that must be complied with is refused."""
    for one in given.all(names.WSMAN("Option")) if given is not None else ():
        if one.get("MustComply", "false") in ("true", "1"):
            raise faults.fault(
                names.WSMAN("InvalidOptions"), f"no option {(one.get('Name') or '')[:60]!r}", "NotSupported"
            )


def _binding(header: xml.Element) -> bool:
    return header.get(envelope.Version.V12("mustUnderstand")) in ("true", "1")
