"""Information nodes, and clients that write, delete, read and watch contexts."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Iterator

import msgspec

from muster.bus.log import pages
from muster.bus.memory import network
from muster.core import errors
from muster.inform import client, protocol, settings
from muster.inform.node import node as node_node
from muster.inform.node.log import context_log, fences, page_order
from tests.sim import domain as domain_
from tests.sim import history, host

NODES = ("node-1", "node-2", "node-3", "node-4")
KEYS = ("alpha", "beta", "gamma")
LEASES_S = (0.0, 0.0, 0.0, 2.0, 8.0)
FRESHNESS_S = (None, 0.0, 0.0, 0.5, 3.0)
TIMEOUT_S = 12.0
WRITES_MAX = 60  # of a client: the check of a history takes long if many of its writes are concurrent

SETTINGS = msgspec.convert(
    {
        "replicas": 3,
        "timeout_s": 2.0,
        "refresh_s": 1.0,
        "lost_after_s": 6.0,
        "interval_s": 5.0,
        "history": 400,
        "tombstone_s": 150.0,
    },
    settings.InformSettings,
)
# So that the log of a short run is trimmed, and pages come too late.
TRIM_BYTES = 8_000
page_order.WINDOW = 40


class ContextPart:
    def __init__(self, domain: domain_.Domain) -> None:
        self._domain = domain
        self._history = domain.history
        self._nodes: dict[str, node_node.InformationNode] = {}
        chance = domain.chance("contexts")
        self._has_views = chance.random() < 0.5
        self._holders: dict[str, tuple[str, ...]] = {}
        self._settings = msgspec.structs.replace(SETTINGS, reads_by_lease=chance.random() < 0.3)
        self._trims = chance.random() < 0.5
        self._replicas = chance.choice((1, 3))  # of the log: where there are several, they confirm reads
        for name in NODES:
            domain.add_host(name, self._node, role="information node")
        for number in (1, 2):
            domain.add_host(f"writer-{number}", self._writer)
            domain.add_host(f"reader-{number}", self._reader)
        domain.add_host("watcher", self._watcher)

    # Programs.

    async def _node(self, machine: host.Host) -> None:
        self._nodes.pop(machine.name, None)
        bus = await machine.connect()
        view = machine.folder / "view.db" if self._has_views else None
        node = await node_node.start(
            bus, settings=self._settings, view=view, replicas=self._replicas, now_ns=machine.wall_ns
        )
        if self._trims:
            node.maintenance.trim_bytes_min = TRIM_BYTES
        self._nodes[machine.name] = node
        self._history.note(machine.name, "serves")
        while True:
            await asyncio.sleep(1.0)
            failure = node.failure()
            if failure is not None and errors.NotConnected.__name__ not in failure:
                raise errors.InvariantViolation(failure)

    async def _writer(self, machine: host.Host) -> None:
        contexts = client.InformClient(await machine.connect(), timeout_s=TIMEOUT_S)
        chance = machine.chance
        versions: dict[str, int] = {}
        for number in range(WRITES_MAX):
            if not await self._domain.pause(chance, 0.1, 1.5):
                return await _forever()
            key = chance.choice(KEYS)
            expected = versions.get(key, 0) if chance.random() < 0.2 else None
            if chance.random() < 0.15:
                await self._delete(contexts, machine.name, key, expected, versions)
            else:
                value = f"{machine.name}.{number}"
                await self._put(contexts, machine.name, key, value, expected, versions, chance)
        return await _forever()

    async def _put(
        self,
        contexts: client.InformClient,
        actor: str,
        key: str,
        value: str,
        expected: int | None,
        versions: dict[str, int],
        chance: random.Random,
    ) -> None:
        lease_s = chance.choice(LEASES_S)
        operation = self._history.begin(
            actor, "put", key=key, value=value, expected=expected, lease_s=lease_s
        )
        try:
            written = await contexts.put(
                key,
                value.encode(),
                expected_version=expected,
                lease_s=lease_s,
                ack="replicated" if chance.random() < 0.2 else "logged",
            )
        except errors.MusterError as error:
            versions.pop(key, None)
            self._failed(operation, error)
        else:
            versions[key] = written.version
            self._history.end(operation, "ok", written.version)

    async def _delete(
        self,
        contexts: client.InformClient,
        actor: str,
        key: str,
        expected: int | None,
        versions: dict[str, int],
    ) -> None:
        operation = self._history.begin(actor, "delete", key=key, expected=expected)
        versions.pop(key, None)
        try:
            deleted = await contexts.delete(key, expected_version=expected)
        except errors.MusterError as error:
            self._failed(operation, error)
        else:
            self._history.end(operation, "ok", deleted.version)

    def _failed(self, operation: history.Operation, error: errors.MusterError) -> None:
        self._history.end(operation, "unknown" if isinstance(error, errors.TimedOut) else error.code, error)

    async def _reader(self, machine: host.Host) -> None:
        contexts = client.InformClient(await machine.connect(), timeout_s=TIMEOUT_S)
        chance = machine.chance
        while await self._domain.pause(chance, 0.05, 0.8):
            await self._read(contexts, machine.name, chance.choice(KEYS), chance.choice(FRESHNESS_S))
        return await _forever()

    async def _read(
        self, contexts: client.InformClient, actor: str, key: str, max_age_s: float | None
    ) -> None:
        operation = self._history.begin(actor, "get", key=key, max_age_s=max_age_s)
        try:
            context = await contexts.get(key, max_staleness_s=max_age_s)
        except errors.MusterError as error:
            self._history.end(operation, error.code, error)
        else:
            source = f"{context.source} ({context.replica_kind})"
            result = (context.value.decode(), context.version, context.age_s, source)
            self._history.end(operation, "ok", result)

    async def _watcher(self, machine: host.Host) -> None:
        contexts = client.InformClient(await machine.connect(), timeout_s=TIMEOUT_S)

        async def watch(key: str) -> None:
            try:
                async for change in contexts.watch(key):
                    value = None if change.value is None else change.value.decode()
                    self._history.event(machine.name, "watched", key=key, version=change.version, value=value)
            except errors.NotFound:  # its versions were trimmed before this node read the log
                if not self._trims:
                    raise

        await asyncio.gather(*(watch(key) for key in KEYS))
        await _forever()  # started again, it would see the first changes once more

    # The end.

    async def finish(self) -> None:
        """Read every context once more."""
        machine = self._domain.hosts["reader-1"]
        contexts = client.InformClient(await machine.connect("finisher"), timeout_s=TIMEOUT_S)
        for key in KEYS:
            await self._read(contexts, "finisher", key, 0.0)
        for entry, primary, at_s in self._log():
            record = entry.record
            self._history.fact(
                "logged",
                key=record.key,
                sequence=entry.position,
                version=entry.version,
                reason=record.reason,
                value=None if record.value is None else record.value.decode(),
                primary=primary,
                stamp=record.stamp,
                stamped_by=record.stamped_by,
                at_s=at_s,
                expires_s=(record.expires_at_ns - network.EPOCH_NS) / 1e9
                if record.expires_at_ns
                else math.inf,
            )

    def _log(self) -> Iterator[tuple[context_log.ContextLogEntry, str | None, float]]:
        """The records that count, the primary that was to write each, and when they were stored."""
        order, holders = page_order.PageOrder(), dict[str, tuple[str, ...]]()
        for stored in self._domain.net.stored.get(protocol.STREAM, ()):
            page = protocol.decode(stored.message.data, protocol.ContextLogPage)
            fenced = protocol.node_of(stored.message.subject)
            if page.fence:
                for key, of in holders.items():
                    if of and of[0] == fenced:
                        holders[key] = fences.moved(of, of[0], page.fence)
            counts = order.add(stored.sequence, page, fenced)
            for place, (record, does) in enumerate(zip(page.records, counts, strict=True)):
                if does:
                    entry = context_log.ContextLogEntry(record, pages.position(stored.sequence, place))
                    yield entry, next(iter(holders.get(record.key, ())), None), stored.at_s
                    if record.reason == "forget":
                        del holders[record.key]
                    elif record.reason != "refuse":
                        holders[record.key] = record.holders
        self._holders = holders

    def missing(self) -> str | None:
        """What is not restored yet after the end of the faults."""
        serving = {
            name: node
            for name, node in self._nodes.items()
            if self._domain.hosts[name].is_up and node and not node.changes.closing
        }
        if len(serving) < len(NODES):
            return f"only {sorted(serving)} serve"
        last: dict[str, context_log.ContextLogEntry | None] = {}
        for entry, _, _ in self._log():
            if entry.record.reason != "refuse":
                last[entry.record.key] = None if entry.record.reason == "forget" else entry
        for key, current in last.items():
            if current is None:
                continue
            holders = self._holders[key]
            if current.record.value is not None and len(holders) != SETTINGS.replicas:
                return f"{key} has replicas on {holders}"
            for name, node in serving.items():
                replica = node.replicas.index.get(key)
                holds = replica is not None and not replica.temporary
                if holds != (name in holders):
                    return f"{name} {'holds' if holds else 'lacks'} {key}, whose holders are {holders}"
                if holds and replica is not None and replica.position != current.position:
                    return f"{name} has {key} at {replica.position}, not {current.position}"
        return None


async def _forever() -> None:
    await asyncio.get_running_loop().create_future()
