"""Leadership of the dispatchers: one process of the domain owns each partition, the others stand by.

Without a second process, this one owns all partitions. With several, each has its share (`membership`), and
takes over the partitions of one that ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Final

from muster.bus import api, leases
from muster.core import errors
from muster.core.telemetry import log, metrics
from muster.message import partitions, producer_holds, settings
from muster.message.dispatcher import dispatcher, rights
from muster.message.dispatcher.log import pages
from muster.message.dispatcher.peers import membership as membership_

events = log.EventLog("message")

RETRY_S: Final = 0.5


class DispatcherLeadership:
    """Acquires the leases of partitions, runs their dispatchers while it holds them, and starts again."""

    def __init__(
        self,
        bus: api.Bus,
        message_settings: settings.MessageSettings | None = None,
        *,
        max_bytes: int = 1 << 30,
        may: rights.May = rights.allow_all,
        lease_ttl_s: float = leases.TTL_S,
        replicas: int = 1,
        measure: metrics.Metrics | None = None,
    ) -> None:
        self._bus = bus
        self._settings = message_settings or settings.MessageSettings()
        self._max_bytes = max_bytes
        self._may = may
        measure = measure or metrics.Metrics()
        self._refused = measure.counter(
            "message_refused_connections", "Rejected connections to the dispatcher, by reason.", ("reason",)
        )
        self._dropped = measure.counter(
            "message_dropped_plain_messages",
            "Messages of plain clients that were not stored for durable subscriptions, by reason.",
            ("reason",),
        )
        self._slow_reports = measure.counter(
            "message_slow_consumer_reports",
            "Reports of slow consumers of topics; refused: their identity has held producers for too long.",
            ("outcome",),
        )
        self._held = measure.counter(
            "message_producer_hold_seconds",
            "Time for which reports of slow consumers held producers, by the consumers' identity.",
            ("identity",),
        )
        self._holds = producer_holds.HoldBudgets(self._count_slow_report)
        self._lease_ttl_s = lease_ttl_s
        self._replicas = replicas
        self._partition_count = 0  # unknown
        self.acting = asyncio.Event()  # set while this process owns a partition
        self.owned: set[int] = set()  # the partitions that this process owns

    @property
    def problem(self) -> str:
        """Why the settings do not apply; empty if they do."""
        actual, requested = self._partition_count, self._settings.partitions
        if actual in (0, requested):
            return ""
        return (
            f"message.partitions is {requested}, but the queues of this domain are divided into {actual} "
            "partitions; the number is fixed when the domain first starts"
        )

    def _count_slow_report(self, identity: str, decision: producer_holds.HoldDecision, held_s: float) -> None:
        self._slow_reports.add(outcome=decision.value)
        if held_s:
            self._held.add(held_s, identity=identity)

    async def run(self) -> None:
        while True:
            try:
                await self._run()
            except errors.Unavailable as error:  # for example brokers without a leader: temporary
                if self._bus.state is api.ConnectionState.CLOSED:
                    raise
                events.warning("dispatcher-waiting", error=error)
            await asyncio.sleep(RETRY_S)

    async def _run(self) -> None:
        async with await leases.Leases.open(
            self._bus, ttl_s=self._lease_ttl_s, replicas=self._replicas
        ) as all_leases:
            count = self._partition_count = await self._read_partition_count()
            if problem := self.problem:
                events.warning("partitions-fixed", problem=problem)
            if count == 1:
                await self._lead(all_leases, partitions.HOME, None)
            membership = membership_.Membership(self._bus, count)
            running = [asyncio.ensure_future(membership.run())]
            running += [
                asyncio.ensure_future(self._lead(all_leases, partition, membership))
                for partition in range(count)
            ]
            try:
                await asyncio.gather(*running)
            finally:
                await _end(running)

    async def _read_partition_count(self) -> int:
        """The number of partitions, which the first process of the domain stores."""
        stream = await self._bus.stream(self._stream_settings(partitions.HOME, self._settings.partitions))
        subject = partitions.LogSubjects().layout
        while True:
            last = 0
            async for message in stream.read((await stream.state()).first_sequence, subject=subject):
                last = message.sequence
                if pages.is_page(message.data):
                    ((_, _, held),) = pages.read(message)
                    return int(held.data)
            page = pages.MessagePage(held=[pages.PagedMessage("{}", f"{self._settings.partitions}".encode())])
            try:
                await stream.publish(subject, pages.encode(page), expected_last_subject_sequence=last)
            except errors.Conflict:  # another process was faster
                continue

    def _stream_settings(self, partition: int, count: int) -> api.StreamSettings:
        return api.StreamSettings(
            partitions.stream(partition),
            partitions.LogSubjects(partition).all,
            max_bytes=self._max_bytes // count,
            max_age_s=0,
            on_full=api.FullPolicy.REFUSE,
            replicas=self._replicas,
        )

    async def _lead(
        self, all_leases: leases.Leases, partition: int, membership: membership_.Membership | None
    ) -> None:
        """Own a partition again and again. ``membership`` None: there is only one partition."""
        while True:
            async with await all_leases.acquire(partitions.lease(partition)) as lease:
                if membership is None or membership.should_own(partition):
                    await self._run_dispatcher(lease, partition, membership)
            if membership is not None:  # let the process acquire it that should own it
                await membership.wait_for_change(partition, self._lease_ttl_s)

    async def _run_dispatcher(
        self, lease: leases.Lease, partition: int, membership: membership_.Membership | None
    ) -> None:
        stream_settings = self._stream_settings(partition, self._partition_count)
        stream = await self._bus.stream(stream_settings)
        acting = asyncio.ensure_future(
            dispatcher.Dispatcher(
                self._bus,
                stream,
                lease.epoch,
                self._settings,
                self._may,
                stream_settings.max_bytes,
                on_refused=lambda reason: self._refused.add(reason=reason),
                on_dropped=lambda reason: self._dropped.add(reason=reason),
                holds=self._holds,
                partition=partition,
                partition_count=self._partition_count,
            ).run()
        )
        ends = [acting, asyncio.ensure_future(_wait(lease.lost))]
        if membership is not None:
            ends.append(asyncio.ensure_future(membership.wait_to_give_way(partition)))
        self.owned.add(partition)
        self.acting.set()
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if acting.done():
                acting.result()
        except errors.MusterError as error:  # after any error, the next dispatcher reads the log again
            events.warning("dispatcher-interrupted", partition=partition, epoch=lease.epoch, error=error)
            if not isinstance(error, errors.Unavailable | errors.Conflict):
                await asyncio.sleep(RETRY_S)
        finally:
            self.owned.discard(partition)
            if not self.owned:
                self.acting.clear()
            await _end(ends)


async def _end(running: Iterable[asyncio.Future[None]]) -> None:
    """Cancel tasks once and wait for their end: a second cancellation would interrupt their clean-up."""
    for task in running:
        if not (isinstance(task, asyncio.Task) and task.cancelling()):
            task.cancel()
    await asyncio.gather(*running, return_exceptions=True)


async def _wait(event: asyncio.Event) -> None:
    await event.wait()
