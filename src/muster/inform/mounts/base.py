"""What a mount is: something that can be listed and read, whatever it is inside.

A back end turns its own entries into `Found`; what they have in common (the key under the mount, the
predicate, the time it may take) is here.  A further kind is a class with two methods and a line in `KINDS`
of `kinds`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

from muster.core import errors
from muster.inform import protocol
from muster.predicates import closure, parser

PREFIX = "mount/"
ENTRIES_MAX = 10_000
T = TypeVar("T")

TIMEOUT_S = 1.5  # a little less than a search waits for our own nodes


class Found(NamedTuple):
    """One entry of a foreign registry."""

    key: str  # as it is called there
    value: bytes
    attributes: protocol.Attributes
    version: int = 0


class Backend(Protocol):
    async def entries(self) -> Sequence[Found]:
        """All that there are, up to `ENTRIES_MAX`; `errors.Unavailable` if it does not answer."""
        ...

    async def entry(self, key: str) -> Found | None: ...


class Mounted:
    """A back end under its name."""

    def __init__(self, name: str, backend: Backend, *, timeout_s: float = TIMEOUT_S) -> None:
        self.name = name
        self._backend = backend
        self._timeout_s = timeout_s

    async def find(self, predicate: str, after: str, limit: int) -> list[protocol.Context]:
        matches = closure.compile(parser.parse(predicate))
        entries = await self._within(self._backend.entries())
        found = [
            self._context(one)
            for one in entries
            if (key := self._key(one.key)) > after
            and matches({**one.attributes, "key": key, "version": one.version}.get)
        ]
        return sorted(found, key=lambda one: one.key)[:limit]

    async def get(self, key: str) -> protocol.Context:
        found = await self._within(self._backend.entry(key.removeprefix(self._key(""))))
        if found is None:
            raise errors.NotFound(f"no {key!r} there")
        return self._context(found)

    async def _within(self, asked: Coroutine[Any, Any, T]) -> T:
        try:
            async with asyncio.timeout(self._timeout_s):
                return await asked
        except TimeoutError as error:
            raise errors.TimedOut(f"{self.name} did not answer in {self._timeout_s:g} s") from error

    def _key(self, key: str) -> str:
        return f"{PREFIX}{self.name}/{key}"

    def _context(self, one: Found) -> protocol.Context:
        return protocol.Context(
            self._key(one.key), one.value, one.attributes, one.version, 0, "", 0.0, self.name, "mounted"
        )
