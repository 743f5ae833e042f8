"""Messages are stored in the log in pages; a page is one message of the broker.

A page contains the messages that one destination received at one time. The last page of a batch also contains
the record of the batch. A sync costs the broker the same for one message as for a page of hundreds, and most
batches are a single page, which does not need atomic batches (docs/decisions/0018).

The number of a message combines the sequence of its page and its place in the page; it increases along the
log.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import msgspec

from muster.core import errors
from muster.message.dispatcher.log import ledger

BITS: Final = 10
PLACES: Final = 1 << BITS
PAGE_BYTES: Final = 512 << 10  # maximum size of a page, unless its first message is larger
STORED_BYTES_MAX: Final = 960 << 10  # with its record: slightly below the broker's limit


class PagedMessage(msgspec.Struct, frozen=True, array_like=True):
    raw: str  # `messages.MessageMeta` in JSON
    data: bytes


class LogPage(msgspec.Struct, array_like=True):
    record: ledger.LogRecord | None = None
    held: list[PagedMessage] = []


class _Cover(msgspec.Struct, array_like=True):
    """A page whose messages are not decoded."""

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
    """The highest number of a message up to this page."""
    return sequence << BITS | (PLACES - 1)


def read(sequence: int, data: bytes) -> Iterator[tuple[int, PagedMessage]]:
    """The messages of a page with their numbers."""
    try:
        held = _pages.decode(data).held
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise errors.InvariantViolation(f"page {sequence} of the log is unreadable: {error}") from error
    first = sequence << BITS
    return ((first | place, message) for place, message in enumerate(held))


def record_of(sequence: int, data: bytes) -> ledger.LogRecord | None:
    try:
        return _covers.decode(data).record
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise errors.InvariantViolation(f"page {sequence} of the log is unreadable: {error}") from error
