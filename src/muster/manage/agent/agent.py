"""The agent: the process on a machine that hosts the adapters of its resources.

It accepts managers by their epochs, sends heartbeats to the manager of each resource, records operations, and
stores this state on disk (`resource_host`). A resource without a manager continues to run. Events of each
adapter are rate-limited.

It announces itself to the registry with an inventory of what it hosts. The registry names those resources
that do not belong there, because they were deleted or moved while the agent was cut off; the agent deletes
them.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import os
import pathlib
import platform
import random
import time
import zlib
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any

import msgspec

from muster.bus import api
from muster.bus.direct import frames
from muster.bus.rpc import client
from muster.core import errors, health, lifecycle, messages, subjects
from muster.core.telemetry import log, metrics
from muster.manage import protocol, secrets
from muster.manage.adapters import base, plugins
from muster.manage.agent import deadlines, resource_host, resource_metrics, watchdog
from muster.supervision import tasks
from muster.trust import sealed_box

events = log.EventLog("manage")

BEAT_S = 5.0
HELLO_TIMEOUT_S = 3.0
# A change is repeated: its event is lost if the broker of this agent or of the manager fails.
REPEAT_S, REPEATED_FOR_S = 1.0, 15.0
BEATS_MAX = 1_000  # in one message, with shortened reasons
REASON_MAX = 200
SECRET_TIMEOUT_S = 10.0


class Agent(resource_host.ResourceHost, lifecycle.ServiceContext):
    """``async with Agent(bus, folder) as agent: …``"""

    def __init__(
        self,
        bus: api.Bus,
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
        keep_peer: Callable[[frames.PeerAddress], None] | None = None,
        measure: metrics.Metrics | None = None,
        guard: deadlines.ResourceWatchdog | None = None,
        sensor: str = "",
        elapsed_s: Callable[[], float] = watchdog.elapsed_s,
        sample: Callable[[], Mapping[str, float]] | None = None,
        on_join: Callable[[], None] = lambda: None,
    ) -> None:
        """``keep_peer`` is called with the address of a manager that accepts direct connections. Without a
        ``guard``, none of its resources may move. ``sensor``: the identity of the sensor of its machine.
        ``sample``: measures the machine, and may block. ``on_join`` is called once, when a registry has
        accepted what this agent is and hosts."""
        super().__init__(name or bus.identity, folder, adapters)
        self.broker_access = broker_access
        self._bus = bus
        self._zone = zone
        self._labels = dict(labels or {})
        self._beat_s = beat_s
        self._machine = machine
        self._sample = sample
        self._measured: dict[str, float] = {}  # at the last announcement: a renewal does not wait for it
        self._on_join = on_join
        self._has_joined = False
        self._sensor = sensor
        self._keep_peer = keep_peer
        self._clock = clock
        self._boot = int(clock() * 1000)
        self._types = tuple(types if types is not None else plugins.names())
        self._sequence = 0
        self._tasks = tasks.TaskSupervisor(f"agent {self.name}")
        self._subscriptions: list[api.Subscription] = []
        self._changed: dict[str, float] = {}  # resources whose state is repeated, until when
        self._has_changed = asyncio.Event()
        self._announce_now = asyncio.Event()
        self._was_cut_off = False
        self._orphans: set[str] = set()  # that are being deleted
        self.dropped_events = 0
        self.deadlines = deadlines.StopDeadlines(self._stop_times, guard, elapsed_s)
        self._metrics = (
            resource_metrics.ResourceMetrics(measure, self.hosted) if measure is not None else None
        )

    # Lifecycle

    async def start(self) -> None:
        await self.deadlines.load()
        await self._resume()
        handlers: dict[str, api.Handler] = {
            protocol.claim(self.name): self._on_claim,
            protocol.operations_of(self.name): self._on_operation,
        }
        for subject, handler in handlers.items():
            self._subscriptions.append(await self._bus.subscribe(subject, handler=handler))
        for resource in self.hosted.values():
            if not resource.observed.exists or resource.observed.state is not health.HealthState.UP:
                self._publish_change(resource)  # it may have ended while no agent ran
        self._tasks.loop("announcement", self._announce_forever)
        self._tasks.loop("heartbeat", self._heartbeat_forever)
        if self.deadlines.has_watchdog:
            self._tasks.loop("renewal", self._renew_forever)
            self._tasks.loop("stop deadlines", self._stop_overdue_forever)
        self._tasks.loop("repetition", self._repeat_forever)
        self._tasks.loop("resumption", self._resume_forever)
        if self._metrics is not None:
            self._tasks.loop("metrics", self._metrics.sample_forever)

    async def stop(self) -> None:
        """Stop the agent. Its resources continue to run."""
        for subscription in self._subscriptions:
            await subscription.close()
        await self._tasks.close()
        await self.shells.close()
        for resource in self.hosted.values():
            if resource.adapter is not None:
                await resource.adapter.close()
        self._release()

    # Outgoing messages

    async def _announce_forever(self) -> None:
        while True:
            self._announce_now.clear()
            wait_s = protocol.HELLO_S
            try:
                await self._announce()
            except errors.MusterError:
                wait_s = min(1.0, self._beat_s)  # no registry is active, or it is overloaded: repeat soon
            # Not all agents of a fleet at the same time, even if they started or reconnected together.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s * (0.75 + random.random() / 2)):
                    await self._announce_now.wait()

    async def _announce(self) -> None:
        """Report what this agent is and hosts, in pages; delete what the registry does not expect here."""
        self._measured = await self._measure()
        after, is_last, sent_at = "", False, self.deadlines.now()
        while not is_last:  # each page anew: resources may have been deleted since the last one
            names = sorted(name for name in self._existing() if name > after)
            is_last = len(names) <= protocol.INVENTORY_PAGE
            del names[protocol.INVENTORY_PAGE :]
            until = "" if is_last else names[-1]
            page = tuple(map(_reported, map(self.hosted.__getitem__, names)))
            result = await self._send_hello(page, after, until)
            self._raise_floor(result.floor)
            for name in result.orphans.keys() & set(names) - self._orphans:
                with contextlib.suppress(errors.StaleEpoch):  # before anything is renewed
                    self.hosted[name].check(result.orphans[name], "")
                self._orphans.add(name)
                self._tasks.spawn("orphan", self._delete_orphan(name, result.orphans[name]))
            await self._adopt_stop_times(result.stop_after_s, names)
            after = until
        await self._renewed(sent_at)
        if not self._has_joined:
            self._has_joined = True
            self._on_join()

    async def _send_hello(
        self, hosted: tuple[protocol.ReportedResource, ...] | None = None, after: str = "", until: str = ""
    ) -> protocol.HelloResult:
        hello = protocol.AgentHello(
            boot=self._boot,
            machine=self._machine,
            zone=self._zone,
            labels=self._labels,
            facts=collect_facts() | ({protocol.SENSOR: self._sensor} if self._sensor else {}),
            types=self._types,
            hosted=hosted,
            after=after,
            until=until,
            has_deadlines=self.deadlines.is_enforced,
            metrics=self._measured,
        )
        answer = await client.exchange_once(
            self._bus, protocol.hello(self.name), messages.encode(hello), timeout_s=HELLO_TIMEOUT_S
        )
        return msgspec.convert(client.result_of(answer.data), protocol.HelloResult)

    async def _measure(self) -> dict[str, float]:
        if self._sample is None:
            return {}
        try:
            measured = await asyncio.to_thread(self._sample)
        except OSError as error:
            events.warning("not-measured", error=error)
            return {}
        return dict(itertools.islice(measured.items(), protocol.METRICS_MAX))

    # Stop deadlines

    def _stop_times(self) -> dict[str, float]:
        records = (hosted.record for hosted in self.hosted.values())
        return {
            each.name: each.stop_after_s for each in records if each.stop_after_s and each.config is not None
        }

    async def _renew_forever(self) -> None:
        while True:
            await asyncio.sleep(deadlines.RENEW_S_MIN)
            if self.deadlines.is_renewal_due():
                with contextlib.suppress(errors.MusterError):
                    await self._renew()

    async def _renew(self) -> None:
        sent_at = self.deadlines.now()
        if (await self._send_hello()).is_renewed:
            await self._renewed(sent_at)
        else:
            self._announce_now.set()

    async def _renewed(self, sent_at: float) -> None:
        was_enforced = self.deadlines.is_enforced
        try:
            await self.deadlines.renewed(sent_at)
        except OSError as error:
            events.error("deadlines-not-stored", error=error)
        if was_enforced != self.deadlines.is_enforced:  # nothing may move while nothing would stop it
            self._announce_now.set()

    async def _adopt_stop_times(self, times: Mapping[str, float], names: Collection[str]) -> None:
        """Enforce what the registry says of these resources, and report it."""
        for name in times.keys() & set(names):
            hosted = self.hosted[name]
            adapter = hosted.adapter
            can_move = adapter is not None and adapter.can_move and adapter.can_be_ended
            is_adopted = bool((hosted.record.config or {}).get("pid_file"))
            after_s = times[name] if self.deadlines.is_enforced and can_move and not is_adopted else 0.0
            if hosted.record.config is None or hosted.record.stop_after_s == after_s:
                continue
            hosted.record.stop_after_s = after_s
            try:
                await self._save(hosted)
            except OSError as error:
                hosted.record.stop_after_s = 0.0  # it reports that it does not enforce it
                events.error("deadline-not-stored", resource=name, error=error)
            self._announce_now.set()

    async def _require_may_run(self, hosted: resource_host.HostedResource, stop_after_s: float) -> bool:
        if not self.deadlines.has_watchdog:
            return False
        if not self.deadlines.may_run(stop_after_s):
            with contextlib.suppress(errors.MusterError):
                await self._renew()
        if hosted.record.name in self._orphans or not self.deadlines.may_run(stop_after_s):
            raise errors.Unavailable(
                f"{self.name} could not renew: {hosted.record.name} may run elsewhere by now"
            )
        try:
            await self.deadlines.keep()
        except OSError as error:
            raise errors.Unavailable(f"{self.name} cannot store its stop deadlines: {error}") from error
        return True

    async def _stop_overdue_forever(self) -> None:
        being_stopped: set[str] = set()
        while True:
            await asyncio.sleep(watchdog.TICK_S)
            for name in set(self.deadlines.overdue()) - being_stopped:
                hosted = self.hosted[name]
                if hosted.adapter is not None and hosted.observed.state in resource_host.RUNNING:
                    being_stopped.add(name)
                    stop = self._tasks.spawn("stop", self._stop_overdue(hosted))
                    stop.add_done_callback(functools.partial(_discard, being_stopped, name))

    async def _stop_overdue(self, hosted: resource_host.HostedResource) -> None:
        """It may be started elsewhere soon. If this takes too long, the watchdog kills it."""
        async with hosted.lock:
            record = hosted.record
            is_overdue = record.stop_after_s and not self.deadlines.may_run(record.stop_after_s)
            if not is_overdue or hosted.adapter is None:
                return
            events.warning("stop-overdue", resource=record.name, after_s=record.stop_after_s)
            record.runtime.pop("ran", None)  # the run has not ended by itself: it counts as none
            try:
                async with asyncio.timeout(record.stop_after_s):
                    await hosted.adapter.execute("stop", {})
                    await self._observe(hosted)
            except Exception as error:  # noqa: BLE001  (adapters are third-party code)
                events.error("not-stopped", resource=record.name, error=error)
                await asyncio.sleep(watchdog.TICK_S)

    def _existing(self) -> list[str]:
        return [name for name, hosted in self.hosted.items() if hosted.record.config is not None]

    async def _delete_orphan(self, name: str, epoch: int) -> None:
        """Delete a resource that belongs elsewhere, or nowhere, unless it was assigned again meanwhile."""
        try:
            self._sequence += 1
            operation = protocol.Operation(
                id=f"orphan-{self._boot:x}-{self._sequence}",
                verb=protocol.Verb.DELETE,
                resource=name,
                epoch=epoch,
            )
            answer = await self.execute(operation)
            events.warning("orphan", resource=name, outcome=answer.outcome.value, reason=answer.reason)
            if answer.outcome is messages.DecisionOutcome.DONE:
                self._announce_now.set()
        finally:
            self._orphans.discard(name)

    async def _heartbeat_forever(self) -> None:
        # Spread the heartbeats of agents that started together over the period.
        await asyncio.sleep(self._beat_s * (zlib.crc32(self.name.encode()) % 1000) / 1000)
        while True:
            try:
                await self.send_heartbeats()
            except Exception as error:  # noqa: BLE001  (one resource must not stop the heartbeats of the others)
                self._tasks.record_failure("heartbeat", error)
            await asyncio.sleep(self._beat_s)

    async def _repeat_forever(self) -> None:
        """Send heartbeats of resources that have changed, sooner than those of all."""
        while True:
            await self._has_changed.wait()
            await asyncio.sleep(min(REPEAT_S, self._beat_s))
            now = asyncio.get_running_loop().time()
            self._changed = {name: until for name, until in self._changed.items() if until > now}
            if not self._changed:
                self._has_changed.clear()
            await self.send_heartbeats(self._changed)

    async def _resume_forever(self) -> None:
        """Not together with the heartbeats: an adapter that hangs must not delay those of other resources."""
        while True:
            await asyncio.sleep(self._beat_s)
            await self._resume_missing()

    async def send_heartbeats(self, only: Collection[str] | None = None) -> None:
        if self._bus.state is not api.ConnectionState.CONNECTED:
            self._was_cut_off = True
            return  # it would be sent after a reconnection, with all the others that were late
        if self._was_cut_off:  # what it hosts may belong elsewhere now
            self._was_cut_off = False
            self._announce_now.set()
        by_manager: dict[str, list[protocol.ResourceHeartbeat]] = {}
        for name in self.hosted if only is None else self.hosted.keys() & set(only):
            record, seen = self.hosted[name].record, self.hosted[name].observed
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
                batch = protocol.HeartbeatBatch(
                    sequence=self._sequence,
                    at_ms=int(self._clock() * 1000),
                    period_s=self._beat_s,
                    zone=self._zone,
                    beats=tuple(beats[first : first + BEATS_MAX]),
                )
                with contextlib.suppress(errors.Unavailable):  # no direct connection to this manager
                    await self._bus.publish(
                        protocol.heartbeat(self.name, manager), messages.encode(batch, "msgpack")
                    )

    def _on_state(self, hosted: resource_host.HostedResource, observed: protocol.ObservedState) -> None:
        before = hosted.observed
        hosted.record_observation(observed)
        now = hosted.observed
        if (before.exists, before.state, before.reason) == (now.exists, now.state, now.reason):
            return
        self._publish_change(hosted)

    def _publish_change(self, hosted: resource_host.HostedResource) -> None:
        """Send the state to the manager now, and for a while more often than with the heartbeats."""
        self._repeat_state(hosted.record.name)
        self.publish_event(hosted, protocol.CHANGED, hosted.observed)

    def _repeat_state(self, name: str) -> None:
        self._changed[name] = asyncio.get_running_loop().time() + REPEATED_FOR_S
        self._has_changed.set()

    def _on_event(self, hosted: resource_host.HostedResource, what: str, **details: str) -> None:
        kept = {name[:256]: str(value)[:4096] for name, value in list(details.items())[:64]}
        self.publish_event(hosted, what, details=kept)

    def publish_event(
        self,
        hosted: resource_host.HostedResource,
        what: str,
        observed: protocol.ObservedState | None = None,
        details: Mapping[str, str] | None = None,
    ) -> None:
        """Send an event to the manager of the resource."""
        now = asyncio.get_running_loop().time()
        if not hosted.record.manager or not hosted.may_publish_event(now):
            self.dropped_events += 1
            return
        event = protocol.ResourceEvent(
            resource=hosted.record.name,
            what=what,
            observed=observed,
            epoch=hosted.record.epoch,
            at_ms=int(self._clock() * 1000),
            details=dict(details or {}),
        )
        self._tasks.spawn(
            "event",
            self._publish(protocol.event(self.name, hosted.record.manager), messages.encode(event)),
        )

    async def _publish(self, subject: str, data: bytes) -> None:
        with contextlib.suppress(errors.Unavailable):
            await self._bus.publish(subject, data)

    # Requests from managers

    async def _on_claim(self, message: api.Message) -> None:
        """A manager takes over: older managers are rejected from now on, and it receives the heartbeats."""
        try:
            claim = messages.decode(message.data, protocol.ClaimRequest)
        except errors.MusterError as error:
            events.warning("bad-claim", error=error)
            return
        if not claim.resources:
            self._announce_now.set()
        if (
            claim.direct is not None
            and self._keep_peer is not None
            and claim.direct.identity == claim.manager
        ):
            self._keep_peer(claim.direct)
        superseded: dict[str, int] = {}
        claimed = []
        for name, epoch in claim.resources.items():
            resource = self._get_or_create(name)
            try:
                resource.check(epoch, claim.manager)
            except errors.StaleEpoch as error:
                superseded[name] = error.current
                continue
            claimed.append(resource)
        await self._save_claims(claimed)
        observed = {hosted.record.name: hosted.observed for hosted in claimed}
        if message.reply is not None:
            answer = protocol.ClaimResult(
                observed=observed, superseded=superseded, period_s=self._beat_s, zone=self._zone
            )
            try:
                data = messages.encode(answer, "msgpack")
            except messages.MessageTooLarge:  # the other properties follow with the first observation of each
                slim = {
                    name: msgspec.structs.replace(state, reason="", properties=_exit_code(state))
                    for name, state in observed.items()
                }
                data = messages.encode(msgspec.structs.replace(answer, observed=slim), "msgpack")
            await message.respond(data)

    def _on_operation(self, message: api.Message) -> None:
        self._tasks.spawn("operation", self._execute_message(message))

    async def _execute_message(self, message: api.Message) -> None:
        try:
            operation = messages.decode(message.data, protocol.Operation)
            if message.subject.rpartition(".")[2] != operation.resource:
                raise errors.InvalidInput("the resource of the operation does not match its subject")
            subjects.token(operation.resource)
        except errors.MusterError as error:
            events.warning("bad-operation", error=error)
            return
        answer = await self.execute(operation)
        if operation.verb in resource_host.CHANGING:  # its manager waits for it to stay up
            self._repeat_state(operation.resource)
        if operation.verb is protocol.Verb.DELETE and not self._existing():
            self._announce_now.set()  # it may have been forgotten
        if message.reply is not None:
            with contextlib.suppress(errors.Unavailable):
                await message.respond(messages.encode(answer))

    # Secrets

    async def _stored_secret(self, hosted: resource_host.HostedResource, name: str) -> str:
        """Request a secret, sealed for a one-time key. The registry checks that this agent may have it."""
        resource, key = hosted.record.name, sealed_box.SealedBoxKey.create()
        arguments = {"resource": resource, "name": name, "key": key.public}
        subject = protocol.request(self.name, protocol.SECRET)
        answer = await client.exchange_once(
            self._bus, subject, msgspec.json.encode(arguments), timeout_s=SECRET_TIMEOUT_S
        )
        box = client.result_of(answer.data)["box"]
        return key.open(box, secrets.delivery_context(self.name, resource, name)).decode()


def collect_facts() -> dict[str, Any]:
    """Facts that the agent observes about its machine: attributes for predicates."""
    return {
        "os": platform.system().lower(),
        "kernel": platform.release(),
        "architecture": platform.machine(),
        "python": platform.python_version(),
        "cpus": os.cpu_count() or 1,
        "memory_mb": (os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")) >> 20,
    }


def _discard(names: set[str], name: str, _: object) -> None:
    names.discard(name)


def _reported(hosted: resource_host.HostedResource) -> protocol.ReportedResource:
    pid = hosted.observed.properties.get("pid")
    return protocol.ReportedResource(
        hosted.record.name,
        hosted.record.epoch,
        hosted.observed.state,
        hosted.observed.ran or 0,
        pid if isinstance(pid, int) else 0,
        hosted.record.stop_after_s,
    )


def _exit_code(observed: protocol.ObservedState) -> dict[str, Any]:
    """The only property that managers use for decisions."""
    properties = observed.properties
    return {"exit_code": properties["exit_code"]} if "exit_code" in properties else {}
