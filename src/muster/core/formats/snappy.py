"""The block format of snappy, which Prometheus remote write requires. Pure.

`store` writes the data as literals: valid for every reader, and without a compressor.  `decompress` reads all
elements of the format, within a limit.
"""

from __future__ import annotations

from muster.core import messages

_LITERAL_BYTES_MAX = 1 << 16


def store(data: bytes) -> bytes:
    """The data in the block format, uncompressed."""
    out = bytearray(varint(len(data)))
    for start in range(0, len(data), _LITERAL_BYTES_MAX):
        literal = data[start : start + _LITERAL_BYTES_MAX]
        out += bytes((61 << 2,)) + (len(literal) - 1).to_bytes(2, "little") + literal
    return bytes(out)


def varint(number: int) -> bytes:
    """The number in groups of seven bits, as in protobuf."""
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes((*out, number))


def decompress(data: bytes, bytes_max: int) -> bytes:
    """`messages.MessageTooLarge` if the result exceeds ``bytes_max``."""
    size, place = _read_varint(data)
    if size > bytes_max:
        raise messages.MessageTooLarge(f"a body that unpacks to {size} bytes is over {bytes_max}")
    out = bytearray()
    while place < len(data):
        tag = data[place]
        place += 1
        if tag & 3 == 0:
            length = tag >> 2
            if length >= 60:
                width = length - 59
                length = int.from_bytes(data[place : place + width], "little")
                place += width
            length += 1
            out += data[place : place + length]
            place += length
        else:
            if tag & 3 == 1:
                length, width = (tag >> 2 & 7) + 4, 1
                offset = (tag >> 5) << 8 | int.from_bytes(data[place : place + 1], "little")
            else:
                length, width = (tag >> 2) + 1, 2 if tag & 3 == 2 else 4
                offset = int.from_bytes(data[place : place + width], "little")
            place += width
            if not 0 < offset <= len(out):
                raise messages.MalformedMessage("not snappy: a reference to nothing")
            copied = out[-offset : len(out) - offset + length]
            out += (copied * (length // len(copied) + 1))[:length]
        if place > len(data) or len(out) > size:
            raise messages.MalformedMessage("not snappy: an element that is too long")
    if len(out) != size:
        raise messages.MalformedMessage("snappy data that ends too early")
    return bytes(out)


def _read_varint(data: bytes) -> tuple[int, int]:
    number = 0
    for place, byte in enumerate(data[:5]):
        number |= (byte & 0x7F) << 7 * place
        if byte < 0x80:
            return number, place + 1
    raise messages.MalformedMessage("not snappy: a length that does not end")
