"""Queries of contexts and service entries.

They are made with the person's identity and without the cache, because the information node checks
permissions; the nodes and the replicas of a context are the same for all.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

from muster.bus import api
from muster.core import errors
from muster.inform import client, protocol, rows
from muster.trust.permissions import roles
from muster.web.auth import sessions
from muster.web.data import bus_feed

READ_S = bus_feed.READ_S

T = TypeVar("T")


class ContextQueries:
    def __init__(self, feed: bus_feed.BusFeed) -> None:
        self._feed = feed

    def _inform(self, bus: api.Bus) -> client.InformClient:
        return client.InformClient(bus, timeout_s=READ_S)

    async def information_nodes(self) -> list[protocol.NodeInfo]:
        return await self._feed.query("nodes", "inform", 2.0, lambda bus: self._inform(bus).nodes())

    async def _as(self, person: sessions.LoginSession) -> api.Bus:
        operates = person.role.covers(sessions.WebRole.OPERATOR)
        role = roles.Role.OPERATOR if operates else roles.Role.VIEWER
        return await self._feed.link.as_person(person.name, role)

    async def read(
        self, person: sessions.LoginSession, ask: Callable[[client.InformClient], Awaitable[T]]
    ) -> T:
        """Read with the person's identity and without the cache: the information node checks permissions."""
        try:
            async with asyncio.timeout(READ_S * 2):
                return await ask(self._inform(await self._as(person)))
        except TimeoutError as error:
            raise errors.TimedOut("no reply in time") from error

    async def watch(
        self, person: sessions.LoginSession, key: str, *, after_version: int
    ) -> AsyncIterator[protocol.ContextChange]:
        async def connected() -> client.InformClient:  # marks the connection as used: idle ones are closed
            return self._inform(await self._as(person))

        async for change in client.watch(connected, key, after_version=after_version):
            yield change

    async def replicas(self, key: str) -> rows.ReplicaPage:
        result = await self._feed.query(
            ("replicas", key), "inform", 1.0, lambda bus: self._inform(bus).where(key)
        )
        return rows.ReplicaPage(
            items=list(map(rows.replica_row, result.replicas)),
            silent=list(result.silent),
        )

    async def context_history(
        self, person: sessions.LoginSession, key: str, *, after: int, limit: int | None
    ) -> rows.ContextHistoryPage:
        history = await self.read(person, lambda inform: inform.history(key, after_version=after))
        changes = history.changes[:limit]
        more = len(history.changes) > len(changes)
        return rows.ContextHistoryPage(
            items=list(map(rows.change_row, changes)),
            complete=history.complete,
            next=str(changes[-1].version) if more else None,
        )
