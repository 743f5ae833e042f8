"""Reads the log for backlogs: for their index, for new selectors, and the messages to deliver.

Each backlog has at most two tasks here, one that indexes and one that reads messages. They end with the
backlog, or when it is unloaded: another backlog with the same key reads for itself. Memory is bounded by the
cache, whatever the depth of a queue.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from muster.core import topics
from muster.core.telemetry import log
from muster.message import messages, selectors
from muster.message.dispatcher import backlog
from muster.message.dispatcher import lifetime as lifetime_
from muster.message.dispatcher.index import lines
from muster.message.dispatcher.log import journal, ledger, message_cache, message_log

events = log.EventLog("message")

READ_AHEAD: Final = 1000  # messages read at one time, for each line: about a page
READ_AHEAD_BYTES: Final = 2 << 20
PATIENCE_S = 5.0  # then messages are delivered although higher priorities may not be indexed yet


class BacklogReader:
    """``pump`` is called when a backlog can deliver more, ``on_live`` when it has been indexed completely."""

    def __init__(
        self,
        log: message_log.MessageLog,
        lifetime: lifetime_.DispatcherLifetime,
        cache: message_cache.MessageCache,
        pump: Callable[[backlog.Backlog], None],
        on_live: Callable[[backlog.Backlog], None],
    ) -> None:
        self._log = log
        self._lifetime = lifetime
        self._ledger = log.ledger
        self._cache = cache
        self._pump = pump
        self._on_live = on_live
        self._indexing: dict[backlog.Backlog, asyncio.Task[None]] = {}
        self._reading: dict[backlog.Backlog, asyncio.Task[None]] = {}
        self._callbacks: list[tuple[list[backlog.Backlog], Callable[[], None]]] = []
        self.may_read = asyncio.Event()  # cleared while too much waits to be sent
        self.may_read.set()

    def start(self, source: backlog.Backlog) -> None:
        """Read what the backlog needs now."""
        if not source.consumers:
            return
        if source not in self._indexing and (not source.live or source.unscanned_line() is not None):
            self._indexing[source] = self._lifetime.spawn(self._index(source))
        if source not in self._reading and source.is_blocked:
            self._reading[source] = self._lifetime.spawn(self._read_wanted(source))

    def stop(self, source: backlog.Backlog) -> None:
        """Nothing is read for the backlog any more: it has been replaced, or its index is dropped."""
        for running in (self._indexing, self._reading):
            if (task := running.pop(source, None)) is not None:
                task.cancel()
        self._call_back()

    def when_read(self, sources: list[backlog.Backlog], act: Callable[[], None]) -> None:
        """Call ``act`` when nothing is being read for these backlogs."""
        if self._indexing.keys().isdisjoint(sources) and self._reading.keys().isdisjoint(sources):
            act()
        else:
            self._callbacks.append((sources, act))

    def _call_back(self) -> None:
        waiting, self._callbacks = self._callbacks, []
        for sources, act in waiting:
            self.when_read(sources, act)

    # The index.

    async def _index(self, source: backlog.Backlog) -> None:
        early_at = self._lifetime.loop.time() + PATIENCE_S
        while source.consumers:
            if not source.live:
                if self._cache.covers(source.position):
                    self._index_rest(source)
                else:
                    await self._index_until(source, self._ledger.end, early_at)
            elif (line := source.unscanned_line()) is not None:
                await self._scan(source, line, early_at)
            else:
                source.early = False
                break
            self._pump(source)
        del self._indexing[source]
        self.start(source)
        self._call_back()

    def _index_rest(self, source: backlog.Backlog) -> None:
        """Index the end of the log, which is in memory, in one step: the backlog is live."""
        subscription = self._ledger.subscriptions.get(source.key)
        for number, copy in self._cache.after(source.position):
            if subscription is None:
                if copy.destination.is_queue and ledger.queue_key(copy.destination.name) == source.key:
                    source.arrive(number, copy.meta)
            elif not copy.destination.is_queue and subscription.pattern.matches(copy.destination.topic):
                self._index_for_subscription(source, subscription, number, copy.meta)
        source.position = max(source.position, self._ledger.end)
        self._on_live(source)

    async def _index_until(self, source: backlog.Backlog, end: int, early_at: float) -> None:
        subscription = self._ledger.subscriptions.get(source.key)
        cached = 0
        async for together in self._log.reader.read(self._subject(source), source.position + 1):
            for number, subject, held in together:
                if number <= source.position:
                    continue
                if number > end:
                    break
                if subscription is not None and not self._matches_topic(subscription, subject):
                    continue
                meta = messages.decode_meta(held.raw)
                if subscription is None:
                    source.arrive(number, meta)
                elif not self._index_for_subscription(source, subscription, number, meta):
                    continue
                if cached < READ_AHEAD_BYTES:  # the first ones are delivered soon
                    cached += len(held.data)
                    self._cache.add_read(number, meta, held.raw, held.data)
            await self._pause(source, early_at)
        source.position = max(source.position, end)

    def _index_for_subscription(
        self,
        source: backlog.Backlog,
        subscription: ledger.DurableSubscription,
        number: int,
        meta: messages.MessageMeta,
    ) -> bool:
        """Whether the subscription receives the message."""
        if self._ledger.wants(source.key, meta) and selectors.accepts(subscription.selector, meta):
            source.matched += 1
            source.arrive(number, meta)
            return True
        source.rejected += 1
        source.position = max(source.position, number)
        return False

    async def _scan(self, source: backlog.Backlog, line: lines.SelectorLine, early_at: float) -> None:
        """Compare a new selector with the messages that were indexed before."""
        first, end = source.pending.first, line.unscanned
        if first is not None and first <= end:
            if self._cache.covers(first - 1):
                for number, copy in self._cache.after(first - 1):
                    if number <= end:
                        source.scan(line, number, copy.meta)
            else:
                async for together in self._log.reader.read(self._subject(source), first, end):
                    for number, _, held in together:
                        if number <= end and number in source.pending:
                            source.scan(line, number, messages.decode_meta(held.raw))
                    if not line.users:
                        return  # its consumer was detached
                    await self._pause(source, early_at)
        source.scanned(line)

    async def _pause(self, source: backlog.Backlog, early_at: float) -> None:
        """Let other tasks run, and do not let consumers wait for the end of a long log."""
        await asyncio.sleep(0)
        if self._lifetime.loop.time() > early_at:
            source.early = True
            source.wake()
            self._pump(source)

    def _subject(self, source: backlog.Backlog) -> str:
        if (subscription := self._ledger.subscriptions.get(source.key)) is not None:
            return self._log.subjects.topic(subscription.pattern.cover)
        return self._log.subjects.queue(source.key.removeprefix(ledger.QUEUE_MARK))

    def _matches_topic(self, subscription: ledger.DurableSubscription, subject: str) -> bool:
        topic = topics.Topic.from_subject(self._log.subjects.of_topic(subject))
        return subscription.pattern.matches(topic)

    # Messages.

    async def get(self, source: backlog.Backlog, number: int) -> backlog.LoadedMessage | None:
        """A message of the log; None if the log does not contain it."""
        if self._cache.get(number) is None:
            await self._read(source, [number])
        return self._cache.get(number)

    async def _read_wanted(self, source: backlog.Backlog) -> None:
        while source.consumers and source.is_blocked:
            if numbers := source.next_to_read(READ_AHEAD, self._cache.get):
                self._finish_missing(source, await self._read(source, numbers))
            source.unblock()
            self._pump(source)
            await self.may_read.wait()
        del self._reading[source]
        self.start(source)
        self._call_back()

    async def _read(self, source: backlog.Backlog, numbers: list[int]) -> list[int]:
        """Read the first of these messages into the cache; returns those that the log does not contain."""
        missing: list[int] = []
        size = 0
        async for of_page, messages_there in self._log.reader.find(self._subject(source), numbers):
            for number, _, held in messages_there:
                of_page.discard(number)
                self._cache.add_read(number, messages.decode_meta(held.raw), held.raw, held.data)
                size += len(held.data)
            missing += of_page
            if size > READ_AHEAD_BYTES:
                break
        return missing

    def _finish_missing(self, source: backlog.Backlog, missing: list[int]) -> None:
        """Messages that were removed from the log by other means than the dispatcher are done. Those that
        are done already may have been removed by it since.
        """
        numbers = [number for number in missing if not source.is_done(number) and source.withdraw(number)]
        if not numbers:
            return
        events.warning("messages-missing", backlog=source.key, count=len(numbers), first=numbers[0])
        self._log.journal.add(
            journal.JournalItem(
                [],
                ledger.LogRecord(acked={source.key: numbers}),
                failed=lambda _: source.cancel_finish(numbers),
            )
        )
