"""How messages stand in the log: in pages, one page being one message of the broker.

A page holds what one destination got at one time, and the last page of a batch also holds the batch's
record.  A sync costs the broker the same for one message as for a page of hundreds, and most batches are a
single page, which needs none of the broker's machinery for atomic batches (docs/decisions/0018).

A message's number is its page's sequence and its place in the page, in one integer that grows along the log.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import msgspec

from muster.core import errors
from muster.message.dispatcher.log import ledger

BITS: Final = 10
PLACES: Final = 1 << BITS
PAGE_BYTES: Final = 512 << 10  # a page takes no more, unless its first message alone does
STORED_BYTES_MAX: Final = 960 << 10  # with its record: the broker takes a little more


class PagedMessage(msgspec.Struct, frozen=True, array_like=True):
    raw: str  # `messages.Meta` in JSON
    data: bytes


class LogPage(msgspec.Struct, array_like=True):
    record: ledger.LogRecord | None = None
    held: list[PagedMessage] = []


class _Cover(msgspec.Struct, array_like=True):
    """A page whose messages nobody looks at now."""

    record: ledger.LogRecord | None = None
    held: msgspec.Raw = msgspec.Raw()


encode: Final = msgspec.msgpack.Encoder().encode
_pages: Final = msgspec.msgpack.Decoder(LogPage)
_covers: Final = msgspec.msgpack.Decoder(_Cover)


def number(sequence: int, place: int) -> int:
    return sequence << BITS | place


def sequence_of(number: int) -> int:
    return number >> BITS


def end(sequence: int) -> int:
    """The highest number that a message up to this page can have."""
    return sequence << BITS | (PLACES - 1)


def read(sequence: int, data: bytes) -> Iterator[tuple[int, PagedMessage]]:
    """The messages of a page with their numbers."""
    try:
        held = _pages.decode(data).held
    except msgspec.DecodeError as error:
        raise errors.InvariantViolation(f"page {sequence} of the log is unreadable: {error}") from error
    first = sequence << BITS
    return ((first | place, message) for place, message in enumerate(held))


def record_of(sequence: int, data: bytes) -> ledger.LogRecord | None:
    try:
        return _covers.decode(data).record
    except msgspec.DecodeError as error:
        raise errors.InvariantViolation(f"page {sequence} of the log is unreadable: {error}") from error
