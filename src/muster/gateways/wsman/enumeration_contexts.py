"""Open enumerations: owner, kind, position and expiry.

Pure: the caller passes the time.  The number is limited for each user and in total, so that abandoned
enumerations do not fill the memory; expired ones are removed when a new one begins.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field

from muster.core import errors
from muster.core.formats import xml
from muster.gateways.soap import xsd_types
from muster.gateways.wsman.wire import faults, namespaces

LIFETIME_S = 600.0
LIFETIME_S_MAX = 3600.0
OF_USER_MAX = 32
ALL_MAX = 1024

OBJECT, EPR, OBJECT_AND_EPR = "EnumerateObject", "EnumerateEPR", "EnumerateObjectAndEPR"
MODES = (OBJECT, EPR, OBJECT_AND_EPR)


@dataclass(slots=True)
class EnumerationContext:
    """``after`` is the name of the last item that was returned."""

    user: str
    kind: xml.XmlNamespace
    where: str
    mode: str
    ends_at_s: float
    after: str = ""
    pulling: bool = False
    id: str = field(default_factory=lambda: f"uuid:{secrets.token_hex(16)}")


class EnumerationContexts:
    def __init__(self) -> None:
        self._open: dict[str, EnumerationContext] = {}

    def __len__(self) -> int:
        return len(self._open)

    def begin(
        self, user: str, kind: xml.XmlNamespace, where: str, mode: str, ends_at_s: float, now_s: float
    ) -> EnumerationContext:
        self._open = {id: context for id, context in self._open.items() if context.ends_at_s > now_s}
        mine = sum(context.user == user for context in self._open.values())
        if mine >= OF_USER_MAX or len(self._open) >= ALL_MAX:
            raise errors.Overloaded(
                f"{user} has {mine} open enumerations", hint="pull them to the end, or release them"
            )
        made = EnumerationContext(user, kind, where, mode, ends_at_s)
        self._open[made.id] = made
        return made

    def find(self, id: str, user: str, kind: str, now_s: float) -> EnumerationContext:
        context = self._open.get(id)
        if context is None or context.user != user or context.ends_at_s <= now_s:
            raise faults.fault(
                namespaces.WSEN("InvalidEnumerationContext"),
                "no such enumeration is open: it was completed, released, or has expired",
                blame=faults.RECEIVER,
            )
        if context.kind != kind:
            raise faults.fault(
                namespaces.WSA("MessageInformationHeaderRequired"), f"this enumeration is of {context.kind}"
            )
        if context.pulling:
            raise faults.fault(
                namespaces.WSMAN("Concurrency"), "another Pull of this enumeration is in progress"
            )
        return context

    def end(self, context: EnumerationContext) -> None:
        self._open.pop(context.id, None)


def mode_of(body: xml.XmlElement) -> str:
    mode = body.text_of(namespaces.WSMAN("EnumerationMode"), OBJECT)
    if mode not in MODES:
        raise faults.unsupported(
            f"unknown enumeration mode {mode[:60]!r}: use one of {', '.join(MODES)}", "EnumerationMode"
        )
    return mode


def ends_at_s(
    body: xml.XmlElement | None, space: xml.XmlNamespace, now_s: float, *, default_s: float, max_s: float
) -> float:
    """The expiry from an ``Expires`` element of this namespace, limited to ``max_s``."""
    expires = body.find(space("Expires")) if body is not None else None
    if expires is None or not expires.text:
        return now_s + default_s
    try:
        left_s = xsd_types.parse_until_s(expires.text, now_s)
    except errors.InvalidInput as error:
        raise faults.fault(space("InvalidExpirationTime"), error.message) from error
    if left_s <= 0:
        raise faults.fault(space("InvalidExpirationTime"), f"{expires.text[:60]!r} is in the past")
    return now_s + min(left_s, max_s)


def count_of(body: xml.XmlElement, name: str, maximum: int) -> int:
    """The value of ``MaxElements``; 1 if it is absent."""
    element = body.find(name)
    if element is None:
        return 1
    try:
        return min(xsd_types.parse_integer(element.text, minimum=1), maximum)
    except errors.InvalidInput as error:
        raise faults.schema(f"{element.local}: {error.message}") from error


def item(mode: str, resource: xml.XmlElement, reference: xml.XmlElement) -> xml.XmlElement:
    if mode == OBJECT:
        return resource
    if mode == EPR:
        return reference
    return xml.XmlElement(namespaces.WSMAN("Item"), resource, reference)
