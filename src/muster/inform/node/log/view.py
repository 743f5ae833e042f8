"""The persistent view of a node's permanent replicas: the records in the store, and a position in the log.

The view may be behind the log: acknowledged writes are in the log, and after a crash the node continues from
the position of the view.  The log records up to which sequence deletions have been purged.  A view with an
earlier position is discarded, because the purged deletions left no trace.  No clock is involved.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Mapping

from muster.inform import protocol
from muster.inform.node.log import context_log
from muster.store import database

_POSITIONS = "inform.positions"
PAGE = 2_000
NODE_CHARACTERS_MAX = 52  # the name of a collection has at most 64


class ReplicaView:
    def __init__(self, store: database.Store, node: str) -> None:
        self._store = store
        if len(node) > NODE_CHARACTERS_MAX:  # two long names might share a prefix
            node = hashlib.blake2b(node.encode(), digest_size=16).hexdigest()
        self._node = node
        self._collection = f"inform.node.{node}"

    async def position(self) -> int:
        """Return the last sequence in the view; 0: there is no view."""
        record = await self._store.get(_POSITIONS, self._node)
        return 0 if record is None else protocol.decode(record.value, int)

    async def load(self) -> AsyncIterator[list[context_log.ContextLogEntry]]:
        async with self._store.snapshot() as snapshot:
            async for page in snapshot.load(self._collection, page=PAGE):
                yield [_entry(record.value) for record in page]

    async def value(self, key: str) -> context_log.ContextLogEntry | None:
        record = await self._store.get(self._collection, key)
        return None if record is None else _entry(record.value)

    async def save(self, entries: Mapping[str, context_log.ContextLogEntry | None], position: int) -> None:
        """Write in one transaction. None: the replica was dropped."""
        async with self._store.transaction() as tx:
            for key, entry in entries.items():
                if entry is None:
                    tx.delete(self._collection, key)
                else:
                    tx.put(
                        self._collection,
                        key,
                        entry.sequence.to_bytes(8, "big") + protocol.encode(entry.record),
                    )
            tx.put(_POSITIONS, self._node, protocol.encode(position))

    async def clear(self) -> None:
        """Delete the position first: without it, the rest of an interrupted clear is ignored."""
        await self._store.delete(_POSITIONS, self._node)
        async with self._store.snapshot() as snapshot:
            async for page in snapshot.load(self._collection, page=PAGE):
                async with self._store.transaction() as tx:
                    for record in page:
                        tx.delete(self._collection, record.key)


def _entry(data: bytes) -> context_log.ContextLogEntry:
    return context_log.ContextLogEntry(protocol.decode_record(data[8:]), int.from_bytes(data[:8], "big"))
