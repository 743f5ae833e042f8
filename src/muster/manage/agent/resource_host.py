"""Hosted resources: their adapters, the operations on them, and their records on disk.

An operation is executed once, by its id, for the manager with the highest epoch. An adapter that does not
return is cancelled at the deadline of its operation, whose outcome is then in doubt. An adapter that raises
an exception fails its own operation only.
"""

from __future__ import annotations

import abc
import asyncio
import fcntl
import functools
import heapq
import os
import pathlib
import shutil
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from muster.core import errors, files, health, messages
from muster.core.telemetry import log
from muster.manage import manifest, operation_results, protocol
from muster.manage.adapters import base
from muster.manage.agent import operation_log, shells, watchdog
from muster.supervision import os_process

events = log.EventLog("manage")

SYNCS_AT_ONCE = 8  # concurrent syncs share disk flushes
RESUME_S = 30.0  # for one adapter to find its resource again
RESUME_PATIENCE_S = 1.0  # before the next adapter begins as well
OBSERVE_TRIES_MAX = 3  # per resource, while changes are reported; then the last report counts
EMPTY_MAX = 256  # records of resources that do not exist any more; older ones become `ResourceHost._floor`
NAMES_MAX = 1_000  # names of hosted resources in one reply
EVENTS_A_SECOND = 10  # per resource; the next heartbeat reports later changes
# Files beside the records; no resource has a name with a dot, and each has a folder of its name.
BOOT, FLOOR, LOCK = ".boot", ".floor", ".agent"
LOCK_WAIT_S, LOCK_LOOK_S = 5.0, 0.1  # for a former process of the agent that is ending
RUNNING = (
    *(health.HealthState.UP, health.HealthState.STARTING, health.HealthState.LATE),
    *(health.HealthState.DRAINING, health.HealthState.UNKNOWN),
)
CHANGING = (
    *(protocol.Verb.PUT, protocol.Verb.CREATE, protocol.Verb.DELETE),
    *(protocol.Verb.RENAME, protocol.Verb.EXECUTE),
)


class HostedResource(operation_log.OperationHistory):
    """A resource with its adapter and the last observation. ``boot`` grows with each start of the agent."""

    context: base.AdapterContext

    def __init__(self, record: operation_log.OperationRecord, boot: int = 0) -> None:
        super().__init__(record)
        self.adapter: base.Adapter | None = None
        self.observed = protocol.ObservedState(False)
        self.resumed = True  # False: the adapter could not find the resource after a restart
        self.sequence = 0  # of the last observation
        self.lock = asyncio.Lock()
        self.saving = asyncio.Lock()
        self.stored = (record.epoch, record.manager)  # on disk
        self._boot = boot
        self._second = 0
        self._events_in_second = 0

    def take_over(self, old: HostedResource) -> None:
        """Take over record and adapter of ``old``, which becomes empty."""
        self.adopt_record(old)
        self.adapter, old.adapter = old.adapter, None
        self.record_observation(old.observed)
        old.record_observation(protocol.ObservedState(False))
        assert self.adapter is not None
        self.context.runtime, old.context.runtime = self.record.runtime, old.record.runtime
        self.context.hooks = self.record.hooks
        self.adapter.context = self.context

    def record_observation(self, observed: protocol.ObservedState) -> None:
        """Record an observation made now."""
        self.sequence += 1
        truncated = operation_results.truncate_observation(
            observed, self.record.digest if observed.exists else ""
        )
        self.observed = msgspec.structs.replace(truncated, boot=self._boot, sequence=self.sequence)

    def may_publish_event(self, now: float) -> bool:
        """Whether the rate limit allows another event."""
        if int(now) != self._second:
            self._second, self._events_in_second = int(now), 0
        self._events_in_second += 1
        return self._events_in_second <= EVENTS_A_SECOND


class ResourceHost(abc.ABC):
    """The transport-independent part of an agent; `muster.manage.agent.agent` connects it to managers."""

    def __init__(
        self, name: str, folder: pathlib.Path | None, adapters: Callable[[str], type[base.Adapter]]
    ) -> None:
        self.name = name
        self.hosted: dict[str, HostedResource] = {}
        self._folder = folder
        self._lock: int | None = None  # on the folder
        self._adapters = adapters
        self.broker_access: Callable[[], Awaitable[base.BrokerAccess]] | None = None
        self._boot = int(time.time() * 1000)
        self._empty: dict[str, None] = {}  # names of records without a resource, oldest first
        # The highest epoch of dropped records. Epochs come from one counter: what is assigned later is above.
        self._floor = 0
        self._dropping = asyncio.Lock()
        self.shells = shells.ShellSessions(name)

    @abc.abstractmethod
    def _on_state(self, hosted: HostedResource, observed: protocol.ObservedState) -> None:
        """An adapter reports the state of its resource."""

    @abc.abstractmethod
    def _on_event(self, hosted: HostedResource, what: str, **details: str) -> None:
        """An adapter reports another event."""

    @abc.abstractmethod
    async def _stored_secret(self, hosted: HostedResource, name: str) -> str:
        """A secret from the domain's store, for this resource."""

    @abc.abstractmethod
    async def _require_may_run(self, hosted: HostedResource, stop_after_s: float) -> bool:
        """Whether it will be stopped if its agent cannot renew. Raises `errors.Unavailable` if it may run
        elsewhere by now."""

    async def _resume(self) -> None:
        """Find the resources that were hosted before a restart. `errors.Conflict` if another process is this
        agent: both would start each resource."""
        if self._folder is None:
            return
        await self._acquire(self._folder)
        self._boot = await asyncio.to_thread(_next_boot, self._folder, self._boot)
        self._floor, loaded = await asyncio.to_thread(_load, self._folder)
        await asyncio.to_thread(_end_unknown_runs, self._folder, loaded)
        for record in sorted(operation_log.resolve_interrupted_rename(loaded), key=lambda each: each.epoch):
            self._get_or_create(record.name, record).resumed = record.config is None
        await self._resume_missing()

    async def _acquire(self, folder: pathlib.Path) -> None:
        loop = asyncio.get_running_loop()
        until_s = loop.time() + LOCK_WAIT_S
        while self._lock is None:
            taken = await asyncio.to_thread(_take_lock, folder)
            if isinstance(taken, int):
                self._lock = taken
            elif loop.time() > until_s:
                raise errors.Conflict(
                    f"the agent of {folder} runs already, as process {taken}", hint="stop it first, or use it"
                )
            else:
                await asyncio.sleep(LOCK_LOOK_S)

    def _release(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    async def _resume_missing(self) -> None:
        """Find resources that have not been found since the agent started.

        One after the other, because an adapter may refer to an earlier one. An adapter that hangs delays the
        next ones only by `RESUME_PATIENCE_S`.
        """
        async with asyncio.TaskGroup() as group:
            for hosted in [hosted for hosted in self.hosted.values() if not hosted.resumed]:
                if not hosted.lock.locked():
                    resumption = group.create_task(self._try_resume(hosted))
                    await asyncio.wait([resumption], timeout=RESUME_PATIENCE_S)

    async def _try_resume(self, hosted: HostedResource) -> None:
        """Resume an adapter. If that fails, the resource is ``unknown`` and left alone, because it may be
        running.
        """
        record = hosted.record
        try:
            async with hosted.lock, asyncio.timeout(RESUME_S):
                await self._resume_adapter(hosted, record.type, record.config or {})
                await self._observe(hosted)
        except Exception as error:  # noqa: BLE001  (adapters are third-party code)
            reason = f"not found after a restart of its agent: {type(error).__name__}: {error}"
            if hosted.observed.reason != reason:
                events.warning("not-resumed", resource=record.name, error=error)
                hosted.record_observation(protocol.ObservedState(True, health.HealthState.UNKNOWN, reason))

    async def _resume_adapter(self, hosted: HostedResource, type_name: str, config: dict[str, Any]) -> None:
        """Resume with a new adapter: a previous one may have failed half-way and still be watching."""
        if hosted.resumed:
            return
        if hosted.adapter is not None:
            await hosted.adapter.close()
        hosted.adapter = None
        adapter = self._adapters(type_name)(hosted.context)
        hosted.adapter = adapter
        await adapter.resume(base.convert(type(adapter), config))
        hosted.resumed = True

    async def execute(self, operation: protocol.Operation) -> protocol.OperationResult:
        """Execute an operation once."""
        if _is_beside(operation):  # a resource that is being stopped writes its log
            return await self._execute(self._get_or_create(operation.resource), operation)
        answer = None
        while answer is None:
            hosted = self._get_or_create(operation.resource)
            async with hosted.lock:
                if self.hosted.get(operation.resource) is hosted:  # otherwise its record was dropped
                    answer = await self._execute(hosted, operation)
        await self._drop_records()
        return answer

    async def _execute(
        self, hosted: HostedResource, operation: protocol.Operation
    ) -> protocol.OperationResult:
        try:
            hosted.check(operation.epoch, operation.manager)
        except errors.StaleEpoch as error:
            events.warning("refused", resource=operation.resource, epoch=error.epoch, now=error.current)
            return operation_log.failure_result(operation.id, error, error.current)
        known = hosted.recorded_result(operation.id)
        if known is not None:
            return known
        changing = operation.verb in CHANGING and not _is_beside(operation)
        if changing:
            hosted.begin(operation.id)
            try:
                await self._save(hosted)
            except OSError as error:
                hosted.forget(operation.id)
                reason = f"nothing was done: {self.name} cannot record the start: {error}"
                refused = operation_log.failure_result(
                    operation.id, errors.Unavailable(reason), hosted.record.epoch
                )
                return msgspec.structs.replace(refused, code="not-stored")
        answer = await self._run_operation(hosted, operation)
        if changing:
            if answer.code == errors.StaleEpoch.code:  # nothing was done: the next manager may repeat it
                hosted.forget(operation.id)
            hosted.end(answer)
            try:
                await self._save(hosted)
            except OSError as error:  # the outcome is known; after a crash it is in doubt
                events.error("outcome-not-stored", resource=operation.resource, error=error)
        return answer

    async def _run_operation(
        self, hosted: HostedResource, operation: protocol.Operation
    ) -> protocol.OperationResult:
        outcome, code, reason, result = messages.DecisionOutcome.DONE, "", "", None
        try:
            async with asyncio.timeout(operation.timeout_s):
                if _reads_log(operation):
                    query = _log_query(operation)
                    result = msgspec.to_builtins(await self._require(hosted).log_page(query))
                elif operation.verb is protocol.Verb.SHELL:
                    result = msgspec.to_builtins(await self._serve_shell(hosted, operation))
                else:
                    result = await self._dispatch_operation(hosted, operation)
                    await self._observe(hosted)
                if operation.verb is protocol.Verb.GET:
                    result = msgspec.to_builtins(hosted.observed)
        except TimeoutError:
            outcome, code = messages.DecisionOutcome.IN_DOUBT, operation_log.IN_DOUBT
            reason = f"the adapter did not finish within {operation.timeout_s:g} s"
        except errors.MusterError as error:
            refused = operation_log.failure_result(operation.id, error, hosted.record.epoch)
            outcome, code, reason = refused.outcome, refused.code, refused.reason
        except Exception as error:  # noqa: BLE001  (adapters are third-party code)
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
            observed=hosted.observed,
            epoch=hosted.record.epoch,
        )
        return operation_results.truncate_result(answer)

    async def _dispatch_operation(self, hosted: HostedResource, operation: protocol.Operation) -> Any:
        record = hosted.record
        if operation.generation:
            hosted.context.generation = operation.generation
        if operation.verb is protocol.Verb.CREATE and operation.stop_after_s:
            is_enforced = await self._require_may_run(hosted, operation.stop_after_s)
            can_move = self._adapters(operation.type).can_move and not operation.config.get("pid_file")
            record.stop_after_s = operation.stop_after_s if is_enforced and can_move else 0.0
        elif record.stop_after_s and may_begin_run(operation):
            await self._require_may_run(hosted, record.stop_after_s)
        hosted.check(operation.epoch, operation.manager)  # it may have been superseded meanwhile
        if not hosted.resumed and record.config is not None:
            renewed = operation.verb in (protocol.Verb.CREATE, protocol.Verb.PUT)
            config = operation.config if renewed else record.config
            await self._resume_adapter(hosted, (renewed and operation.type) or record.type, config)
        match operation.verb:
            case protocol.Verb.CREATE | protocol.Verb.PUT:
                kind = self._adapters(operation.type or record.type)
                config = base.convert(kind, operation.config)
                digest = manifest.digest(operation.config, operation.hooks)
                created = hosted.adapter is not None and record.config is not None
                if hosted.adapter is None or (not created and type(hosted.adapter) is not kind):
                    hosted.adapter = kind(hosted.context)
                record.type, record.config = kind.type_name, operation.config
                record.hooks = hosted.context.hooks = operation.hooks
                if created:
                    record.digest = ""  # neither configuration applies until the change is done
                    await hosted.adapter.put(config)
                else:
                    await hosted.adapter.create(config, start=operation.start)
                record.digest = digest
            case protocol.Verb.DELETE:
                if hosted.adapter is not None and record.config is not None:
                    await self.shells.end_all(record.name)
                    await hosted.adapter.delete()
                    await hosted.adapter.close()
                if self._folder is not None and operation.manager:  # an orphan's data is kept
                    await asyncio.to_thread(_remove, self._folder / record.name)
                hosted.adapter, record.config, record.digest, record.stop_after_s = None, None, "", 0.0
                hosted.resumed = True
                record.runtime.clear()
                if record.epoch == operation.epoch:  # not claimed meanwhile
                    record.manager = ""  # no manager receives its heartbeats; its epoch remains
                self._empty.pop(record.name, None)
                self._empty[record.name] = None
            case protocol.Verb.EXECUTE:
                return await self._require(hosted).execute(operation.operation, operation.arguments)
            case protocol.Verb.ENUMERATE:
                return {
                    "resources": heapq.nsmallest(NAMES_MAX, self.hosted),
                    "operations": self._require(hosted).operations(),
                }
            case protocol.Verb.RENAME:
                return await self._rename(hosted, str(operation.arguments.get("from", "")))
        return None  # for a GET too: its result is the observation that follows every operation

    async def _serve_shell(
        self, hosted: HostedResource, operation: protocol.Operation
    ) -> protocol.ShellOutput | None:
        try:
            request = msgspec.convert(operation.arguments, protocol.ShellCommand | protocol.ShellExchange)
        except msgspec.ValidationError as error:
            raise errors.InvalidInput(f"{protocol.SHELL}: {error}") from error
        if isinstance(request, protocol.ShellExchange):
            return await self.shells.exchange(operation.operation, request)
        await self.shells.begin(operation.operation, self._require(hosted), request)
        return None

    def _require(self, hosted: HostedResource) -> base.Adapter:
        if hosted.adapter is None or hosted.record.config is None:
            raise errors.NotFound(f"{hosted.record.name} does not exist on {self.name}")
        return hosted.adapter

    async def _rename(self, renamed: HostedResource, former: str) -> dict[str, bool]:
        """``renamed`` takes over the resource ``former``; nothing happens if that does not exist.

        The former name stays fenced by the new epoch: an earlier manager cannot recreate it.
        """
        old = self.hosted.get(former)
        if old is None or old is renamed or old.adapter is None or old.record.config is None:
            return {"renamed": False}
        async with old.lock:
            if renamed.record.config is not None:
                raise errors.AlreadyExists(f"{renamed.record.name} already exists on {self.name}")
            if not old.adapter.can_be_renamed:
                raise errors.Refused(f"a resource of type {old.record.type} cannot be renamed")
            old.check(renamed.record.epoch, "")
            if self._folder is not None:
                await asyncio.to_thread(_move, self._folder / former, self._folder / renamed.record.name)
            renamed.take_over(old)
            await self._save(renamed)  # first: after a crash, the new name owns what both claim
            await self._save(old)
            renamed.record.formerly = ""
            self._empty[former] = None
        return {"renamed": True}

    async def _observe(self, hosted: HostedResource) -> None:
        if hosted.adapter is None or hosted.record.config is None:
            hosted.record_observation(protocol.ObservedState(False))
            return
        for _ in range(OBSERVE_TRIES_MAX):
            before = hosted.sequence
            observed = await hosted.adapter.observe()
            if hosted.sequence == before:
                hosted.record_observation(observed)
                return
            # The adapter reported a change meanwhile: the order of the two is unknown.

    # Records

    def _get_or_create(
        self, name: str, record: operation_log.OperationRecord | None = None
    ) -> HostedResource:
        hosted = self.hosted.get(name)
        if hosted is None:
            hosted = self.hosted[name] = HostedResource(
                record or operation_log.OperationRecord(name=name, epoch=self._floor), self._boot
            )
            if hosted.record.config is None:
                self._empty[name] = None
            hosted.context = base.AdapterContext(
                name=name,
                folder=self._folder / name if self._folder is not None else None,
                report_state=functools.partial(self._on_state, hosted),
                report_event=functools.partial(self._on_event, hosted),
                runtime=hosted.record.runtime,
                sibling=self._sibling,
                stored_secret=functools.partial(self._stored_secret, hosted),
                save=functools.partial(self._save_run, hosted),
                broker_access=self.broker_access,
                may_move=lambda: bool(hosted.record.stop_after_s),
                hooks=hosted.record.hooks,
            )
        return hosted

    def _sibling(self, name: str) -> base.Adapter | None:
        hosted = self.hosted.get(name)
        return hosted.adapter if hosted is not None and hosted.record.config is not None else None

    def _raise_floor(self, epoch: int) -> None:
        """What was assigned before this epoch, and does not exist here, is not created any more."""
        self._floor = max(self._floor, epoch)
        for hosted in self.hosted.values():
            if hosted.record.config is None and hosted.record.epoch < epoch:
                hosted.check(epoch, "")

    async def _drop_records(self) -> None:
        """Drop the oldest records of resources that no longer exist, many at a time. The floor replaces their
        epochs; a manager whose epoch it refuses gets a higher one from the registry.
        """
        if len(self._empty) <= EMPTY_MAX or self._dropping.locked():
            return
        async with self._dropping:
            dropped: list[HostedResource] = []
            for name in list(self._empty)[: EMPTY_MAX // 2]:
                del self._empty[name]
                hosted = self.hosted[name]
                if hosted.record.config is None and not hosted.record.manager and not hosted.lock.locked():
                    dropped.append(self.hosted.pop(name))
            self._floor = max([self._floor, *(hosted.record.epoch for hosted in dropped)])
            if self._folder is not None and dropped:
                paths = [self._folder / f"{hosted.record.name}.json" for hosted in dropped]
                try:
                    await asyncio.to_thread(_drop, self._folder, self._floor, paths)
                except OSError as error:  # they are loaded again after a restart
                    events.warning("records-not-dropped", error=error)
                for again in filter(None, (self.hosted.get(hosted.record.name) for hosted in dropped)):
                    await self._save(again)  # its new record may have been removed with the old one

    async def _save(self, hosted: HostedResource) -> None:
        if self._folder is not None:
            async with hosted.saving:  # one at a time, so that the last write wins
                await self._write(hosted, self._folder)

    async def _save_run(self, hosted: HostedResource) -> None:
        """A run is about to begin."""
        if hosted.record.stop_after_s:
            await self._require_may_run(hosted, hosted.record.stop_after_s)
        await self._save(hosted)

    async def _save_claims(self, claimed: list[HostedResource]) -> None:
        """Store only what is not on disk yet: a repeated claim continues where the last one timed out."""
        folder, ahead = self._folder, iter(claimed)
        if folder is None:
            return

        async def save_some() -> None:
            for hosted in ahead:
                async with hosted.saving:
                    if hosted.stored != (hosted.record.epoch, hosted.record.manager):
                        await self._write(hosted, folder)

        await asyncio.gather(*(save_some() for _ in range(SYNCS_AT_ONCE)))

    async def _write(self, hosted: HostedResource, folder: pathlib.Path) -> None:
        if hosted.adapter is not None:
            hosted.record.mark = hosted.adapter.mark
        stored = (hosted.record.epoch, hosted.record.manager)
        await asyncio.to_thread(_store, folder / f"{hosted.record.name}.json", hosted.to_store())
        hosted.stored = stored


def may_begin_run(operation: protocol.Operation) -> bool:
    stops = operation.operation in ("stop", "drain") or _is_beside(operation)
    return operation.verb in (protocol.Verb.CREATE, protocol.Verb.PUT) or (
        operation.verb is protocol.Verb.EXECUTE and not stops
    )


def _reads_log(operation: protocol.Operation) -> bool:
    return operation.verb is protocol.Verb.EXECUTE and operation.operation == protocol.LOG_PAGE


def _is_beside(operation: protocol.Operation) -> bool:
    """Whether it waits for no other operation, and no other for it. Then it changes nothing."""
    return _reads_log(operation) or operation.verb is protocol.Verb.SHELL


def _log_query(operation: protocol.Operation) -> protocol.LogQuery:
    try:
        return msgspec.convert(operation.arguments, protocol.LogQuery)
    except msgspec.ValidationError as error:
        raise errors.InvalidInput(f"{protocol.LOG_PAGE}: {error}") from error


def _move(old: pathlib.Path, new: pathlib.Path) -> None:
    """Move an adapter's folder with its name; open files stay open."""
    if old.exists() and not new.exists():
        old.rename(new)


def _remove(folder: pathlib.Path) -> None:
    """Remove an adapter's folder."""
    try:
        shutil.rmtree(folder)
    except FileNotFoundError:
        pass
    except OSError as error:
        events.warning("folder-not-removed", folder=folder, error=error)


def _drop(folder: pathlib.Path, floor: int, paths: list[pathlib.Path]) -> None:
    files.write(folder / FLOOR, str(floor).encode())
    for path in paths:
        path.unlink(missing_ok=True)


def _load(folder: pathlib.Path) -> tuple[int, list[operation_log.OperationRecord]]:
    """The floor and the records."""
    folder.mkdir(parents=True, exist_ok=True)
    records = []
    for path in sorted(folder.glob("*.json")):
        try:
            records.append(msgspec.json.decode(path.read_bytes(), type=operation_log.OperationRecord))
        except (msgspec.MsgspecError, UnicodeDecodeError, OSError, RecursionError) as error:
            events.warning("unreadable-record", file=path.name, error=error)
    try:
        return int((folder / FLOOR).read_text()), records
    except (OSError, ValueError):
        return 0, records


def _end_unknown_runs(folder: pathlib.Path, loaded: list[operation_log.OperationRecord]) -> None:
    """End what runs without a record, because the folder was emptied, or is that of an earlier day: its
    resource would be started once more, here or elsewhere."""
    prefix = base.marks_of(folder)
    known = {record.mark for record in loaded} | {record.runtime.get("token") for record in loaded}
    unknown = {mark for mark in os_process.marks() if mark.startswith(prefix)} - known
    if prefix and unknown:
        count = watchdog.kill({watchdog.MARK + mark.encode() for mark in unknown})
        events.warning("unknown-runs-ended", runs=len(unknown), processes=count)


def _next_boot(folder: pathlib.Path, now_ms: int) -> int:
    """A number above those of all previous starts, even if the clock was set back."""
    path = folder / BOOT
    try:
        last = int(path.read_text())
    except (OSError, ValueError):
        last = 0
    boot = max(last + 1, now_ms)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        files.write(path, str(boot).encode())
    except OSError as error:  # for example a full disk: use the clock
        events.warning("boot-not-stored", error=error)
    return boot


def _take_lock(folder: pathlib.Path) -> int | str:
    """The descriptor that holds the lock; or the process that has it. It ends with its process."""
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.read(descriptor, 20).decode("ascii", "replace") or "?"
        os.close(descriptor)
        return holder
    os.ftruncate(descriptor, 0)
    os.write(descriptor, str(os.getpid()).encode())
    return descriptor


def _store(path: pathlib.Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write(path, data)
