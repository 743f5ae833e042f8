"""The registry's records in its owned log, and all of them in memory.

A record has a collection, a key and a value. Resources, owners, statuses and agents are held by the
`assignments.AssignmentProcessor` only, in their types; other records (secrets, rollouts, enrolment tokens) as
they are stored. Memory changes only by records that are stored, whole transactions at a time, in the same way
in the owner and in those that follow it: so a registry on standby is as ready as the active one, and takes
over when it has read the last page.

A log that was restored from a backup is marked as such (`RegistryLog.mark_restored`) before a registry uses
it. The epoch counter is then set beyond all epochs assigned after the backup (by the clock; agents correct it
if the clock is wrong, see `assignments`), and its owners are discarded.
"""

from __future__ import annotations

import bisect
import contextvars
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, Self

import msgspec

from muster.bus import api
from muster.bus.log import owned_log, pages
from muster.core import lifecycle
from muster.core.telemetry import log
from muster.manage import protocol
from muster.manage.registry import assignments, records

events = log.EventLog("manage")

RESOURCES, OWNERS, STATUSES = "manage.resources", "manage.owners", "manage.statuses"
AGENTS, META = "manage.agents", "manage.meta"
EPOCH, LOST_EPOCHS = "epoch", "lost-epochs"
EPOCHS_A_SECOND = 1 << 20  # more than are ever assigned
MAX_BYTES = 1 << 30
USED_SHARE = 0.75  # of the stream: the rest is for pages that are trimmed and not removed yet
SIZE_BITS = 28  # of a record, beside its position

REQUESTS_S = 3600.0  # how long a request is recognised: a client may repeat it for as long

#: A record to write: its collection, key and value; None deletes it.
RecordChange = tuple[str, str, bytes | None]

#: The request that is executed: it is recorded with its changes, so that the next registry recognises it.
executing: contextvars.ContextVar[str] = contextvars.ContextVar("executing", default="")


class RegistryRecord(msgspec.Struct, frozen=True, gc=False):
    """``version``: another one after each write."""

    key: str
    value: bytes
    version: int


class RecordType(NamedTuple):
    """``field``: of `records.RegistryChanges`."""

    field: str
    decode: Callable[[bytes], Any]


TYPES = {
    RESOURCES: RecordType("resources", msgspec.json.Decoder(records.ResourceRecord).decode),
    OWNERS: RecordType("owners", msgspec.json.Decoder(records.ResourceOwner).decode),
    STATUSES: RecordType("statuses", msgspec.json.Decoder(protocol.ResourceStatus).decode),
    AGENTS: RecordType("agents", msgspec.json.Decoder(records.AgentRecord).decode),
}
_decode_lost_epochs = msgspec.json.Decoder(list[tuple[int, int]]).decode


class RegistryState:
    """The state in memory, as `muster.bus.log.journal.LogState`. ``fleet`` has the typed records."""

    def __init__(self, ttl_s: float) -> None:
        self._ttl_s = ttl_s
        self.reset()

    def reset(self) -> None:
        self.live_bytes = 0
        self.fleet = assignments.AssignmentProcessor(term=0, ttl_s=self._ttl_s)
        self.touched: set[str] = set()  # managers to notify
        self._places: dict[str, dict[str, int]] = {}  # of each record: its position and size
        self._records: dict[str, dict[str, RegistryRecord]] = {}
        self._sorted_keys: dict[str, list[str]] = {}
        self._page = records.RegistryChanges()

    def apply(self, record: pages.OwnedRecord, version: int, position: int) -> None:
        collection, key = _split(record.key)
        places = self._places.setdefault(collection, {})
        before = places.pop(key, None)
        if before is not None:
            self.live_bytes -= before & (1 << SIZE_BITS) - 1
        if record.value is not None:
            places[key] = position << SIZE_BITS | record.size
            self.live_bytes += record.size
        if before is None or version == position:  # otherwise it is only at another place
            self._change(collection, key, record.value, version)

    def holds(self, key: bytes, position: int) -> bool:
        collection, name = _split(key)
        return self._places.get(collection, {}).get(name, 0) >> SIZE_BITS == position

    def end_page(self) -> None:
        """The records of a page have been applied: it has whole transactions only."""
        page, self._page = self._page, records.RegistryChanges()
        self.touched |= self.fleet.accept(page)

    def _change(self, collection: str, key: str, value: bytes | None, version: int) -> None:
        if (typed := TYPES.get(collection)) is not None:
            changed: dict[str, Any] = getattr(self._page, typed.field)
            changed[key] = None if value is None else typed.decode(value)
            return
        by_key = self._records.setdefault(collection, {})
        if (key in by_key) != (value is not None):
            self._sorted_keys.pop(collection, None)
        if value is None:
            by_key.pop(key, None)
        else:
            by_key[key] = RegistryRecord(key, value, version)
        if collection == META and value is not None:
            if key == EPOCH:
                self._page.epoch = int(value)
            elif key == LOST_EPOCHS:
                self.fleet.lost_epochs = _decode_lost_epochs(value)

    def get(self, collection: str, key: str) -> RegistryRecord | None:
        return self._records.get(collection, {}).get(key)

    def scan(
        self, collection: str, *, prefix: str = "", after: str = "", limit: int | None = None
    ) -> list[RegistryRecord]:
        by_key = self._records.get(collection, {})
        if (keys := self._sorted_keys.get(collection)) is None:
            keys = self._sorted_keys[collection] = sorted(by_key)
        first = bisect.bisect_right(keys, after) if after > prefix else bisect.bisect_left(keys, prefix)
        scanned: list[RegistryRecord] = []
        for index in range(first, len(keys)):
            key = keys[index]
            if len(scanned) == limit or not key.startswith(prefix):
                break
            scanned.append(by_key[key])
        return scanned


class RegistryLog(lifecycle.ServiceContext):
    """The records of the registry. A standby reads and follows; the owner also writes."""

    def __init__(self, stream: api.Stream, *, ttl_s: float = 0.0, max_bytes: int = MAX_BYTES) -> None:
        """``ttl_s``: of a manager's renewal. ``max_bytes``: the budget of the stream."""
        self._state = RegistryState(ttl_s)
        self._log = owned_log.OwnedLog(
            stream,
            protocol.REGISTRY_LOG,
            self._state,
            bytes_max=int(max_bytes * USED_SHARE),
            reserve_bytes=max_bytes // 100,
            window_ms=int(REQUESTS_S * 1000),
            on_applied=lambda _: self._state.end_page(),
        )
        self.lost = self._log.lost  # the ownership has ended

    @classmethod
    async def open(
        cls, bus: api.Bus, *, ttl_s: float = 0.0, max_bytes: int = MAX_BYTES, replicas: int = 1
    ) -> Self:
        """To be started. The stream is created if there is none."""
        stream = await bus.stream(
            api.StreamSettings(
                protocol.STREAM,
                subjects=(f"{protocol.REGISTRY_LOG}.>",),
                max_bytes=max_bytes,
                max_age_s=0.0,
                on_full=api.FullPolicy.REFUSE,
                replicas=replicas,
            )
        )
        return cls(stream, ttl_s=ttl_s, max_bytes=max_bytes)

    def __repr__(self) -> str:
        return repr(self._log)

    async def start(self) -> None:
        await self._log.start()

    async def stop(self) -> None:
        await self._log.stop()

    # Reading: what is stored, as far as it is known here.

    @property
    def fleet(self) -> assignments.AssignmentProcessor:
        return self._state.fleet

    @property
    def age_s(self) -> float:
        """How old the records can be."""
        return self._log.age_s

    def get(self, collection: str, key: str) -> RegistryRecord | None:
        """Not of the collections in ``fleet``."""
        return self._state.get(collection, key)

    def scan(
        self, collection: str, *, prefix: str = "", after: str = "", limit: int | None = None
    ) -> list[RegistryRecord]:
        """In the order of their keys: those with ``prefix``, after the key ``after``."""
        return self._state.scan(collection, prefix=prefix, after=after, limit=limit)

    # Owning.

    async def own(self, epoch: int, is_held: Callable[[], bool] = lambda: True) -> int:
        """Become the owner, with the epoch of the lease. Returns the epoch of the ownership: a higher one if
        the leases were lost and count from a lower number again. ``is_held``: whether the lease still is."""
        try:
            await self._log.own(epoch)
        except owned_log.NotOwner:
            # The state is current now: a process that was faster stores a page, and then this fails.
            if not is_held():
                raise
            epoch = self._log.epoch + 1
            await self._log.own(epoch)
        return epoch

    @property
    def is_owned(self) -> bool:
        return self._log.is_owned

    @property
    def lost_because(self) -> str:
        return self._log.lost_because

    async def resign(self) -> None:
        """End the ownership, and follow the log again."""
        await self._log.resign()

    async def write(self, changes: Iterable[RecordChange], *, request: str = "") -> None:
        """Store the changes, all or none.

        ``request``: recorded as executed (`executed`) with them. `errors.TimedOut`: they may have been
        stored, and the ownership has ended. Other errors: nothing was stored.
        """
        await self._log.append(
            [(f"{collection}\0{key}".encode(), value) for collection, key, value in changes], request=request
        )

    def executed(self, request: str) -> bool:
        """Whether the request was executed in the last minutes, by this owner or a former one."""
        return self._log.executed(request) is not None

    def take_touched(self) -> set[str]:
        """The managers whose assignments have changed since the last call."""
        touched, self._state.touched = self._state.touched, set()
        return touched

    async def mark_restored(self, *, clock: Callable[[], float] = time.time) -> None:
        """The stream was restored from a backup: later epochs than those in it have been assigned. To be
        called by the restore, before a registry is started; repeated if it was interrupted."""
        await self.own(self._log.epoch + 1)
        fleet = self.fleet
        before, lost_epochs = fleet.epoch, list(fleet.lost_epochs)
        epoch = max(before, int(clock()) * EPOCHS_A_SECOND)
        lost_epochs.append((before, epoch))
        await self.write(
            [
                (META, EPOCH, str(epoch).encode()),
                (META, LOST_EPOCHS, msgspec.json.encode(lost_epochs)),
                *((OWNERS, name, None) for name in fleet.owners),
            ]
        )
        events.warning("registry-restored", epoch=epoch)


def written(changes: records.RegistryChanges, *, epoch: int) -> Iterator[RecordChange]:
    """The records of the changes. ``epoch``: the stored one."""
    encode = msgspec.json.encode
    if changes.epoch > epoch:
        yield META, EPOCH, str(changes.epoch).encode()
    for collection, typed in TYPES.items():
        for key, record in getattr(changes, typed.field).items():
            yield collection, key, None if record is None else encode(record)


def _split(key: bytes) -> tuple[str, str]:
    collection, _, name = key.decode().partition("\0")
    return sys.intern(collection), sys.intern(name)
