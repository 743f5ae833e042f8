"""What an agent hosts: resources with their adapters, what is done to them, and what is kept of it on disk.

An operation is carried out once, by its id, for the manager with the highest epoch.  An adapter that hangs is
given up at its operation's deadline (in doubt); one that raises anything at all costs its own operation and
nothing else.
"""

from __future__ import annotations

import abc
import asyncio
import functools
import heapq
import pathlib
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from muster.core import errors, files, health, messages
from muster.core.telemetry import log
from muster.manage import manifest, operation_results, protocol
from muster.manage.adapters import base
from muster.manage.agent import operation_log

events = log.EventLog("manage")

SYNCS_AT_ONCE = 8  # concurrent syncs share the disk's work
RESUME_S = 30.0  # for one adapter to find its resource again
LOOKS_MAX = 3  # at one resource, while changes are reported; then what was reported last holds
NAMES_MAX = 1_000  # of hosted resources in one answer
EVENTS_A_SECOND = 10  # of one resource; what is more is told by the next heartbeat
CHANGING = (
    *(protocol.Verb.PUT, protocol.Verb.CREATE, protocol.Verb.DELETE),
    *(protocol.Verb.RENAME, protocol.Verb.EXECUTE),
)


class HostedResource(operation_log.OperationHistory):
    """With its adapter, and what was last seen. ``boot`` is the agent's, and grows with each start."""

    place: base.AdapterContext

    def __init__(self, record: operation_log.OperationRecord, boot: int = 0) -> None:
        super().__init__(record)
        self.adapter: base.Adapter | None = None
        self.seen = protocol.ObservedState(False)
        self.resumed = True  # False: its adapter could not find the resource again after a restart
        self.sequence = 0  # of the last observation
        self.lock = asyncio.Lock()
        self.saving = asyncio.Lock()
        self.stored = (record.epoch, record.manager)  # on disk
        self._boot = boot
        self._second = 0
        self._told = 0

    def take_over(self, old: HostedResource) -> None:
        """Be what ``old`` was; it is nothing from now on."""
        self.take_record(old)
        self.adapter, old.adapter = old.adapter, None
        self.see(old.seen)
        old.see(protocol.ObservedState(False))
        assert self.adapter is not None
        self.place.runtime, old.place.runtime = self.record.runtime, old.record.runtime
        self.adapter.place = self.place

    def see(self, observed: protocol.ObservedState) -> None:
        """Take an observation that is made now."""
        self.sequence += 1
        bounded = operation_log.truncate_observation(observed, self.record.digest if observed.exists else "")
        self.seen = msgspec.structs.replace(bounded, boot=self._boot, sequence=self.sequence)

    def allowance(self, now: float) -> bool:
        if int(now) != self._second:
            self._second, self._told = int(now), 0
        self._told += 1
        return self._told <= EVENTS_A_SECOND


class ResourceHost(abc.ABC):
    """Whoever has a road to managers tells them of what happens here (`muster.manage.agent.agent`)."""

    def __init__(
        self, name: str, folder: pathlib.Path | None, adapters: Callable[[str], type[base.Adapter]]
    ) -> None:
        self.name = name
        self.hosted: dict[str, HostedResource] = {}
        self._folder = folder
        self._adapters = adapters
        self.broker_access: Callable[[], Awaitable[base.BrokerAccess]] | None = None
        self._boot = int(time.time() * 1000)

    @abc.abstractmethod
    def _changed(self, one: HostedResource, observed: protocol.ObservedState) -> None:
        """An adapter tells how its resource is."""

    @abc.abstractmethod
    def _happened(self, one: HostedResource, what: str, **details: str) -> None:
        """An adapter tells of something else."""

    @abc.abstractmethod
    async def _stored_secret(self, one: HostedResource, name: str) -> str:
        """Of the domain's store, for this resource."""

    async def _resume(self) -> None:
        """Find again what was hosted before a restart."""
        if self._folder is None:
            return
        self._boot = await asyncio.to_thread(_next_boot, self._folder, self._boot)
        for record in operation_log.resolve_interrupted_rename(await asyncio.to_thread(_load, self._folder)):
            one = self._host(record.name, record)
            if record.config is not None:
                one.resumed = False
                await self._resume_quietly(one)

    async def _resume_again(self) -> None:
        """Try again what could not be found when the agent was started."""
        for one in list(self.hosted.values()):
            if not one.resumed and not one.lock.locked():
                async with one.lock:
                    await self._resume_quietly(one)

    async def _resume_quietly(self, one: HostedResource) -> None:
        """One whose adapter fails is ``unknown``: it may run, so nothing is done to it; the others go on."""
        record = one.record
        try:
            async with asyncio.timeout(RESUME_S):
                await self._resume_one(one, record.type, record.config or {})
                await self._look(one)
        except Exception as error:  # noqa: BLE001  (an adapter is others' code)
            reason = f"not found again after a restart of its agent: {type(error).__name__}: {error}"
            if one.seen.reason != reason:
                events.warning("not-resumed", resource=record.name, error=error)
                one.see(protocol.ObservedState(True, health.HealthState.UNKNOWN, reason))

    async def _resume_one(self, one: HostedResource, type_name: str, config: dict[str, Any]) -> None:
        """With a new adapter: one that failed half-way may have begun to watch."""
        if one.resumed:
            return
        if one.adapter is not None:
            await one.adapter.close()
        one.adapter = None
        adapter = self._adapters(type_name)(one.place)
        one.adapter = adapter
        await adapter.resume(base.convert(type(adapter), config))
        one.resumed = True

    async def obey(self, operation: protocol.Operation) -> protocol.OperationResult:
        """Carry out one operation, once."""
        one = self._host(operation.resource)
        async with one.lock:
            try:
                one.check(operation.epoch, operation.manager)
            except errors.StaleEpoch as error:
                events.warning("refused", resource=operation.resource, epoch=error.epoch, now=error.current)
                return operation_log.refusal(operation.id, error, error.current)
            if operation.verb is protocol.Verb.OUTCOME:
                return one.remembered(operation.id) or protocol.OperationResult(
                    id=operation.id,
                    outcome=messages.DecisionOutcome.REFUSED,
                    code="never-begun",
                    reason="this agent was never told to do it",
                    epoch=one.record.epoch,
                )
            known = one.remembered(operation.id)
            if known is not None:
                return known
            changing = operation.verb in CHANGING
            if changing:
                one.begin(operation.id)
                try:
                    await self._save(one)
                except OSError as error:
                    one.forget(operation.id)
                    reason = f"nothing was done: {self.name} cannot store that it begins: {error}"
                    refused = operation_log.refusal(
                        operation.id, errors.Unavailable(reason), one.record.epoch
                    )
                    return msgspec.structs.replace(refused, code="not-stored")
            answer = await self._try(one, operation)
            if changing:
                one.end(answer)
                try:
                    await self._save(one)
                except OSError as error:  # the outcome is known all the same; after a crash it is in doubt
                    events.error("outcome-not-stored", resource=operation.resource, error=error)
            return answer

    async def _try(self, one: HostedResource, operation: protocol.Operation) -> protocol.OperationResult:
        outcome, code, reason, result = messages.DecisionOutcome.DONE, "", "", None
        try:
            async with asyncio.timeout(operation.timeout_s):
                result = await self._do(one, operation)
                await self._look(one)
        except TimeoutError:
            outcome, code = messages.DecisionOutcome.IN_DOUBT, operation_log.IN_DOUBT
            reason = f"the adapter did not answer in {operation.timeout_s:g} s"
        except errors.MusterError as error:
            refused = operation_log.refusal(operation.id, error, one.record.epoch)
            outcome, code, reason = refused.outcome, refused.code, refused.reason
        except Exception as error:  # noqa: BLE001  (an adapter is others' code)
            outcome, code, reason = (
                messages.DecisionOutcome.FAILED,
                "adapter-failed",
                f"{type(error).__name__}: {error}",
            )
            events.error(
                "adapter-failed", resource=operation.resource, verb=operation.verb.value, error=error
            )
        answer = protocol.OperationResult(
            id=operation.id,
            outcome=outcome,
            result=result,
            code=code,
            reason=reason[:4000],
            observed=one.seen,
            epoch=one.record.epoch,
        )
        return operation_results.bounded(answer)

    async def _do(self, one: HostedResource, operation: protocol.Operation) -> Any:
        record = one.record
        if operation.generation:
            one.place.generation = operation.generation
        if not one.resumed and record.config is not None:
            renewed = operation.verb in (protocol.Verb.CREATE, protocol.Verb.PUT)
            config = operation.config if renewed else record.config
            await self._resume_one(one, (renewed and operation.type) or record.type, config)
        match operation.verb:
            case protocol.Verb.GET:
                await self._look(one)
                return msgspec.to_builtins(one.seen)
            case protocol.Verb.CREATE | protocol.Verb.PUT:
                kind = self._adapters(operation.type or record.type)
                config = base.convert(kind, operation.config)
                digest = manifest.digest(operation.config)
                created = one.adapter is not None and record.config is not None
                if one.adapter is None or (not created and type(one.adapter) is not kind):
                    one.adapter = kind(one.place)
                record.type, record.config = kind.type_name, operation.config
                if created:
                    record.digest = ""  # until it is done, it has neither
                    await one.adapter.put(config)
                else:
                    await one.adapter.create(config, start=operation.start)
                record.digest = digest
            case protocol.Verb.DELETE:
                if one.adapter is not None and record.config is not None:
                    await one.adapter.delete()
                    await one.adapter.close()
                one.adapter, record.config, record.digest = None, None, ""
                one.resumed = True
                record.runtime.clear()
                record.manager = ""  # nobody hears of it any more; its epoch stays
            case protocol.Verb.EXECUTE:
                return await self._require(one).execute(operation.operation, operation.arguments)
            case protocol.Verb.ENUMERATE:
                return {
                    "resources": heapq.nsmallest(NAMES_MAX, self.hosted),
                    "operations": self._require(one).operations(),
                }
            case protocol.Verb.RENAME:
                return await self._rename(one, str(operation.arguments.get("from", "")))
            case protocol.Verb.SUBSCRIBE:
                one.check(operation.epoch, operation.manager)
        return None

    def _require(self, one: HostedResource) -> base.Adapter:
        if one.adapter is None or one.record.config is None:
            raise errors.NotFound(f"{one.record.name} does not exist on {self.name}")
        return one.adapter

    async def _rename(self, one: HostedResource, former: str) -> dict[str, bool]:
        """``one`` takes over what ``former`` is; where that is nothing, nothing happens.

        The former name stays fenced by the new owner's epoch: a manager from before cannot bring it back.
        """
        old = self.hosted.get(former)
        if old is None or old is one or old.adapter is None or old.record.config is None:
            return {"renamed": False}
        async with old.lock:
            if one.record.config is not None:
                raise errors.AlreadyExists(f"{one.record.name} exists on {self.name} already")
            if not old.adapter.can_be_renamed:
                raise errors.Refused(f"a {old.record.type} cannot be renamed")
            old.check(one.record.epoch, "")
            if self._folder is not None:
                await asyncio.to_thread(_move, self._folder / former, self._folder / one.record.name)
            one.take_over(old)
            await self._save(one)  # first: what both claim after a crash is the new one's
            await self._save(old)
            one.record.formerly = ""
        return {"renamed": True}

    async def _look(self, one: HostedResource) -> None:
        if one.adapter is None or one.record.config is None:
            one.see(protocol.ObservedState(False))
            return
        for _ in range(LOOKS_MAX):
            before = one.sequence
            observed = await one.adapter.observe()
            if one.sequence == before:
                one.see(observed)
                return
            # The adapter has reported a change meanwhile: which of the two is older cannot be known.

    # What it keeps

    def _host(self, name: str, record: operation_log.OperationRecord | None = None) -> HostedResource:
        one = self.hosted.get(name)
        if one is None:
            one = self.hosted[name] = HostedResource(
                record or operation_log.OperationRecord(name=name), self._boot
            )
            one.place = base.AdapterContext(
                name=name,
                folder=self._folder / name if self._folder is not None else None,
                changed=functools.partial(self._changed, one),
                happened=functools.partial(self._happened, one),
                runtime=one.record.runtime,
                neighbour=self._neighbour,
                stored=functools.partial(self._stored_secret, one),
                save=functools.partial(self._save, one),
                broker_access=self.broker_access,
            )
        return one

    def _neighbour(self, name: str) -> base.Adapter | None:
        one = self.hosted.get(name)
        return one.adapter if one is not None and one.record.config is not None else None

    async def _save(self, one: HostedResource) -> None:
        if self._folder is not None:
            async with one.saving:  # one after the other: the last one has the last word
                await self._write(one, self._folder)

    async def _save_claims(self, claimed: list[HostedResource]) -> None:
        """Only what is not on disk yet: a claim that took too long is repeated, and goes on where it was."""
        folder, ahead = self._folder, iter(claimed)
        if folder is None:
            return

        async def save_some() -> None:
            for one in ahead:
                async with one.saving:
                    if one.stored != (one.record.epoch, one.record.manager):
                        await self._write(one, folder)

        await asyncio.gather(*(save_some() for _ in range(SYNCS_AT_ONCE)))

    async def _write(self, one: HostedResource, folder: pathlib.Path) -> None:
        stored = (one.record.epoch, one.record.manager)
        await asyncio.to_thread(_store, folder / f"{one.record.name}.json", one.to_store())
        one.stored = stored


def _move(old: pathlib.Path, new: pathlib.Path) -> None:
    """An adapter's folder goes with its name; files that are open stay open."""
    if old.exists() and not new.exists():
        old.rename(new)


def _load(folder: pathlib.Path) -> list[operation_log.OperationRecord]:
    folder.mkdir(parents=True, exist_ok=True)
    found = []
    for path in sorted(folder.glob("*.json")):
        try:
            found.append(msgspec.json.decode(path.read_bytes(), type=operation_log.OperationRecord))
        except (msgspec.MsgspecError, OSError) as error:
            events.warning("unreadable-record", file=path.name, error=error)
    return found


def _next_boot(folder: pathlib.Path, now_ms: int) -> int:
    """A number above those of all starts before, also where the clock was set back."""
    path = folder / "boot"
    try:
        last = int(path.read_text())
    except (OSError, ValueError):
        last = 0
    boot = max(last + 1, now_ms)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        files.write(path, str(boot).encode())
    except OSError as error:  # a full disk, say: the clock has to do
        events.warning("boot-not-stored", error=error)
    return boot


def _store(path: pathlib.Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write(path, data)
