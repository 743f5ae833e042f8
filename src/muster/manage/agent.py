"""The agent: one process on a machine, which hosts the adapters of its resources.

It obeys managers by their epochs, heartbeats to the manager of each resource, remembers what it was told to
do, and keeps all that on disk.  When nobody manages a resource, the resource goes on as it is.

An adapter that hangs is given up at its operation's deadline (in doubt), one that floods is heard some times
a second, one that raises anything at all costs its own operation and nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import pathlib
import platform
import secrets
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, Self

import msgspec

from muster.bus import api
from muster.core import errors, health, log, messages, subjects
from muster.manage import hosting, manifest, protocol, requests
from muster.manage.adapters import base, catalogue

events = log.Events("manage")

BEAT_S = 5.0
HELLO_S = 30.0
HELLO_TIMEOUT_S = 3.0
BEATS_MAX = 1_000  # in one message, with reasons cut short
REASON_MAX = 200
EVENTS_A_SECOND = 10  # of one resource; what is more is told by the next heartbeat
CHANGING = (
    *(protocol.Verb.PUT, protocol.Verb.CREATE, protocol.Verb.DELETE),
    *(protocol.Verb.RENAME, protocol.Verb.EXECUTE),
)


class Road(Protocol):
    """What an agent needs of the bus; lines to managers offer it too (`muster.manage.direct`)."""

    @property
    def identity(self) -> str: ...
    async def publish(self, subject: str, data: bytes) -> None: ...
    async def request(self, subject: str, data: bytes, *, timeout_s: float) -> api.Message: ...
    async def subscribe(self, subject: str, *, handler: api.Handler) -> Closable: ...


class Closable(Protocol):
    async def close(self) -> None: ...


class Agent:
    """``async with Agent(bus, folder) as agent: …``"""

    def __init__(
        self,
        bus: Road,
        folder: pathlib.Path | None = None,
        *,
        name: str | None = None,
        zone: str = "default",
        labels: Mapping[str, str] | None = None,
        beat_s: float = BEAT_S,
        machine: str = "",
        adapters: Callable[[str], type[base.Adapter]] = catalogue.find,
        types: Sequence[str] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.name = name or bus.identity
        self.hosted: dict[str, _Hosted] = {}
        self._bus = bus
        self._folder = folder
        self._zone = zone
        self._labels = dict(labels or {})
        self._beat_s = beat_s
        self._machine = machine
        self._clock = clock
        self._adapters = adapters
        self._types = tuple(types if types is not None else catalogue.names())
        self._boot = secrets.randbits(48)
        self._sequence = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._subscriptions: list[Closable] = []
        self.dropped_events = 0

    # Life

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        await self._resume()
        self._subscriptions = [
            await self._bus.subscribe(protocol.claim(self.name), handler=self._claimed),
            await self._bus.subscribe(protocol.operations_of(self.name), handler=self._asked),
        ]
        self._spawn(self._say_hello())
        self._spawn(self._beat_always())

    async def stop(self) -> None:
        """The resources go on."""
        for subscription in self._subscriptions:
            await subscription.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for one in self.hosted.values():
            if one.adapter is not None:
                await one.adapter.close()

    def _spawn(self, work: Any) -> None:
        task = asyncio.create_task(work, name=f"agent {self.name}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _resume(self) -> None:
        """Find again what was hosted before a restart."""
        if self._folder is None:
            return
        for record in hosting.settled(await asyncio.to_thread(_load, self._folder)):
            one = self._host(record.name, record)
            if record.config is None:
                continue
            try:
                adapter = one.adapter = self._adapters(record.type)(one.place)
                await adapter.resume(base.convert(type(adapter), record.config))
            except errors.MusterError as error:
                events.warning("not-resumed", resource=record.name, error=error)

    # What it says

    async def _say_hello(self) -> None:
        while True:
            said = protocol.Hello(
                boot=self._boot,
                machine=self._machine,
                zone=self._zone,
                labels=self._labels,
                facts=facts(),
                types=self._types,
                resources=tuple(self.hosted)[:2_000],
            )
            wait_s = HELLO_S
            try:
                answer = await self._bus.request(
                    protocol.hello(self.name), messages.encode(said), timeout_s=HELLO_TIMEOUT_S
                )
                requests.result_of(answer)
            except errors.MusterError:
                wait_s = min(
                    1.0, self._beat_s
                )  # no registry acts, or it takes nothing now: say it again soon
            await asyncio.sleep(wait_s)

    async def _beat_always(self) -> None:
        # Agents that were started together beat apart from each other: each has its place within a period.
        await asyncio.sleep(self._beat_s * (zlib.crc32(self.name.encode()) % 1000) / 1000)
        while True:
            with contextlib.suppress(errors.Unavailable):
                await self.beat()
            await asyncio.sleep(self._beat_s)

    async def beat(self) -> None:
        by_manager: dict[str, list[protocol.Beat]] = {}
        for name, one in self.hosted.items():
            record, seen = one.record, one.seen
            if record.manager:
                by_manager.setdefault(record.manager, []).append(
                    protocol.Beat(
                        name,
                        seen.state if seen.exists else health.State.DOWN,
                        record.epoch,
                        record.digest if seen.exists else "",
                        seen.reason[:REASON_MAX],
                    )
                )
        for manager, beats in by_manager.items():
            for first in range(0, len(beats), BEATS_MAX):
                self._sequence += 1
                said = protocol.Beats(
                    sequence=self._sequence,
                    at_ms=int(self._clock() * 1000),
                    period_s=self._beat_s,
                    zone=self._zone,
                    beats=tuple(beats[first : first + BEATS_MAX]),
                )
                await self._bus.publish(protocol.beat(self.name, manager), messages.encode(said, "msgpack"))

    def _changed(self, one: _Hosted, observed: protocol.Observed) -> None:
        """An adapter tells of its resource."""
        before, one.seen = one.seen, hosting.bounded(observed, one.record.digest)
        if (before.exists, before.state, before.reason) == (observed.exists, observed.state, observed.reason):
            return
        self.tell(one, protocol.CHANGED, one.seen)

    def _happened(self, one: _Hosted, what: str, **details: str) -> None:
        kept = {name[:256]: str(value)[:4096] for name, value in list(details.items())[:64]}
        self.tell(one, what, details=kept)

    def tell(
        self,
        one: _Hosted,
        what: str,
        observed: protocol.Observed | None = None,
        details: Mapping[str, str] | None = None,
    ) -> None:
        """An event, to the resource's manager."""
        now = asyncio.get_running_loop().time()
        if not one.record.manager or not one.allowance(now):
            self.dropped_events += 1
            return
        said = protocol.Event(
            resource=one.record.name,
            what=what,
            observed=observed,
            epoch=one.record.epoch,
            at_ms=int(self._clock() * 1000),
            details=dict(details or {}),
        )
        self._spawn(self._publish(protocol.event(self.name, one.record.manager), messages.encode(said)))

    async def _publish(self, subject: str, data: bytes) -> None:
        with contextlib.suppress(errors.Unavailable):
            await self._bus.publish(subject, data)

    # What it is told

    async def _claimed(self, message: api.Message) -> None:
        """A manager takes over: from now on older ones are refused, and it gets the heartbeats."""
        try:
            claim = messages.decode(message.data, protocol.Claim)
        except errors.MusterError as error:
            events.warning("bad-claim", error=error)
            return
        observed: dict[str, protocol.Observed] = {}
        superseded: dict[str, int] = {}
        stored = []
        for name, epoch in claim.resources.items():
            one = self._host(name)
            try:
                one.check(epoch, claim.manager)
            except errors.StaleEpoch as error:
                superseded[name] = error.current
                continue
            observed[name] = one.seen
            if self._folder is not None:
                stored.append(one)
        for one in stored:
            await self._save(one)
        if message.reply is not None:
            answer = protocol.Claimed(
                observed=observed, superseded=superseded, period_s=self._beat_s, zone=self._zone
            )
            try:
                data = messages.encode(answer, "msgpack")
            except messages.TooLarge:  # the properties come with the first look at each
                slim = {
                    name: msgspec.structs.replace(one, reason="", properties={})
                    for name, one in observed.items()
                }
                data = messages.encode(msgspec.structs.replace(answer, observed=slim), "msgpack")
            await message.respond(data)

    def _asked(self, message: api.Message) -> None:
        self._spawn(self._obey(message))

    async def _obey(self, message: api.Message) -> None:
        try:
            operation = messages.decode(message.data, protocol.Operation)
            if message.subject.rpartition(".")[2] != operation.resource:
                raise errors.InvalidInput("the operation is for another resource than its subject says")
            subjects.token(operation.resource)
        except errors.MusterError as error:
            events.warning("bad-operation", error=error)
            return
        answer = await self.obey(operation)
        if message.reply is not None:
            with contextlib.suppress(errors.Unavailable):
                await message.respond(_encoded(answer))

    async def obey(self, operation: protocol.Operation) -> protocol.Answer:
        """Carry out one operation, once."""
        one = self._host(operation.resource)
        async with one.lock:
            try:
                one.check(operation.epoch, operation.manager)
            except errors.StaleEpoch as error:
                events.warning("refused", resource=operation.resource, epoch=error.epoch, now=error.current)
                return hosting.refusal(operation.id, error, error.current)
            if operation.verb is protocol.Verb.OUTCOME:
                return one.remembered(operation.id) or protocol.Answer(
                    id=operation.id,
                    outcome=messages.Outcome.REFUSED,
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
                await self._save(one)
            answer = await self._try(one, operation)
            if changing:
                one.end(answer)
                await self._save(one)
            return answer

    async def _try(self, one: _Hosted, operation: protocol.Operation) -> protocol.Answer:
        outcome, code, reason, result = messages.Outcome.DONE, "", "", None
        try:
            async with asyncio.timeout(operation.timeout_s):
                result = await self._do(one, operation)
                await self._look(one)
        except TimeoutError:
            outcome, code = messages.Outcome.IN_DOUBT, "in-doubt"
            reason = f"the adapter did not answer in {operation.timeout_s:g} s"
        except errors.MusterError as error:
            refused = hosting.refusal(operation.id, error, one.record.epoch)
            outcome, code, reason = refused.outcome, refused.code, refused.reason
        except Exception as error:  # noqa: BLE001  (an adapter is others' code)
            outcome, code, reason = (
                messages.Outcome.FAILED,
                "adapter-failed",
                f"{type(error).__name__}: {error}",
            )
            events.error(
                "adapter-failed", resource=operation.resource, verb=operation.verb.value, error=error
            )
        return protocol.Answer(
            id=operation.id,
            outcome=outcome,
            result=result,
            code=code,
            reason=reason[:4000],
            observed=one.seen,
            epoch=one.record.epoch,
        )

    async def _do(self, one: _Hosted, operation: protocol.Operation) -> Any:
        record = one.record
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
                record.runtime.clear()
                record.manager = ""  # nobody hears of it any more; its epoch stays
            case protocol.Verb.EXECUTE:
                return await self._require(one).execute(operation.operation, operation.arguments)
            case protocol.Verb.ENUMERATE:
                return {"resources": sorted(self.hosted), "operations": self._require(one).operations()}
            case protocol.Verb.RENAME:
                return await self._rename(one, str(operation.arguments.get("from", "")))
            case protocol.Verb.SUBSCRIBE:
                one.check(operation.epoch, operation.manager)
        return None

    def _require(self, one: _Hosted) -> base.Adapter:
        if one.adapter is None or one.record.config is None:
            raise errors.NotFound(f"{one.record.name} does not exist on {self.name}")
        return one.adapter

    async def _rename(self, one: _Hosted, former: str) -> dict[str, bool]:
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

    async def _look(self, one: _Hosted) -> None:
        if one.adapter is None or one.record.config is None:
            one.seen = protocol.Observed(False)
            return
        one.seen = hosting.bounded(await one.adapter.observe(), one.record.digest)

    # What it keeps

    def _host(self, name: str, record: hosting.Record | None = None) -> _Hosted:
        one = self.hosted.get(name)
        if one is None:
            one = self.hosted[name] = _Hosted(record or hosting.Record(name=name))
            one.place = base.Place(
                name=name,
                folder=self._folder / name if self._folder is not None else None,
                changed=functools.partial(self._changed, one),
                happened=functools.partial(self._happened, one),
                runtime=one.record.runtime,
                neighbour=self._neighbour,
            )
        return one

    def _neighbour(self, name: str) -> base.Adapter | None:
        one = self.hosted.get(name)
        return one.adapter if one is not None and one.record.config is not None else None

    async def _save(self, one: _Hosted) -> None:
        if self._folder is not None:
            async with one.saving:  # one after the other: the last one has the last word
                path = self._folder / f"{one.record.name}.json"
                await asyncio.to_thread(_store, path, one.to_store())


class _Hosted(hosting.Hosted):
    """With its adapter, and what was last seen."""

    place: base.Place

    def __init__(self, record: hosting.Record) -> None:
        super().__init__(record)
        self.adapter: base.Adapter | None = None
        self.seen = protocol.Observed(False)
        self.lock = asyncio.Lock()
        self.saving = asyncio.Lock()
        self._second = 0
        self._told = 0

    def take_over(self, old: _Hosted) -> None:
        """Be what ``old`` was; it is nothing from now on."""
        self.take_record(old)
        self.adapter, old.adapter = old.adapter, None
        self.seen, old.seen = old.seen, protocol.Observed(False)
        assert self.adapter is not None
        self.place.runtime, old.place.runtime = self.record.runtime, old.record.runtime
        self.adapter.place = self.place

    def allowance(self, now: float) -> bool:
        if int(now) != self._second:
            self._second, self._told = int(now), 0
        self._told += 1
        return self._told <= EVENTS_A_SECOND


def facts() -> dict[str, Any]:
    """What an agent observes of its machine: attributes that predicates select on."""
    return {
        "os": platform.system().lower(),
        "kernel": platform.release(),
        "architecture": platform.machine(),
        "python": platform.python_version(),
    }


def _encoded(answer: protocol.Answer) -> bytes:
    try:
        return messages.encode(answer)
    except (errors.LimitExceeded, TypeError, ValueError) as error:
        failed = msgspec.structs.replace(
            answer, result=None, code="bad-result", reason=f"the result cannot be sent: {error}"[:4000]
        )
        return messages.encode(failed)


def _move(old: pathlib.Path, new: pathlib.Path) -> None:
    """An adapter's folder goes with its name; files that are open stay open."""
    if old.exists() and not new.exists():
        old.rename(new)


def _load(folder: pathlib.Path) -> list[hosting.Record]:
    folder.mkdir(parents=True, exist_ok=True)
    found = []
    for path in sorted(folder.glob("*.json")):
        try:
            found.append(msgspec.json.decode(path.read_bytes(), type=hosting.Record))
        except (msgspec.MsgspecError, OSError) as error:
            events.warning("unreadable-record", file=path.name, error=error)
    return found


def _store(path: pathlib.Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".new")
    with beside.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)
