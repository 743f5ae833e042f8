"""What a mount is: something that can be listed and read, whatever it is inside.

A back end turns its own entries into `Found`; what they have in common (the key under the mount, the
predicate, the time it may take) is here.  A further kind is a class with two methods and a line in `KINDS`
of `kinds`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

from muster.core import errors
from muster.inform import protocol, search_plan

PREFIX = "mount/"
ENTRIES_MAX = 10_000
CHUNK = 500
T = TypeVar("T")

TIMEOUT_S = 1.5  # a little less than a search waits for our own nodes


class MountedEntry(NamedTuple):
    """One entry of a foreign registry."""

    key: str  # as it is called there
    value: bytes
    attributes: protocol.Attributes
    version: int = 0


class MountBackend(Protocol):
    async def entries(self) -> Sequence[MountedEntry]:
        """All that there are, up to `ENTRIES_MAX`; `errors.Unavailable` if it does not answer."""
        ...

    async def entry(self, key: str) -> MountedEntry | None: ...


class MountedRegistry:
    """A back end under its name."""

    def __init__(self, name: str, backend: MountBackend, *, timeout_s: float = TIMEOUT_S) -> None:
        self.name = name
        self._backend = backend
        self._timeout_s = timeout_s

    def may_have(self, plan: search_plan.SearchPlan, after: str) -> bool:
        """Whether anything here can be what the plan selects, behind ``after``."""
        prefix = self._key("")
        return plan.reaches(prefix) and (after < prefix or after.startswith(prefix))

    async def find(
        self, plan: search_plan.SearchPlan, after: str, limit: int, may_read: Callable[[str, str], bool]
    ) -> protocol.PartialFindResult:
        """``may_read``: of a key and its writer, who is nobody here."""
        entries = await self._within(self._backend.entries())
        matching: list[MountedEntry] = []
        for number, entry in enumerate(entries, 1):
            if number % CHUNK == 0:
                await asyncio.sleep(0)
            key = self._key(entry.key)
            if (
                key > after
                and plan.selects(key, entry.version, "", dict(entry.attributes))
                and may_read(key, "")
            ):
                matching.append(entry)
        matching.sort(key=lambda entry: entry.key)
        contexts = protocol.fit_to_reply([self._context(entry) for entry in matching[:limit]])
        more = len(contexts) < len(matching)
        reached = contexts[-1].key if more else ""
        return protocol.PartialFindResult(self.name, contexts, more, reached, cut=len(entries) >= ENTRIES_MAX)

    async def get(self, key: str) -> protocol.Context:
        entry = await self._within(self._backend.entry(key.removeprefix(self._key(""))))
        if entry is None:
            raise errors.NotFound(f"no {key!r} there")
        return self._context(entry)

    async def _within(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            async with asyncio.timeout(self._timeout_s):
                return await work
        except TimeoutError as error:
            raise errors.TimedOut(f"{self.name} did not answer in {self._timeout_s:g} s") from error

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
