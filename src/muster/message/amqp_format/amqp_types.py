"""AMQP 1.0 values and the sections of a message, encoded and decoded without the proton library.

Proton's message class costs tens of microseconds per message, mostly for fields that are not used. Here a
section can be skipped by its size, and values are decoded only where they are needed. This module needs
Python only, so clients without proton can read messages that came through a gateway.

A primitive is a `values.TypedValue`; maps, lists and arrays are Python's; values without a JMS type (uuid,
decimals) are Python's as well. Keys of maps that are strings are plain ``str``.
"""

from __future__ import annotations

import decimal
import struct
import uuid
from typing import Any, Final

from muster.message import values

HEADER, DELIVERY_ANNOTATIONS, ANNOTATIONS, PROPERTIES, APPLICATION, DATA, SEQUENCE, VALUE, FOOTER = range(
    0x70, 0x79
)
MALFORMED: Final = (ValueError, IndexError, struct.error, OverflowError)  # errors that reading may raise
_DEPTH_MAX: Final = 64
_EMPTY_ELEMENTS_MAX: Final = 1 << 16  # of an array: each costs its readers memory, and the sender nothing
_FIXED: Final = {4: 0, 5: 1, 6: 2, 7: 4, 8: 8, 9: 16}
_SMALL: Final = (0xC0, 0xC1)  # a list or map of up to 255 bytes
_U32: Final = struct.Struct(">I")
_K: Final = values.JavaType
_PRIMITIVES: Final = {
    0x50: ("B", _K.SHORT),
    0x51: ("b", _K.BYTE),
    0x52: ("B", _K.LONG),
    0x53: ("B", _K.LONG),
    0x54: ("b", _K.INT),
    0x55: ("b", _K.LONG),
    0x60: (">H", _K.INT),
    0x61: (">h", _K.SHORT),
    0x70: (">I", _K.LONG),
    0x71: (">i", _K.INT),
    0x72: (">f", _K.FLOAT),
    0x80: (">Q", _K.LONG),
    0x81: (">q", _K.LONG),
    0x82: (">d", _K.DOUBLE),
    0x83: (">q", _K.LONG),
}
_READERS: Final = {
    code: (struct.Struct(form).unpack_from, struct.calcsize(form), kind)
    for code, (form, kind) in _PRIMITIVES.items()
}
_NULL: Final = values.TypedValue(_K.STRING, None)
_TRUE: Final = values.TypedValue(_K.BOOLEAN, True)
_FALSE: Final = values.TypedValue(_K.BOOLEAN, False)
_WITHOUT_CONTENT: Final = {0x40: _NULL, 0x41: _TRUE, 0x42: _FALSE}  # most fields of a section


class UnhashableMap(list[tuple[Any, Any]]):
    """The keys and values of a map with a list or a map among its keys."""


class DescribedValue:
    """A value with a descriptor that is not a message section."""

    def __init__(self, descriptor: Any, value: Any) -> None:
        self.descriptor = descriptor
        self.value = value


def skip(data: bytes, at: int) -> int:
    """The end of the value that begins at ``at``."""
    values_left = 1
    while values_left:
        code = data[at]
        width = code >> 4
        if code == 0:  # a described value: descriptor and value
            at += 1
            values_left += 1
            continue
        if width in _FIXED:
            at += 1 + _FIXED[width]
        elif width in (0xA, 0xC, 0xE):
            at += 2 + data[at + 1]
        elif width in (0xB, 0xD, 0xF):
            at += 5 + int(_U32.unpack_from(data, at + 1)[0])
        else:
            raise ValueError(f"unknown type {code:#x}")
        values_left -= 1
    return at


def split(data: bytes) -> list[tuple[int, int, int, int]]:
    """For each section: its code, its start, the start of its value, and its end."""
    sections = []
    at, size, last = 0, len(data), 0
    while at < size:
        if data[at] != 0:
            raise ValueError("a section has no descriptor")
        if data[at + 1] == 0x53:
            code, value = data[at + 2], at + 3
        elif data[at + 1] == 0x80:
            code, value = int.from_bytes(data[at + 2 : at + 10], "big"), at + 10
        else:
            raise ValueError("a section has no numeric descriptor")
        end = skip(data, value)
        if end > size:
            raise ValueError("a section extends beyond the message")
        if not HEADER <= code <= FOOTER:
            raise ValueError(f"unknown section {code:#x}")
        if code < last or (code == last and code not in (DATA, SEQUENCE)):
            raise ValueError(f"section {code:#x} after section {last:#x}")
        if DATA <= last < code <= VALUE:
            raise ValueError("the body has sections of different types")
        last = code
        sections.append((code, at, value, end))
        at = end
    return sections


def read(data: bytes, at: int, depth: int = 0) -> tuple[Any, int]:
    """The value that begins at ``at``, and its end."""
    code = data[at]
    if code:
        return _read_content(code, data, at + 1, depth)
    if depth >= _DEPTH_MAX:
        raise ValueError("values are nested too deeply")
    descriptor, at = read(data, at + 1, depth + 1)
    value, at = read(data, at, depth + 1)
    return DescribedValue(_plain_descriptor(descriptor), value), at


def _plain_descriptor(descriptor: Any) -> Any:
    return descriptor.value if isinstance(descriptor, values.TypedValue) else descriptor


def _read_content(code: int, data: bytes, at: int, depth: int) -> tuple[Any, int]:
    """The value of type ``code`` whose content begins at ``at``, and its end."""
    reader = _READERS.get(code)
    if reader is not None:
        unpack, size, kind = reader
        return values.TypedValue(kind, unpack(data, at)[0]), at + size
    match code:
        case 0xA1 | 0xA3:
            end = at + 1 + data[at]
            return values.TypedValue(_K.STRING, _text(data, at + 1, end)), end
        case 0xB1 | 0xB3:
            end = at + 4 + _U32.unpack_from(data, at)[0]
            return values.TypedValue(_K.STRING, _text(data, at + 4, end)), end
        case 0xA0:
            end = at + 1 + data[at]
            return values.TypedValue(_K.BYTES, _bytes(data, at + 1, end)), end
        case 0xB0:
            end = at + 4 + _U32.unpack_from(data, at)[0]
            return values.TypedValue(_K.BYTES, _bytes(data, at + 4, end)), end
        case 0x40:
            return _NULL, at
        case 0x41:
            return _TRUE, at
        case 0x42:
            return _FALSE, at
        case 0x56:
            return (_TRUE if data[at] else _FALSE), at + 1
        case 0x43 | 0x44:
            return values.TypedValue(_K.LONG, 0), at
        case 0x73:
            return values.TypedValue(_K.CHAR, _character(_U32.unpack_from(data, at)[0])), at + 4
        case 0x74 | 0x84 | 0x94:
            end = at + _FIXED[code >> 4]
            return _decimal(_bytes(data, at, end)), end
        case 0x98:
            return uuid.UUID(bytes=_bytes(data, at, at + 16)), at + 16
        case 0x45:
            return [], at
        case 0xC0 | 0xD0 | 0xC1 | 0xD1:
            return _compound(data, at, code, depth)
        case 0xE0 | 0xF0:
            return _array(data, at, code, depth)
    raise ValueError(f"unexpected type {code:#x}")


def _character(code: int) -> str:
    if 0xD800 <= code < 0xE000:
        raise ValueError(f"{code:#x} is not a character")
    return chr(code)


def _decimal(raw: bytes) -> decimal.Decimal:
    """A decimal number in IEEE 754 binary integer encoding."""
    bits = 8 * len(raw)
    exponent_bits, bias = {32: (8, 101), 64: (10, 398), 128: (14, 6176)}[bits]
    number = int.from_bytes(raw, "big")
    sign, magnitude = number >> (bits - 1), number & ((1 << (bits - 1)) - 1)
    if magnitude >> (bits - 5) == 0b1111:
        return decimal.Decimal("NaN" if magnitude >> (bits - 6) & 1 else "-Infinity" if sign else "Infinity")
    large = magnitude >> (bits - 3) == 0b11
    coefficient_bits = bits - 1 - exponent_bits - (2 if large else 0)
    exponent = magnitude >> coefficient_bits & ((1 << exponent_bits) - 1)
    coefficient = magnitude & ((1 << coefficient_bits) - 1) | (0b100 << coefficient_bits if large else 0)
    return decimal.Decimal((sign, tuple(map(int, str(coefficient))), exponent - bias))


def _compound(data: bytes, at: int, code: int, depth: int) -> tuple[Any, int]:
    count, at, end = _extent(data, at, code, depth)
    items: list[Any] = []
    for _ in range(count):
        item: Any = _WITHOUT_CONTENT.get(data[at])
        if item is None:
            item, at = read(data, at, depth + 1)
        else:
            at += 1
        items.append(item)
    if at != end:
        raise ValueError("the size of a list or map does not match its elements")
    if code in (0xC0, 0xD0):
        return items, end
    if len(items) % 2:
        raise ValueError("a map has a key without a value")
    pairs = list(zip(items[::2], items[1::2], strict=True))
    try:
        return {_map_key(key): value for key, value in pairs}, end
    except TypeError:
        return UnhashableMap(pairs), end


def _map_key(key: Any) -> Any:
    return key.value if isinstance(key, values.TypedValue) and key.value.__class__ is str else key


def _extent(data: bytes, at: int, code: int, depth: int) -> tuple[int, int, int]:
    """Of a list, map or array whose size is at ``at``: number of elements, start of the first, end."""
    if depth >= _DEPTH_MAX:
        raise ValueError("values are nested too deeply")
    if code < 0xD0 or code == 0xE0:
        count, begin, end = data[at + 1], at + 2, at + 1 + data[at]
    else:
        count, begin = _U32.unpack_from(data, at + 4)[0], at + 8
        end = at + 4 + _U32.unpack_from(data, at)[0]
    if end > len(data) or begin > end:
        raise ValueError("a value extends beyond the message")
    return count, begin, end


def _array(data: bytes, at: int, code: int, depth: int) -> tuple[Any, int]:
    count, at, end = _extent(data, at, code, depth)
    descriptors: list[Any] = []
    while data[at] == 0:
        descriptor, at = read(data, at + 1, depth + len(descriptors) + 1)
        descriptors.append(_plain_descriptor(descriptor))
        if len(descriptors) > _DEPTH_MAX:
            raise ValueError("values are nested too deeply")
    element, at = data[at], at + 1
    if element >> 4 == 4 and count > _EMPTY_ELEMENTS_MAX:
        raise ValueError(f"an array of {count} elements without content")
    items = []
    for _ in range(count):
        item, at = _read_content(element, data, at, depth + 1)
        for descriptor in reversed(descriptors):
            item = DescribedValue(descriptor, item)
        items.append(item)
    if at != end:
        raise ValueError("the size of an array does not match its elements")
    return items, end


def _text(data: bytes, at: int, end: int) -> str:
    return _bytes(data, at, end).decode()


def _bytes(data: bytes, at: int, end: int) -> bytes:
    if end > len(data):
        raise ValueError("a value extends beyond the message")
    return data[at:end]


def fields(data: bytes, value: int) -> list[Any]:
    """The fields of a described list."""
    items, _ = read(data, value)
    if not isinstance(items, list):
        raise ValueError("a section is not a list")
    return items


def plain_fields(data: bytes, value: int) -> list[Any]:
    """The fields of a described list, for sections whose fields are simple: others are None."""
    code = data[value]
    if code not in (0xC0, 0xD0):
        return [_plain_field(item) for item in fields(data, value)]
    count, at, end = _extent(data, value + 1, code, 0)
    items: list[Any] = []
    for _ in range(count):
        code = data[at]
        if code == 0x40:
            items.append(None)
            at += 1
        elif code in (0xA1, 0xA3):
            text, at = at + 2, at + 2 + data[at + 1]
            items.append(_text(data, text, at))
        else:
            item, at = read(data, at, 1)
            items.append(_plain_field(item))
    if at != end:
        raise ValueError("the size of a list does not match its elements")
    return items


def _plain_field(item: Any) -> Any:
    if isinstance(item, values.TypedValue):
        return item.value
    return item if isinstance(item, uuid.UUID) else None


def entries(data: bytes, value: int) -> dict[str, Any]:
    """The entries of a map, without those whose key is not a string or symbol."""
    items, _ = read(data, value)
    if isinstance(items, values.TypedValue) and items.value is None:
        return {}
    if not isinstance(items, dict):
        raise ValueError("a section is not a map")
    return {name: item for name, item in items.items() if isinstance(name, str)}


def elements(data: bytes, value: int) -> list[bytes]:
    """The encoded elements of a list, or keys and values of a map."""
    code = data[value]
    if code in (0x40, 0x45):
        return []
    if code not in (0xC0, 0xC1, 0xD0, 0xD1):
        raise ValueError("a section is not a list or map")
    count, at, _ = _extent(data, value + 1, code, 0)
    items = []
    for _ in range(count):
        end = skip(data, at)
        items.append(data[at:end])
        at = end
    return items


_ttls_ms: dict[bytes, int] = {}  # time to live in ms, by header section: few differ


def expires_ms(data: bytes, now_ms: int) -> int:
    """When a message that arrives now expires; 0: never, or the value is malformed."""
    at, ttl_ms = 0, 0
    try:
        while (code := data[at + 2]) < PROPERTIES:
            end = at + 5 + data[at + 4] if data[at + 3] in _SMALL else skip(data, at)
            if code == HEADER:
                header = data[at:end]
                cached_ms = _ttls_ms.get(header)
                ttl_ms = _read_ttl_ms(header) if cached_ms is None else cached_ms
            at = end
        absolute_ms = 0
        if code == PROPERTIES:
            # Fast path for most messages: of ten properties, the ninth is null and the last, the creation
            # time, has 9 bytes. A ninth property that is a time also has 9 bytes, and could end with the byte
            # of a null.
            last = at + 5 + data[at + 4] - 9
            if (
                data[at + 3] != 0xC0
                or data[at + 5] != 10
                or data[last] != 0x83
                or data[last - 1] != 0x40
                or data[last - 9] == 0x83
            ):
                absolute_ms = _number(data, at + 3, 8)
    except MALFORMED:
        return 0
    return absolute_ms or (now_ms + ttl_ms if ttl_ms else 0)


def _read_ttl_ms(header: bytes) -> int:
    if len(_ttls_ms) > 4096:
        _ttls_ms.clear()
    ttl_ms = _ttls_ms[header] = _number(header, 3, 2)
    return ttl_ms


def _number(data: bytes, value: int, place: int) -> int:
    """One field of a described list, without decoding the others; 0 if it is not a number."""
    code = data[value]
    if code not in (0xC0, 0xD0):
        return 0
    count, at, _ = _extent(data, value + 1, code, 0)
    if place >= count:
        return 0
    for _ in range(place):
        at = skip(data, at)
    field = read(data, at)[0]
    return field.value if isinstance(field, values.TypedValue) and type(field.value) is int else 0


# -- writing -----------------------------------------------------------------------------------------------


def text(value: str, *, symbol: bool = False) -> bytes:
    data = value.encode()
    if len(data) < 256:
        return bytes((0xA3 if symbol else 0xA1, len(data))) + data
    return (b"\xb3" if symbol else b"\xb1") + _U32.pack(len(data)) + data


def binary(data: bytes) -> bytes:
    return (bytes((0xA0, len(data))) if len(data) < 256 else b"\xb0" + _U32.pack(len(data))) + data


def ulong(value: int) -> bytes:
    return bytes((0x53, value)) if value < 256 else b"\x80" + value.to_bytes(8, "big")


def timestamp(ms: int) -> bytes:
    return b"\x83" + ms.to_bytes(8, "big", signed=True)


def uint(value: int) -> bytes:
    return b"\x70" + _U32.pack(value)


_WRITERS: Final = {
    _K.BYTE: (b"\x51", struct.Struct("b")),
    _K.SHORT: (b"\x61", struct.Struct(">h")),
    _K.INT: (b"\x71", struct.Struct(">i")),
    _K.LONG: (b"\x81", struct.Struct(">q")),
    _K.FLOAT: (b"\x72", struct.Struct(">f")),
    _K.DOUBLE: (b"\x82", struct.Struct(">d")),
}


def primitive(item: values.TypedValue) -> bytes:
    value = item.value
    if value is None:
        return b"\x40"
    writer = _WRITERS.get(item.kind)
    if writer is not None:
        return writer[0] + writer[1].pack(value)
    match item.kind:
        case _K.BOOLEAN:
            return b"\x41" if value else b"\x42"
        case _K.STRING:
            return text(str(value))
        case _K.CHAR:
            return b"\x73" + _U32.pack(ord(str(value)))
        case _:
            return binary(bytes(value))  # type: ignore[arg-type]


def encode_value(value: Any) -> bytes:
    """Encode any value of JSON or of a message."""
    match value:
        case values.TypedValue():
            return primitive(value)
        case dict():
            return mapping({str(name): encode_value(item) for name, item in value.items()})
        case list() | tuple():
            return sequence([encode_value(item) for item in value])
        case int() if not -(1 << 63) <= value < 1 << 63:
            return ulong(value) if 0 <= value < 1 << 64 else primitive(values.typed(float(value)))
        case _:
            return primitive(values.typed(value))


def sequence(items: list[bytes]) -> bytes:
    content = b"".join(items)
    if not items:
        return b"\x45"
    if len(content) < 255 and len(items) < 256:
        return bytes((0xC0, len(content) + 1, len(items))) + content
    return b"\xd0" + _U32.pack(len(content) + 4) + _U32.pack(len(items)) + content


def mapping(items: dict[str, bytes], *, symbols: bool = False) -> bytes:
    return encoded_map(
        [part for name, value in items.items() for part in (text(name, symbol=symbols), value)]
    )


def encoded_map(parts: list[bytes]) -> bytes:
    """A map of encoded keys and values in turn."""
    content = b"".join(parts)
    if len(content) < 255 and len(parts) < 256:
        return bytes((0xC1, len(content) + 1, len(parts))) + content
    return b"\xd1" + _U32.pack(len(content) + 4) + _U32.pack(len(parts)) + content


def section(code: int, value: bytes) -> bytes:
    return bytes((0, 0x53, code)) + value
