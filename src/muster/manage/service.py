"""A registry endpoint: of several, the one that holds the lease acts; the others are ready.

Reads are answered from memory; writes are committed first, fenced by the lease's epoch, and change the memory
after.  While the store is away, managers go on renewing and nothing can be applied.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import json
import secrets
import time
from collections.abc import Awaitable, Callable
from typing import Any, Self

import msgspec

from muster.bus import api, leases
from muster.core import errors, log, messages, subjects
from muster.manage import once, processor, protocol, requests, secrecy, verbs
from muster.store import database

events = log.Events("manage")

MANAGER_TTL_S = 15.0
CLOSED_GRACE_S = 1.0
LOOK_S = 5.0
RESOURCES, OWNERS, STATUSES = "manage.resources", "manage.owners", "manage.statuses"
AGENTS, META = "manage.agents", "manage.meta"
BATCH = 1_000  # records in a commit

#: (sender, verb, whether it changes anything): raises, or says whether only for what the sender hosts.
Authorize = Callable[[str, str, bool], Awaitable[bool]]


async def allow_all(sender: str, verb: str, changes: bool) -> bool:
    """For tests and simulations: no broker that knows who is who."""
    return False


async def allow_own(sender: str, verb: str, changes: bool) -> bool:
    """An agent that a manager vouches for."""
    return True


class Registry:
    def __init__(
        self,
        bus: api.Bus,
        store: database.Store,
        *,
        lease_ttl_s: float = leases.TTL_S,
        manager_ttl_s: float = MANAGER_TTL_S,
        authorize: Authorize = allow_all,
        replicas: int = 1,
        audit_bytes_max: int = 256 << 20,
        open_key: secrecy.OpenKey | None = None,
    ) -> None:
        """``open_key`` reads the key of secrets; without it none are kept here."""
        self.name = bus.identity
        self.processor: processor.Processor | None = None  # while it acts
        self.acting = asyncio.Event()
        self._bus = bus
        self._store = store
        self._lease_ttl_s = lease_ttl_s
        self._manager_ttl_s = manager_ttl_s
        self._authorize = authorize
        self._replicas = replicas
        self._audit_bytes_max = audit_bytes_max
        self._open_key = open_key
        self._lease: leases.Lease | None = None
        self._leases: leases.Leases | None = None
        self._write = asyncio.Lock()
        self._changed = asyncio.Event()
        self._running: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._audit: api.Stream | None = None
        self._verbs: verbs.Verbs
        self._executing = once.UnderWay[Any]()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        await self._drop_own()
        self._leases = await leases.Leases.open(self._bus, ttl_s=self._lease_ttl_s, replicas=self._replicas)
        self._running = asyncio.create_task(self._run(), name=f"registry {self.name}")

    async def stop(self) -> None:
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, *self._tasks, return_exceptions=True)
        if self._leases is not None:
            with contextlib.suppress(errors.Unavailable):
                await self._leases.close()

    async def _drop_own(self) -> None:
        """A lease under our own name is of a process that we replace: nobody has to wait for its end.

        If it lives after all, its epoch is lower than ours, and the store refuses it.
        """
        bucket = await self._bus.key_value(
            api.KeyValueSettings(leases.BUCKET, max_bytes=16 << 20, replicas=self._replicas)
        )
        entry = await bucket.get(protocol.LEASE)
        if entry is None or entry.value is None:
            return
        with contextlib.suppress(ValueError, KeyError, TypeError, errors.Conflict):
            if json.loads(entry.value)["holder"] == self.name:
                await bucket.delete(protocol.LEASE, revision=entry.revision)

    async def _run(self) -> None:
        assert self._leases is not None
        while True:
            try:
                async with await self._leases.acquire(protocol.LEASE) as lease:
                    await self._act(lease)
            except (errors.Unavailable, errors.StaleEpoch) as error:
                events.warning("registry-interrupted", registry=self.name, error=error)
                await asyncio.sleep(0.5)

    # Acting

    async def _act(self, lease: leases.Lease) -> None:
        self._lease = lease
        self.processor = await self._load(lease.epoch)
        self._verbs = verbs.Verbs(self, self._open_key)
        self._audit = await self._open_audit()
        async with contextlib.AsyncExitStack() as stack:
            for subject, handler in (
                (protocol.REQUESTS, self._requested),
                (protocol.READS, self._requested),
                (protocol.RENEWALS, self._renewed),
                (protocol.CHECKPOINTS, self._checkpointed),
                (protocol.HELLOS, self._greeted),
                (protocol.VOUCHES, self._greeted),
                (protocol.SECRETS_VOUCHED, self._secret_asked),
            ):
                await stack.enter_async_context(
                    await self._bus.subscribe(subject, handler=self._in_background(handler))
                )
            with contextlib.suppress(errors.Forbidden):
                await stack.enter_async_context(
                    await self._bus.subscribe(leases.DISCONNECTED, handler=self._closed)
                )
            events.info("registry-acts", registry=self.name, epoch=lease.epoch)
            self.acting.set()
            try:
                await self._work(lease)
            finally:
                self.acting.clear()
                self.processor = None
                events.info("registry-rests", registry=self.name, epoch=lease.epoch)
                for task in list(self._tasks):
                    task.cancel()

    async def _work(self, lease: leases.Lease) -> None:
        """Expire, assign, wait."""
        loop = asyncio.get_running_loop()
        helpers = [
            asyncio.create_task(self._tell_of_loss(lease)),
            asyncio.create_task(self._verbs.rollouts.resume()),
        ]
        try:
            # Managers of an earlier term have one full time to live to show themselves.
            quiet_until = loop.time() + self._manager_ttl_s
            while not lease.lost.is_set():
                self._changed.clear()
                await self._expire_and_assign(loop.time(), quiet_until)
                dues = (self._acting().next_expiry(), quiet_until, loop.time() + LOOK_S)
                due = min(one for one in dues if one is not None and one > loop.time())
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(max(0.01, due - loop.time())):
                        await self._changed.wait()
        finally:
            for helper in helpers:
                helper.cancel()
            await asyncio.gather(*helpers, return_exceptions=True)

    async def _tell_of_loss(self, lease: leases.Lease) -> None:
        await lease.lost.wait()
        self._changed.set()

    async def _expire_and_assign(self, now: float, quiet_until: float) -> None:
        acting = self._acting()
        late = acting.expire(now)
        for name in late:
            events.warning("manager-expired", manager=name)
        if now < quiet_until and not self._all_known(acting):
            return
        async with self._write:
            changes = acting.assign()
            if not changes.owners:
                return
            owners = filter(None, map(acting.owners.get, changes.owners))
            lost = collections.Counter(owner.manager for owner in owners)
            try:
                await self.commit(changes)
            except errors.Unavailable as error:
                events.warning("not-assigned", error=error)
                await asyncio.sleep(0.5)
                self._changed.set()
                return
        moved = len(changes.owners)
        events.info("assigned", resources=moved, managers=len(acting.managers))
        for name in late:
            await self.record("reassign", name, f"it did not renew; {moved} resources moved", who=self.name)
        for name in lost.keys() - set(late):
            why = f"started anew, or relieved by another; {lost[name]} resources taken over"
            await self.record("reassign", name, why, who=self.name)

    @staticmethod
    def _all_known(acting: processor.Processor) -> bool:
        """Whether every manager that owns something has shown itself in this term."""
        return {owner.manager for owner in acting.owners.values()} <= acting.seen

    def _acting(self) -> processor.Processor:
        if self.processor is None or self._lease is None or not self._lease.held:
            raise errors.Unavailable("this registry endpoint does not act now")
        return self.processor

    @property
    def state(self) -> processor.Processor:
        return self._acting()

    def _in_background(self, handler: Callable[[api.Message], Awaitable[None]]) -> api.Handler:
        async def guarded(message: api.Message) -> None:
            with contextlib.suppress(errors.Unavailable):
                await handler(message)

        def begin(message: api.Message) -> None:
            task = asyncio.create_task(guarded(message))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

        return begin

    # What it is asked

    async def _requested(self, message: api.Message) -> None:
        if self._lease is None or not self._lease.held:
            return
        sender = subjects.sender_of(message.subject)
        kind, verb = message.subject.split(".")[4:6]

        async def obey(arguments: dict[str, Any]) -> Any:
            def do() -> Awaitable[Any]:
                return self._verbs.obey(sender, verb, kind, arguments, self._authorize)

            if verb == "exec" and arguments.get("id"):  # the same id is the same act
                return await self._executing.once((sender, message.data), do)
            return await do()

        await requests.answer(message, obey)

    async def _renewed(self, message: api.Message) -> None:
        if not subjects.may_reply(message.subject, message.reply):
            return
        said = messages.decode(message.data, protocol.Renew)
        manager = subjects.sender_of(message.subject)
        try:
            await self._authorize(manager, protocol.RENEW, True)
        except errors.Forbidden as error:
            events.warning("renewal-refused", manager=manager, error=error)
            return
        acting = self._acting()
        if acting.renew(manager, said, asyncio.get_running_loop().time()):
            self._changed.set()
        await message.respond(messages.encode(acting.granted(manager, said), "msgpack"))

    async def _checkpointed(self, message: api.Message) -> None:
        async def store(_: dict[str, Any]) -> Any:
            said = messages.decode(message.data, protocol.Checkpoints)
            async with self._write:
                manager = subjects.sender_of(message.subject)
                changes, refused = self._acting().checkpointed(manager, said.items)
                if changes:
                    await self.commit(changes)
            return {"refused": refused}

        await requests.answer(message, store, typed=True)

    async def _greeted(self, message: api.Message) -> None:
        async def store(_: dict[str, Any]) -> Any:
            said = messages.decode(message.data, protocol.Hello)
            name = subjects.sender_of(message.subject)
            if message.subject.split(".")[4] == "vouch":
                name = self._vouched(message)
            else:
                await self._authorize(name, protocol.HELLO, True)
            async with self._write:
                acting = self._acting()
                before = acting.agents.get(name)
                now = processor.Agent(
                    zone=said.zone,
                    labels=said.labels,
                    facts=said.facts,
                    types=said.types,
                    machine=said.machine,
                    cordoned=before.cordoned if before else False,
                )
                if now != before:
                    await self.commit(processor.Changes(agents={name: now}, epoch=acting.epoch))
            return {}

        await requests.answer(message, store, typed=True)

    async def _secret_asked(self, message: api.Message) -> None:
        """By an agent that comes by way of a manager's line."""

        async def obey(arguments: dict[str, Any]) -> Any:
            agent = self._vouched(message)
            return await self._verbs.obey(agent, protocol.SECRET, "request", arguments, allow_own)

        await requests.answer(message, obey)

    def _vouched(self, message: api.Message) -> str:
        """The agent for which a manager speaks."""
        manager = subjects.sender_of(message.subject)
        if manager not in self._acting().managers:
            raise errors.Forbidden(f"{manager} is no manager, and vouches for nobody")
        return message.subject.split(".")[5]

    def _closed(self, message: api.Message) -> None:
        """A broker's report of a closed connection: a manager's, perhaps."""
        if self.processor is None:
            return
        with contextlib.suppress(ValueError, KeyError, TypeError):
            report = json.loads(message.data)
            now = asyncio.get_running_loop().time()
            if self.processor.closed(
                report["server"]["id"], int(report["client"]["id"]), now, CLOSED_GRACE_S
            ):
                self._changed.set()

    # What it keeps

    @contextlib.asynccontextmanager
    async def writing(self) -> Any:
        """One writer at a time; what it commits is seen by the next."""
        async with self._write:
            yield self._acting()

    async def commit(self, changes: processor.Changes) -> None:
        """Store, then know. Call it while writing."""
        acting, lease = self._acting(), self._lease
        assert lease is not None
        writes = list(_writes(changes))
        for first in range(0, max(1, len(writes)), BATCH):
            async with self._store.transaction() as tx:
                tx.fence(protocol.LEASE, lease.epoch)
                if changes.epoch > acting.epoch:
                    tx.put(META, "epoch", str(changes.epoch).encode())
                for collection, key, value, epoch in writes[first : first + BATCH]:
                    if value is None:
                        tx.delete(collection, key)
                    else:
                        tx.put(collection, key, value, epoch=epoch)
        for manager in acting.accept(changes):
            await self._bus.publish(protocol.to_manager(manager, "poke"), b"")
        if changes.resources:
            self._changed.set()

    async def _load(self, term: int) -> processor.Processor:
        loaded = processor.Processor(term=term, ttl_s=self._manager_ttl_s)
        changes = processor.Changes()
        async with self._store.transaction() as tx:  # from now on, an earlier term can write nothing
            tx.fence(protocol.LEASE, term)
        async with self._store.snapshot() as snapshot:
            async for page in snapshot.load(META):
                for record in page:
                    changes.epoch = int(record.value)
            async for page in snapshot.load(AGENTS):
                for record in page:
                    changes.agents[record.key] = msgspec.json.decode(record.value, type=processor.Agent)
            async for page in snapshot.load(RESOURCES):
                for record in page:
                    changes.resources[record.key] = msgspec.json.decode(record.value, type=processor.Resource)
            async for page in snapshot.load(OWNERS):
                for record in page:
                    changes.owners[record.key] = msgspec.json.decode(record.value, type=processor.Owner)
            async for page in snapshot.load(STATUSES):
                for record in page:
                    status = msgspec.json.decode(record.value, type=protocol.Status)
                    changes.statuses[record.key] = (record.epoch, status)
        loaded.accept(changes)
        return loaded

    @property
    def store(self) -> database.Store:
        return self._store

    @property
    def bus(self) -> api.Bus:
        return self._bus

    @property
    def term(self) -> int:
        return self._acting().term

    # The audit

    async def _open_audit(self) -> api.Stream:
        return await self._bus.stream(
            api.StreamSettings(
                name=messages.DECISIONS_STREAM,
                subjects=(messages.DECISIONS_SUBJECTS,),
                max_bytes=self._audit_bytes_max,
                max_age_s=365 * 86400.0,
                replicas=self._replicas,
            )
        )

    async def record(
        self,
        what: str,
        target: str,
        why: str,
        *,
        who: str,
        id: str | None = None,
        outcome: messages.Outcome = messages.Outcome.DONE,
        on_behalf_of: str = "",
        **details: str,
    ) -> None:
        """One line of the audit; an act is not undone because its record could not be stored."""
        decision = messages.Decision(
            id=id or secrets.token_hex(8),
            who=who,
            on_behalf_of=on_behalf_of,
            what=what,
            target=target[:256] or "-",
            why=why[:4096],
            at_ms=int(time.time() * 1000),
            epoch=self.processor.term if self.processor else 0,
            outcome=outcome,
            details=details,
        )
        if self._audit is None:
            return
        try:
            await self._audit.publish(protocol.decision(what), messages.encode(decision))
        except errors.MusterError as error:
            events.error("not-recorded", what=what, target=target, error=error)


def _writes(changes: processor.Changes) -> Any:
    encode = msgspec.json.encode
    for name, agent in changes.agents.items():
        yield AGENTS, name, None if agent is None else encode(agent), None
    for name, resource in changes.resources.items():
        yield RESOURCES, name, None if resource is None else encode(resource), None
    for name, owner in changes.owners.items():
        yield OWNERS, name, None if owner is None else encode(owner), None
    for name, record in changes.statuses.items():
        if record is None:
            yield STATUSES, name, None, None
        else:
            yield STATUSES, name, encode(record[1]), record[0]
