"""An information node: subscriptions, request dispatch and background tasks.

    async with await node.start(bus, view=folder / "n1.db") as information_node:
        ...

The node follows the log, serves clients and other nodes, and runs the rounds of maintenance.
"""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import dataclasses
import functools
import pathlib
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from typing import Any, TypeVar

import msgspec

from muster.bus import api, uptime
from muster.bus.rpc import admission, requests, server
from muster.core import errors, lifecycle, subjects
from muster.core.telemetry import log as log_
from muster.inform import protocol
from muster.inform import settings as settings_
from muster.inform.mounts import base, registry
from muster.inform.node import access, change_events, maintenance, primary, reads, search, writes
from muster.inform.node.log import context_log, executed, follower, freshness, view_writer
from muster.inform.node.log import view as log_view
from muster.inform.node.replicas import demand, links, peers, records, replica_table
from muster.supervision import os_process, tasks

IN_FLIGHT_MAX = 4_096
EACH_AT_ONCE = 64  # of one client
WATCHING_MAX = 16_384  # a separate limit: waiting clients must not block writes
RETRY_S = 0.5
TRIM_S = 2.0  # longer than the view is behind
DRAIN_S = 2.0
AT_ONCE_BYTES_MAX = 64 << 10
READ_COST = 0.02  # of a read from memory, beside its receipt (`admission`)
GROUP = "nodes"
UNDER_WAY_BYTES_MAX = 64 << 20  # memory for records that are not in the view yet

events = log_.EventLog("inform")

T = TypeVar("T")


async def start(
    bus: api.Bus,
    *,
    name: str | None = None,
    settings: settings_.InformSettings = settings_.DEFAULT,
    view: pathlib.Path | None = None,
    max_bytes: int = context_log.MAX_BYTES,
    replicas: int = 1,
    joins: bool = False,
    now_ns: Callable[[], int] = time.time_ns,
    uptime_s: Callable[[], float] | None = None,
    role_of: access.RoleResolver | None = None,
    zone: str = "default",
    mount_backends: registry.Backends = registry.BACKENDS,
) -> InformationNode:
    """Start a node. It has loaded its view and received the whole log. ``name``: by default the bus identity.
    ``view``: the file of its view; in memory by default.

    ``joins``: leave an existing log as it is, whatever the settings say.  ``uptime_s``: a clock that also
    counts time in suspend (None: `uptime.clock_of` the loop).  ``role_of``: None if identities have no roles,
    on a bus without trust.
    """
    name = subjects.token(name or bus.identity)
    uptime_s = uptime_s or uptime.clock_of(asyncio.get_running_loop())
    log = context_log.ContextLog(
        await context_log.open_stream(bus, max_bytes=max_bytes, replicas=replicas, joins=joins),
        name,
        max_bytes,
        reads_by_lease=settings.reads_by_lease,
        timeout_s=settings.timeout_s,
        now_s=uptime_s,
    )
    node = InformationNode(
        name,
        bus,
        settings,
        log,
        log_view.ReplicaView(view, name, settings.history),
        {mount.name: registry.open_mount(mount, mount_backends) for mount in settings.mounts},
        now_ns=now_ns,
        uptime_s=uptime_s,
        role_of=role_of,
        zone=zone,
    )
    try:
        await node.open()
    except BaseException:
        await node.close()
        raise
    return node


class InformationNode(lifecycle.ClosingContext):
    def __init__(
        self,
        name: str,
        bus: api.Bus,
        settings: settings_.InformSettings,
        log: context_log.ContextLog,
        view: log_view.ReplicaView,
        mounts: Mapping[str, base.MountedRegistry],
        *,
        now_ns: Callable[[], int],
        uptime_s: Callable[[], float],
        role_of: access.RoleResolver | None,
        zone: str,
    ) -> None:
        self.name = name
        self.bus = bus
        self.settings = settings
        self.log = log
        under_way = min(settings.memory_bytes // 8, UNDER_WAY_BYTES_MAX)
        self.replicas = replica_table.ReplicaTable(
            name, memory_bytes_max=settings.memory_bytes - under_way, history=settings.history
        )
        self.directory = peers.NodeDirectory(name, settings, self.replicas, zone=zone)
        self.executed = executed.ExecutedRequests(uptime_s)
        self.records = records.ContextRecords(
            name,
            log,
            view,
            self.replicas,
            self.directory,
            self.executed,
            history=settings.history,
            tombstone_s=settings.tombstone_s,
            now_ns=now_ns,
            now_s=uptime_s,
        )
        self.freshness = freshness.LogFreshness(name, log, settings, now_ns=now_ns, uptime_s=uptime_s)
        self.access = access.ContextAccess(settings, role_of, log, self.replicas.stored)
        self.changes = change_events.ChangeEvents()
        self.demand = demand.DemandCounts()
        self.links = links.NodeLinks(bus, settings.timeout_s)
        self.primary = primary.PrimaryWriter(
            name, settings, log, self.records, self.executed, self.freshness, self.access, now_ns
        )
        self.writer = writes.ContextWriter(
            name,
            settings,
            log,
            self.records,
            self.executed,
            self.freshness,
            self.directory,
            self.links,
            self.primary,
        )
        self.reader = reads.ContextReader(
            name,
            bus,
            settings,
            log,
            self.records,
            self.freshness,
            self.access,
            self.directory,
            self.links,
            self.changes,
            self.demand,
            mounts,
            self.primary,
            self.writer,
        )
        self.search = search.ContextSearch(
            name,
            bus,
            settings,
            self.records,
            self.freshness,
            self.access,
            self.directory,
            mounts,
            self.reader,
        )
        self.maintenance = maintenance.NodeMaintenance(
            name,
            bus,
            settings,
            log,
            self.records,
            self.freshness,
            self.directory,
            self.links,
            self.changes,
            self.demand,
            self.primary,
            self.writer,
        )
        self._view_writer = view_writer.ViewWriter(name, log, self.records, self.freshness)
        self.follower = follower.LogFollower(
            name, bus, log, self.records, self.executed, self.freshness, self.changes, self._view_writer
        )
        self._confirming = 0  # reads without a task that wait for the log
        self.malformed = 0  # messages of nodes
        self.not_requests: Counter[str] = Counter()  # invalid messages of clients, by reason
        self._subscriptions: list[api.Subscription] = []
        self._topics: dict[int, api.Subscription] = {}
        self._supervisor = tasks.TaskSupervisor(f"information node {self.name}")
        self._loops: list[asyncio.Task[None]] = []
        self._tasks: set[asyncio.Future[Any]] = set()  # writes without a task of their own, and replies
        reader, writer = self.reader, self.writer
        operations = [
            _operation("read.get", protocol.GetContext, lambda call, get: reader.get(get, call.identity)),
            _operation(
                "read.find",
                protocol.FindContexts,
                lambda call, find: self.search.find(find, call.identity),
            ),
            _operation(
                "read.history", protocol.WaitForChanges, lambda call, of: reader.history(of, call.identity)
            ),
            _operation("read.where", protocol.Where, lambda call, query: reader.where(query, call.identity)),
            _operation("read.nodes", protocol.Nodes, self._nodes),
            _operation("write.put", protocol.PutContext, lambda call, put: writer.write(put, call.identity)),
            _operation(
                "write.delete",
                protocol.DeleteContext,
                lambda call, delete: writer.write(delete, call.identity),
            ),
        ]
        changes = _operation(
            "read.changes", protocol.WaitForChanges, lambda call, of: reader.changes(of, call.identity)
        )
        # Clients address one node or any node: the token between the kind and the verb.
        self._operations = {
            f"{kind}.{node}.{verb}": operation
            for operation in (*operations, changes)
            for kind, _, verb in [operation.name.partition(".")]
            for node in (self.name, protocol.ANY)
        }
        self._internal = {
            operation.name: dataclasses.replace(operation, is_charged=False)
            for operation in (
                _operation("update", protocol.UpdateContext, lambda _, update: self.primary.update(update)),
                _operation("end-lease", protocol.ContextQuery, lambda _, of: self.primary.end_lease(of.key)),
                _operation("find", protocol.FindContexts, self._find_here),
                _operation("where", protocol.ContextQuery, self._where_here),
                _operation("store", protocol.ContextQuery, lambda _, name: self.maintenance.store(name.key)),
            )
        }
        self._server = self._new_server((*operations, *self._internal.values()), IN_FLIGHT_MAX, EACH_AT_ONCE)
        self._watching = self._new_server([changes], WATCHING_MAX, None)
        self._notification_handlers: dict[str, Callable[[bytes], Awaitable[None] | None]] = {
            "applied": lambda data: self.primary.applied(protocol.decode(data, protocol.ReplicaApplied)),
            "server-information": self.maintenance.on_information_response,
        }

    # Start and stop.

    async def open(self) -> None:
        log = self.log
        await self._view_writer.load()
        self._loops.append(self._supervisor.loop("view", self._view_writer.run))
        self._loops.append(self._supervisor.loop("log", self.follower.run))
        await self.follower.catch_up()
        await log.look_up(self.name)  # of a former process
        if self.replicas.evicted:
            await asyncio.to_thread(os_process.trim_heap)
        for subject in (protocol.to_node(self.name, "*"), protocol.to_all("*")):
            self._subscriptions.append(await self.bus.subscribe(subject, handler=self._on_node_message))
        for node, group in ((self.name, None), (protocol.ANY, GROUP)):
            for kind in ("read", "write"):
                pattern = subjects.from_identity(protocol.PART, "*", kind, node, "*")
                handler = self._server.in_turn(pattern, functools.partial(self._on_request, pattern))
                self._subscriptions.append(await self.bus.subscribe(pattern, group=group, handler=handler))
        await self._subscribe_topics()
        self._loops.append(self._supervisor.loop("topics", self._keep_topics))
        await self.maintenance.discover()
        settings = self.settings
        loop, every = self._supervisor.loop, functools.partial(functools.partial, self._every)
        self._loops += [
            loop("discovery", every(settings.refresh_s, self.maintenance.discover)),
            loop("probes", every(maintenance.PROBE_S, self.maintenance.probe)),
            loop("expiry", every(maintenance.PROBE_S, self.maintenance.expire_due)),
            loop("demand", every(settings.interval_s, self.maintenance.follow_demand)),
            loop("trimming", every(TRIM_S, self.maintenance.trim)),
        ]

    async def close(self) -> None:
        """Finish the pending requests, then stop."""
        for subscription in (*self._subscriptions, *self._topics.values()):
            with contextlib.suppress(errors.Unavailable):
                await subscription.close()
        self._subscriptions.clear()
        self._topics.clear()
        self.changes.wake_all()
        await asyncio.gather(self._drain(), self._server.drain(DRAIN_S), self._watching.drain(DRAIN_S))
        while work := (*self._loops, *self._tasks):
            for task in work:
                task.cancel()
            await asyncio.gather(*work, return_exceptions=True)
            self._loops.clear()
        await self.log.close()
        await self.freshness.close()
        await self._server.close()  # last: a failed write may have been submitted to it
        await self._watching.close()
        await self._view_writer.close()

    async def _drain(self) -> None:
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=DRAIN_S)

    @property
    def refused(self) -> int:
        """Requests that were rejected because too many were pending."""
        overloaded = errors.Overloaded.code
        return self._server.outcomes[overloaded] + self._watching.outcomes[overloaded]

    @property
    def view_failure(self) -> errors.MusterError | None:
        """The error while the view cannot be written."""
        return self._view_writer.failure

    def failure(self) -> str | None:
        """The last failure of a background task that has not run long enough since."""
        if self.log.is_superseded:
            return f"another process runs as the information node {self.name}"
        return self._supervisor.problem()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._supervisor.spawn("reply", work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _new_server(
        self, operations: Iterable[server.RpcOperation], pending_max: int, each_at_once: int | None
    ) -> server.RpcServer:
        return server.RpcServer(
            self.bus,
            protocol.PART,
            operations,
            codec=protocol.InformCodec(self.name),
            pending_max=pending_max,
            each_at_once=each_at_once,
        )

    async def _every(self, period_s: float, action: Callable[[], Awaitable[None]]) -> None:
        while True:
            await asyncio.sleep(period_s)
            try:
                await action()
            except errors.Unavailable as error:
                events.info("round-failed", node=self.name, error=error)

    # Topics of contexts.

    async def _keep_topics(self) -> None:
        while True:
            await self.records.buckets_changed.wait()
            self.records.buckets_changed.clear()
            try:
                await self._subscribe_topics()
            except errors.Unavailable:
                self.records.buckets_changed.set()
                await asyncio.sleep(RETRY_S)

    async def _subscribe_topics(self) -> None:
        held = self.replicas.buckets
        for bucket in [bucket for bucket in held if bucket not in self._topics]:
            self._topics[bucket] = await self.bus.subscribe(protocol.topic(bucket, "*"), handler=self._topic)
        for bucket in [bucket for bucket in self._topics if bucket not in held]:
            await self._topics.pop(bucket).close()

    def _topic(self, message: api.Message) -> None:
        """Handle a request to the holders of a context; ignore it if there is no permanent replica here."""
        kind = message.subject.rpartition(".")[2]
        try:
            if kind == "access":
                request = protocol.decode(message.data, protocol.GetContext)
                replica = self.replicas.index.get(request.key)
                if request.origin == self.name or replica is None or replica.temporary:
                    return
                context = self.reader.local(request.key, request.max_staleness_s)
                if context is None:
                    self._spawn(self._reply_access(message, request))
                    return
                self.demand.add(request.key, request.origin)
                self._respond(message, protocol.reply(context, self.name))
        except errors.InvalidInput as error:
            self.malformed += 1
            events.warning("malformed", subject=message.subject, error=error)

    def _respond(self, message: api.Message, data: bytes) -> None:
        if not message.respond_now(data):
            self._spawn(self._guarded(message.respond(data)))

    async def _reply_access(self, message: api.Message, request: protocol.GetContext) -> None:
        with contextlib.suppress(errors.Unavailable):
            context = await self.reader.from_replica(request)
            if context is not None:
                self.demand.add(request.key, request.origin)
                await message.respond(protocol.reply(context, self.name))

    # Requests.

    def _on_request(self, pattern: str, message: api.Message) -> None:
        """Handle a request of a client; the broker has put the client's identity into the subject."""
        caller = requests.accept(message, pattern, self.not_requests, admit=self._server.admit)
        if caller is None:
            return
        self.maintenance.requests += 1
        operation = self._operations.get(caller.operation)
        name = operation.name if operation is not None else ""
        if operation is not None and name == "read.get":
            if self._try_read(caller, operation):
                return
        elif name in _WRITES:
            if self.freshness.is_stalled:
                self.not_requests["stalled"] += 1  # its client also asks another node
                return
            if self._try_write(caller, _WRITES[name]):
                return
        (self._watching if name == "read.changes" else self._server).submit(caller, operation)

    def _try_read(self, caller: requests.RpcCaller, operation: server.RpcOperation) -> bool:
        """Serve a read from memory without a task, a linearizable one when the log has confirmed it.
        Everything unusual is left to the server.
        """
        try:
            request = protocol.decode(caller.message.data, protocol.GetContext)
            data = self._read(caller.identity, request.key, request.max_staleness_s)
            if data is not None:
                return caller.message.respond_now(data)
            is_refused = self._confirming >= IN_FLIGHT_MAX
            if request.max_staleness_s != 0 or not self.reader.is_in_memory(request.key) or is_refused:
                return False
            self.freshness.when_confirmed(functools.partial(self._confirmed, caller, operation, request.key))
        except errors.MusterError:
            return False
        self._confirming += 1
        return True

    def _confirmed(
        self, caller: requests.RpcCaller, operation: server.RpcOperation, key: str, is_confirmed: bool
    ) -> None:
        self._confirming -= 1
        data = None
        with contextlib.suppress(errors.MusterError):
            data = self._read(caller.identity, key, None) if is_confirmed else None
        if data is not None:
            self._respond(caller.message, data)
        else:
            self._server.submit(caller, operation)

    def _read(self, sender: str, key: str, max_staleness_s: float | None) -> bytes | None:
        """The reply to a read, if memory has it."""
        context = self.reader.local(key, max_staleness_s)
        if context is None or len(context.value) > AT_ONCE_BYTES_MAX:
            return None
        self.access.check(sender, "read", key, context.writer)
        self.demand.add(key, self.name)
        self._server.charge(sender, READ_COST + len(context.value) / admission.RECEIVED_BYTES)
        return protocol.reply(context, self.name)

    def _try_write(
        self, caller: requests.RpcCaller, kind: type[protocol.PutContext] | type[protocol.DeleteContext]
    ) -> bool:
        """Start a write without a task, if this node is the primary and the key has no pending write."""
        if len(self._tasks) + self._server.pending >= IN_FLIGHT_MAX:
            return False
        try:
            write = protocol.decode(caller.message.data, kind)
            begun = self.writer.begin(write, caller.identity)
        except errors.MusterError:
            return False
        if begun is None:
            return False
        record, stored = begun
        self._server.charge(caller.identity, admission.REQUEST)
        self._tasks.add(stored)

        def finish(_: asyncio.Future[int]) -> None:
            self._tasks.discard(stored)
            if stored.cancelled():
                return
            if stored.exception() is None:
                entry = context_log.ContextLogEntry(record, stored.result())
                self._respond(caller.message, protocol.reply(primary.written(entry, 1), self.name))
                return
            again = msgspec.structs.replace(write, request=record.request, key=record.key, repeat=True)
            operation = server.RpcOperation(
                "write",
                lambda *_: self.writer.write(again, caller.identity),
                audited=False,
                decode=lambda data: data,
                once=False,
            )
            self._server.submit(caller, operation, admitted=True)  # not rejected for overload

        stored.add_done_callback(finish)
        return True

    def _on_node_message(self, message: api.Message) -> None:
        """Handle a message of another node."""
        kind = message.subject.rpartition(".")[2]
        if message.subject == protocol.to_all("server-information"):
            self._spawn(self._guarded(self.maintenance.on_information_request(message.data)))
        elif kind == protocol.PING and message.reply is not None:
            self._respond(message, b"")
        elif kind in self._internal and message.reply is not None:
            self._server.submit(requests.RpcCaller("", kind, message), self._internal[kind])
        elif (handler := self._notification_handlers.get(kind)) is not None:
            try:
                handler(message.data)
            except errors.InvalidInput:
                self.malformed += 1

    async def _guarded(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except errors.InvalidInput:
            self.malformed += 1
        except errors.Unavailable:
            return

    async def _nodes(self, _: server.RpcCall, query: protocol.Nodes) -> protocol.Page[protocol.NodeInfo]:
        names = list(self.directory.nodes)
        bisect.insort(names, self.name)
        page = server.page(names, str, query.after, rows_max=protocol.PAGE_NODES)
        views = self.directory.views(self.freshness.now_s(), page["items"])
        return protocol.Page(views, page["next"], self.name)

    async def _find_here(self, _: server.RpcCall, query: protocol.FindContexts) -> protocol.PartialFindResult:
        return await server.metered(query.reader, lambda: self.search.find_here(query))

    async def _where_here(self, _: server.RpcCall, name: protocol.ContextQuery) -> list[protocol.ReplicaInfo]:
        return self.reader.where_here(name.key)


_WRITES: dict[str, type[protocol.PutContext] | type[protocol.DeleteContext]] = {
    "write.put": protocol.PutContext,
    "write.delete": protocol.DeleteContext,
}


def _operation(
    name: str,
    kind: type[T],
    handler: Callable[[server.RpcCall, T], Awaitable[object]],
) -> server.RpcOperation:
    """An operation without an audit record: the log has the writer of each record."""
    decode = functools.partial(protocol.decode, kind=kind)
    return server.RpcOperation(name, handler, audited=False, decode=decode)
