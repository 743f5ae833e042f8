"""The three frames that transfer messages (transfer, disposition, flow), encoded and decoded without proton.

Pure: bytes in, bytes out. All other frames are rare, and proton handles them. The fields of a transfer after
its tag are the same from one message to the next, so they are decoded once and then looked up.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Any, Final

from muster.message.amqp_format import amqp_types

OPEN, BEGIN, ATTACH, FLOW, TRANSFER, DISPOSITION, DETACH, END, CLOSE = range(0x10, 0x19)
ACCEPTED, REJECTED, RELEASED, MODIFIED = range(0x24, 0x28)
_SOURCE, DECLARED, TRANSACTIONAL = 0x28, 0x33, 0x34
_SOURCE_HEAD: Final = bytes((0, 0x53, _SOURCE))
DELIVERY_TAG: Final = "delivery-tag"  # in the info of an error
HEADER: Final = b"AMQP\x00\x01\x00\x00"
EMPTY: Final = b"\x00\x00\x00\x08\x02\x00\x00\x00"
ACCEPTED_STATE: Final = b"\x00\x53\x24\x45"
RELEASED_STATE: Final = b"\x00\x53\x26\x45"
_KNOWN_MAX: Final = 1024
_U32: Final = struct.Struct(">I")
_HEAD: Final = struct.Struct(">IBBHHB")  # size, offset, type, channel, start of the descriptor, its code
HEAD_BYTES: Final = _HEAD.size
read_head = _HEAD.unpack_from


def frame_type(data: bytes, at: int, end: int) -> tuple[int, int]:
    """The code of the frame from ``at`` to ``end`` (0: no body), and the start of its fields."""
    start = at + 4 * data[at + 4]
    if start >= end or data[at + 5] != 0:
        return 0, end
    if data[start] == 0 and data[start + 1] == 0x53:
        return data[start + 2], start + 3
    if data[start] == 0 and data[start + 1] == 0x80:
        return int.from_bytes(data[start + 2 : start + 10], "big"), start + 10
    return 0, end


def fields(data: bytes, at: int, most: int = 32) -> tuple[list[Any], int]:
    """The first fields of a list, and its end; values that are not primitive remain bytes."""
    kind = data[at]
    if kind == 0xC0:
        end, count, at = at + 2 + data[at + 1], data[at + 2], at + 3
    elif kind == 0xD0:
        end = at + 5 + _U32.unpack_from(data, at + 1)[0]
        count, at = _U32.unpack_from(data, at + 5)[0], at + 9
    elif kind == 0x45:
        return [], at + 1
    else:
        raise ValueError(f"type {kind:#x} is not a list")
    items: list[Any] = []
    for _ in range(min(count, most)):
        value, at = _field(data, at)
        items.append(value)
    if at > end:
        raise ValueError("a list ends before its fields")
    return items, end


_CONSTANTS: Final = {0x40: None, 0x41: True, 0x42: False, 0x43: 0, 0x44: 0}


def _field(data: bytes, at: int) -> tuple[Any, int]:
    kind = data[at]
    if kind in _CONSTANTS:
        return _CONSTANTS[kind], at + 1
    if kind == 0x52 or kind == 0x53 or kind == 0x50:
        return data[at + 1], at + 2
    if kind == 0x70:
        return _U32.unpack_from(data, at + 1)[0], at + 5
    if kind == 0 and data[at + 1] == 0x53 and data[at + 3] == 0x45:  # a state without fields
        return data[at : at + 4], at + 4
    match kind:
        case 0x56:
            return data[at + 1] != 0, at + 2
        case 0x60:
            return int.from_bytes(data[at + 1 : at + 3], "big"), at + 3
        case 0x80:
            return int.from_bytes(data[at + 1 : at + 9], "big"), at + 9
        case 0xA1 | 0xA3:
            end = at + 2 + data[at + 1]
            return data[at + 2 : end].decode(), end
        case 0xB1 | 0xB3:
            end = at + 5 + _U32.unpack_from(data, at + 1)[0]
            return data[at + 5 : end].decode(), end
        case _:
            end = amqp_types.skip(data, at)
            return data[at:end], end


def numbers(data: bytes, at: int, count: int) -> list[int | None]:
    """The first ``count`` fields of a list, which are numbers or missing."""
    items, _ = fields(data, at, count)
    for item in items:
        if item is not None and type(item) is not int:
            raise ValueError(f"{item!r} is not a number")
    return items + [None] * (count - len(items))


def require(frame: str, **values: object) -> None:
    """Raise an error for the fields that the standard demands and that are missing."""
    missing = [name.replace("_", "-") for name, value in values.items() if value is None]
    if missing:
        raise ValueError(f"{frame} without {' and '.join(missing)}")


# Settled, more, state, aborted, message format, whether the receiver settles second, resumed
Rest = tuple[bool, bool, bytes | None, bool, int | None, bool, bool]
_known: dict[bytes, Rest] = {}


def transfer(data: bytes, at: int) -> tuple[int, int | None, bytes | None, Rest, int]:
    """The handle, the delivery number, the encoded tag, the other fields, and the start of the payload of the
    transfer whose fields begin at ``at``.
    """
    kind = data[at]
    if kind == 0xC0:
        end, count, at = at + 2 + data[at + 1], data[at + 2], at + 3
    elif kind == 0xD0:
        end = at + 5 + _U32.unpack_from(data, at + 1)[0]
        count, at = _U32.unpack_from(data, at + 5)[0], at + 9
    else:
        raise ValueError("a transfer has no fields")
    kind = data[at]
    if kind == 0x43:
        handle, at = 0, at + 1
    elif kind == 0x52:
        handle, at = data[at + 1], at + 2
    elif kind == 0x70:
        handle, at = _U32.unpack_from(data, at + 1)[0], at + 5
    else:
        raise ValueError("a transfer has no handle")
    number: int | None = None
    if count > 1:
        kind = data[at]
        if kind == 0x70:
            number, at = _U32.unpack_from(data, at + 1)[0], at + 5
        elif kind == 0x52:
            number, at = data[at + 1], at + 2
        elif kind == 0x43:
            number, at = 0, at + 1
        else:
            at = amqp_types.skip(data, at)
    tag: bytes | None = None
    if count > 2:
        kind, begin = data[at], at
        at = at + 2 + data[at + 1] if kind == 0xA0 else amqp_types.skip(data, at)
        if kind != 0x40:
            tag = data[begin:at]
    raw = data[at:end]
    rest = _known.get(raw)
    if rest is None:
        rest = _rest(raw, count - 3)
    return handle, number, tag, rest, end


def _rest(raw: bytes, count: int) -> Rest:
    """Message format, settled, more, settle mode, state, resume, aborted."""
    at = 0
    items: list[Any] = []
    for _ in range(min(count, 8)):
        value, at = _field(raw, at)
        items.append(value)
    if at > len(raw):
        raise ValueError("a transfer ends before its fields")
    items += [None] * (8 - len(items))
    if items[3] not in (None, 0, 1):
        raise ValueError(f"a transfer with the unknown settle mode {items[3]!r}")
    settled, more, resumed, aborted = (bool(items[place]) for place in (1, 2, 5, 6))
    rest = (settled, more, items[4], aborted, items[0], items[3] == 1, resumed)
    if rest[2] is None:
        if len(_known) >= _KNOWN_MAX:
            _known.clear()
        _known[raw] = rest
    return rest


_SETTLED: Final = struct.Struct(">6sH8sIBI5s")
SETTLED_BYTES: Final = _SETTLED.size
SETTLED: Final = _U32.pack(SETTLED_BYTES) + b"\x02\x00"
_SETTLED_BEFORE: Final = b"\x00\x53\x15\xc0\x11\x05\x41\x70"
_SETTLED_AFTER: Final = b"\x41" + ACCEPTED_STATE


def accepted(data: bytes, at: int) -> Iterator[tuple[int, int]]:
    """Channels and delivery numbers of a run of dispositions that begins at ``at``, each of which accepts and
    settles one message; most dispositions of receivers have this form.
    """
    end = at + (len(data) - at) // SETTLED_BYTES * SETTLED_BYTES
    for lead, channel, before, first, kind, last, after in _SETTLED.iter_unpack(memoryview(data)[at:end]):
        if (
            first != last
            or lead != SETTLED
            or before != _SETTLED_BEFORE
            or after != _SETTLED_AFTER
            or kind != 0x70
        ):
            return
        yield channel, first


def code_of(state: bytes | None) -> int:
    """The code of a delivery state; 0 if there is none."""
    if not isinstance(state, bytes) or len(state) < 4 or state[0] != 0:
        return 0
    if state[1] == 0x53:
        return state[2]
    return int.from_bytes(state[2:10], "big") if state[1] == 0x80 else 0


def state_fields(state: bytes | None) -> list[Any]:
    if not state or state[0] != 0:
        return []
    return fields(state, 3 if state[1] == 0x53 else 10)[0]


def modified(state: bytes | None) -> tuple[bool, bool]:
    """Whether the delivery failed, and whether it must not be delivered to this receiver again."""
    failed, undeliverable, *_ = (*state_fields(state), None, None)
    return bool(failed), bool(undeliverable)


def is_outcome(code: int, state: bytes | None) -> bool:
    """Whether a delivery state ends a delivery, in a transaction or not."""
    if code == TRANSACTIONAL:
        code = code_of(outcome_of(state))
    return ACCEPTED <= code <= MODIFIED


def default_outcome(source: bytes | None) -> bytes | None:
    """The outcome that a source gives messages which are settled without one."""
    items = state_fields(source) if code_of(source) == _SOURCE else []
    return items[8] if len(items) > 8 and isinstance(items[8], bytes) else None


def with_default_outcome(frame: bytes, at: int, outcome: bytes) -> bytes:
    """An attach, whose fields begin at ``at``, with the default outcome of its source, if it has a source."""
    items = amqp_types.elements(frame, at)
    if len(items) < 6 or not items[5].startswith(_SOURCE_HEAD):
        return frame
    source = amqp_types.sequence(_with_field(amqp_types.elements(items[5], len(_SOURCE_HEAD)), 8, outcome))
    return _changed(frame, at, _with_field(items, 5, _SOURCE_HEAD + source))


def with_unsettled(frame: bytes, at: int, deliveries: list[bytes], bytes_max: int) -> tuple[bytes, bool]:
    """An attach with unsettled deliveries (tags and states in turn), and whether it names all of them: the
    frame has at most ``bytes_max``.
    """
    size, fitting = len(frame) + 16, 0
    while fitting < len(deliveries):
        size += len(deliveries[fitting]) + len(deliveries[fitting + 1])
        if size > bytes_max:
            break
        fitting += 2
    items = _with_field(amqp_types.elements(frame, at), 7, amqp_types.encoded_map(deliveries[:fitting]))
    complete = fitting == len(deliveries)
    return _changed(frame, at, items if complete else _with_field(items, 8, b"\x41")), complete


def _with_field(items: list[bytes], place: int, value: bytes) -> list[bytes]:
    items += [b"\x40"] * (place + 1 - len(items))
    items[place] = value
    return items


def _changed(frame: bytes, at: int, items: list[bytes]) -> bytes:
    changed = frame[4:at] + amqp_types.sequence(items)
    return _U32.pack(4 + len(changed)) + changed


def names_transaction(properties: bytes) -> bool:
    """Whether the properties of a flow acquire messages in a transaction."""
    return "txn-id" in amqp_types.entries(properties, 0)


def transaction_of(state: bytes | None) -> bytes:
    """The transaction of a transactional state."""
    items = state_fields(state)
    if not items or not isinstance(items[0], bytes) or items[0][:1] not in (b"\xa0", b"\xb0"):
        raise ValueError("a transactional state names no transaction")
    return binary_of(items[0])


def binary_of(encoded: bytes) -> bytes:
    """An encoded binary value."""
    return encoded[2 if encoded[0] == 0xA0 else 5 :]


def outcome_of(state: bytes | None) -> bytes | None:
    """The outcome in a transactional state."""
    items = state_fields(state)
    return items[1] if len(items) > 1 and isinstance(items[1], bytes) else None


# -- writing -----------------------------------------------------------------------------------------------

_LEAD: Final = struct.Struct(">BBHHBBBBBIB")  # of a transfer: from its fifth byte to its number
_TRANSFER: Final = struct.Struct(f">I{_LEAD.size}sIHI3s")
TRANSFER_BYTES: Final = _TRANSFER.size
_SETTLED_AND_MORE: Final = ((b"\x43\x42\x42", b"\x43\x42\x41"), (b"\x43\x41\x42", b"\x43\x41\x41"))
_FLOW: Final = struct.Struct(">IBBHHBBBBBIBIBIBIBIBIBIBB")
_SESSION_FLOW: Final = struct.Struct(">IBBHHBBBBBIBIBIBI")
WINDOW_MAX: Final = 0x7FFFFFFF


def transfer_lead(channel: int, handle: int) -> bytes:
    """The common beginning of all transfers of a link."""
    return _LEAD.pack(2, 0, channel, 0x53, TRANSFER, 0xC0, TRANSFER_BYTES - 13, 6, 0x70, handle, 0x70)


def transfer_head(lead: bytes, number: int, size: int, settled: bool, more: bool) -> bytes:
    """A transfer without its payload of ``size`` bytes; its tag is its number."""
    return _TRANSFER.pack(
        TRANSFER_BYTES + size, lead, number, 0xA004, number, _SETTLED_AND_MORE[settled][more]
    )


def flow(
    channel: int, window: Sequence[int], link: tuple[int, int, int] | None = None, *, drain: bool = False
) -> bytes:
    """``window``: next incoming number, incoming window, next outgoing number. ``link``: handle, delivery
    count, credit.
    """
    incoming, room, outgoing = window
    values: tuple[int, ...]
    common = (0x70, incoming, 0x70, room, 0x70, outgoing, 0x70, WINDOW_MAX)
    if link is None:
        form, count, values = _SESSION_FLOW, 4, common
    else:
        handle, delivered, credit = link
        form, count = _FLOW, 9
        values = (*common, 0x70, handle, 0x70, delivered, 0x70, credit, 0x40, 0x41 if drain else 0x42)
    return form.pack(form.size, 2, 0, channel, 0x53, FLOW, 0xC0, form.size - 13, count, *values)


def disposition(
    channel: int, first: int, last: int, state: bytes, *, receiver: bool = True, settled: bool = True
) -> bytes:
    """The outcome of all deliveries from ``first`` to ``last``; ``receiver``: in the role of the receiver."""
    content = (
        (b"\x41" if receiver else b"\x42")
        + b"\x70"
        + _U32.pack(first)
        + b"\x70"
        + _U32.pack(last)
        + (b"\x41" if settled else b"\x42")
        + state
    )
    if len(content) < 255:
        made = b"\xc0" + bytes((len(content) + 1, 5)) + content
    else:
        made = b"\xd0" + _U32.pack(len(content) + 4) + _U32.pack(5) + content
    return _U32.pack(11 + len(made)) + b"\x02\x00" + channel.to_bytes(2, "big") + b"\x00\x53\x15" + made


def rejected(condition: str, description: str, tag: bytes | None = None) -> bytes:
    """``tag``: of the delivery, encoded, for senders that do not wait for outcomes."""
    return b"\x00\x53\x25" + _error(condition, description, tag)


def close(condition: str, description: str) -> bytes:
    """The frame that closes a connection with an error."""
    made = b"\x00\x53\x18" + _error(condition, description)
    return _U32.pack(8 + len(made)) + b"\x02\x00\x00\x00" + made


def _error(condition: str, description: str, tag: bytes | None = None) -> bytes:
    """The only field of a list: an error."""
    items = [amqp_types.text(condition, symbol=True), amqp_types.text(description)]
    if tag is not None:
        items.append(amqp_types.mapping({DELIVERY_TAG: tag}, symbols=True))
    return amqp_types.sequence([b"\x00\x53\x1d" + amqp_types.sequence(items)])


def declared(name: bytes) -> bytes:
    return b"\x00\x53\x33" + amqp_types.sequence([amqp_types.binary(name)])


def transactional(name: bytes, outcome: bytes = ACCEPTED_STATE) -> bytes:
    return b"\x00\x53\x34" + amqp_types.sequence([amqp_types.binary(name), outcome])
