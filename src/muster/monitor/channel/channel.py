"""A channel: receives reports, holds them, forwards them, and publishes heartbeats.

The I/O around `aggregator` and `parent_selection`.  A message to the stream at the top has a unique id, so a
retry stores it once.  A message to another channel is kept until the heartbeats of that channel confirm that
it has been forwarded; if the parent becomes silent first, the message is sent to the next parent.  So the
failure of a channel does not lose reports that it received from another channel.

The buffers are bounded; messages that do not fit are counted as ``unforwarded``.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from muster.bus import api
from muster.core import errors, lifecycle, messages, subjects
from muster.core.reports import columns
from muster.core.telemetry import log, metrics
from muster.monitor import parent_selection, protocol
from muster.monitor.channel import aggregator, interpreters
from muster.supervision import tasks

events = log.EventLog("monitor")

_SENDER_AT = len(subjects.from_identity(protocol.PART, ""))
RETRY_S = 0.5
MESSAGE_BYTES_MAX = 1_000_000  # compressed; the default limit of a broker is 1 MiB
CONFIRM_MARGIN_S = 1.0  # for the latency of the message and of the heartbeat


@dataclass(frozen=True, slots=True)
class ChannelOptions:
    hold_s: float = 1.0
    beat_s: float = 1.0
    subscriptions: Sequence[interpreters.ForwardTarget] = (
        interpreters.ForwardTarget("up", (protocol.ROOT,)),
    )
    limits: aggregator.ChannelLimits = field(default_factory=aggregator.ChannelLimits)
    compression: str | None = "lz4"
    sensors: bool = True  # accepts sensors without a list of channels
    waiting_bytes_max: int = 256 << 20  # of messages that may wait to be forwarded
    replicas: int = 1
    stream_bytes_max: int = 4 << 30
    stream_age_s_max: float = 86400.0


@dataclass(slots=True)
class _Waiting:
    """A message to be forwarded. ``sent_to`` and ``sent_at_s``: sent, but not confirmed yet."""

    subscription: interpreters.ForwardTarget
    facts: columns.BatchInfo
    data: bytes
    since_s: float
    sent_to: str = ""
    sent_at_s: float = 0.0


class Channel(lifecycle.ServiceContext):
    """``async with Channel(bus, settings): …``; its name is the identity of its bus."""

    def __init__(
        self, bus: api.Bus, settings: ChannelOptions | None = None, *, measure: metrics.Metrics | None = None
    ) -> None:
        self._bus = bus
        self._settings = settings or ChannelOptions()
        self.name = bus.identity
        self._boot = time.time_ns() // 1_000_000
        self.aggregator = aggregator.Aggregator(
            self.name, self._boot, self._settings.subscriptions, limits=self._settings.limits
        )
        self._parents = {
            target.name: parent_selection.ParentSelector(self.name, target.parents)
            for target in self._settings.subscriptions
        }
        self._streams: dict[str, api.Stream] = {}
        self._registry: api.KeyValue | None = None
        self._subscriptions: list[api.Subscription] = []
        self._tasks = tasks.TaskSupervisor(f"channel {self.name}")
        self._receiving: list[asyncio.Task[None]] = []  # ended before the last reports are forwarded
        self._waiting: collections.deque[_Waiting] = collections.deque()
        self._waiting_bytes = 0
        self._sender_end = _SENDER_AT + 1 - len(protocol.reports_to(self.name))  # in a subject, from its end
        self._wake = asyncio.Event()
        self._all_sent = asyncio.Event()
        self._beats = 0
        self._held_since_s: float | None = None
        self._draining = False
        self.forwarded = 0  # rows
        self._measure = _Measure(measure, self) if measure is not None else None

    async def start(self) -> None:
        if any(protocol.ROOT in target.parents for target in self._settings.subscriptions):
            for stream in protocol.streams(
                max_bytes=self._settings.stream_bytes_max,
                max_age_s=self._settings.stream_age_s_max,
                replicas=self._settings.replicas,
            ):
                self._streams[stream.name] = await self._bus.stream(stream)
        self._registry = await self._bus.key_value(
            api.KeyValueSettings(bucket=protocol.BUCKET, replicas=self._settings.replicas)
        )
        await self._listen(protocol.BEATS, self._on_heartbeat)
        for subject in protocol.batches_to(self.name):
            await self._listen(subject, self._on_batch)
        self._subscriptions.append(
            await self._bus.subscribe(protocol.reports_to(self.name), bulk=self._on_reports)
        )
        self._receiving = [self._tasks.loop("hold", self._hold), self._tasks.loop("heartbeat", self._beat)]
        self._tasks.loop("forward", self._forward)
        events.info("channel-started", channel=self.name)

    async def stop(self, *, drain_s: float = 5.0) -> None:
        """Announce the end to the children, forward the held reports, and stop.

        Without a connection the held reports are lost here; their senders still have them.
        """
        self._draining = True
        with contextlib.suppress(TimeoutError, errors.MusterError):
            async with asyncio.timeout(drain_s):
                await self._drain()
        for subscription in self._subscriptions:
            await subscription.close()
        await self._tasks.close()

    async def _drain(self) -> None:
        if not self._receiving or self._bus.state is not api.ConnectionState.CONNECTED:
            return
        await self._publish_heartbeat()
        for subscription in self._subscriptions:
            await subscription.close()
        for task in self._receiving:
            task.cancel()
        self._receiving = []  # a second call has nothing to drain
        self._flush()
        await self._all_sent.wait()
        if self._registry is not None:
            await self._registry.delete(f"producer.{self.name}")

    @property
    def dropped(self) -> dict[str, int]:
        """Rows, by reason, since the start; ``slow-consumer`` counts messages that were never processed."""
        lost = sum(subscription.statistics().dropped for subscription in self._subscriptions)
        return {**self.aggregator.dropped, **({"slow-consumer": lost} if lost else {})}

    @property
    def waiting_s(self) -> float:
        """Age of the oldest message that has not been forwarded."""
        now_s = time.monotonic()
        oldest = [message.since_s for message in self._waiting if not message.sent_to][:1]
        if self._held_since_s is not None:
            oldest.append(self._held_since_s)
        return now_s - min(oldest) if oldest else 0.0

    # Receiving. These handlers run in the read loop of the connection and must not block.

    async def _listen(self, subject: str, handler: api.Handler) -> None:
        subscription = await self._bus.subscribe(subject, handler=handler)
        self._subscriptions.append(subscription)

    def _on_reports(self, subjects_: Sequence[bytes], reports: Sequence[bytes]) -> None:
        if self._held_since_s is None:
            self._held_since_s = time.monotonic()
        senders = [subject[_SENDER_AT : self._sender_end] for subject in subjects_]
        self.aggregator.add_reports(senders, reports, int(time.time() * 1000))

    def _on_batch(self, message: api.Message) -> None:
        if self._held_since_s is None:
            self._held_since_s = time.monotonic()
        self.aggregator.add_batch(subjects.sender_of(message.subject), message.data, int(time.time() * 1000))

    def _on_heartbeat(self, message: api.Message) -> None:
        try:
            beat = messages.decode(message.data, protocol.ChannelHeartbeat)
        except errors.MusterError as error:
            self.aggregator.dropped[f"beat-{error.code}"] += 1
            return
        channel, now_s = protocol.channel_of(message.subject), time.monotonic()
        for choice in self._parents.values():
            choice.record_heartbeat(channel, beat, now_s)
        confirmed_s = now_s - beat.waiting_s - CONFIRM_MARGIN_S
        kept = [
            pending
            for pending in self._waiting
            if pending.sent_to != channel or pending.sent_at_s >= confirmed_s
        ]
        if len(kept) != len(self._waiting):
            self._set_waiting(kept)

    # Forwarding.

    async def _hold(self) -> None:
        next_s = time.monotonic()
        while True:
            next_s = max(next_s + self._settings.hold_s, time.monotonic())
            await asyncio.sleep(next_s - time.monotonic())
            try:
                self._flush()
            except Exception as error:  # noqa: BLE001  (no received message may stop a channel)
                self.aggregator.dropped["flush-failed"] += 1
                self._tasks.record_failure("hold", error)

    def _flush(self) -> None:
        since_s, self._held_since_s = self._held_since_s or time.monotonic(), None
        forwards = collections.deque(self.aggregator.flush(int(time.time() * 1000)))
        while forwards:
            forward = forwards.popleft()
            try:
                data = forward.encode(self._settings.compression)
            except errors.MusterError as error:
                self.aggregator.dropped[error.code] += forward.batch.num_rows
                continue
            if len(data) > MESSAGE_BYTES_MAX and (halves := self.aggregator.halves(forward)):
                forwards.extendleft(reversed(halves))
                continue
            self._waiting.append(_Waiting(forward.subscription, forward.facts, data, since_s))
            self._waiting_bytes += len(data)
            self.forwarded += forward.batch.num_rows
        while self._waiting_bytes > self._settings.waiting_bytes_max:
            gone = self._waiting.popleft()
            self._waiting_bytes -= len(gone.data)
            if not gone.sent_to:
                self.aggregator.dropped["unforwarded"] += 1
        self._all_sent.clear()
        self._wake.set()

    def _set_waiting(self, kept: Sequence[_Waiting]) -> None:
        self._waiting = collections.deque(kept)
        self._waiting_bytes = sum(len(message.data) for message in kept)

    async def _forward(self) -> None:
        while True:
            self._wake.clear()
            try:
                await self._forward_all()
            except errors.MusterError as error:
                events.warning("forward-failed", channel=self.name, error=error)
            if all(message.sent_to for message in self._waiting):
                self._all_sent.set()
            with contextlib.suppress(TimeoutError):  # check periodically: a parent may have failed
                async with asyncio.timeout(RETRY_S):
                    await self._wake.wait()

    async def _forward_all(self) -> None:
        """Send waiting messages, and repeat those that a failed parent did not confirm."""
        now_s = time.monotonic()
        to = {name: choice.choose(now_s) for name, choice in self._parents.items()}
        due = [
            message
            for message in self._waiting
            if to[message.subscription.name] not in (None, message.sent_to)
        ]
        sent = await asyncio.gather(
            *(self._send(message, to[message.subscription.name] or "") for message in due),
            return_exceptions=True,
        )
        gone = {id(message) for message, result in zip(due, sent, strict=True) if result is True}
        if gone:
            self._set_waiting([message for message in self._waiting if id(message) not in gone])
            # At once, not with the next heartbeat: children would repeat unconfirmed messages.
            await self._publish_heartbeat()
        for result in sent:
            if isinstance(result, BaseException):
                raise result

    async def _send(self, message: _Waiting, parent: str) -> bool:
        """Whether the message can be removed."""
        subject = protocol.batch(self.name, parent, schema=message.facts.schema)
        try:
            if parent != protocol.ROOT:
                await self._bus.publish(subject, message.data)
                message.sent_to, message.sent_at_s = parent, time.monotonic()
                return False
            detail = message.facts.schema == columns.NODE_SCHEMA
            stream = self._streams[columns.REPORTS_STREAM if detail else columns.SUMMARIES_STREAM]
            name = f"{self.name}-{self._boot}-{message.facts.sequence}"
            await stream.publish(subject, message.data, message_id=name)
        except (errors.InvalidInput, errors.LimitExceeded) as error:
            # A retry would not help, and later messages must not be blocked.
            self.aggregator.dropped[error.code] += 1
            events.warning("forward-refused", channel=self.name, error=error)
        return True

    # Heartbeats.

    async def _beat(self) -> None:
        for number in itertools.count():
            try:
                await self._publish_heartbeat()
                if number % 10 == 0:
                    await self._register()
            except errors.MusterError as error:
                events.debug("beat-failed", channel=self.name, error=error)
            if self._measure is not None:
                self._measure.update()
            await asyncio.sleep(self._settings.beat_s)

    async def _publish_heartbeat(self) -> None:
        self._beats += 1
        beat = protocol.ChannelHeartbeat(
            boot=self._boot,
            sequence=self._beats,
            period_s=self._settings.beat_s,
            hold_s=self._settings.hold_s,
            level=self.aggregator.level,
            open=not self._draining,
            sensors=self._settings.sensors,
            waiting_s=min(self.waiting_s, 86400.0),
        )
        await self._bus.publish(protocol.beat(self.name), messages.encode(beat))

    async def _register(self) -> None:
        """Store the registry entry of the channel, for the first of its subscriptions."""
        first = self._settings.subscriptions[0]
        schema = columns.SUMMARY_SCHEMA if first.interpreter == "merge" else columns.NODE_SCHEMA
        durable = columns.REPORTS_STREAM if schema == columns.NODE_SCHEMA else columns.SUMMARIES_STREAM
        parent = self._parents[first.name].choose(time.monotonic()) or first.parents[0]
        entry = protocol.ReportProducer(
            name=self.name,
            produces=schema,
            subject=protocol.batch(self.name, parent, schema=schema),
            stream=durable if parent == protocol.ROOT else "",
            level=self.aggregator.level,
            interpreter=first.interpreter,
            hold_s=self._settings.hold_s,
            parents=first.parents,
            groups=tuple(sorted(self.aggregator.groups))[:256],
            machines=self.aggregator.machines,
            at_ms=int(time.time() * 1000),
        )
        assert self._registry is not None
        ttl_s = max(1.0, float(round(30 * self._settings.beat_s)))
        await self._registry.put(f"producer.{self.name}", messages.encode(entry), ttl_s=ttl_s)


class _Measure:
    """The metrics of the channel, updated with each heartbeat."""

    def __init__(self, measure: metrics.Metrics, channel: Channel) -> None:
        labels = ("channel",)
        self._channel = channel
        self._received = measure.counter("channel_received_rows", "Rows received.", labels)
        self._forwarded = measure.counter("channel_forwarded_rows", "Rows forwarded.", labels)
        self._dropped = measure.counter(
            "channel_dropped_rows", "Rows dropped, by reason.", ("channel", "reason")
        )
        self._machines = measure.gauge("channel_machines", "Active machines.", labels)
        self._gaps = measure.gauge("channel_gap_rows", "Reports that were never received.", labels)
        self._waiting = measure.gauge(
            "channel_waiting_seconds", "Age of the oldest message that is not forwarded.", labels
        )
        self._seen: dict[Any, int] = {}

    def update(self) -> None:
        name = self._channel.name
        self._received.add(self._grown("received", self._channel.aggregator.received), channel=name)
        self._forwarded.add(self._grown("forwarded", self._channel.forwarded), channel=name)
        for reason, count in self._channel.dropped.items():
            self._dropped.add(self._grown(("dropped", reason), count), channel=name, reason=reason)
        self._machines.set(self._channel.aggregator.machines, channel=name)
        self._gaps.set(self._channel.aggregator.gaps, channel=name)
        self._waiting.set(self._channel.waiting_s, channel=name)

    def _grown(self, key: Any, now: int) -> int:
        before, self._seen[key] = self._seen.get(key, 0), now
        return now - before
