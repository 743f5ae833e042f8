"""`m.contexts`: the contexts of the information service."""

from __future__ import annotations

import asyncio
import contextlib
import enum
from collections.abc import AsyncIterator, Mapping
from typing import TypeVar

from muster.bus import api
from muster.client import rows
from muster.core import errors
from muster.inform import client, protocol

D = TypeVar("D")
LIMIT = 100


class _Required(enum.Enum):
    REQUIRED = enum.auto()


REQUIRED = _Required.REQUIRED  # there is no default


class AsyncContexts:
    """Metadata under keys, replicated close to its readers; as `muster inform`.

    A version is the position of a change in the log of all contexts, not a number that each key counts by
    itself: a later change of any key has a greater version, and a key that is deleted and written again never
    has an earlier version again. So one number says what a watcher has seen.

    >>> written = await m.contexts.put("printers/3", "idle", attributes={"floor": 2})
    >>> (await m.contexts.get("printers/3", max_staleness_s=0)).text
    'idle'
    >>> [context.key for context in await m.contexts.find("floor >= 2")]
    ['printers/3']
    """

    def __init__(self, bus: api.Bus) -> None:
        self._client = client.InformClient(bus)

    def __repr__(self) -> str:
        return "<the contexts of the domain>"

    async def get(
        self, key: str, default: D | _Required = REQUIRED, *, max_staleness_s: float | None = None
    ) -> protocol.Context | D:
        """Read a context; if it does not exist, ``default``, or without one `errors.NotFound`.

        ``max_staleness_s``: the maximum age of the replica that is read; 0 for the newest value there is.
        """
        try:
            return await self._client.get(key, max_staleness_s=max_staleness_s)
        except errors.NotFound:
            if isinstance(default, _Required):
                raise
            return default

    async def put(
        self,
        key: str | None,
        value: str | bytes,
        *,
        attributes: Mapping[str, protocol.Attribute] | None = None,
        lease_s: float = 0.0,
        if_version: int | None = None,
        replicated: bool = False,
    ) -> protocol.WriteResult:
        """Write a context; without a key the system assigns one.

        ``lease_s``: delete it after this time. ``if_version``: only if it has this version, 0: only if it
        does not exist; otherwise `errors.Conflict`. ``replicated``: wait for all permanent replicas.
        """
        if not isinstance(key, str | None):
            raise errors.InvalidInput(f"the key of a context is text, not {type(key).__name__}")
        if not isinstance(value, str | bytes):
            raise errors.InvalidInput(
                f"the value of a context is text or bytes, not {type(value).__name__}",
                hint="encode it, for example with json.dumps; attributes can be numbers",
            )
        for name, attribute in (attributes or {}).items():
            if not isinstance(attribute, str | bool | int | float | list | tuple):
                raise errors.InvalidInput(
                    f"the attribute {name!r} is text, a number, a truth value or a list, "
                    f"not {type(attribute).__name__}"
                )
        try:
            data = value.encode() if isinstance(value, str) else value
        except UnicodeEncodeError as error:
            raise errors.InvalidInput(f"the value of a context contains no surrogates: {error}") from error
        return await self._client.put(
            key,
            data,
            attributes=attributes,
            lease_s=lease_s,
            expected_version=if_version,
            ack="replicated" if replicated else "logged",
        )

    async def delete(self, key: str, *, if_version: int | None = None) -> protocol.WriteResult:
        """Delete a context. ``if_version``: only if it has this version."""
        return await self._client.delete(key, expected_version=if_version)

    async def find(
        self, where: str = "TRUE", *, limit: int = LIMIT, after: str = ""
    ) -> rows.Rows[protocol.Context]:
        """The contexts whose attributes match a predicate, sorted by key: at most ``limit``, after a key."""
        page = await self._client.find(where, limit=limit, after=after)
        return rows.Rows(page.contexts, complete=not (page.more or page.silent or page.failed))

    async def keys(self) -> AsyncIterator[str]:
        """The keys of all contexts, sorted."""
        after, more = "", True
        while more:
            page = await self._client.find("TRUE", limit=1_000, after=after)
            for context in page.contexts:
                yield context.key
            after, more = page.reached, page.more

    async def history(self, key: str, *, after_version: int = 0) -> rows.Rows[protocol.ContextChange]:
        """The changes of a context, as far back as the log goes, oldest first."""
        history = await self._client.history(key, after_version=after_version)
        return rows.Rows(history.changes, complete=history.complete)

    async def watch(
        self,
        key: str,
        *,
        after_version: int | None = None,
        prefix: bool = False,
        timeout_s: float | None = None,
    ) -> AsyncIterator[protocol.ContextChange]:
        """Every change of a context after that version, without it all that the log has and then new ones;
        ends after ``timeout_s`` without a change.

        ``prefix``: of all contexts whose keys begin with ``key``, and without ``after_version`` from now on.
        The value of a deleted context is None.
        """
        if prefix:
            watch = self._client.watch_prefix(key, after_version=after_version)
        else:
            watch = self._client.watch(key, after_version=after_version or 0)
        async with contextlib.aclosing(watch) as changes:
            while True:
                try:
                    async with asyncio.timeout(timeout_s):
                        change = await anext(changes)
                except TimeoutError:
                    return
                yield change

    async def position(self) -> int:
        """The version of the latest change of any context."""
        return await self._client.log_position()

    async def where(self, key: str) -> rows.Rows[protocol.ReplicaInfo]:
        """The replicas of a context, the primary first."""
        result = await self._client.where(key)
        return rows.Rows(result.replicas, complete=not result.silent)
