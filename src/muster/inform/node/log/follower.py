"""The follower of the log: applies every record, in order."""

from __future__ import annotations

import asyncio
import contextlib

from muster.bus import api
from muster.core import errors
from muster.inform import protocol
from muster.inform.node import state
from muster.inform.node.log import context_log, page_order, view_writer

RETRY_S = 0.5


class LogFollower:
    """`catch_up` returns when `run`, in a task, has received the whole log."""

    def __init__(self, shared: state.NodeState, writer: view_writer.ViewWriter) -> None:
        self._state = shared
        self._log = shared.log
        self._log.apply_own = self._apply_own
        self._view_writer = writer
        self.malformed = 0

    async def catch_up(self) -> None:
        """Receive the whole log; there is no time limit while it makes progress."""
        shared = self._state
        moved_at_s = shared.now_s()
        while True:
            applied = self._log.applied
            try:
                return await shared.refresh(api.DURABLE_TIMEOUT_S)
            except errors.Unavailable:
                if self._log.applied != applied:
                    moved_at_s = shared.now_s()
                elif shared.now_s() - moved_at_s > 2 * api.DURABLE_TIMEOUT_S:
                    raise
                await asyncio.sleep(RETRY_S)

    async def run(self) -> None:
        shared = self._state
        while True:
            try:
                first = await self._start()
                async with self._log.follow(first) as following:
                    await self._apply_all(following)
            except errors.Dropped:  # trimmed before it was received
                state.events.warning("log-read-again", node=shared.name, applied=self._log.applied)
                await self._view_writer.restart()
            except errors.Unavailable as error:
                state.events.info("log-lost", node=shared.name, error=error)
                await asyncio.sleep(RETRY_S)

    async def _start(self) -> int:
        """The sequence to continue with. What decides whether its records count is read before."""
        log = self._log
        if log.order.is_begun:
            return log.applied + 1
        first = (await log.state()).first_sequence
        if not log.applied:
            self._state.remembers_from_s = -float("inf") if first <= 1 else self._state.now_s()
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
                            self._state.remember_request(entry)
        except BaseException:
            log.order.clear()
            raise
        return log.applied + 1

    async def _apply_all(self, following: api.OrderedConsumer) -> None:
        number = 0
        async for stored in following:
            for subject, data in self.apply(stored):
                with contextlib.suppress(errors.Unavailable):
                    await self._state.bus.publish(subject, data)
            number += 1
            if number % 100 == 0 or self._state.unsaved.is_full:
                await asyncio.sleep(0)  # let other tasks run
                await self._view_writer.wait_for_space()

    def apply(self, stored: api.StoredMessage) -> list[tuple[str, bytes]]:
        """Apply a page. Return the acknowledgements to send: subject and data."""
        log = self._log
        if stored.sequence <= log.applied:
            return []
        sent = log.sent(stored)
        try:
            page = sent.page if sent is not None else context_log.decode_page(stored)
        except errors.InvalidInput as error:
            self.malformed += 1
            state.events.error("invalid-record", sequence=stored.sequence, error=error)
            log.advance(stored.sequence)
            return []
        node = protocol.node_of(stored.subject)
        return self._apply(stored.sequence, node, page, sent, len(stored.data), stored.stored_at_ns)

    def _apply_own(self, sequence: int, sent: context_log.SentPage) -> None:
        shared = self._state
        self._apply(sequence, shared.name, sent.page, sent, len(sent.data), shared.log_now_ns())

    def _apply(
        self,
        sequence: int,
        node: str | None,
        page: protocol.ContextLogPage,
        sent: context_log.SentPage | None,
        size: int,
        stored_at_ns: int,
    ) -> list[tuple[str, bytes]]:
        shared, log = self._state, self._log
        entries = log.add(sequence, node, page)
        if page.fence and node is not None:
            shared.fence(node, page.fence, sequence)
        acknowledgements: list[tuple[str, bytes]] = []
        for entry, counts in entries:
            if not counts:
                continue
            shared.apply(entry, stored_at_ns, just_stamped=sent is not None)
            record = entry.record
            if record.acknowledge and shared.name in record.holders[1:]:
                applied = protocol.ReplicaApplied(shared.name, record.key, record.stamp)
                subject = protocol.to_node(record.holders[0], "applied")
                acknowledgements.append((subject, protocol.encode(applied)))
        log.advance(sequence)
        shared.received(entries, size)
        if sent is not None:
            log.settle(sequence, sent, [counts for _, counts in entries])
        return acknowledgements
