"""The registry's records in the store: loaded at the start of a term, then only written.

Each decision is one transaction, fenced by the registry's lease, whatever its size. A write is never
interrupted: a cancelled caller receives its cancellation when the store has replied, so that memory and store
do not diverge.

The identity of the store is recorded too. A store restored from a backup has another identity. Its epoch
counter is then set beyond all epochs assigned after the backup (by the clock; agents correct it if the clock
is wrong, see `assignments`), and its owners are discarded.
"""

from __future__ import annotations

import asyncio
import contextvars
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

import msgspec

from muster.core.telemetry import log
from muster.manage import protocol
from muster.manage.registry import assignments, records
from muster.store import database, transactions

events = log.EventLog("manage")

RESOURCES, OWNERS, STATUSES = "manage.resources", "manage.owners", "manage.statuses"
AGENTS, META, REQUESTS = "manage.agents", "manage.meta", "manage.requests"
EPOCH, IDENTITY, LOST_EPOCHS = "epoch", "store", "lost-epochs"
EPOCHS_A_SECOND = 1 << 20  # more than are ever assigned

#: The request that is executed: it is recorded with its changes, so that the next registry recognises it.
executing: contextvars.ContextVar[str] = contextvars.ContextVar("executing", default="")

T = TypeVar("T")


async def finish(work: Coroutine[Any, Any, T]) -> T:
    """The result of ``work``, which runs to its end even if the caller is cancelled."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        if not task.cancelled() and (failure := task.exception()) is not None:
            events.warning("failed-after-cancellation", error=failure)
        raise cancelled
    return task.result()


class RegistryRecords:
    def __init__(self, store: database.Store, *, clock: Callable[[], float] = time.time) -> None:
        self._store = store
        self._clock = clock

    async def write(self, term: int, fill: Callable[[transactions.Transaction], None]) -> None:
        """Write a transaction as the holder of the lease in this term."""
        async with self._store.transaction() as tx:
            tx.fence(protocol.LEASE, term)
            fill(tx)

    async def commit(
        self,
        state: assignments.AssignmentProcessor,
        changes: records.RegistryChanges,
        also: Callable[[transactions.Transaction], None] | None = None,
    ) -> set[str]:
        """Store the changes, then apply them. Returns the managers to notify.

        ``also`` writes other records in the same transaction.
        """

        def fill(tx: transactions.Transaction) -> None:
            if also is not None:
                also(tx)
            if changes.epoch > state.epoch:
                tx.put(META, EPOCH, str(changes.epoch).encode())
            for collection, key, value in _writes(changes):
                if value is None:
                    tx.delete(collection, key)
                else:
                    tx.put(collection, key, value)

        await self.write(state.term, fill)
        return state.accept(changes)

    async def load(self, loaded: assignments.AssignmentProcessor) -> None:
        """Load all records into a new processor."""
        await self.write(loaded.term, lambda _: None)  # from now on, earlier terms cannot write
        changes, identity = records.RegistryChanges(), ""
        async with self._store.snapshot() as snapshot:
            async for page in snapshot.load(REQUESTS):
                changes.requests |= {record.key: int(record.value) for record in page}
            async for page in snapshot.load(META):
                for record in page:
                    if record.key == EPOCH:
                        changes.epoch = int(record.value)
                    elif record.key == IDENTITY:
                        identity = record.value.decode()
                    elif record.key == LOST_EPOCHS:
                        loaded.lost_epochs = msgspec.json.decode(record.value, type=list[tuple[int, int]])
            async for page in snapshot.load(AGENTS):
                for record in page:
                    changes.agents[record.key] = msgspec.json.decode(record.value, type=records.AgentRecord)
            async for page in snapshot.load(RESOURCES):
                for record in page:
                    changes.resources[record.key] = msgspec.json.decode(
                        record.value, type=records.ResourceRecord
                    )
            async for page in snapshot.load(OWNERS):
                for record in page:
                    changes.owners[record.key] = msgspec.json.decode(record.value, type=records.ResourceOwner)
            async for page in snapshot.load(STATUSES):
                for record in page:
                    status = msgspec.json.decode(record.value, type=protocol.ResourceStatus)
                    changes.statuses[record.key] = status
        if identity != self._store.identity:
            if identity:
                before = changes.epoch
                changes.epoch = max(before, int(self._clock()) * EPOCHS_A_SECOND)
                loaded.lost_epochs.append((before, changes.epoch))
                changes.owners.clear()
                events.warning("store-restored", epoch=changes.epoch)
            await self.write(loaded.term, lambda tx: self._identify(tx, changes.epoch, loaded.lost_epochs))
        changes.requests = dict(sorted(changes.requests.items(), key=lambda item: item[1] or 0))
        loaded.accept(changes)

    def _identify(self, tx: transactions.Transaction, epoch: int, lost: list[tuple[int, int]]) -> None:
        tx.put(META, EPOCH, str(epoch).encode())
        tx.put(META, LOST_EPOCHS, msgspec.json.encode(lost))
        tx.put(META, IDENTITY, self._store.identity.encode())


def _writes(changes: records.RegistryChanges) -> Iterator[tuple[str, str, bytes | None]]:
    encode = msgspec.json.encode
    for request, number in changes.requests.items():
        yield REQUESTS, request, None if number is None else b"%d" % number
    for name, agent in changes.agents.items():
        yield AGENTS, name, None if agent is None else encode(agent)
    for name, resource in changes.resources.items():
        yield RESOURCES, name, None if resource is None else encode(resource)
    for name, owner in changes.owners.items():
        yield OWNERS, name, None if owner is None else encode(owner)
    for name, status in changes.statuses.items():
        yield STATUSES, name, None if status is None else encode(status)
