"""The types of the store interface.

A *collection* is a named, ordered map from a key (text, sorted by its UTF-8 bytes) to a *record*: bytes, the
version of the commit that wrote it and, if fencing is used, the epoch under which it was written.

Versions come from one counter for the complete store. Every change has the next *position*; the *version* of
a commit, and of every record it wrote, is the position of its last change. So versions grow in the order of
commits, and a version is also a position in the change feed.
"""

from __future__ import annotations

from typing import Literal, Self

import msgspec

from muster.core import errors
from muster.core.settings import domain

KEY_BYTES_MAX = 1_024  # PostgreSQL's index entries end at some 2,700 bytes
COLLECTION_CHARS_MAX = 64
INTEGER_MAX = 2**63 - 1

#: `expected_version` of a record that must not exist yet.
ABSENT = 0


class StoreRecord(msgspec.Struct, frozen=True):
    """``version`` is 0 for a write of the transaction that reads it, ``epoch`` 0 where none was given."""

    key: str
    value: bytes
    version: int
    epoch: int = 0


class StoreChange(msgspec.Struct, frozen=True):
    """One write of a commit; ``value`` is None for a deletion.

    The last change of a commit is the one whose ``position`` equals its ``version``.
    """

    position: int
    version: int
    collection: str
    key: str
    value: bytes | None
    epoch: int = 0


class ChangePage(msgspec.Struct, frozen=True):
    """A page of the change feed. Continue from ``position``, which may be after the last returned change."""

    changes: list[StoreChange]
    position: int


class StoreOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of a process for a store. Each field explains its trade-off."""

    #: ``full``: a commit is on disk when it returns. ``normal``: a power failure may lose the last ones.
    sync: Literal["full", "normal"] = "full"
    #: Readers in addition to the one writer. A transaction that reads uses one of them until it ends.
    pool: int = 4
    #: Wait for another process's lock, or for a free reader, before the call fails as unavailable.
    busy_timeout_s: float = 5.0
    #: A request without a response from PostgreSQL fails after this time.
    answer_timeout_s: float = 30.0
    #: Keys and values stored, at most; beyond it only deletions and smaller values are accepted.
    bytes_max: int = 8 << 30
    #: Number of changes in the feed: a reader further behind must scan again. More costs disk space only.
    history_changes_max: int = 100_000
    #: …and this many bytes of values that have since been overwritten or deleted.
    history_bytes_max: int = 256 << 20
    value_bytes_max: int = 16 << 20
    #: A transaction is held in memory until it commits.
    transaction_bytes_max: int = 64 << 20
    #: Commits waiting for the disk; beyond it `errors.Overloaded`.
    waiting_max: int = 10_000
    #: How often a `watch` polls for commits of other processes (PostgreSQL notifies; polling covers lost
    #: notifications).
    poll_s: float = 0.25
    #: PostgreSQL's schema that holds the tables: several stores may share one database.
    namespace: str = "muster"

    @classmethod
    def from_settings(cls, settings: domain.StoreSettings) -> Self:
        return cls(
            sync=settings.sync,
            pool=settings.pool,
            busy_timeout_s=settings.busy_timeout_s,
            bytes_max=settings.max_bytes,
            history_changes_max=settings.history_max_changes,
            history_bytes_max=settings.history_max_bytes,
        )


class StoreStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Counters since this process opened the store, and sizes as they are now."""

    engine: str
    #: Whether a commit that returned survives a power failure.
    durable: bool
    version: int
    commits: int
    batches: int
    overtaken: int
    conflicts: int
    stale_epochs: int
    over_budget: int
    failures: int
    waiting: int
    record_bytes: int
    history_bytes: int
    disk_bytes: int


class TransactionConflict(errors.Conflict):
    """The data that the transaction read has changed. A retry helps."""

    code = "overtaken"


class FeedTrimmed(errors.NotFound):
    """The feed no longer reaches back that far: scan, then follow from ``version``."""

    code = "trimmed"

    def __init__(self, message: str, *, version: int) -> None:
        super().__init__(message, hint="read the collections again and follow the feed from there")
        self.version = version


OUTCOME_HINT = "read before trying again: it may have been stored"


class CommitOutcomeUnknown(errors.Unavailable):
    """The engine or its connection failed during the commit, and the outcome could not be determined: check
    before a retry."""

    code = "outcome-unknown"


class StoreFull(errors.Unavailable):
    """The disk is full. Nothing was written; it works again when there is room."""

    code = "disk-full"


class StoreCorrupt(errors.MusterError):
    """The data is not a store, or is damaged."""

    code = "corrupt"
