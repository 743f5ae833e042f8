"""Non-persistent topic messages of AMQP clients: transferred without decoding them.

Such a message has a foreign header: its sections before the body, unchanged in base64, in place of a
`messages.MessageMeta`. Readers of other protocols decode it when they receive it.
"""

from __future__ import annotations

import base64
import binascii
from typing import Final

from muster.message import messages
from muster.message.amqp_format import amqp_types

_DUE: Final = b"x-opt-delivery-time"
_durable: dict[bytes, bool] = {}  # by header section: few differ


class FastPath:
    """Parses simple messages of a link, most of which begin with the same bytes."""

    __slots__ = ("_lead",)

    def __init__(self) -> None:
        self._lead = b""

    def __call__(self, data: bytes) -> tuple[int, int, str] | None:
        """See `locate_body`."""
        lead = self._lead
        if lead and data.startswith(lead):
            return locate_body(data, len(lead))
        location = locate_body(data)
        if location is not None:
            self._lead = data[: _before_properties(data)]
        return location


def _before_properties(data: bytes) -> int:
    for code, at, _, _ in amqp_types.split(data):
        if code >= amqp_types.PROPERTIES:
            return at
    return 0


def locate_body(data: bytes, at: int = 0) -> tuple[int, int, str] | None:
    """The start of the body's section, the start of the body, and its type (``b`` data, ``t`` text).

    None if the message is durable, delayed, has delivery annotations (which are for this gateway only) or
    another structure: it must then be decoded completely.
    ``at``: the section to start from.
    """
    start, size = 0, len(data)
    try:
        while data[at] == 0 and data[at + 1] == 0x53:
            code, kind = data[at + 2], data[at + 3]
            if kind in (0xA0, 0xA1):
                start = at + 5
                end = start + data[at + 4]
            elif kind in (0xB0, 0xB1):
                start = at + 8
                end = start + int.from_bytes(data[at + 4 : start], "big")
            elif kind in (0xC0, 0xC1):
                end = at + 5 + data[at + 4]
            elif kind in (0xD0, 0xD1):
                end = at + 8 + int.from_bytes(data[at + 4 : at + 8], "big")
            elif kind == 0x45:
                end = at + 4
            else:
                return None
            if code == amqp_types.DATA:
                return (at, start, "b") if kind in (0xA0, 0xB0) and end == size else None
            if code == amqp_types.VALUE:
                return (at, start, "t") if kind in (0xA1, 0xB1) and end == size else None
            if code == amqp_types.HEADER:
                header = data[at:end]
                durable = _durable.get(header)
                if durable is None:
                    durable = _is_durable(header)
                if durable:
                    return None
            elif code == amqp_types.ANNOTATIONS:
                if _DUE in data[at:end]:
                    return None
            elif code not in (amqp_types.PROPERTIES, amqp_types.APPLICATION):
                return None
            at = end
    except IndexError:
        return None
    return None


def _is_durable(header: bytes) -> bool:
    try:
        fields = amqp_types.plain_fields(header, 3)
    except amqp_types.MALFORMED:
        return True  # complete decoding will report the error
    durable = bool(fields and fields[0])
    if len(_durable) > 4096:
        _durable.clear()
    _durable[header] = durable
    return durable


def foreign_header(data: bytes, at: int, kind: str, origin: str) -> str:
    """The header of a message whose body section begins at ``at``; ``origin`` is from `origin_token`."""
    return f"{messages.FOREIGN}{kind}{origin}.{binascii.b2a_base64(data[:at], newline=False).decode()}"


def origin_token(origin: str) -> str:
    return base64.b64encode(origin.encode()).decode()


def origin_of(raw: str) -> str:
    return base64.b64decode(raw[2 : raw.index(".")]).decode()


def unwrap(raw: str, data: bytes) -> bytes:
    """The AMQP message of a foreign header and a body."""
    head = binascii.a2b_base64(raw[raw.index(".") + 1 :])
    if len(data) < 256:
        return head + body_section(raw[1], data)
    return b"".join((head, b"\x00\x53\x75\xb0" if raw[1] == "b" else b"\x00\x53\x77\xb1", _size(data), data))


def body_section(kind: str, data: bytes) -> bytes:
    small = len(data) < 256
    if kind == "b":
        return (b"\x00\x53\x75\xa0%c" % len(data) if small else b"\x00\x53\x75\xb0" + _size(data)) + data
    return (b"\x00\x53\x77\xa1%c" % len(data) if small else b"\x00\x53\x77\xb1" + _size(data)) + data


def _size(data: bytes) -> bytes:
    return len(data).to_bytes(4, "big")
