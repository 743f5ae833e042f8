"""The interface of an SQL engine; `database.Store` implements the rest for all of them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from muster.core import errors
from muster.store import api, commit_plan


class EngineReader(Protocol):
    """Reads of one snapshot with its `version`."""

    @property
    def version(self) -> int: ...
    async def get_many(self, collection: str, keys: Sequence[bytes]) -> list[api.StoreRecord]: ...
    async def scan(
        self, key_range: commit_plan.KeyRange, limit: int | None, reverse: bool
    ) -> list[api.StoreRecord]: ...
    async def everything(
        self, after: commit_plan.Place, limit: int, max_bytes: int
    ) -> list[tuple[str, api.StoreRecord]]:
        """All collections, internal ones too, in order: up to ``limit`` records, the last of which may exceed
        ``max_bytes``."""
        ...

    def load(self, collection: str, page: int, max_bytes: int) -> AsyncIterator[list[api.StoreRecord]]:
        """All of a collection, in whatever order is fastest from a cold disk.

        Up to ``page`` records at a time, the last of which may reach beyond ``max_bytes``.
        """
        ...


class StorageEngine(Protocol):
    name: str
    durable: bool
    #: A random name assigned when the store was created: a position in the feed is not valid in another
    #: store.
    identity: str
    #: Whether `listen` is notified of commits of other processes; otherwise they are found by polling.
    notifies: bool

    def snapshot(self) -> AbstractAsyncContextManager[EngineReader]: ...

    async def get_many(self, collection: str, keys: Sequence[bytes]) -> list[api.StoreRecord]:
        """Like that of a reader, for the current state, in one step."""
        ...

    async def scan(
        self, key_range: commit_plan.KeyRange, limit: int | None, reverse: bool
    ) -> list[api.StoreRecord]: ...

    async def changes(
        self, after: int, collection: str | None, limit: int
    ) -> tuple[commit_plan.StoreHead, list[api.StoreChange]]:
        """The changes after that position, and the head they were read with."""
        ...

    async def head(self) -> commit_plan.StoreHead: ...
    async def disk_bytes(self) -> int: ...

    async def commit(self, batch: Sequence[commit_plan.Commit]) -> list[int | errors.MusterError]:
        """All of the batch in one durable step, each by itself accepted (its version) or refused.

        Raises if the engine failed. A `errors.MusterError` means that nothing of the batch was stored, except
        `api.CommitOutcomeUnknown`; after any other exception the outcome is unknown.
        """
        ...

    async def listen(self, wake: Callable[[], None]) -> None:
        """Call ``wake`` whenever another process has committed, until cancelled."""
        ...

    async def close(self) -> None: ...
