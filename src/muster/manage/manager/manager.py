"""The manager: one process that keeps many thousands of resources as they should be.

It renews itself with the acting registry and learns what is assigned to it (`renewing`); claims that from the
agents; hears heartbeats and events; lets `reconcile` decide, one step at a time for each resource, some
hundred at once; and checkpoints each resource's runtime state, many in a message.

It acts only while its renewal holds; adapters refuse it by its epochs when it has been superseded without
noticing.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Any, Self

from muster.bus import api
from muster.core import errors, health, messages, subjects
from muster.core.telemetry import log
from muster.manage import protocol
from muster.manage.manager import agent_calls, checkpoints, orders, reconciler, renewal, zones

events = log.EventLog("manage")

TICK_S = 0.5
CLAIMS_MAX = 250  # in one message: agents on slow disks store each before they answer
CLAIMS_AT_ONCE = 16  # messages; they do not wait behind operations, which may be many thousands
CLAIM_TIMEOUT_S = 3.0
OUTRANKED_S = 2.0  # between two reports of epochs that agents obey above ours: an agent may make them up

_ACTS = {
    reconciler.ReconcileAction.CREATE: protocol.Verb.CREATE,
    reconciler.ReconcileAction.PUT: protocol.Verb.PUT,
    reconciler.ReconcileAction.DELETE: protocol.Verb.DELETE,
    reconciler.ReconcileAction.DELETE_FORMER: protocol.Verb.DELETE,
    reconciler.ReconcileAction.RENAME: protocol.Verb.RENAME,
}


class ManagedResource:
    """One resource in this manager's hands."""

    __slots__ = ("assignment", "outranked_by", "runtime", "superseded", "told")

    def __init__(self, assignment: protocol.Assignment, runtime: reconciler.ResourceRuntime) -> None:
        self.assignment = assignment
        self.runtime = runtime
        self.superseded = False
        self.outranked_by = 0  # the agent obeys this higher epoch
        self.told = runtime.health.state  # the state that all have been told of

    @property
    def name(self) -> str:
        return self.assignment.spec.name


class Manager:
    def __init__(
        self,
        bus: api.Bus,
        *,
        name: str | None = None,
        tick_s: float = TICK_S,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.name = name or bus.identity
        self.managed: dict[str, ManagedResource] = {}
        self.renewal = renewal.ManagerRenewal(bus, self.name, self._take)
        self._bus = bus
        self._tick_s = tick_s
        self._clock = clock
        self._sifting: set[str] | None = None  # while pages of a new beginning arrive: what they named
        self._zones = zones.ZoneReachability(0.0)
        self._work: set[str] = set()
        self._outranked: set[str] = set()
        self._report_outranked_at = 0.0
        self._claiming = asyncio.Semaphore(CLAIMS_AT_ONCE)
        self._operator = agent_calls.AgentCaller(bus, lambda: self.acts)
        self._orders = orders.OrderRunner(self.name, self._operator, self._find, self._seen)
        self._checkpoints = checkpoints.CheckpointWriter(
            bus,
            self.name,
            may_act=lambda: self.acts,
            state_of=self._state_of,
            superseded=self._superseded,
        )
        self._tasks: set[asyncio.Task[None]] = set()
        self._subscriptions: list[api.Subscription] = []
        self._operations = 0
        self.failed_ticks = 0
        self._listening: Callable[[], None] | None = None

    # Life

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    @property
    def acts(self) -> bool:
        """Whether it may do anything now."""
        return self.renewal.holds

    async def start(self) -> None:
        bus, me = self._bus, self.name
        self._zones.heard_since = asyncio.get_running_loop().time()
        self._subscriptions = [
            await bus.subscribe(protocol.beats_to(me), handler=self._beaten),
            await bus.subscribe(protocol.events_to(me), handler=self._told),
            await bus.subscribe(protocol.to_manager(me, "poke"), handler=lambda _: self.renewal.soon()),
            await bus.subscribe(protocol.to_manager(me, "execute"), handler=self._ordered),
        ]
        self._listening = bus.on_state(self._connection_changed)
        self._spawn(self.renewal.run())
        self._spawn(self._tick_always())
        self._spawn(self._checkpoints.run())

    async def stop(self) -> None:
        """Hand everything back, so that others need not wait for it to expire."""
        self.renewal.leaving = True
        with contextlib.suppress(errors.MusterError):
            await self._checkpoints.flush()
            await self.renewal.ask(timeout_s=1.0)
        await self.abandon()

    async def abandon(self) -> None:
        """End at once, as a crash would."""
        self.renewal.held_until = 0.0
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for subscription in self._subscriptions:
            with contextlib.suppress(errors.Unavailable):
                await subscription.close()
        if self._listening is not None:
            self._listening()

    def _spawn(self, work: Any) -> None:
        task = asyncio.create_task(work, name=f"manager {self.name}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _connection_changed(self, state: api.ConnectionState) -> None:
        if state is api.ConnectionState.CONNECTED:
            self._zones.heard_since = asyncio.get_running_loop().time()
            self.renewal.soon()

    def _now_ms(self) -> int:
        return int(self._clock() * 1000)

    # What is assigned to it

    def _take(self, granted: protocol.RenewResult) -> None:
        now, now_ms = asyncio.get_running_loop().time(), self._now_ms()
        if granted.anew:
            self._sifting = set()
        for name in granted.released:
            self.managed.pop(name, None)
        for assignment in granted.assigned:
            name = assignment.spec.name
            if self._sifting is not None:
                self._sifting.add(name)
            known = self.managed.get(name)
            if known is None or known.assignment.epoch != assignment.epoch:
                self.managed[name] = ManagedResource(
                    assignment, reconciler.ResourceRuntime.begin(assignment, now, now_ms)
                )
            else:
                reconciler.changed(known.assignment, assignment, known.runtime)
                known.assignment = assignment
            self._work.add(name)
        if not granted.more and self._sifting is not None:
            for name in set(self.managed) - self._sifting:
                del self.managed[name]
            self._sifting = None
        self._claim_soon()

    # Claims

    def _claim_soon(self) -> None:
        """Tell the agents of what is new here: one message for many resources."""
        by_agent: dict[str, dict[str, int]] = {}
        for name in self._work:
            one = self.managed.get(name)
            if one is None or one.runtime.busy:
                continue
            if one.runtime.observed is None or one.runtime.look:
                one.runtime.busy = True
                by_agent.setdefault(one.assignment.spec.agent, {})[name] = one.assignment.epoch
        for agent, wanted in by_agent.items():
            names = list(wanted)
            for first in range(0, len(names), CLAIMS_MAX):
                page = {name: wanted[name] for name in names[first : first + CLAIMS_MAX]}
                self._spawn(self._claim(agent, page))
        self._go_on()

    async def _claim(self, agent: str, wanted: dict[str, int]) -> None:
        said = protocol.ClaimRequest(manager=self.name, resources=wanted)
        answer: protocol.ClaimResult | None = None
        try:
            async with self._claiming:
                if self.acts:
                    message = await self._bus.request(
                        protocol.claim(agent), messages.encode(said), timeout_s=CLAIM_TIMEOUT_S
                    )
                    answer = messages.decode(message.data, protocol.ClaimResult)
        except errors.MusterError as error:
            events.info("not-claimed", agent=agent, resources=len(wanted), error=error)
        now, now_ms = asyncio.get_running_loop().time(), self._now_ms()
        if answer is not None:
            self._zones.hear(answer.zone, answer.period_s, now)
        for name, epoch in wanted.items():
            one = self.managed.get(name)
            if one is None or one.assignment.epoch != epoch:
                continue
            self._note(one, reconciler.release(one.assignment, one.runtime, now, now_ms))
            if answer is None:
                one.runtime.retry_at = now + reconciler.RETRY_S
                if one.runtime.health.state is health.HealthState.STARTING:
                    self._note(
                        one,
                        reconciler.apply_health_event(
                            one.runtime, health.HealthEvent.START, f"{agent} does not answer", now_ms
                        ),
                    )
            elif name in answer.superseded:
                self._outrank(one, answer.superseded[name])
            elif name in answer.observed:
                one.runtime.period_s, one.runtime.zone = answer.period_s, answer.zone
                one.runtime.look = False
                observed = answer.observed[name]
                self._note(
                    one, reconciler.observe(one.assignment, one.runtime, observed, now, now_ms, asked=True)
                )
            self._work.add(name)
        self._go_on()

    # What it hears

    def _beaten(self, message: api.Message) -> None:
        try:
            said = messages.decode(message.data, protocol.HeartbeatBatch)
        except errors.MusterError as error:
            events.warning("bad-heartbeat", error=error)
            return
        now, now_ms = asyncio.get_running_loop().time(), self._now_ms()
        agent = subjects.sender_of(message.subject)
        self._zones.hear(said.zone, said.period_s, now)
        differs = False
        for beat in said.beats:
            one = self.managed.get(beat.name)
            if one is None or one.assignment.spec.agent != agent:
                continue
            runtime = one.runtime
            if beat.epoch != one.assignment.epoch:
                if beat.epoch > one.assignment.epoch:
                    self._outrank(one, beat.epoch)
                continue
            runtime.period_s, runtime.zone = said.period_s, said.zone
            seen = runtime.observed
            if (
                seen is not None
                and beat.state is health.HealthState.UP
                and seen.state is health.HealthState.UP
                and runtime.health.state is health.HealthState.UP
                and seen.digest == beat.digest
            ):
                runtime.heard_at = now  # the usual beat: nothing new
                continue
            runtime.heard_at = now
            if runtime.busy:
                continue
            if seen is not None and (beat.state, beat.digest) == (seen.state, seen.digest):
                self._observed(one, seen, now, now_ms)
            else:
                # A heartbeat is too short to tell how it ended, and may have been overtaken: ask.
                runtime.look = differs = True
                self._work.add(beat.name)
        if differs:
            self._claim_soon()
        else:
            self._go_on()

    def _told(self, message: api.Message) -> None:
        try:
            said = messages.decode(message.data, protocol.ResourceEvent)
        except errors.MusterError as error:
            events.warning("bad-event", error=error)
            return
        one = self.managed.get(said.resource)
        agent = subjects.sender_of(message.subject)
        if one is None or one.assignment.spec.agent != agent or said.epoch != one.assignment.epoch:
            return
        if said.observed is not None:
            self._observed(one, said.observed, asyncio.get_running_loop().time(), self._now_ms())
            self._go_on()
        if said.what != protocol.CHANGED:  # of the resource's own: those who subscribed want it
            self._spawn(self._publish(protocol.resource_event_subject(said.resource), message.data))
        if subjects.may_reply(message.subject, message.reply) and not message.respond_now(b"{}"):
            self._spawn(_respond(message, b"{}"))

    def _ordered(self, message: api.Message) -> None:
        self._spawn(self._orders.obey(message))

    def _find(self, name: str) -> protocol.Assignment | None:
        one = self.managed.get(name)
        return None if one is None or one.superseded else one.assignment

    def _seen(self, name: str, observed: protocol.ObservedState) -> None:
        one = self.managed.get(name)
        if one is not None:
            self._observed(one, observed, asyncio.get_running_loop().time(), self._now_ms())
            self._go_on()

    def _observed(
        self, one: ManagedResource, observed: protocol.ObservedState, now: float, now_ms: int
    ) -> None:
        self._note(one, reconciler.observe(one.assignment, one.runtime, observed, now, now_ms))
        self._work.add(one.name)

    def _note(self, one: ManagedResource, state_changed: bool) -> None:
        """Something about it changed: it is checkpointed, and said to all if its state did."""
        runtime = one.runtime
        if runtime.dirty:
            self._checkpoints.due.add(one.name)
        if state_changed:
            said = protocol.ResourceStateChange(
                resource=one.name,
                state=runtime.health.state,
                reason=runtime.health.reason[:4000],
                since_ms=runtime.health.since_ms,
                was=one.told,
                manager=self.name,
                epoch=one.assignment.epoch,
            )
            one.told = said.state
            self._spawn(self._publish(protocol.state(one.name), messages.encode(said)))

    async def _publish(self, subject: str, data: bytes) -> None:
        with contextlib.suppress(errors.Unavailable):
            await self._bus.publish(subject, data)

    # Time

    def _state_of(self, name: str) -> tuple[int, protocol.ResourceStatus] | None:
        one = self.managed.get(name)
        if one is None:
            return None
        one.runtime.dirty = False
        now, now_ms = asyncio.get_running_loop().time(), self._now_ms()
        status = one.runtime.status(one.assignment, now, now_ms)
        if one.outranked_by:
            status = protocol.ResourceStatus(superseded_by=one.outranked_by)
        return one.assignment.epoch, status

    def _superseded(self, name: str, epoch: int) -> None:
        one = self.managed.get(name)
        if one is not None and one.assignment.epoch == epoch:
            one.superseded = True
            self.renewal.soon()

    def _outrank(self, one: ManagedResource, epoch: int) -> None:
        """The agent obeys a later epoch.

        Usually another manager has the resource by now, and the next renewal says so.  Where the registry
        still says that it is ours, it was set back, and gives a higher epoch once it knows of this one.
        """
        one.superseded = True
        if epoch > one.outranked_by:
            one.outranked_by = epoch
            self._outranked.add(one.name)
        self.renewal.soon()

    async def _tick_always(self) -> None:
        while True:
            await asyncio.sleep(self._tick_s)
            if self.acts:
                try:
                    self.tick()
                except Exception as error:  # noqa: BLE001  (one resource must not end the care of all others)
                    self.failed_ticks += 1
                    events.error("tick-failed", manager=self.name, failed=self.failed_ticks, error=error)

    def tick(self) -> None:
        """Silence, and what was put off."""
        now, now_ms = asyncio.get_running_loop().time(), self._now_ms()
        for zone, silent in self._zones.look(now).items():
            events.warning("zone-silent" if silent else "zone-heard", zone=zone, manager=self.name)
        if self._outranked and now >= self._report_outranked_at:
            self._checkpoints.due |= self._outranked
            self._outranked.clear()
            self._report_outranked_at = now + OUTRANKED_S
        for name, one in self.managed.items():
            runtime = one.runtime
            # Nearly all of them were just heard and are up: that must cost next to nothing.
            if now - runtime.heard_at > reconciler.LATE_PERIODS * runtime.period_s:
                self._listen(one, now, now_ms)
            if runtime.dirty:
                self._checkpoints.due.add(name)
            unsettled = runtime.observed is None or runtime.look or runtime.retry_at
            if unsettled or runtime.health.state is not health.HealthState.UP:
                self._work.add(name)
        self._claim_soon()

    def _listen(self, one: ManagedResource, now: float, now_ms: int) -> None:
        zones, zone = self._zones, one.runtime.zone
        if reconciler.check_silence(
            one.runtime,
            now,
            now_ms,
            zone_silent=zone in zones.silent,
            heard_since=zones.heard_since,
            zone_heard_at=zones.heard_at(zone),
        ):
            self._note(one, True)

    # Acts

    def _go_on(self) -> None:
        """Begin the next step of whatever has one."""
        if not self.acts:
            return
        now = asyncio.get_running_loop().time()
        for name in list(self._work):
            self._work.discard(name)
            one = self.managed.get(name)
            if one is None or one.superseded:
                continue
            runtime = one.runtime
            if one.assignment.waits_for and runtime.health.state is health.HealthState.STARTING:
                reason = f"waits for {', '.join(one.assignment.waits_for[:5])}"
                self._note(
                    one,
                    reconciler.apply_health_event(runtime, health.HealthEvent.START, reason, self._now_ms()),
                )
            step = reconciler.decide(one.assignment, runtime, now)
            if step is None:
                if reconciler.mark_converged(one.assignment, runtime):
                    self._checkpoints.due.add(name)
            elif step.act is not reconciler.ReconcileAction.CLAIM:
                runtime.busy = True
                self._spawn(self._act(one, step))

    async def _act(self, one: ManagedResource, step: reconciler.ReconcileStep) -> None:
        spec, runtime, epoch = one.assignment.spec, one.runtime, one.assignment.epoch
        generation, former = one.assignment.generation, step.act is reconciler.ReconcileAction.DELETE_FORMER
        try:
            if step.act in (reconciler.ReconcileAction.CREATE, reconciler.ReconcileAction.START):
                self._note(
                    one,
                    reconciler.apply_health_event(
                        runtime, health.HealthEvent.START, step.why, self._now_ms()
                    ),
                )
            if step.act is reconciler.ReconcileAction.START:
                runtime.restarts += 1
            verb = _ACTS.get(step.act, protocol.Verb.EXECUTE)
            operation = protocol.Operation(
                id=self._next_id(),
                verb=verb,
                resource=one.assignment.formerly if former else spec.name,
                epoch=epoch,
                manager=self.name,
                type=spec.type,
                config=spec.config if verb in (protocol.Verb.CREATE, protocol.Verb.PUT) else {},
                start=spec.wanted is protocol.DesiredState.UP,
                arguments={"from": one.assignment.formerly} if verb is protocol.Verb.RENAME else {},
                operation=step.act.value if verb is protocol.Verb.EXECUTE else "",
                generation=generation,
            )
            events.info("act", resource=spec.name, act=step.act.value, why=step.why, epoch=epoch)
            answer = await self._operator.operate(spec.agent, operation)
        finally:
            runtime.busy = False
        if self.managed.get(one.name) is not one:
            return
        now, now_ms = asyncio.get_running_loop().time(), self._now_ms()
        if answer.outcome is messages.DecisionOutcome.DONE:
            there = answer.observed is not None and answer.observed.exists
            reconciler.done(
                runtime, step.act, generation=generation, started=operation.start, there=there, now=now
            )
        elif one.assignment.generation == generation or answer.code == errors.StaleEpoch.code:
            self._failed(one, step, answer, now, now_ms)
        else:  # of a wish that is not in force any more: the next look tells what is to be done
            runtime.observed = None
        if former:
            runtime.observed = None  # look again: a renaming may have come first
        elif answer.observed is not None:
            self._observed(one, answer.observed, now, now_ms)
        self._note(one, reconciler.release(one.assignment, runtime, now, now_ms))
        if runtime.dirty:
            self._checkpoints.due.add(one.name)
        self._work.add(one.name)
        self._go_on()

    def _failed(
        self,
        one: ManagedResource,
        step: reconciler.ReconcileStep,
        answer: protocol.OperationResult,
        now: float,
        now_ms: int,
    ) -> None:
        if answer.code == errors.StaleEpoch.code:
            self._outrank(one, answer.epoch)
        else:
            self._note(one, reconciler.failed(one.assignment, one.runtime, step.act, answer, now, now_ms))

    def _next_id(self) -> str:
        self._operations += 1
        return f"{self.name}-{self.renewal.boot:x}-{self._operations}"


async def _respond(message: api.Message, data: bytes) -> None:
    with contextlib.suppress(errors.MusterError):
        await message.respond(data)
