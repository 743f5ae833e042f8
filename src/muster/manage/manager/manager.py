"""The manager: a process that keeps thousands of resources in their desired state.

It renews its membership with the acting registry and receives its assignments (`renewal`), claims the
assigned resources from their agents, receives heartbeats and events, lets `reconciler` decide the next step
of each resource, and checkpoints runtime states in batches. Each resource has one step in progress at a time.

It acts only while its renewal is valid. If it was superseded without noticing, adapters reject it by its
epochs.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import time
from collections.abc import Callable

from muster.bus import api
from muster.bus.direct import frames
from muster.bus.rpc import client
from muster.core import backoff, errors, health, lifecycle, messages, subjects
from muster.core.telemetry import log
from muster.manage import protocol
from muster.manage.manager import agent_calls, checkpoints, orders, reconciler, renewal, resources, zones
from muster.supervision import tasks

events = log.EventLog("manage")

TICK_S = 0.5
CLAIMS_MAX = 250  # in one message: an agent stores each claim before it replies, and disks may be slow
CLAIMS_AT_ONCE = 16  # messages; separate from operations, of which thousands may be queued
CLAIM_TIMEOUT_S = 3.0
RESTART_POLICY = backoff.BackoffPolicy(crashes_max=None, pause_s_max=0.5)  # renewals have to continue
INVENTORY_S = 10.0  # between two requests to one agent
OUTRANKED_S = 2.0  # between two reports of higher epochs; an agent may invent them


class Manager(lifecycle.ServiceContext):
    def __init__(
        self,
        bus: api.Bus,
        *,
        name: str | None = None,
        tick_s: float = TICK_S,
        clock: Callable[[], float] = time.time,
        direct: frames.PeerAddress | None = None,
    ) -> None:
        """``direct``: where agents may connect to it without a broker."""
        self.name = name or bus.identity
        self._direct = direct
        self.managed: dict[str, resources.ManagedResource] = {}
        self.renewal = renewal.ManagerRenewal(bus, self.name, self._apply_renewal)
        self._bus = bus
        self._tick_s = tick_s
        self._clock = clock
        self._resync: set[str] | None = None  # names received so far, during a complete resynchronisation
        self._zones = zones.ZoneReachability(0.0)
        self._queue: set[str] = set()
        self._outranked: set[str] = set()
        self._report_outranked_at = 0.0
        self._asked: set[str] = set()  # agents that were requested to announce what they host
        self._asked_until = 0.0
        self._claiming = asyncio.Semaphore(CLAIMS_AT_ONCE)
        self._claiming_of = collections.defaultdict[str, asyncio.Semaphore](  # by agent: half of them
            lambda: asyncio.Semaphore(CLAIMS_AT_ONCE // 2)
        )
        self._agents = agent_calls.AgentCaller(bus, lambda: self.may_act)
        self._checkpoints = checkpoints.CheckpointWriter(
            bus,
            self.name,
            may_act=lambda: self.may_act,
            checkpoint_of=self._checkpoint_of,
            superseded=self._superseded,
        )
        self._orders = orders.OrderRunner(
            self.name, self._agents, self._find, self._on_executed, self._checkpoints.flush
        )
        self._tasks = tasks.TaskSupervisor(f"manager {self.name}", policy=RESTART_POLICY)
        self._subscriptions: list[api.Subscription] = []
        self._operations = 0
        self._listening: Callable[[], None] | None = None

    # Lifecycle

    @property
    def may_act(self) -> bool:
        """Whether the renewal is valid, so that the manager may act."""
        return self.renewal.is_valid

    async def start(self) -> None:
        me = self.name
        self._zones.connected_since = asyncio.get_running_loop().time()
        handlers: dict[str, api.Handler] = {
            protocol.heartbeats_to(me): self._on_heartbeats,
            protocol.events_to(me): self._on_event,
            protocol.to_manager(me, "poke"): lambda _: self.renewal.renew_soon(),
            protocol.to_manager(me, "execute"): self._on_orders,
        }
        for subject, handler in handlers.items():
            self._subscriptions.append(await self._bus.subscribe(subject, handler=handler))
        self._listening = self._bus.on_state(self._connection_changed)
        self._tasks.loop("renewal", self.renewal.run)
        self._tasks.loop("tick", self._tick_forever)
        self._tasks.loop("checkpoints", self._checkpoints.run)

    async def stop(self) -> None:
        """Release all resources, so that other managers need not wait for the expiry."""
        self.renewal.leaving = True
        with contextlib.suppress(errors.MusterError):
            await self._checkpoints.flush()
        with contextlib.suppress(errors.MusterError):
            await self.renewal.renew(timeout_s=1.0)
        await self.abandon()

    async def abandon(self) -> None:
        """End at once, as a crash would."""
        self.renewal.valid_until = 0.0
        await self._tasks.close()
        for subscription in self._subscriptions:
            with contextlib.suppress(errors.Unavailable):
                await subscription.close()
        if self._listening is not None:
            self._listening()

    def _connection_changed(self, state: api.ConnectionState) -> None:
        if state is api.ConnectionState.CONNECTED:
            self._zones.connected_since = asyncio.get_running_loop().time()
            self.renewal.renew_soon()

    def _now_ms(self) -> int:
        return int(self._clock() * 1000)

    # Assignments

    def _apply_renewal(self, granted: protocol.RenewResult) -> None:
        now, now_ms = asyncio.get_running_loop().time(), self._now_ms()
        if granted.anew:
            self._resync = set()
        for name in granted.released:
            self.managed.pop(name, None)
        for assignment in granted.assigned:
            name = assignment.spec.name
            if self._resync is not None:
                self._resync.add(name)
            known = self.managed.get(name)
            if known is None or known.assignment.epoch != assignment.epoch:
                self.managed[name] = resources.ManagedResource(
                    assignment, reconciler.ResourceRuntime.begin(assignment, now, now_ms)
                )
            else:
                reconciler.assignment_changed(known.assignment, assignment, known.runtime)
                known.assignment = assignment
            self._queue.add(name)
        if not granted.more and self._resync is not None:
            for name in set(self.managed) - self._resync:
                del self.managed[name]
            self._resync = None
        self._claim_soon()

    # Claims

    def _claim_soon(self) -> None:
        """Claim new resources from their agents, many in one message."""
        by_agent: dict[str, dict[str, int]] = {}
        for name in self._queue:
            resource = self.managed.get(name)
            if resource is None or resource.runtime.busy:
                continue
            if resource.runtime.observed is None or resource.runtime.recheck:
                resource.runtime.busy = True
                by_agent.setdefault(resource.assignment.spec.agent, {})[name] = resource.assignment.epoch
        for agent, epochs in by_agent.items():
            names = list(epochs)
            for first in range(0, len(names), CLAIMS_MAX):
                page = {name: epochs[name] for name in names[first : first + CLAIMS_MAX]}
                self._tasks.spawn("claim", self._claim(agent, page))
        self._start_steps()

    async def _claim(self, agent: str, epochs: dict[str, int]) -> None:
        request = protocol.ClaimRequest(manager=self.name, resources=epochs, direct=self._direct)
        answer: protocol.ClaimResult | None = None
        try:
            async with self._claiming_of[agent], self._claiming:
                if self.may_act:
                    message = await client.exchange_once(
                        self._bus, protocol.claim(agent), messages.encode(request), timeout_s=CLAIM_TIMEOUT_S
                    )
                    answer = messages.decode(message.data, protocol.ClaimResult)
        except errors.MusterError as error:
            events.info("not-claimed", agent=agent, resources=len(epochs), error=error)
        now, now_ms = asyncio.get_running_loop().time(), self._now_ms()
        if answer is not None:
            self._zones.record(answer.zone, answer.period_s, now)
        for name, epoch in epochs.items():
            resource = self.managed.get(name)
            if resource is None or resource.assignment.epoch != epoch:
                continue
            self._record_change(
                resource, reconciler.release(resource.assignment, resource.runtime, now, now_ms)
            )
            if answer is None:
                resource.runtime.retry_at = now + reconciler.RETRY_S
                if resource.runtime.health.state is health.HealthState.STARTING:
                    self._record_change(
                        resource,
                        reconciler.apply_health_event(
                            resource.runtime, health.HealthEvent.START, f"{agent} does not reply", now_ms
                        ),
                    )
            elif name in answer.superseded:
                self._mark_outranked(resource, answer.superseded[name])
            elif name in answer.observed:
                resource.runtime.period_s, resource.runtime.zone = answer.period_s, answer.zone
                resource.runtime.recheck = False
                observed = answer.observed[name]
                self._record_change(
                    resource,
                    reconciler.observe(
                        resource.assignment, resource.runtime, observed, now, now_ms, requested=True
                    ),
                )
            self._queue.add(name)
        self._start_steps()

    # Heartbeats and events

    def _on_heartbeats(self, message: api.Message) -> None:
        try:
            batch = messages.decode(message.data, protocol.HeartbeatBatch)
        except errors.MusterError as error:
            events.warning("bad-heartbeat", error=error)
            return
        now, now_ms = asyncio.get_running_loop().time(), self._now_ms()
        agent = subjects.sender_of(message.subject)
        self._zones.record(batch.zone, batch.period_s, now)
        differs = is_foreign = False
        for beat in batch.beats:
            resource = self.managed.get(beat.name)
            if resource is None or resource.assignment.spec.agent != agent:
                is_foreign = True
                continue
            runtime = resource.runtime
            if beat.epoch != resource.assignment.epoch:
                if beat.epoch > resource.assignment.epoch:
                    self._mark_outranked(resource, beat.epoch)
                continue
            runtime.period_s, runtime.zone = batch.period_s, batch.zone
            seen = runtime.observed
            if (
                seen is not None
                and beat.state is health.HealthState.UP
                and seen.state is health.HealthState.UP
                and runtime.health.state is health.HealthState.UP
                and seen.digest == beat.digest
            ):
                runtime.last_seen_at = now  # the usual heartbeat: no change
                is_known = runtime.stable or runtime.busy
                if not is_known and reconciler.confirm_up(runtime, batch.at_ms, now):
                    self._checkpoints.due.add(beat.name)
                continue
            runtime.last_seen_at = now
            if runtime.busy:
                continue
            if seen is not None and (beat.state, beat.digest) == (seen.state, seen.digest):
                self._observed(resource, seen, now, now_ms)
            else:
                # A heartbeat has no details and may be outdated: ask the agent.
                runtime.recheck = differs = True
                self._queue.add(beat.name)
        if is_foreign and self.may_act and agent not in self._asked:
            self._asked.add(agent)  # it may host what belongs elsewhere: the registry decides
            request = protocol.ClaimRequest(manager=self.name, resources={})
            self._tasks.spawn("inventory", self._publish(protocol.claim(agent), messages.encode(request)))
        if differs:
            self._claim_soon()
        else:
            self._start_steps()

    def _on_event(self, message: api.Message) -> None:
        try:
            event = messages.decode(message.data, protocol.ResourceEvent)
        except errors.MusterError as error:
            events.warning("bad-event", error=error)
            return
        resource = self.managed.get(event.resource)
        agent = subjects.sender_of(message.subject)
        if (
            resource is None
            or resource.assignment.spec.agent != agent
            or event.epoch != resource.assignment.epoch
        ):
            return
        if event.observed is not None:
            self._observed(resource, event.observed, asyncio.get_running_loop().time(), self._now_ms())
            self._start_steps()
        if event.what != protocol.CHANGED:  # an event of the resource itself: forward it to subscribers
            self._tasks.spawn(
                "event", self._publish(protocol.resource_event_subject(event.resource), message.data)
            )
        if subjects.may_reply(message.subject, message.reply) and not message.respond_now(b"{}"):
            self._tasks.spawn("reply", _respond(message, b"{}"))

    def _on_orders(self, message: api.Message) -> None:
        self._tasks.spawn("orders", self._orders.execute(message))

    def _find(self, name: str) -> protocol.Assignment | None:
        resource = self.managed.get(name)
        return None if resource is None or resource.superseded else resource.assignment

    def _on_executed(self, name: str, observed: protocol.ObservedState | None, has_begun: bool) -> None:
        """An operation requested by a user has ended; ``has_begun``: it may have begun a run."""
        resource = self.managed.get(name)
        if resource is None:
            return
        if has_begun:
            reconciler.doubt_stability(resource.runtime)
            self._checkpoints.due.add(name)
        if observed is not None:
            self._observed(resource, observed, asyncio.get_running_loop().time(), self._now_ms())
            self._start_steps()

    def _observed(
        self, resource: resources.ManagedResource, observed: protocol.ObservedState, now: float, now_ms: int
    ) -> None:
        self._record_change(
            resource, reconciler.observe(resource.assignment, resource.runtime, observed, now, now_ms)
        )
        self._queue.add(resource.name)

    def _record_change(self, resource: resources.ManagedResource, state_changed: bool) -> None:
        """Schedule a checkpoint if the runtime is dirty; publish the state if it changed."""
        runtime = resource.runtime
        if runtime.dirty:
            self._checkpoints.due.add(resource.name)
        if state_changed:
            change = protocol.ResourceStateChange(
                resource=resource.name,
                state=runtime.health.state,
                reason=runtime.health.reason[:4000],
                since_ms=runtime.health.since_ms,
                was=resource.published_state,
                manager=self.name,
                epoch=resource.assignment.epoch,
            )
            resource.published_state = change.state
            self._tasks.spawn("state", self._publish(protocol.state(resource.name), messages.encode(change)))

    async def _publish(self, subject: str, data: bytes) -> None:
        with contextlib.suppress(errors.Unavailable):
            await self._bus.publish(subject, data)

    # Checkpoints and periodic work

    def _checkpoint_of(self, name: str) -> tuple[int, protocol.ResourceStatus] | None:
        resource = self.managed.get(name)
        if resource is None:
            return None
        resource.runtime.dirty = False
        now, now_ms = asyncio.get_running_loop().time(), self._now_ms()
        status = resource.runtime.status(resource.assignment, now, now_ms)
        if resource.outranked_by:
            status = protocol.ResourceStatus(superseded_by=resource.outranked_by)
        return resource.assignment.epoch, status

    def _superseded(self, name: str, epoch: int) -> None:
        resource = self.managed.get(name)
        if resource is not None and resource.assignment.epoch == epoch:
            resource.superseded = True
            self.renewal.renew_soon()

    def _mark_outranked(self, resource: resources.ManagedResource, epoch: int) -> None:
        """The agent accepted a higher epoch.

        Usually another manager owns the resource now, and the next renewal releases it here. If the registry
        still assigns it to this manager, the registry was restored from an older state; it assigns a higher
        epoch once this one is reported.
        """
        resource.superseded = True
        if epoch > resource.outranked_by:
            resource.outranked_by = epoch
            self._outranked.add(resource.name)
        self.renewal.renew_soon()

    async def _tick_forever(self) -> None:
        while True:
            await asyncio.sleep(self._tick_s)
            if self.may_act:
                self.tick()

    def tick(self) -> None:
        """Detect silence, report outranked resources and retry postponed steps."""
        now, now_ms = asyncio.get_running_loop().time(), self._now_ms()
        for zone, silent in self._zones.update(now).items():
            events.warning("zone-silent" if silent else "zone-heard", zone=zone, manager=self.name)
        if now >= self._asked_until:
            self._asked.clear()
            self._asked_until = now + INVENTORY_S
        if self._outranked and now >= self._report_outranked_at:
            self._checkpoints.due |= self._outranked
            self._outranked.clear()
            self._report_outranked_at = now + OUTRANKED_S
        for name, resource in self.managed.items():
            runtime = resource.runtime
            # Most resources were seen recently and are up: this path has to be cheap.
            if now - runtime.last_seen_at > reconciler.LATE_PERIODS * runtime.period_s:
                self._check_silence(resource, now, now_ms)
            if runtime.dirty:
                self._checkpoints.due.add(name)
            unsettled = runtime.observed is None or runtime.recheck or runtime.retry_at
            if unsettled or runtime.health.state is not health.HealthState.UP or now >= runtime.overdue_at:
                self._queue.add(name)
        self._claim_soon()

    def _check_silence(self, resource: resources.ManagedResource, now: float, now_ms: int) -> None:
        zones, zone = self._zones, resource.runtime.zone
        if reconciler.check_silence(
            resource.runtime,
            now,
            now_ms,
            zone_silent=zone in zones.silent,
            connected_since=zones.connected_since,
            zone_last_seen_at=zones.last_seen_at(zone),
        ):
            self._record_change(resource, True)

    # Steps

    def _start_steps(self) -> None:
        """Start the next step of each queued resource."""
        if not self.may_act:
            return
        now = asyncio.get_running_loop().time()
        # A new set: one that was emptied keeps its size, and each event would read all of it.
        queue, self._queue = self._queue, set()
        for name in queue:
            resource = self.managed.get(name)
            if resource is None or resource.superseded:
                continue
            runtime = resource.runtime
            if resource.assignment.waits_for and runtime.health.state is health.HealthState.STARTING:
                reason = f"waiting for {', '.join(resource.assignment.waits_for[:5])}"
                self._record_change(
                    resource,
                    reconciler.apply_health_event(runtime, health.HealthEvent.START, reason, self._now_ms()),
                )
            step = reconciler.decide(resource.assignment, runtime, now)
            if step is None:
                if reconciler.mark_converged(resource.assignment, runtime):
                    self._checkpoints.due.add(name)
            elif step.action is not reconciler.ReconcileAction.CLAIM:
                runtime.busy = True
                self._tasks.spawn("step", self._run_step(resource, step))

    async def _run_step(self, resource: resources.ManagedResource, step: reconciler.ReconcileStep) -> None:
        spec, runtime = resource.assignment.spec, resource.runtime
        generation = resource.assignment.generation
        try:
            if reconciler.begins_run(resource.assignment, runtime, step.action):
                now, now_ms = asyncio.get_running_loop().time(), self._now_ms()
                reconciler.run_begins(resource.assignment, runtime, now, now_ms)
                self._record_change(
                    resource,
                    reconciler.apply_health_event(
                        runtime, health.HealthEvent.START, step.reason, self._now_ms()
                    ),
                )
            if step.action is reconciler.ReconcileAction.START:
                runtime.restarts += 1
            is_to_run = spec.desired is protocol.DesiredState.UP
            runtime.is_overdue |= is_to_run and step.action is reconciler.ReconcileAction.STOP
            operation = resources.operation_for(resource, step, id=self._next_id(), manager=self.name)
            events.info(
                "act", resource=spec.name, act=step.action.value, why=step.reason, epoch=operation.epoch
            )
            answer = await self._agents.call(spec.agent, operation)
        finally:
            runtime.busy = False
        if self.managed.get(resource.name) is not resource:
            return
        now, now_ms = asyncio.get_running_loop().time(), self._now_ms()
        if answer.outcome is messages.DecisionOutcome.DONE:
            there = answer.observed is not None and answer.observed.exists
            reconciler.step_done(
                runtime, step.action, generation=generation, started=operation.start, there=there, now=now
            )
        elif resource.assignment.generation == generation or answer.code == errors.StaleEpoch.code:
            self._step_failed(resource, step, answer, now, now_ms)
        else:  # the desired state changed meanwhile: observe before the next step
            runtime.observed = None
        if step.action is reconciler.ReconcileAction.DELETE_FORMER:
            runtime.observed = None  # observe again: a rename may have come first
        elif answer.observed is not None:
            self._observed(resource, answer.observed, now, now_ms)
        self._record_change(resource, reconciler.release(resource.assignment, runtime, now, now_ms))
        if runtime.dirty:
            self._checkpoints.due.add(resource.name)
        self._queue.add(resource.name)
        self._start_steps()

    def _step_failed(
        self,
        resource: resources.ManagedResource,
        step: reconciler.ReconcileStep,
        answer: protocol.OperationResult,
        now: float,
        now_ms: int,
    ) -> None:
        if answer.code == errors.StaleEpoch.code:
            self._mark_outranked(resource, answer.epoch)
        else:
            self._record_change(
                resource,
                reconciler.step_failed(
                    resource.assignment, resource.runtime, step.action, answer, now, now_ms
                ),
            )

    def _next_id(self) -> str:
        self._operations += 1
        return f"{self.name}-{self.renewal.boot:x}-{self._operations}"


async def _respond(message: api.Message, data: bytes) -> None:
    with contextlib.suppress(errors.MusterError):
        await message.respond(data)
