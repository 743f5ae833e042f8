"""The follower of the log: applies every record, in order."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses

from muster.bus import api
from muster.core import errors
from muster.core.telemetry import log as log_
from muster.inform import protocol
from muster.inform.node import change_events
from muster.inform.node.log import context_log, page_order, view_writer
from muster.inform.node.log import executed as requests
from muster.inform.node.log import freshness as log_freshness
from muster.inform.node.replicas import records as replica_records

events = log_.EventLog("inform")

RETRY_S = 0.5


@dataclasses.dataclass(eq=False)
class LogFollower:
    """`catch_up` returns when `run`, in a task, has received the whole log."""

    node: str
    bus: api.Bus
    log: context_log.ContextLog
    records: replica_records.ContextRecords
    executed: requests.ExecutedRequests
    freshness: log_freshness.LogFreshness
    changes: change_events.ChangeEvents
    view_writer: view_writer.ViewWriter

    def __post_init__(self) -> None:
        self.log.apply_own = self._apply_own
        self.malformed = 0

    async def catch_up(self) -> None:
        """Receive the whole log; there is no time limit while it makes progress."""
        moved_at_s = self.freshness.now_s()
        while True:
            applied = self.log.applied
            try:
                return await self.freshness.refresh(api.DURABLE_TIMEOUT_S)
            except errors.Unavailable:
                if self.log.applied != applied:
                    moved_at_s = self.freshness.now_s()
                elif self.freshness.now_s() - moved_at_s > 2 * api.DURABLE_TIMEOUT_S:
                    raise
                await asyncio.sleep(RETRY_S)

    async def run(self) -> None:
        while True:
            try:
                first = await self._start()
                async with self.log.follow(first) as following:
                    await self._apply_all(following)
            except errors.Dropped:  # trimmed before it was received, or lost
                events.warning("log-read-again", node=self.node, applied=self.log.applied)
                await self.view_writer.restart()
            except errors.Unavailable as error:
                events.info("log-lost", node=self.node, error=error)
                await asyncio.sleep(RETRY_S)

    async def _start(self) -> int:
        """The sequence to continue with. What decides whether its records count is read before."""
        log = self.log
        if log.is_replaced:
            raise errors.Dropped("pages were lost", first=1, last=log.applied)
        if log.order.is_begun:
            return log.applied + 1
        first = (await log.state()).first_sequence
        if not log.applied:
            self.executed.since_s = -float("inf") if first <= 1 else self.freshness.now_s()
            log.order.begin(first - 1)
            log.advance(first - 1)
            return first
        if not page_order.is_continued(first, log.applied):
            raise errors.Dropped("pages that decide about later ones were trimmed", first=1, last=first - 1)
        first = max(1, log.applied - page_order.WINDOW)
        log.order.begin(first - 1)
        try:
            async for message in log.read(first, log.applied):
                with contextlib.suppress(errors.InvalidInput):
                    page = context_log.decode_page(message)
                    node = protocol.node_of(message.subject)
                    for entry, counts in log.add(message.sequence, node, page):
                        if counts:
                            self.executed.remember(entry)
        except BaseException:
            log.order.clear()
            raise
        return log.applied + 1

    async def _apply_all(self, following: api.OrderedConsumer) -> None:
        number = 0
        async for stored in following:
            for subject, data in self.apply(stored):
                with contextlib.suppress(errors.Unavailable):
                    await self.bus.publish(subject, data)
            number += 1
            if number % 100 == 0 or self.records.unsaved.is_full:
                await asyncio.sleep(0)  # let other tasks run
                await self.view_writer.wait_for_space()

    def apply(self, stored: api.StoredMessage) -> list[tuple[str, bytes]]:
        """Apply a page. Return the acknowledgements to send: subject and data."""
        log = self.log
        if stored.sequence <= log.applied:
            return []
        sent = log.sent(stored)
        try:
            page = sent.page if sent is not None else context_log.decode_page(stored)
        except errors.InvalidInput as error:
            self.malformed += 1
            events.error("invalid-record", sequence=stored.sequence, error=error)
            log.advance(stored.sequence)
            return []
        node = protocol.node_of(stored.subject)
        return self._apply(stored.sequence, node, page, sent, len(stored.data), stored.stored_at_ns)

    def _apply_own(self, sequence: int, sent: context_log.SentPage) -> None:
        self._apply(sequence, self.node, sent.page, sent, len(sent.data), self.freshness.log_now_ns())

    def _apply(
        self,
        sequence: int,
        node: str | None,
        page: protocol.ContextLogPage,
        sent: context_log.SentPage | None,
        size: int,
        stored_at_ns: int,
    ) -> list[tuple[str, bytes]]:
        log = self.log
        entries = log.add(sequence, node, page)
        if page.fence and node is not None:
            self.records.fence(node, page.fence, sequence)
        acknowledgements: list[tuple[str, bytes]] = []
        for entry, counts in entries:
            if not counts:
                continue
            self.records.apply(entry, stored_at_ns, just_stamped=sent is not None)
            record = entry.record
            if record.acknowledge and self.node in record.holders[1:]:
                applied = protocol.ReplicaApplied(self.node, record.key, record.stamp)
                subject = protocol.to_node(record.holders[0], "applied")
                acknowledgements.append((subject, protocol.encode(applied)))
        log.advance(sequence)
        log.bytes += size
        self.changes.changed(entry.record.key for entry, _ in entries)
        if sent is not None:
            log.settle(sequence, sent, [counts for _, counts in entries])
        return acknowledgements
