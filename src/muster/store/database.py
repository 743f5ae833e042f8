"""A store, whatever its engine: `open` one, run transactions, read, and follow the feed of changes.

    store = await database.open("sqlite:state.db")
    async with store.transaction() as tx:
        record = await tx.get("resources", "r1")
        tx.put("resources", "r1", b"…", expected_version=record.version if record else api.ABSENT)
    async for changes in store.watch(after=tx.version):
        …

Close it, or use it with ``async with``.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import pathlib
from collections.abc import AsyncIterator, Iterable, Mapping

from muster.core import errors, lifecycle
from muster.store import api, commit_plan, engine, group_commit, transactions, urls
from muster.supervision import tasks

PAGE_RECORDS = 1_000
PAGE_BYTES = 4 << 20
NOTIFIED_POLL_FACTOR = 20  # an engine that notifies of commits is polled only in case a notification was lost

#: Present in a store during a restore.
UNFINISHED: commit_plan.Place = ("_unfinished", b"restore")


async def open(
    url: str,
    *,
    settings: api.StoreOptions | None = None,
    password: str | None = None,
    folder: pathlib.Path | None = None,
    unfinished: bool = False,
) -> Store:
    """``sqlite:PATH``, ``sqlite::memory:`` or ``postgresql://USER@HOST:PORT/DATABASE``.

    A relative path is relative to ``folder``; ``password`` is the secret itself, not a reference to it. A
    store with an incomplete restore is rejected unless ``unfinished`` is set.
    """
    settings = settings or api.StoreOptions()
    where = urls.parse(url, folder)
    opened: engine.StorageEngine
    if isinstance(where, urls.SqliteUrl):
        from muster.store.sqlite import engine as sqlite

        opened = await sqlite.open(where, settings)
    else:
        try:
            from muster.store.postgres import engine as postgres
        except ImportError as error:
            raise errors.MissingDependency(
                "PostgreSQL needs the driver psycopg", hint="pip install 'muster-fabric[postgres]'"
            ) from error

        opened = await postgres.open(where, settings, password)
    store = Store(opened, settings)
    if not unfinished and await store.is_unfinished():
        await store.close()
        raise api.StoreCorrupt("a restore into this store did not finish", hint="restore again")
    return store


class StoreSnapshot:
    """Created by `Store.snapshot`. It occupies a reader: close it soon."""

    def __init__(self, reader: engine.EngineReader) -> None:
        self.version = reader.version
        self._reader = reader

    def load(self, collection: str, *, page: int = PAGE_RECORDS) -> AsyncIterator[list[api.StoreRecord]]:
        """All records, in no order but the fastest.

        At a time in memory: ``page`` records, or fewer where their values reach `PAGE_BYTES`.
        """
        return self._reader.load(transactions.check_collection(collection), page, PAGE_BYTES)


class Store(lifecycle.ClosingContext):
    """Belongs to the event loop that opened it."""

    def __init__(self, opened: engine.StorageEngine, settings: api.StoreOptions) -> None:
        self.engine = opened
        self._settings = settings
        self._tick = asyncio.Event()
        self._listening: asyncio.Task[None] | None = None
        self._closed = False
        self._committer = group_commit.StoreCommitter(opened, settings.waiting_max, self._wake)

    @property
    def identity(self) -> str:
        """Assigned when the store was created: a position or version is not valid in a store with another
        identity."""
        return self.engine.identity

    # -- transactions ------------------------------------------------------------------------------------

    def transaction(self) -> transactions.Transaction:
        """A rejection (`api.TransactionConflict`, `errors.Conflict`, …) is raised at the end of its block."""
        self._check_open()
        return transactions.Transaction(self.engine, self._committer.submit, self._settings)

    async def put(
        self,
        collection: str,
        key: str,
        value: bytes,
        *,
        expected_version: int | None = None,
        epoch: int | None = None,
    ) -> int:
        """`Transaction.put` alone. Returns the version."""
        async with self.transaction() as tx:
            tx.put(collection, key, value, expected_version=expected_version, epoch=epoch)
        return tx.version

    async def delete(
        self, collection: str, key: str, *, expected_version: int | None = None, epoch: int | None = None
    ) -> int:
        async with self.transaction() as tx:
            tx.delete(collection, key, expected_version=expected_version, epoch=epoch)
        return tx.version

    # -- current reads -----------------------------------------------------------------------------------

    async def get(self, collection: str, key: str) -> api.StoreRecord | None:
        return (await self.get_many(collection, [key])).get(key)

    async def get_many(self, collection: str, keys: Iterable[str]) -> dict[str, api.StoreRecord]:
        self._check_open()
        transactions.check_collection(collection)
        encoded = [transactions.encode_key(key) for key in dict.fromkeys(keys)]
        return {record.key: record for record in await self.engine.get_many(collection, encoded)}

    async def scan(
        self,
        collection: str,
        *,
        prefix: str = "",
        start: str | None = None,
        end: str | None = None,
        limit: int | None = None,
        reverse: bool = False,
    ) -> list[api.StoreRecord]:
        """Like `Transaction.scan`; for a large collection see `pages`."""
        self._check_open()
        transactions.check_limit(limit)
        key_range = transactions.range_of(collection, prefix, start, end)
        return await self.engine.scan(key_range, limit, reverse)

    async def pages(
        self,
        collection: str,
        *,
        prefix: str = "",
        start: str | None = None,
        end: str | None = None,
        page: int = PAGE_RECORDS,
    ) -> AsyncIterator[list[api.StoreRecord]]:
        """The complete range, with ``page`` records in memory at a time.

        Each page is consistent by itself. To load a complete collection, `snapshot` is faster from a cold
        disk.
        """
        while True:
            records = await self.scan(collection, prefix=prefix, start=start, end=end, limit=page)
            if records:
                yield records
            if len(records) < page:
                return
            start = records[-1].key + "\0"

    @contextlib.asynccontextmanager
    async def snapshot(self) -> AsyncIterator[StoreSnapshot]:
        """A consistent view of the complete store: load from it, then follow the feed from its
        ``version``."""
        self._check_open()
        async with self.engine.snapshot() as reader:
            yield StoreSnapshot(reader)

    async def version(self) -> int:
        """The version of the last commit."""
        self._check_open()
        return (await self.engine.head()).position

    # -- the feed ----------------------------------------------------------------------------------------

    async def changes(
        self, after: int, *, collection: str | None = None, limit: int = 1_000
    ) -> api.ChangePage:
        """The changes committed after that version, in the order of commits; `api.FeedTrimmed` if they are
        not retained."""
        self._check_open()
        if collection is not None:
            transactions.check_collection(collection)
        if limit < 1:
            raise errors.InvalidInput(f"a limit of {limit} is not possible: give 1 or more")
        head, changes = await self.engine.changes(after, collection, limit)
        if after < head.trimmed:
            raise api.FeedTrimmed(
                f"the changes after {after} are not retained; the feed begins after {head.trimmed}",
                version=head.position,
            )
        if after > head.position:
            raise errors.InvalidInput(
                f"position {after} has not been reached: the store is at {head.position}",
                hint="it may come from another store: compare `identity`, and scan again",
            )
        return api.ChangePage(changes, changes[-1].position if len(changes) == limit else head.position)

    async def watch(
        self, after: int | None = None, *, collection: str | None = None, limit: int = 1_000
    ) -> AsyncIterator[list[api.StoreChange]]:
        """The feed from ``after`` (None: from now) on, as it happens, until the store is closed.

        It rides out an engine that is unavailable for a while.
        """
        position = await self.version() if after is None else after
        if self.engine.notifies and self._listening is None:
            listen = functools.partial(self.engine.listen, self._wake)
            self._listening = tasks.TaskSupervisor("store").loop("notifications", listen)
        while not self._closed:
            tick, poll_s = (
                self._tick,
                self._settings.poll_s * (NOTIFIED_POLL_FACTOR if self.engine.notifies else 1),
            )
            try:
                batch = await self.changes(position, collection=collection, limit=limit)
            except errors.Unavailable:
                poll_s = self._settings.poll_s
            else:
                position = batch.position
                if batch.changes:
                    yield batch.changes
                if len(batch.changes) == limit:
                    continue
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(poll_s):
                    await tick.wait()

    def _wake(self) -> None:
        self._tick.set()
        self._tick = asyncio.Event()

    # -- for backup and restore ------------------------------------------------------------------------------

    async def write(self, writes: Mapping[commit_plan.Place, commit_plan.RecordWrite]) -> int:
        """One commit to any collections, internal ones too."""
        size_bytes = sum(commit_plan.size(place, len(write.value or b"")) for place, write in writes.items())
        return await self._committer.submit(commit_plan.Commit(writes), size_bytes)

    async def is_unfinished(self) -> bool:
        collection, key = UNFINISHED
        return bool(await self.engine.get_many(collection, [key]))

    # -- the store itself --------------------------------------------------------------------------------

    async def statistics(self) -> api.StoreStatistics:
        self._check_open()
        head = await self.engine.head()
        counters = self._committer.counters
        return api.StoreStatistics(
            engine=self.engine.name,
            durable=self.engine.durable,
            version=head.position,
            commits=counters.commits,
            batches=counters.batches,
            overtaken=counters.overtaken,
            conflicts=counters.conflicts,
            stale_epochs=counters.stale_epochs,
            over_budget=counters.over_budget,
            failures=counters.failures,
            waiting=self._committer.waiting,
            record_bytes=head.record_bytes,
            history_bytes=head.history_bytes,
            disk_bytes=await self.engine.disk_bytes(),
        )

    async def close(self) -> None:
        """Submitted commits are completed first. A second call has no effect."""
        if self._closed:
            return
        self._closed = True
        self._wake()
        await self._committer.close()
        if self._listening is not None:
            self._listening.cancel()
            await asyncio.wait([self._listening])
            self._listening = None
        await self.engine.close()

    def _check_open(self) -> None:
        if self._closed:
            raise errors.NotConnected("the store is closed")
