"""A registry endpoint. The endpoint that holds the lease is active; the others are on standby.

Reads are served from memory. Writes are appended to the log (`registry_log`) and then applied to memory. An
endpoint on standby follows the log, so it takes over without loading. While nothing can be stored, managers
continue to renew and nothing can be applied. If the outcome of a write is unknown, the endpoint releases the
lease, and reads the log up to its end before it acts again.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import json
import secrets
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from typing import Any

import msgspec

from muster.bus import api, leases
from muster.bus.rpc import request_audit, requests, server
from muster.core import backoff, errors, lifecycle, messages, units
from muster.core.telemetry import log, metrics
from muster.manage import protocol
from muster.manage.registry import (
    assignments,
    handlers,
    inventory,
    moves,
    records,
    registry_log,
    secret_store,
    views,
)
from muster.manage.registry.jobs import executor
from muster.supervision import tasks

events = log.EventLog("manage")

MANAGER_TTL_S = 6.0
CLOSED_GRACE_S = 1.0
LOOK_S = 5.0
MOVE_LOOK_S = 1.0
RESTART_POLICY = backoff.BackoffPolicy(crashes_max=None, pause_s=5.0)  # another endpoint may act meanwhile
PENDING_MAX = 20_000  # concurrent requests: a complete fleet may announce itself at once

#: (sender, verb, changes): raises an error, or returns whether the sender is limited to its own resources.
Authorize = Callable[[str, str, bool], Awaitable[bool]]


async def allow_all(sender: str, verb: str, changes: bool) -> bool:
    """For tests and simulations without a broker that authenticates."""
    return False


class RegistryEndpoint(lifecycle.ServiceContext):
    def __init__(
        self,
        bus: api.Bus,
        *,
        lease_ttl_s: float = leases.TTL_S,
        manager_ttl_s: float = MANAGER_TTL_S,
        authorize: Authorize = allow_all,
        replicas: int = 1,
        max_bytes: int = registry_log.MAX_BYTES,
        open_key: secret_store.OpenKey | None = None,
        clock: Callable[[], float] = time.time,
        measure: metrics.Metrics | None = None,
        alerts: Callable[[], Mapping[str, Collection[str]]] = dict,
    ) -> None:
        """``max_bytes``: the budget of the log. ``open_key`` reads the key of the secrets; without it, no
        secrets are stored."""
        self.name = bus.identity
        self.processor: assignments.AssignmentProcessor | None = None  # while it is active
        self.presence: views.AgentPresence  # since it is active
        self.log: registry_log.RegistryLog  # since it was started
        self.acting = asyncio.Event()
        self.bus = bus
        self._max_bytes = max_bytes
        self._lease_ttl_s = lease_ttl_s
        self._manager_ttl_s = manager_ttl_s
        self._authorize = authorize
        self._replicas = replicas
        self._open_key = open_key
        self.clock = clock
        self._alerts = alerts
        self._lease: leases.Lease | None = None
        self._leases: leases.Leases | None = None
        self._opened = contextlib.AsyncExitStack()
        self._write = asyncio.Lock()
        self._wake = asyncio.Event()
        self._tasks = tasks.TaskSupervisor(f"registry {self.name}", policy=RESTART_POLICY)
        self._requests = tasks.TaskSupervisor(f"requests of registry {self.name}")
        self._audit: request_audit.RequestAudit | None = None
        self._handlers: handlers.RegistryHandlers
        self._refused: collections.Counter[str] = collections.Counter()
        if measure is not None:
            measure.gauge_from(
                "rollout_resources",
                "Resources of running updates and other rollouts, by the state of their step.",
                ("rollout", "state"),
                lambda: self._handlers.rollouts.progress() if self.acting.is_set() else {},
            )

    async def start(self) -> None:
        await self._drop_own_lease()
        self._leases = await leases.Leases.open(self.bus, ttl_s=self._lease_ttl_s, replicas=self._replicas)
        self.log = await self._opened.enter_async_context(
            await registry_log.RegistryLog.open(
                self.bus, ttl_s=self._manager_ttl_s, max_bytes=self._max_bytes, replicas=self._replicas
            )
        )
        self._tasks.loop("leadership", self._run)

    async def stop(self) -> None:
        await self._tasks.close()
        await self._requests.close()
        if self._leases is not None:
            with contextlib.suppress(errors.Unavailable):
                await self._leases.close()
        await self._opened.aclose()

    async def _drop_own_lease(self) -> None:
        """Delete a lease that a previous process with this name left, so that its expiry need not be awaited.

        If that process still runs, its next append to the log fails.
        """
        bucket = await self.bus.key_value(
            api.KeyValueSettings(leases.BUCKET, max_bytes=16 << 20, replicas=self._replicas)
        )
        entry = await bucket.get(protocol.LEASE)
        if entry is None or entry.value is None:
            return
        with contextlib.suppress(ValueError, KeyError, TypeError, errors.Conflict, RecursionError):
            if json.loads(entry.value)["holder"] == self.name:
                await bucket.delete(protocol.LEASE, revision=entry.revision)

    async def _run(self) -> None:
        assert self._leases is not None
        while True:
            try:
                async with await self._leases.acquire(protocol.LEASE) as lease:
                    await self._act(lease)
            except errors.MusterError as error:
                events.warning("registry-interrupted", registry=self.name, error=error)
                await asyncio.sleep(0.5)

    # Active

    async def _act(self, lease: leases.Lease) -> None:
        self._lease = lease
        try:
            term = await self.log.own(lease.epoch, lambda: lease.held)
            if lease.held:  # if the first page took longer than the lease, there may be a newer one
                await self._act_as_owner(lease, term)
        finally:
            await self.log.resign()

    async def _act_as_owner(self, lease: leases.Lease, term: int) -> None:
        fleet = self.log.fleet
        fleet.begin_term(term, secrets.randbits(48))
        self.processor = fleet
        now = asyncio.get_running_loop().time
        self.presence = views.AgentPresence(now())
        moves.note_arrivals(fleet, self.presence, now())
        fleet.machines = views.MachineStates(fleet, self.presence, self._alerts, now)
        self._handlers = handlers.RegistryHandlers(self, self._open_key)
        self._audit = request_audit.RequestAudit(
            self.bus,
            protocol.PART,
            epoch=lambda: self.processor.term if self.processor else 0,
        )
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(
                await self.bus.subscribe(protocol.RENEWALS, handler=self._on_renewal)
            )
            await stack.enter_async_context(
                server.RpcServer(
                    self.bus,
                    protocol.PART,
                    self._operations(),
                    audit=self._audit,
                    authorize=self._authorized,
                    pending_max=PENDING_MAX,
                    serving=lambda: lease.held and self.processor is not None,
                )
            )
            with contextlib.suppress(errors.Forbidden):
                await stack.enter_async_context(
                    await self.bus.subscribe(leases.DISCONNECTED, handler=self._on_disconnect)
                )
            events.info("registry-acts", registry=self.name, epoch=term)
            self.acting.set()
            try:
                await self._poke(fleet.owning_managers)  # they renew at once
                quiet_until = fleet.unknown_until(asyncio.get_running_loop().time(), lease.former_until)
                await self._work(lease, quiet_until)
            finally:
                self.acting.clear()
                self.processor = None
                events.info("registry-rests", registry=self.name, epoch=term)
                self._requests.cancel()

    async def _work(self, lease: leases.Lease, quiet_until: float) -> None:
        """Expire and assign until the lease is lost. Managers of an earlier term may act until
        ``quiet_until``."""
        loop, lapses = asyncio.get_running_loop(), lease.lapses
        helpers = [
            self._tasks.spawn("lease loss", self._wake_on(lease.lost)),
            self._tasks.spawn("log loss", self._wake_on(self.log.lost)),
            self._tasks.loop("rollouts", self._handlers.rollouts.run),
            self._tasks.loop("jobs", self._handlers.jobs.run),
        ]
        try:
            while not lease.lost.is_set():
                self._wake.clear()
                if (acting := self.processor) is None or self.log.lost.is_set():
                    raise errors.Unavailable(f"the log is not owned any more: {self.log.lost_because}")
                if not lease.held:  # disconnected, or not renewed in time; the lease may outlast that
                    await asyncio.sleep(0.1)
                    continue
                if lapses != lease.lapses:  # managers could not renew
                    lapses = lease.lapses
                    acting.resume(loop.time())
                    self.presence.since = loop.time()  # announcements may have been lost meanwhile
                    await self._poke(acting.managers)
                await self._expire_and_assign(loop.time(), quiet_until)
                await self._move(acting)
                look_s = MOVE_LOOK_S if acting.index.movable or acting.index.ending else LOOK_S
                dues = (acting.next_expiry(), quiet_until, loop.time() + look_s)
                due = min(at for at in dues if at is not None and at > loop.time())
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(max(0.01, due - loop.time())):
                        await self._wake.wait()
        finally:
            for helper in helpers:
                helper.cancel()
            await asyncio.gather(*helpers, return_exceptions=True)

    async def _wake_on(self, lost: asyncio.Event) -> None:
        await lost.wait()
        self._wake.set()

    async def _expire_and_assign(self, now: float, quiet_until: float) -> None:
        acting = self._acting()
        late = acting.expire(now)
        for name in late:
            events.warning("manager-expired", manager=name)
        if now < quiet_until and not acting.owning_managers <= acting.renewed:
            return
        moved, lost = 0, collections.Counter[str]()
        while changes := await self._assign_batch(acting, lost):
            moved += changes
        if not moved:
            return
        events.info("assigned", resources=moved, managers=len(acting.managers))
        for name in late:
            await self.record(
                "reassign", name, f"did not renew; {moved} resources were reassigned", who=self.name
            )
        for name in lost.keys() - set(late):
            why = f"restarted or rebalanced; {lost[name]} resources were reassigned"
            await self.record("reassign", name, why, who=self.name)

    async def _assign_batch(
        self, acting: assignments.AssignmentProcessor, lost: collections.Counter[str]
    ) -> int:
        """The number of resources with a new owner; ``lost`` counts them by previous owner."""
        async with self._write:
            changes = acting.assign()
            if not changes.owners:
                return 0
            former = filter(None, map(acting.owners.get, changes.owners))
            managers = collections.Counter(owner.manager for owner in former)
            try:
                await self.commit(changes)
            except errors.MusterError as error:
                events.warning("not-assigned", error=error)
                if self.processor is None:
                    raise
                await asyncio.sleep(0.5)
                self._wake.set()
                return 0
        lost.update(managers)
        return len(changes.owners)

    async def _move(self, acting: assignments.AssignmentProcessor) -> None:
        """Start elsewhere what has certainly stopped, and end the deletions of lost machines."""
        moved: collections.defaultdict[str, list[str]] = collections.defaultdict(list)
        ended: collections.defaultdict[str, list[str]] = collections.defaultdict(list)
        decided: moves.MovePlan | None = None
        while (acting.index.movable or acting.index.ending) and (decided is None or decided.size):
            async with self._write:
                now = asyncio.get_running_loop().time()
                decided = moves.plan(self._acting(), self.presence, now, int(self.clock() * 1000))
                acting.waiting = decided.waiting
                if not decided.size:
                    decided.changes = moves.leave_drained(acting, self.presence, now)
                if not decided.size:
                    break
                try:
                    await self.commit(decided.changes)
                except errors.MusterError as error:
                    events.warning("not-moved", error=error)
                    if self.processor is None:
                        raise
                    break
            for total, part in ((moved, decided.moved), (ended, decided.ended)):
                for agent, names in part.items():
                    total[agent] += names
        for agent, names in moved.items():
            events.warning("machine-lost", agent=agent, moved=len(names))
            why = f"no contact; {units.format_count(len(names), 'resource')} moved: {', '.join(names[:10])}"
            await self.record("move", agent, why, who=self.name)
        for agent, names in ended.items():
            why = f"no contact with its machine {agent}, which deletes it when it returns"
            for name in names:
                await self.record("delete-lost", name, why, who=self.name)

    def _acting(self) -> assignments.AssignmentProcessor:
        if self.processor is None or self._lease is None or not self._lease.held:
            raise errors.Unavailable("this registry endpoint is not active")
        return self.processor

    @property
    def state(self) -> assignments.AssignmentProcessor:
        return self._acting()

    # Requests

    def _operations(self) -> list[server.RpcOperation]:
        def of_process(name: str, handler: server.Handler, kind: type[messages.M]) -> server.RpcOperation:
            return server.RpcOperation(
                name,
                handler,
                audited=False,
                decode=lambda data: messages.decode(data, kind),
                is_charged=name == protocol.HELLO,  # anyone may send it
            )

        return [
            *self._handlers.operations(),
            of_process("checkpoint", self._store_checkpoints, protocol.CheckpointBatch),
            of_process(protocol.HELLO, self._agent_hello, protocol.AgentHello),
            of_process("vouch.*", self._forwarded_hello, protocol.AgentHello),
            server.RpcOperation(f"vouch.*.{protocol.SECRET}", self._forwarded_secret, is_charged=False),
        ]

    async def _authorized(
        self, call: server.RpcCall, operation: server.RpcOperation, arguments: Mapping[str, Any]
    ) -> None:
        match operation.name.split("."):
            case ["read", protocol.LOGS | protocol.JOB_RUNS]:
                await self._authorize(call.identity, protocol.LOGS, True)  # it may contain secrets
            case ["read", verb]:
                await self._authorize(call.identity, verb, False)
            case ["request", verb]:
                await self._handlers.authorize(call, verb, arguments, self._authorize)
            case [protocol.HELLO]:
                await self._authorize(call.identity, protocol.HELLO, True)

    def _on_renewal(self, message: api.Message) -> None:
        self._requests.spawn("renewal", self._renew(message))

    async def _renew(self, message: api.Message) -> None:
        caller = requests.accept(message, protocol.RENEWALS, self._refused)
        if caller is None:
            return
        manager = caller.identity
        try:
            request = messages.decode(message.data, protocol.RenewRequest)
            await self._authorize(manager, protocol.RENEW, True)
            acting = self._acting()
            assert self._lease is not None
            ttl_s = acting.granted_s(self._lease.remaining_s)
            if acting.renew(manager, request, asyncio.get_running_loop().time(), ttl_s=ttl_s):
                self._wake.set()
            page = msgspec.structs.replace(acting.renewal_page(manager, request), ttl_s=ttl_s)
            await message.respond(messages.encode(page, "msgpack"))
        except errors.MusterError as error:
            note = events.warning if isinstance(error, errors.Forbidden) else events.info
            note("renewal-refused", manager=manager, error=error)

    async def _store_checkpoints(
        self, call: server.RpcCall, batch: protocol.CheckpointBatch
    ) -> dict[str, Any]:
        async with self._write:
            changes, refused = self._acting().apply_checkpoints(call.identity, batch.items)
            if changes:
                await self.commit(changes)
        return {"refused": refused}

    async def _agent_hello(self, call: server.RpcCall, hello: protocol.AgentHello) -> protocol.HelloResult:
        return await self._store_agent(call.identity, hello)

    async def _forwarded_hello(
        self, call: server.RpcCall, hello: protocol.AgentHello
    ) -> protocol.HelloResult:
        return await self._store_agent(self._forwarding_agent(call), hello)

    async def _store_agent(self, name: str, hello: protocol.AgentHello) -> protocol.HelloResult:
        async with self._write:
            acting = self._acting()
            before = acting.agents.get(name)
            is_renewed = hello.hosted is not None or (before is not None and not before.must_report)
            now = records.AgentRecord(
                zone=hello.zone,
                labels=hello.labels,
                facts=hello.facts,
                types=hello.types,
                machine=hello.machine,
                cordoned=before.cordoned if before else False,
                forgotten=before.forgotten if before else False,
                has_deadlines=hello.has_deadlines,
                must_report=before.must_report if before else False,
            )
            if len(msgspec.json.encode(now)) > protocol.AGENT_BYTES_MAX:
                raise errors.LimitExceeded(
                    f"facts and labels of {name!r} exceed {protocol.AGENT_BYTES_MAX} bytes"
                )
            orphans = inventory.find_orphans(acting, name, hello.hosted or ())
            new_orphans = self.presence.inventories.record(name, hello, orphans)
            if hello.hosted is not None and not hello.until and not self.presence.inventories.count(name):
                now = msgspec.structs.replace(now, must_report=False)  # what was moved is gone
            changes = records.RegistryChanges(epoch=acting.epoch)
            changes.resources, stop_after_s = acting.confirm_deadlines(name, hello)
            if now != before:
                changes.agents[name] = now
            if changes:
                await self.commit(changes)
            epoch = acting.epoch
            self.presence.metrics[name] = hello.metrics
            if is_renewed:
                self.presence.announced(name, asyncio.get_running_loop().time())
        for orphan in new_orphans:
            events.warning("orphan", resource=orphan.name, agent=name, reason=orphan.reason)
            if orphan.is_deleted:
                why = f"{orphan.reason}, and still existed on {name}"
                await self.record("delete-orphan", orphan.name, why, who=self.name, agent=name)
        return protocol.HelloResult(
            is_renewed=is_renewed,
            stop_after_s=stop_after_s,
            floor=epoch if before is not None and before.must_report else 0,
            orphans={orphan.name: max(epoch, orphan.epoch) for orphan in orphans if orphan.is_deleted},
        )

    async def _forwarded_secret(
        self, call: server.RpcCall, resource: str, name: str, key: str
    ) -> dict[str, str]:
        """A request of an agent without a broker, forwarded by its manager."""
        call.on_behalf_of = self._forwarding_agent(call)
        return await self._handlers.secret(call.on_behalf_of, resource, name, key)

    def _forwarding_agent(self, call: server.RpcCall) -> str:
        """The agent for which a manager forwards a request."""
        if call.identity not in self._acting().managers:
            raise errors.Forbidden(f"{call.identity} is not an active manager and may not forward requests")
        return call.operation.split(".")[1]

    def _on_disconnect(self, message: api.Message) -> None:
        """A broker reported a closed connection, possibly that of a manager."""
        if self.processor is None:
            return
        with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
            report = json.loads(message.data)
            now = asyncio.get_running_loop().time()
            if self.processor.connection_closed(
                report["server"]["id"], int(report["client"]["id"]), now, CLOSED_GRACE_S
            ):
                self._wake.set()

    # The log

    def has_executed(self, request: str) -> bool:
        """Whether this registry or a former one has executed the request."""
        self._acting()
        return self.log.executed(request)

    @contextlib.asynccontextmanager
    async def writing(self) -> Any:
        """Exclusive access for a writer; the next writer sees what it committed."""
        async with self._write:
            yield self._acting()

    async def commit(
        self, changes: records.RegistryChanges, more: Iterable[registry_log.RecordChange] = ()
    ) -> None:
        """Store the changes, which are then applied, with ``more`` records. Only within `writing`."""
        acting = self._acting()
        with_jobs = executor.removed(self.log, acting, changes.resources)
        for name, agent in changes.agents.items():
            if agent is not None and agent.must_report:
                self.presence.awaited.add(name)
        await self.write([*registry_log.written(changes, epoch=acting.epoch), *more, *with_jobs])
        if changes.resources:
            self._wake.set()
            self._handlers.jobs.changed.set()

    async def write(self, changes: Iterable[registry_log.RecordChange]) -> None:
        """Store records of the registry: all or none, also if the caller is cancelled meanwhile."""
        self._acting()
        try:
            await tasks.finish(self._write_and_notify(list(changes)))
        except errors.Unavailable as error:
            if self.log.is_owned:
                raise
            self.processor = None  # give up the active role; the next one answers a repetition
            self._wake.set()
            raise errors.Unavailable(f"this registry endpoint is not active any more: {error}") from error

    async def _write_and_notify(self, changes: list[registry_log.RecordChange]) -> None:
        await self.log.write(changes, request=registry_log.executing.get())
        await self._poke(self.log.take_touched())

    async def _poke(self, managers: Iterable[str]) -> None:
        """Ask managers to renew now. They renew soon in any case."""
        for manager in list(managers):
            with contextlib.suppress(errors.MusterError):
                await self.bus.publish(protocol.to_manager(manager, "poke"), b"")

    # The audit

    async def record(self, what: str, target: str, why: str, *, who: str, **facts: Any) -> None:
        """Write an audit entry. An operation is not undone if its entry cannot be stored."""
        if self._audit is not None:
            await self._audit.record(what, target, why, who=who, **facts)
