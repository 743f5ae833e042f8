"""Decides which commits of a batch are accepted, and their effects on the tables. Pure.

Transactions are optimistic. A transaction reads a snapshot and buffers its writes; at its end it submits a
`Commit`: its reads and its writes. The engine takes the waiting commits as one batch, locks the store, loads
the data that `plan` needs, and calls it. `plan` processes them in order, as if each was alone: it rejects a
commit whose reads are outdated, whose expectations do not hold, whose epoch is stale or which exceeds the
budget, numbers the others, and adds up their effects. The engine executes these and syncs once for all. A
rejected commit has no effect, so it cannot affect the others.

Because numbers are assigned under the lock, the order of numbers is the order of commits, and a reader that
sees a number sees everything below it: so the feed has no gaps. (A PostgreSQL sequence would not do: its
numbers are assigned before the commits, and become visible in another order.)

Old values stay in the feed without being written twice: a change's value is read from the record as long as
it is current, and is moved to the change when the record is overwritten.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from muster.core import errors
from muster.store import api

FENCES = "_fences"
OVERHEAD_BYTES = 64  # approximate size of a record in addition to its key and value

Place = tuple[str, bytes]  # collection, key


class KeyRange(msgspec.Struct, frozen=True):
    """Keys of a collection from ``low`` to just below ``high`` (None: to the end)."""

    collection: str
    low: bytes
    high: bytes | None

    def holds(self, place: Place) -> bool:
        collection, key = place
        return collection == self.collection and key >= self.low and (self.high is None or key < self.high)


class RecordWrite(msgspec.Struct, frozen=True):
    """``value`` None deletes."""

    value: bytes | None
    expected_version: int | None = None
    epoch: int | None = None


class Commit(msgspec.Struct, frozen=True):
    """``snapshot`` is the version it read at, None if it read nothing."""

    writes: Mapping[Place, RecordWrite]
    snapshot: int | None = None
    keys_read: frozenset[Place] = frozenset()
    ranges_read: tuple[KeyRange, ...] = ()


class RecordVersion(msgspec.Struct, frozen=True):
    """The metadata of a record."""

    version: int
    position: int
    epoch: int
    value_bytes: int


class StoreHead(msgspec.Struct, frozen=True):
    """The store's own row: the last position given, the last one trimmed from the feed, and sizes."""

    position: int = 0
    trimmed: int = 0
    record_bytes: int = 0
    history_bytes: int = 0


class RecordPut(msgspec.Struct, frozen=True):
    value: bytes
    version: int
    position: int
    epoch: int


class FeedRow(msgspec.Struct):
    """A row of the feed. ``value`` is filled in once the record no longer holds it."""

    position: int
    version: int
    place: Place
    deleted: bool
    epoch: int
    value: bytes | None = None


class CommitPlan(msgspec.Struct, frozen=True):
    """``outcomes`` correspond to the batch; ``superseded`` are records whose value is moved to the feed."""

    outcomes: list[int | errors.MusterError]
    superseded: dict[Place, int]
    puts: dict[Place, RecordPut]
    deletes: set[Place]
    changes: list[FeedRow]
    head: StoreHead

    @property
    def writes(self) -> bool:
        return bool(self.puts or self.deletes)


class CommitLimits(msgspec.Struct, frozen=True):
    record_bytes_max: int
    history_changes_max: int


def limits(settings: api.StoreOptions) -> CommitLimits:
    return CommitLimits(settings.bytes_max, settings.history_changes_max)


def size(place: Place, value_bytes: int) -> int:
    return len(place[0]) + len(place[1]) + value_bytes + OVERHEAD_BYTES


def touched(batch: Iterable[Commit]) -> set[Place]:
    """The places whose `Stored` `plan` needs."""
    return {place for commit in batch for place in commit.writes}


def oldest_snapshot(batch: Iterable[Commit]) -> int | None:
    """`plan` needs the changes after this one; None: it needs none."""
    return min((commit.snapshot for commit in batch if commit.snapshot is not None), default=None)


def plan(
    batch: Sequence[Commit],
    *,
    head: StoreHead,
    stored: Mapping[Place, RecordVersion],
    recent: Iterable[tuple[int, Place]],
    limits: CommitLimits,
) -> CommitPlan:
    """``stored`` holds what exists of `touched`; ``recent`` every change after `oldest_snapshot`."""
    planner = _Planner(head, dict(stored), {place: position for position, place in recent}, limits)
    outcomes = [planner.add(commit) for commit in batch]
    return planner.finish(outcomes)


class _Planner:
    def __init__(
        self,
        head: StoreHead,
        current: dict[Place, RecordVersion],
        latest: dict[Place, int],
        limits: CommitLimits,
    ) -> None:
        self._head = head
        self._current = current  # after the commits accepted so far
        self._latest = latest  # position of the last change of each place changed since the oldest snapshot
        self._limits = limits
        self._position = head.position
        self._record_bytes = head.record_bytes
        # where the value in the table is overwritten or deleted
        self._superseded: dict[Place, RecordVersion] = {}
        self._puts: dict[Place, RecordPut] = {}
        self._deletes: set[Place] = set()
        self._changes: list[FeedRow] = []

    def add(self, commit: Commit) -> int | errors.MusterError:
        refusal = self._overtaken(commit)
        if refusal is None:
            effective, refusal = self._judge(commit)
            if refusal is None:
                return self._accept(effective)
        return refusal

    def _overtaken(self, commit: Commit) -> errors.MusterError | None:
        snapshot = commit.snapshot
        if snapshot is None or snapshot >= self._position:
            return None
        if snapshot < self._head.trimmed:
            return api.TransactionConflict(
                "the transaction took so long that the changes since its start are not retained any more"
            )
        for place in commit.keys_read:
            if self._latest.get(place, 0) > snapshot:
                return _overtaken_at(place, self._latest[place])
        for key_range in commit.ranges_read:
            for place, position in self._latest.items():
                if position > snapshot and key_range.holds(place):
                    return _overtaken_at(place, position)
        return None

    def _judge(self, commit: Commit) -> tuple[dict[Place, RecordWrite], errors.MusterError | None]:
        """The writes that change something, or why none may."""
        effective: dict[Place, RecordWrite] = {}
        growth = 0
        for place, write in commit.writes.items():
            stored = self._current.get(place)
            version, epoch = (stored.version, stored.epoch) if stored else (api.ABSENT, 0)
            if write.epoch is not None and write.epoch < epoch:
                return {}, errors.StaleEpoch(
                    f"{_name(place)} was written under epoch {epoch}; {write.epoch} is over",
                    epoch=write.epoch,
                    current=epoch,
                )
            if write.expected_version is not None and write.expected_version != version:
                return {}, errors.Conflict(
                    f"{_name(place)} is {_at(version)}, not {_at(write.expected_version)}",
                    actual=version,
                    hint="read it again and decide again",
                )
            if write.value is None and stored is None:
                continue
            if place[0] == FENCES and write.epoch == epoch and write.value is not None:
                continue
            effective[place] = write
            growth += size(place, len(write.value)) if write.value is not None else 0
            growth -= size(place, stored.value_bytes) if stored else 0
        if growth > 0 and self._record_bytes + growth > self._limits.record_bytes_max:
            return {}, errors.LimitExceeded(
                f"the store's budget of {self._limits.record_bytes_max} bytes is used up: "
                f"{self._record_bytes} are in use and this would add {growth}",
                hint="delete records, or raise bytes_max",
            )
        self._record_bytes += growth
        return effective, None

    def _accept(self, writes: Mapping[Place, RecordWrite]) -> int:
        version = self._position + len(writes)
        for place, write in writes.items():
            self._position += 1
            old = self._current.pop(place, None)
            if place in self._puts:  # by an earlier commit of this batch: its value never reaches the table
                put = self._puts.pop(place)
                self._changes[put.position - self._head.position - 1].value = put.value
            elif old is not None:
                self._superseded[place] = old
            epoch = write.epoch if write.epoch is not None else old.epoch if old else 0
            if write.value is None:
                self._deletes.add(place)
            else:
                self._deletes.discard(place)
                self._puts[place] = RecordPut(write.value, version, self._position, epoch)
                self._current[place] = RecordVersion(version, self._position, epoch, len(write.value))
            self._latest[place] = self._position
            self._changes.append(FeedRow(self._position, version, place, write.value is None, epoch))
        return version

    def finish(self, outcomes: list[int | errors.MusterError]) -> CommitPlan:
        trimmed = max(self._head.trimmed, self._position - self._limits.history_changes_max)
        superseded = {place: old for place, old in self._superseded.items() if old.position > trimmed}
        changes = [change for change in self._changes if change.position > trimmed]
        moved_bytes = sum(old.value_bytes for old in superseded.values())
        moved_bytes += sum(len(change.value) for change in changes if change.value is not None)
        return CommitPlan(
            outcomes=outcomes,
            superseded={place: old.position for place, old in superseded.items()},
            puts=self._puts,
            deletes=self._deletes,
            changes=changes,
            head=StoreHead(
                position=self._position,
                trimmed=trimmed,
                record_bytes=self._record_bytes,
                history_bytes=self._head.history_bytes + moved_bytes,
            ),
        )


def trim_to(head: StoreHead, history_bytes_max: int) -> int:
    """The position up to which the feed is trimmed if its old values take too much space: a tenth at a
    time."""
    if head.history_bytes <= history_bytes_max or head.trimmed >= head.position:
        return head.trimmed
    return head.trimmed + max(1, (head.position - head.trimmed) // 10)


def _name(place: Place) -> str:
    return f"{place[0]}/{place[1].decode(errors='replace')[:200]}"


def _at(version: int) -> str:
    return f"at version {version}" if version else "absent"


def _overtaken_at(place: Place, position: int) -> api.TransactionConflict:
    return api.TransactionConflict(
        f"{_name(place)} has changed since the transaction read it", actual=position
    )
