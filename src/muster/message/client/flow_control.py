"""Slow consumers of topics slow the producers down.

The bus itself has no back-pressure: a slow reader loses messages. A consumer with too many waiting messages
therefore reports this to the dispatcher repeatedly, the dispatcher broadcasts it, and producers of the topic
wait. After a consumer has been slow for `producer_holds.PATIENCE_S` without interruption, producers no longer
wait for it; its oldest messages are then dropped and counted. Without a dispatcher, no producer waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Final, Protocol

from muster.core import errors, topics
from muster.message import destinations, producer_holds, protocol

CHECK_S: Final = 0.005
WAITING_SLOW: Final = 5_000  # waiting messages above which a consumer reports that it is slow
WAITING_SLOW_BYTES: Final = 8 << 20
WAITING_MAX: Final = 65_536  # and above which the oldest are dropped
WAITING_BYTES_MAX: Final = 64 << 20


class SlowableConsumer(Protocol):
    @property
    def destination(self) -> destinations.Destination: ...
    def is_slow(self) -> bool: ...


class SlowConsumerReports:
    """The slow consumers of one connection."""

    def __init__(
        self,
        report: Callable[[str, bool], Coroutine[Any, Any, None]],
        spawn: Callable[[Coroutine[Any, Any, None]], object],
    ) -> None:
        self._report = report
        self._spawn = spawn
        self._reported: set[SlowableConsumer] = set()

    def add(self, consumer: SlowableConsumer) -> None:
        """Report this consumer as slow until it has recovered."""
        if consumer not in self._reported:
            self._reported.add(consumer)
            self._spawn(self._report_slow(consumer))

    async def _report_slow(self, consumer: SlowableConsumer) -> None:
        loop = asyncio.get_running_loop()
        until = loop.time() + producer_holds.PATIENCE_S
        reported_at = -producer_holds.RENEW_S
        try:
            while consumer.is_slow():
                now = loop.time()
                if now < until and now - reported_at >= producer_holds.RENEW_S:
                    reported_at = now
                    await self._report(consumer.destination.name, False)
                await asyncio.sleep(CHECK_S)
            await self._report(consumer.destination.name, True)
        finally:
            self._reported.discard(consumer)


class ProducerHolds:
    """The topics to which a connection may not send now, because a consumer cannot keep up."""

    def __init__(self, on_released: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_released = on_released
        self._held: dict[str, topics.TopicPattern] = {}
        self._alarms: dict[str, asyncio.TimerHandle] = {}
        self._released = asyncio.Event()
        self.hold_count = 0  # number of times that a producer had to wait

    def __bool__(self) -> bool:
        return bool(self._held)

    def on_report(self, report: protocol.SlowConsumer) -> None:
        try:
            pattern = topics.TopicPattern.parse(report.topic)
        except errors.MusterError:
            return
        if (alarm := self._alarms.pop(report.topic, None)) is not None:
            alarm.cancel()
        if report.recovered:
            self._expire(report.topic)
            return
        self._held[report.topic] = pattern
        self._alarms[report.topic] = self._loop.call_later(producer_holds.HOLD_S, self._expire, report.topic)

    def _expire(self, topic: str) -> None:
        if self._held.pop(topic, None) is None:
            return
        self._alarms.pop(topic, None)
        self._released.set()
        self._on_released()

    def is_held(self, destination: destinations.Destination | None) -> bool:
        if not self._held or destination is None or destination.is_queue:
            return False
        return any(pattern.matches(destination.topic) for pattern in self._held.values())

    async def wait_until_released(self, destination: destinations.Destination) -> None:
        """Wait until messages may be sent to the destination."""
        while self.is_held(destination):
            self.hold_count += 1
            self._released.clear()
            await self._released.wait()
