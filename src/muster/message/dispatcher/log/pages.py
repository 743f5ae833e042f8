"""Messages are stored in the log in pages; a page is one message of the broker.

A page contains what was stored at one time: the record, and the messages. If these have one destination, the
page has its subject; otherwise it is a *shared page*, with `MessagePage.parts`. A sync costs the broker the
same for one message as for a page of hundreds, and an atomic batch of two pages five times as much
(docs/decisions/0043).

The number of a message combines the sequence of its page and its place in the page; it increases along the
log. The place in a shared page begins at `SHARED`: those of its messages that are still needed at a
checkpoint are written again to *sorted pages* (`shared_pages`), with their numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, TypeVar

import msgspec

from muster.bus import api
from muster.bus.log import pages
from muster.core import errors
from muster.message.dispatcher.log import ledger

BITS: Final = 10
SHARED: Final = 1 << (BITS - 1)  # also in numbers of other pages that Muster 0.1 has written
PLACES: Final = SHARED  # messages of a page
PAGE_BYTES: Final = 512 << 10  # maximum size of a page, unless its first message is larger
STORED_BYTES_MAX: Final = 960 << 10  # with its record: slightly below the broker's limit


class PagedMessage(msgspec.Struct, frozen=True, array_like=True):
    raw: str  # `messages.MessageMeta` in JSON
    data: bytes


class MessagePage(msgspec.Struct, array_like=True):
    """``parts``: of a shared or sorted page, the subjects of ``held``: for each, how many in turn have it.
    ``numbers``: of a sorted page, those of ``held``.
    """

    record: ledger.LogRecord | None = None
    held: list[PagedMessage] = []
    parts: list[tuple[str, int]] = []
    numbers: list[int] = []


class PageCover(msgspec.Struct, array_like=True):
    """A page whose messages are not decoded."""

    record: ledger.LogRecord | None = None
    held: msgspec.Raw = msgspec.Raw()
    parts: list[tuple[str, int]] = []


is_page: Final = pages.is_page
encode: Final = msgspec.msgpack.Encoder().encode
P = TypeVar("P")
_pages: Final = msgspec.msgpack.Decoder(MessagePage)
_covers: Final = msgspec.msgpack.Decoder(PageCover)


def number(sequence: int, place: int) -> int:
    return sequence << BITS | place


def sequence_of(number: int) -> int:
    return number >> BITS


def end(sequence: int) -> int:
    """The highest number of a message up to this page."""
    return sequence << BITS | ((1 << BITS) - 1)


def read(page: api.StoredMessage) -> Iterator[tuple[int, str, PagedMessage]]:
    """The messages of a page, in the order of their numbers, each with its number and its subject."""
    decoded = _decode(page, _pages)
    if not decoded.parts:
        first, subject = page.sequence << BITS, page.subject
        return ((first | place, subject, message) for place, message in enumerate(decoded.held))
    numbers = decoded.numbers or range(number(page.sequence, SHARED), end(page.sequence) + 1)
    of_each = (subject for subject, count in decoded.parts for _ in range(count))
    return zip(numbers, of_each, decoded.held, strict=False)


def cover(page: api.StoredMessage) -> PageCover:
    return _decode(page, _covers)


def _decode(page: api.StoredMessage, decoder: msgspec.msgpack.Decoder[P]) -> P:
    try:
        return decoder.decode(page.data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise errors.InvariantViolation(f"page {page.sequence} of the log is unreadable: {error}") from error
