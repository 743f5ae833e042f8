"""A mount: a registry that can be listed and read.

A back end converts its entries to `MountedEntry`.  `MountedRegistry` adds what all mounts share: the key
prefix, the predicate and the timeout.  A new kind is a class with two methods and an entry in the back ends
that the process passes to the node (`muster.inform.mounts.registry`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

from muster.core import errors
from muster.inform import protocol, search_plan

PREFIX = "mount/"
ENTRIES_MAX = 10_000
ENTRY_BYTES_MAX = protocol.VALUE_BYTES_MAX + protocol.ATTRIBUTES_BYTES_MAX  # as of our own contexts
CHUNK = 500
T = TypeVar("T")

TIMEOUT_S = 1.5  # less than a search waits for information nodes


class MountedEntry(NamedTuple):
    """An entry of another registry."""

    key: str  # in that registry
    value: bytes
    attributes: protocol.Attributes
    version: int = 0


class MountBackend(Protocol):
    async def entries(self) -> Sequence[MountedEntry]:
        """Return all entries, up to `ENTRIES_MAX`; `errors.Unavailable` if the registry does not respond."""
        ...

    async def entry(self, key: str) -> MountedEntry | None: ...


class MountedRegistry:
    """A back end with its name."""

    def __init__(self, name: str, backend: MountBackend, *, timeout_s: float = TIMEOUT_S) -> None:
        self.name = name
        self._backend = backend
        self._timeout_s = timeout_s

    def may_have(self, plan: search_plan.SearchPlan, after: str) -> bool:
        """Whether the plan can select an entry of this mount with a key greater than ``after``."""
        prefix = self._key("")
        return plan.reaches(prefix) and (after < prefix or after.startswith(prefix))

    async def find(
        self, plan: search_plan.SearchPlan, after: str, limit: int, may_read: Callable[[str, str], bool]
    ) -> protocol.PartialFindResult:
        """``may_read``: takes a key and its writer, which is empty for a mount.

        An entry that does not fit into a reply is left out, and the result is marked as ``cut``.
        """
        entries = await self._with_timeout(self._backend.entries())
        matching: list[MountedEntry] = []
        too_large = False
        for number, entry in enumerate(entries, 1):
            if number % CHUNK == 0:
                await asyncio.sleep(0)
            key = self._key(entry.key)
            if (
                key > after
                and plan.selects(key, entry.version, "", dict(entry.attributes))
                and may_read(key, "")
            ):
                if _size(entry) > ENTRY_BYTES_MAX:
                    too_large = True
                else:
                    matching.append(entry)
        matching.sort(key=lambda entry: entry.key)
        contexts = protocol.fit_to_reply([self._context(entry) for entry in matching[:limit]])
        more = len(contexts) < len(matching)
        reached = contexts[-1].key if more else ""
        cut = too_large or len(entries) >= ENTRIES_MAX
        return protocol.PartialFindResult(self.name, contexts, more, reached, cut=cut)

    async def get(self, key: str) -> protocol.Context:
        entry = await self._with_timeout(self._backend.entry(key.removeprefix(self._key(""))))
        if entry is None:
            raise errors.NotFound(f"no entry {key!r}")
        if (size := _size(entry)) > ENTRY_BYTES_MAX:
            raise errors.LimitExceeded(f"{key!r} has {size} bytes, which is more than a context may have")
        return self._context(entry)

    async def _with_timeout(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            async with asyncio.timeout(self._timeout_s):
                return await work
        except TimeoutError as error:
            raise errors.TimedOut(f"{self.name} did not respond in {self._timeout_s:g} s") from error

    def _key(self, key: str) -> str:
        return f"{PREFIX}{self.name}/{key}"

    def _context(self, entry: MountedEntry) -> protocol.Context:
        return protocol.Context(
            self._key(entry.key),
            entry.value,
            entry.attributes,
            entry.version,
            0,
            "",
            0.0,
            self.name,
            "mounted",
        )


def _size(entry: MountedEntry) -> int:
    return len(entry.value) + len(protocol.encode(entry.attributes))
