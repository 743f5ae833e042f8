"""The agent: one process on a machine, which hosts the adapters of its resources.

It obeys managers by their epochs, heartbeats to the manager of each resource, remembers what it was told to
do, and keeps all that on disk (`household`).  When nobody manages a resource, the resource goes on as it is.
An adapter that floods is heard some times a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import pathlib
import platform
import time
import zlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol, Self

import msgspec

from muster.bus import api
from muster.bus.rpc import client
from muster.core import errors, health, messages, subjects
from muster.core.telemetry import log
from muster.manage import protocol, secrets
from muster.manage.adapters import base, plugins
from muster.manage.agent import resource_host
from muster.trust import sealed_box

events = log.EventLog("manage")

BEAT_S = 5.0
HELLO_S = 30.0
HELLO_TIMEOUT_S = 3.0
BEATS_MAX = 1_000  # in one message, with reasons cut short
REASON_MAX = 200
SECRET_TIMEOUT_S = 10.0


class AgentTransport(Protocol):
    """What an agent needs of the bus; lines to managers offer it too (`muster.manage.direct.links`)."""

    @property
    def identity(self) -> str: ...
    async def publish(self, subject: str, data: bytes) -> None: ...
    async def request(self, subject: str, data: bytes, *, timeout_s: float) -> api.Message: ...
    async def subscribe(self, subject: str, *, handler: api.Handler) -> Closable: ...


class Closable(Protocol):
    async def close(self) -> None: ...


class Agent(resource_host.ResourceHost):
    """``async with Agent(bus, folder) as agent: …``"""

    def __init__(
        self,
        bus: AgentTransport,
        folder: pathlib.Path | None = None,
        *,
        name: str | None = None,
        zone: str = "default",
        labels: Mapping[str, str] | None = None,
        beat_s: float = BEAT_S,
        machine: str = "",
        adapters: Callable[[str], type[base.Adapter]] = plugins.load_adapter,
        types: Sequence[str] | None = None,
        clock: Callable[[], float] = time.time,
        broker_access: Callable[[], Awaitable[base.BrokerAccess]] | None = None,
    ) -> None:
        super().__init__(name or bus.identity, folder, adapters)
        self.broker_access = broker_access
        self._bus = bus
        self._zone = zone
        self._labels = dict(labels or {})
        self._beat_s = beat_s
        self._machine = machine
        self._clock = clock
        self._boot = int(clock() * 1000)
        self._types = tuple(types if types is not None else plugins.names())
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

    # What it says

    async def _say_hello(self) -> None:
        while True:
            said = protocol.AgentHello(
                boot=self._boot,
                machine=self._machine,
                zone=self._zone,
                labels=self._labels,
                facts=collect_facts(),
                types=self._types,
                resources=tuple(self.hosted)[:2_000],
            )
            wait_s = HELLO_S
            try:
                answer = await self._bus.request(
                    protocol.hello(self.name), messages.encode(said), timeout_s=HELLO_TIMEOUT_S
                )
                client.result_of(answer.data)
            except errors.MusterError:
                wait_s = min(
                    1.0, self._beat_s
                )  # no registry acts, or it takes nothing now: say it again soon
            await asyncio.sleep(wait_s)

    async def _beat_always(self) -> None:
        # Agents that were started together beat apart from each other: each has its place within a period.
        await asyncio.sleep(self._beat_s * (zlib.crc32(self.name.encode()) % 1000) / 1000)
        while True:
            try:
                await self.beat()
                await self._resume_again()
            except errors.Unavailable:
                pass
            except Exception as error:  # noqa: BLE001  (whatever one resource is: the others need heartbeats)
                events.error("beat-failed", agent=self.name, error=error)
            await asyncio.sleep(self._beat_s)

    async def beat(self) -> None:
        by_manager: dict[str, list[protocol.ResourceHeartbeat]] = {}
        for name, one in self.hosted.items():
            record, seen = one.record, one.seen
            if record.manager:
                by_manager.setdefault(record.manager, []).append(
                    protocol.ResourceHeartbeat(
                        name,
                        seen.state if seen.exists else health.HealthState.DOWN,
                        record.epoch,
                        seen.digest if seen.exists else "",
                        seen.reason[:REASON_MAX],
                    )
                )
        for manager, beats in by_manager.items():
            for first in range(0, len(beats), BEATS_MAX):
                self._sequence += 1
                said = protocol.HeartbeatBatch(
                    sequence=self._sequence,
                    at_ms=int(self._clock() * 1000),
                    period_s=self._beat_s,
                    zone=self._zone,
                    beats=tuple(beats[first : first + BEATS_MAX]),
                )
                await self._bus.publish(protocol.beat(self.name, manager), messages.encode(said, "msgpack"))

    def _changed(self, one: resource_host.HostedResource, observed: protocol.ObservedState) -> None:
        before = one.seen
        one.see(observed)
        now = one.seen
        if (before.exists, before.state, before.reason) == (now.exists, now.state, now.reason):
            return
        self.tell(one, protocol.CHANGED, one.seen)

    def _happened(self, one: resource_host.HostedResource, what: str, **details: str) -> None:
        kept = {name[:256]: str(value)[:4096] for name, value in list(details.items())[:64]}
        self.tell(one, what, details=kept)

    def tell(
        self,
        one: resource_host.HostedResource,
        what: str,
        observed: protocol.ObservedState | None = None,
        details: Mapping[str, str] | None = None,
    ) -> None:
        """An event, to the resource's manager."""
        now = asyncio.get_running_loop().time()
        if not one.record.manager or not one.allowance(now):
            self.dropped_events += 1
            return
        said = protocol.ResourceEvent(
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
            claim = messages.decode(message.data, protocol.ClaimRequest)
        except errors.MusterError as error:
            events.warning("bad-claim", error=error)
            return
        superseded: dict[str, int] = {}
        claimed = []
        for name, epoch in claim.resources.items():
            one = self._host(name)
            try:
                one.check(epoch, claim.manager)
            except errors.StaleEpoch as error:
                superseded[name] = error.current
                continue
            claimed.append(one)
        await self._save_claims(claimed)
        observed = {one.record.name: one.seen for one in claimed}
        if message.reply is not None:
            answer = protocol.ClaimResult(
                observed=observed, superseded=superseded, period_s=self._beat_s, zone=self._zone
            )
            try:
                data = messages.encode(answer, "msgpack")
            except messages.MessageTooLarge:  # the other properties come with the first look at each
                slim = {
                    name: msgspec.structs.replace(one, reason="", properties=_exit_code(one))
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
                await message.respond(messages.encode(answer))

    # What it asks

    async def _stored_secret(self, one: resource_host.HostedResource, name: str) -> str:
        """Sealed for a key of this one question; the registry looks whether it is ours to know."""
        resource, key = one.record.name, sealed_box.SealedBoxKey.create()
        asked = {"resource": resource, "name": name, "key": key.public}
        subject = protocol.request(self.name, protocol.SECRET)
        answer = await self._bus.request(subject, msgspec.json.encode(asked), timeout_s=SECRET_TIMEOUT_S)
        box = client.result_of(answer.data)["box"]
        return key.open(box, secrets.delivery_context(self.name, resource, name)).decode()


def collect_facts() -> dict[str, Any]:
    """What an agent observes of its machine: attributes that predicates select on."""
    return {
        "os": platform.system().lower(),
        "kernel": platform.release(),
        "architecture": platform.machine(),
        "python": platform.python_version(),
    }


def _exit_code(observed: protocol.ObservedState) -> dict[str, Any]:
    """The one property that managers decide by."""
    properties = observed.properties
    return {"exit_code": properties["exit_code"]} if "exit_code" in properties else {}
