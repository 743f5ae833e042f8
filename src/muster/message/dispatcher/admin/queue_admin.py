"""Queue administration: list, browse, purge and move messages."""

from __future__ import annotations

import asyncio
import difflib
import functools
import itertools
import sys
from collections.abc import Callable
from typing import Final

from muster.core import errors
from muster.message import (
    destinations,
    listings,
    messages,
    moved_messages,
    partitions,
    protocol,
    selectors,
    settings,
)
from muster.message import errors as message_errors
from muster.message.dispatcher import clients, delivery, rights
from muster.message.dispatcher.log import journal, ledger, message_log, pages

BROWSE_MAX: Final = 1000
BROWSE_SKIPPED_MAX = 10_000  # messages that a selector does not match, in one request
AT_ONCE: Final = 16  # messages or rows: looked at in a tenth of a millisecond
EXPIRY_SKIPPED_MAX = 10_000  # of one queue, in one search for expired messages
BATCH_MESSAGES: Final = 500  # messages moved or purged in one batch
BATCH_BYTES: Final = 4 << 20
FORGET_S = 600.0  # an empty queue is forgotten when unused for this long
FORGET_BATCH: Final = 100  # queues forgotten at one time
COMPARED_MAX: Final = 1000  # queues that are compared with an unknown name

Waiting = list[tuple[int, messages.MessageMeta, pages.PagedMessage]]


class QueueAdmin:
    def __init__(
        self,
        log: message_log.MessageLog,
        message_rights: rights.MessageRights,
        client_table: clients.ClientTable,
        message_settings: settings.MessageSettings,
        delivery_queue: delivery.DeliveryQueue,
    ) -> None:
        self._log = log
        self._ledger = log.ledger
        self._rights = message_rights
        self._clients = client_table
        self._settings = message_settings
        self._delivery = delivery_queue
        self._counted_at = 0.0
        self._counts: dict[str, tuple[int, int]] = {}  # by queue: messages stored and delivered
        self._rates: dict[str, tuple[float, float]] = {}
        # By queue: its counts, and since when
        self._idle: dict[str, tuple[tuple[int, int], float]] = {}

    def update_rates(self, now: float) -> None:
        """Called periodically: rates refer to the time since the last call."""
        took_s, self._counted_at = now - self._counted_at, now
        counts, rates = {}, {}
        for key in self._ledger.depths:
            stored, delivered = self._ledger.stored.get(key, 0), self._ledger.backlogs[key].delivered
            before = self._counts.get(key, (stored, delivered))
            counts[key] = (stored, delivered)
            rates[key] = (round((stored - before[0]) / took_s, 1), round((delivered - before[1]) / took_s, 1))
        self._counts, self._rates = counts, rates

    async def forget_idle_queues(self, now: float) -> None:
        """Forget empty, unused queues. Called periodically, because clients may use any number of queue
        names.

        A queue starts anew with its next message, so the log must not contain any of its messages. That is
        the case some time after the last one was acknowledged, when a checkpoint has trimmed the log.
        """
        before, self._idle = self._idle, {}
        for key, queue in self._ledger.backlogs.items():
            if key.startswith(ledger.QUEUE_MARK) and self._is_idle(key):
                counts = (self._ledger.stored.get(key, 0), queue.delivered)
                was, since = before.get(key, (counts, now))
                self._idle[key] = (counts, since if was == counts else now)
        old = [key for key, (_, since) in self._idle.items() if now - since > FORGET_S]
        for key in old[:FORGET_BATCH]:
            subject = self._log.subjects.queue(key.removeprefix(ledger.QUEUE_MARK))
            if subject in self._log.shared_pages or await self._log.stream.last_for(subject) is not None:
                self._idle[key] = (self._idle[key][0], now)
            elif (
                self._is_idle(key)
                and self._ledger.stored.get(key, 0) == self._idle[key][0][0]  # none since the broker answered
                and not self._has_pending_consumer(key)
            ):
                self._ledger.forget(key)

    def _is_idle(self, key: str) -> bool:
        return not self._ledger.depths.get(key) and key not in self._ledger.consumed

    def _has_pending_consumer(self, key: str) -> bool:
        """Whether a consumer is being attached."""
        return any(key in connection.consumers.values() for connection in self._clients.connections.values())

    async def queue_rows(self, reader: str) -> list[listings.QueueRow]:
        """The queues on which the reader has any permission."""
        rows = []
        for at, (key, depth) in enumerate(sorted(self._ledger.depths.items()), 1):
            if at % AT_ONCE == 0:
                await asyncio.sleep(0)  # other requests have their turn
            name, queue = key.removeprefix(ledger.QUEUE_MARK), self._ledger.backlogs.get(key)
            if queue is None or not self._may_see(reader, name):
                continue
            rows.append(
                listings.QueueRow(
                    queue=name,
                    depth=depth,
                    consumers=len(queue.consumers),
                    in_flight=sum(len(consumer.held) for consumer in queue.consumers.values()),
                    in_per_s=self._rates.get(key, (0.0, 0.0))[0],
                    out_per_s=self._rates.get(key, (0.0, 0.0))[1],
                    delivered=queue.delivered,
                    expired=queue.expired,
                    matched=queue.matched,
                    rejected=queue.rejected,
                    partition=self._log.partition,
                    owner=partitions.owner(),
                )
            )
        return rows

    def _may_see(self, reader: str, queue: str) -> bool:
        if queue.startswith(destinations.TEMPORARY):  # every client that has its name may send to it
            return self._rights.may_browse(reader, queue)
        return any(self._rights.may(reader, right, queue) for right in ("browse", "receive", "send", "admin"))

    async def subscription_rows(self, reader: str) -> list[listings.SubscriptionRow]:
        """The subscriptions that the reader made, or all if it may list them."""
        rows = []
        sees_all = self._rights.may(reader, "subscriptions", "list")
        for at, (key, subscription) in enumerate(sorted(self._ledger.subscriptions.items()), 1):
            if at % AT_ONCE == 0:
                await asyncio.sleep(0)
            queue = self._ledger.backlogs.get(key)
            if queue is None or not (sees_all or subscription.identity == reader):
                continue
            rows.append(
                listings.SubscriptionRow(
                    subscription=subscription.name,
                    identity=subscription.identity,
                    client_id=subscription.client_id,
                    topic=subscription.topic,
                    selector=subscription.selector,
                    shared=subscription.shared,
                    consumers=len(queue.consumers),
                    waiting=len(queue.pending),
                    behind=0 if queue.live else self._ledger.head - pages.sequence_of(queue.position),
                    delivered=queue.delivered,
                    matched=queue.matched,
                    rejected=self._delivery.rejected(queue),
                )
            )
        return rows

    async def _waiting(
        self,
        queue: str,
        selector: str | None,
        after: int,
        limit: int,
        *,
        expired: bool = False,
        skipped_max: int = sys.maxsize,
    ) -> tuple[Waiting, list[int], int]:
        """Unacknowledged messages in log order, the numbers of those skipped between them, and the last
        number that was read; 0: the end of the queue was reached.

        At most ``limit``, and at most one batch of the log. ``expired``: only expired messages; otherwise
        only others.
        """
        queue_backlog = self._ledger.queue(queue)
        waiting: Waiting = []
        left: list[int] = []
        total = 0
        begin = max(after, queue_backlog.floor) + 1
        if queue_backlog.live:  # skip pages whose messages are all done
            following = queue_backlog.pending.neighbours(begin - 1)[1]
            if following is None:
                return waiting, left, 0
            begin = following
        async for together in self._log.reader.read(self._log.subjects.queue(queue), begin):
            for at, (number, _, held) in enumerate(together, 1):
                if at % AT_ONCE == 0:
                    await asyncio.sleep(0)
                if number < begin or queue_backlog.is_done(number):
                    continue
                meta = messages.decode_meta(held.raw)
                gone = bool(meta.expiration_ms) and meta.expiration_ms <= messages.now_ms()
                if gone is not expired or not selectors.accepts(selector, meta):
                    left.append(number)
                    if len(left) >= skipped_max:
                        return waiting, left, number
                    continue
                waiting.append((number, meta, held))
                total += len(held.data)
                if len(waiting) >= limit or total > BATCH_BYTES:
                    return waiting, left, number
        return waiting, left, 0

    def _check_exists(self, queue: str, reader: str) -> None:
        """A queue exists from its first use until `forget_idle_queues`; that of dead letters always does."""
        if ledger.queue_key(queue) in self._ledger.backlogs or queue == destinations.DEAD_LETTERS:
            return
        keys = itertools.islice(self._ledger.depths, COMPARED_MAX)
        names = [name for key in keys if self._may_see(reader, name := key.removeprefix(ledger.QUEUE_MARK))]
        near = difflib.get_close_matches(queue, names, 2)
        raise message_errors.InvalidDestination(
            f"there is no queue {queue!r}",
            hint=f"did you mean {' or '.join(near)}?" if near else None,
        )

    async def browse(self, request: protocol.BrowseQueue, reader: str) -> protocol.DispatcherReply:
        if request.selector:
            selectors.compiled(request.selector)
        limit = min(max(request.limit, 1), BROWSE_MAX)
        key = ledger.queue_key(request.queue)
        deliveries: list[protocol.MessageDelivery] = []
        total = reached = 0
        await self._log.store(journal.JournalItem())  # store everything received before the request
        if request.must_exist:
            self._check_exists(request.queue, reader)
        if key in self._ledger.backlogs:
            waiting, _, reached = await self._waiting(
                request.queue, request.selector, request.after, limit, skipped_max=BROWSE_SKIPPED_MAX
            )
            for number, _, held in waiting:
                total += len(held.data) + len(held.raw)
                if deliveries and total > delivery.BATCH_BYTES:
                    reached = deliveries[-1].sequence
                    break
                deliveries.append(protocol.MessageDelivery(0, key, number, 0, held.raw, held.data))
        return protocol.DispatcherReply(messages=deliveries, continue_after=reached)

    async def purge(self, request: protocol.PurgeQueue, reader: str) -> protocol.DispatcherReply:
        return protocol.DispatcherReply(
            count=await self._remove_waiting(
                request.queue, request.selector, 1 << 30, lambda *_: None, reader=reader
            )
        )

    async def move(self, request: protocol.MoveMessages, mover: str) -> protocol.DispatcherReply:
        if request.to == str(destinations.queue(request.queue)):
            raise errors.InvalidInput(f"the messages are already in the queue {request.queue!r}")

        def to(meta: messages.MessageMeta, held: pages.PagedMessage) -> journal.JournalMessage:
            name = request.to or str(meta.properties.get(messages.DEAD_FROM) or "")
            if not name:
                raise errors.InvalidInput("a message that is not a dead letter needs a destination")
            meta, target = moved_messages.moved(meta, name), destinations.Destination.parse(name)
            self._rights.check_may_send(mover, target)
            raw = messages.encode_meta(meta).decode()
            return self._delivery.copy_to(target, meta, raw, held.data, republish=True, due=True)

        count = await self._remove_waiting(request.queue, request.selector, request.limit, to, reader=mover)
        transfers = self._delivery.transfers
        await transfers.wait_done(transfers.last_waiting())
        return protocol.DispatcherReply(count=count)

    async def expire_messages(self, *, everywhere: bool) -> None:
        """Remove expired messages from queues that have a queue for them, as far as `EXPIRY_SKIPPED_MAX`
        others. ``everywhere``: all of them, from all queues. Queues without consumers are not examined
        otherwise, and would fill the log.
        """
        for key, depth in list(self._ledger.depths.items()):
            queue = self._ledger.backlogs.get(key)
            name = key.removeprefix(ledger.QUEUE_MARK)
            if depth and queue is not None and (everywhere or self._settings.queue(name).expired):
                removed = await self._remove_waiting(
                    name,
                    None,
                    1 << 30,
                    functools.partial(self._expired_copy, name),
                    expired=True,
                    skipped_max=sys.maxsize if everywhere else EXPIRY_SKIPPED_MAX,
                )
                queue.expired += removed  # consumers' messages expired meanwhile as well

    def _expired_copy(
        self, queue: str, meta: messages.MessageMeta, held: pages.PagedMessage
    ) -> journal.JournalMessage | None:
        """The copy of an expired message for the queue of these, if there is one."""
        target = self._settings.queue(queue).expired
        return (
            self._delivery.dead_letter(queue, meta, held.data, messages.EXPIRED, target) if target else None
        )

    async def _remove_waiting(
        self,
        queue: str,
        selector: str | None,
        limit: int,
        to: Callable[[messages.MessageMeta, pages.PagedMessage], journal.JournalMessage | None],
        *,
        reader: str = "",
        expired: bool = False,
        skipped_max: int = sys.maxsize,
    ) -> int:
        """Acknowledge waiting messages that no consumer holds, each together with the copy that ``to``
        creates. ``reader``: who named the queue, which must exist then.

        An error after some of them were removed states their number.
        """
        if selector:
            selectors.compiled(selector)
        await self._log.store(journal.JournalItem())  # store everything received before the request
        if reader:
            self._check_exists(queue, reader)
        key = ledger.queue_key(queue)
        queue_backlog = self._ledger.backlogs.get(key)
        count = after = 0
        while queue_backlog is not None and count < limit:
            most = min(BATCH_MESSAGES, limit - count)
            waiting, left, _ = await self._waiting(
                queue, selector, after, most, expired=expired, skipped_max=skipped_max
            )
            queue_backlog = self._ledger.backlogs.get(key)
            if not waiting or queue_backlog is None:
                break
            before, after = after, waiting[-1][0]
            taken: list[int] = []
            copies: list[journal.JournalMessage] = []
            try:
                made = [(number, to(meta, held)) for number, meta, held in waiting]
            except errors.MusterError as error:
                _add_count(error, count)
                raise
            for number, copy in made:
                if queue_backlog.is_done(number):
                    continue  # acknowledged since it was read
                if not queue_backlog.withdraw(number):
                    left.append(number)
                    continue
                taken.append(number)
                if copy is not None:
                    copies.append(copy)
            if not taken:
                continue
            record = ledger.LogRecord(acked={key: taken}, stored=journal.count_by_queue(copies))
            try:
                await self._log.store(journal.JournalItem(copies, record))
            except errors.MusterError as error:
                queue_backlog.cancel_finish(taken)
                self._delivery.pump(queue_backlog)
                _add_count(error, count)
                raise
            queue_backlog.done.cover(max(before, queue_backlog.floor) + 1, after, sorted(left))
            count += len(taken)
        return count


def _add_count(error: errors.MusterError, count: int) -> None:
    """Add the number of messages processed before an error to its message."""
    if count:
        error.message = f"after {count} messages: {error.message}"
