"""A cache with request coalescing: concurrent readers of a key share one request.

An entry is valid until it expires or its tag is touched; messages from the bus touch tags when data changes.
Readers that arrive during a request wait for its result, unless the tag was touched after the request began:
it may have read the state before the change.  They wait for the next request, which begins when the current
one ends, so each key has at most one request at a time.  Errors are cached for a short time, so that not
every page sends requests to an unavailable service.  The number of entries is bounded; the least recently
used is evicted, at the latest some time after it expired.  Of a key, which may contain a long request, only a
digest is stored.
"""

from __future__ import annotations

import asyncio
import collections
import hashlib
import time
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from muster.core import errors
from muster.supervision import tasks

T = TypeVar("T")
ENTRIES_MAX = 2_000
FAILED_S = 1.0


@dataclass(slots=True)
class _Entry:
    tag: str
    made_at_s: float
    kept_s: float
    future: asyncio.Future[Any]
    turn: int | None = None  # version of its tag when the request began; None: not begun


class TaggedCache:
    def __init__(self, *, entries_max: int = ENTRIES_MAX, now: Callable[[], float] = time.monotonic) -> None:
        self._entries: collections.OrderedDict[bytes, _Entry] = collections.OrderedDict()
        self._turns: collections.Counter[str] = collections.Counter()
        self._max = entries_max
        self._now = now
        self.made = 0
        self._tasks = tasks.TaskSupervisor("web")

    def __len__(self) -> int:
        return len(self._entries)

    async def get(self, key: Hashable, tag: str, kept_s: float, make: Callable[[], Awaitable[T]]) -> T:
        """``key``: its `repr` identifies the request."""
        digest = hashlib.blake2b(repr(key).encode(errors="surrogatepass"), digest_size=16).digest()
        entry = self._entries.get(digest)
        if entry is None or self._is_over(entry):
            entry = self._begin(digest, tag, kept_s, make, after=None if entry is None else entry.future)
        self._entries.move_to_end(digest)
        return cast(T, await asyncio.shield(entry.future))

    def touch(self, tag: str) -> None:
        """Invalidate the entries with this tag."""
        self._turns[tag] += 1

    def turn(self, tag: str) -> int:
        """The version of a tag. It grows with every touch."""
        return self._turns[tag]

    def clear(self) -> None:
        for entry in self._entries.values():
            entry.turn = -1
        self._entries.clear()

    async def close(self) -> None:
        await self._tasks.close()

    def _is_over(self, entry: _Entry) -> bool:
        if not entry.future.done():
            return entry.turn not in (None, self._turns[entry.tag])
        kept_s = entry.kept_s
        if entry.future.cancelled() or entry.future.exception() is not None:
            kept_s = min(FAILED_S, kept_s)
        return entry.turn != self._turns[entry.tag] or self._now() - entry.made_at_s > kept_s

    def _has_expired(self, entry: _Entry) -> bool:
        return entry.future.done() and self._now() - entry.made_at_s > entry.kept_s

    def _begin(
        self,
        digest: bytes,
        tag: str,
        kept_s: float,
        make: Callable[[], Awaitable[T]],
        after: asyncio.Future[Any] | None,
    ) -> _Entry:
        """``after``: the previous request, which may still be running."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        entry = self._entries[digest] = _Entry(tag, self._now(), kept_s, future)
        while len(self._entries) > self._max or self._has_expired(next(iter(self._entries.values()))):
            self._entries.popitem(last=False)
        self.made += 1
        self._tasks.spawn(f"cache {tag}", self._make(entry, make, after))
        return entry

    async def _make(
        self, entry: _Entry, make: Callable[[], Awaitable[T]], after: asyncio.Future[Any] | None
    ) -> None:
        try:
            if after is not None and not after.done():
                await asyncio.wait([after])
            entry.turn = self._turns[entry.tag]
            value = await make()
        except asyncio.CancelledError:
            entry.future.cancel()
            raise
        except errors.MusterError as error:
            entry.future.set_exception(error)
        except Exception as error:  # noqa: BLE001  (waiting readers must receive the error)
            broken = errors.InvariantViolation(f"{type(error).__name__}: {error}")
            broken.__cause__ = error
            entry.future.set_exception(broken)
        else:
            entry.future.set_result(value)
        if not entry.future.cancelled():
            entry.future.exception()  # retrieved, in case all readers are gone
        entry.made_at_s = self._now()
