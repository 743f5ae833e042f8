"""The format of an owned log: pages of records, each page one message of a stream.

A record is a key and a value; the last record of a key is its present value, and one without a value deletes
the key. The *position* of a record is the sequence of its page and its place there. Its *version* is the
position at which it was first written: trimming writes live records again, at another position.

A page names the page before it, so a reader notices that it missed some. It contains the ids of the requests
that its records execute, for the recognition of repetitions. The records of a large transaction are in *body*
messages that were stored before; the page that names them commits it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from muster.core import errors

PLACE_BITS = 20
RECORDS_MAX = 1 << PLACE_BITS
PAGE_BYTES = 512 << 10  # of records and request ids, unless one transaction has more; half of a message
OVERHEAD_BYTES = 160  # of a page in the stream, besides its records


class OwnedRecord(msgspec.Struct, frozen=True, array_like=True):
    """``version`` 0: that of its position."""

    key: bytes
    value: bytes | None
    version: int = 0

    @property
    def size(self) -> int:
        return len(self.key) + len(self.value or b"") + 12


class LogRequest(msgspec.Struct, frozen=True, array_like=True):
    """A request that was executed: its result is the ``position`` of its last record."""

    id: str
    at_ms: int
    position: int

    @property
    def size(self) -> int:
        return len(self.id) + 24


class OwnedPage(msgspec.Struct, frozen=True, array_like=True):
    """``previous``: the sequence of the page before it. ``body``: the sequences of the messages with its
    records. A request whose position is lower than `RECORDS_MAX` is at that place of this page. ``first``:
    the oldest page that is left; those before it may be removed once this one is stored. ``former``: the
    identity of the log before this page, which is the first one after a restore from a backup.
    ``leaves_first``: otherwise the page is of a version that named ``first`` before it trimmed that, too."""

    log: str
    epoch: int
    previous: int
    records: list[OwnedRecord] = []
    requests: list[LogRequest] = []
    body: list[int] = []
    first: int = 0
    former: str = ""
    leaves_first: bool = False


_ARRAYS = frozenset(bytes((0x90 | fields,)) for fields in range(16))  # the first byte of a short array
_PAGES = msgspec.msgpack.Decoder(OwnedPage)
_RECORDS = msgspec.msgpack.Decoder(list[OwnedRecord])


def position(sequence: int, place: int = 0) -> int:
    return sequence << PLACE_BITS | place


def sequence_of(position: int) -> int:
    return position >> PLACE_BITS


def encode(page: OwnedPage) -> bytes:
    return msgspec.msgpack.encode(page)


def is_page(data: bytes) -> bool:
    """Whether a message of a log is a page, which may be damaged. Others can put messages there, though no
    permission allows it: the broker sends its replies to the subject that a client names. These are no pages.
    """
    return data[:1] in _ARRAYS


def page_in(data: bytes) -> OwnedPage | None:
    """The page; None if the message is none: no owner wrote it."""
    return decode(data) if is_page(data) else None


def decode(data: bytes) -> OwnedPage:
    """`errors.InvalidInput` if it is not a page."""
    try:
        return _PAGES.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise errors.InvalidInput(f"not a page of a log: {error}") from error


def to_body(records: Sequence[OwnedRecord]) -> list[bytes]:
    """Records as parts that fit into messages."""
    data = msgspec.msgpack.encode(records)
    return [data[at : at + PAGE_BYTES] for at in range(0, len(data), PAGE_BYTES)]


def from_body(parts: Iterable[bytes]) -> list[OwnedRecord]:
    try:
        return _RECORDS.decode(b"".join(parts))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise errors.InvalidInput(f"not the body of a transaction: {error}") from error
