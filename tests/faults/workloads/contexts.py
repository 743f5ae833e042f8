"""Contexts: writers, which also delete, and readers of every freshness share a few keys."""

from __future__ import annotations

import collections

from muster.inform import client as inform_client
from tests.faults import deployment
from tests.faults.workloads import workload

KEYS = ("x", "y", "z")
LEASED_KEY = "leased"  # the end of keys that expire; each put has a new one, so all nodes become primaries
LEASE_S = 4.0
DELETIONS = 0.05  # the share of writes that delete
FRESHNESS_S = (None, None, 0.0, 0.0, 1.0)


class ContextWorkload(workload.Workload):
    name = "contexts"
    guarantee = "linearizable writes and reads; a value is not older than its reply says; no write is lost"
    measured = ("put", "get")

    async def start(self) -> None:
        self._clients = [
            inform_client.InformClient(await self.connect("user", number), timeout_s=workload.TIMEOUT_S)
            for number in range(1, deployment.CLIENTS + 1)
        ]
        for key in self._keys():
            await workload.patiently(self._put, self._clients[0], workload.UNMEASURED, key, 0)
        self._leased: collections.deque[str] = collections.deque([f"{self.tag}/0-{LEASED_KEY}"], maxlen=12)
        self.run(self._lease(self._clients[0]))
        for number, contexts in enumerate(self._clients, 1):
            self.run(self._write(contexts, f"writer-{number}"))
            self.run(self._read(contexts, f"reader-{number}"))

    def _keys(self) -> list[str]:
        return [f"{self.tag}/{key}" for key in KEYS]

    async def _write(self, contexts: inform_client.InformClient, actor: str) -> None:
        number = 0

        async def write() -> None:
            nonlocal number
            number += 1
            key = self.chance.choice(self._keys())
            if self.chance.random() < DELETIONS:
                operation = self.history.begin(actor, "delete", key=key, expected=None)
                await self.operate(operation, contexts.delete(key), lambda deleted: deleted.version)
            else:
                await self._put(contexts, actor, key, number)

        await self.repeat(write, 2 * workload.PACE_S)

    async def _put(self, contexts: inform_client.InformClient, actor: str, key: str, number: int) -> None:
        lease_s = LEASE_S if key.endswith(LEASED_KEY) else 0.0
        value = f"{actor}.{key[-1]}{number}"
        operation = self.history.begin(actor, "put", key=key, value=value, expected=None, lease_s=lease_s)
        await self.operate(
            operation,
            contexts.put(key, value.encode(), lease_s=lease_s),
            lambda written: written.version,
        )

    async def _lease(self, contexts: inform_client.InformClient) -> None:
        number = 0

        async def put() -> None:
            nonlocal number
            number += 1
            self._leased.append(f"{self.tag}/{number}-{LEASED_KEY}")
            await self._put(contexts, workload.UNMEASURED, self._leased[-1], number)

        await self.repeat(put, LEASE_S / 4)

    async def _read(self, contexts: inform_client.InformClient, actor: str) -> None:
        async def get() -> None:
            await self._get(
                contexts,
                actor,
                self.chance.choice([*self._keys(), self.chance.choice(self._leased)]),
                self.chance.choice(FRESHNESS_S),
            )

        await self.repeat(get)

    async def _get(
        self, contexts: inform_client.InformClient, actor: str, key: str, max_age_s: float | None
    ) -> None:
        operation = self.history.begin(actor, "get", key=key, max_age_s=max_age_s)
        await self.operate(
            operation,
            contexts.get(key, max_staleness_s=max_age_s),
            lambda context: (
                context.value.decode(),
                context.version,
                context.age_s,
                f"{context.source} ({context.replica_kind})",
            ),
        )

    async def finish(self) -> None:
        for key in self._keys():
            await self._get(self._clients[0], workload.UNMEASURED, key, 0.0)
