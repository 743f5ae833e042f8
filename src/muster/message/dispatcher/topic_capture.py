"""Stores messages of plain clients for the durable subscriptions that select them."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable

from muster.bus import api
from muster.core import errors, subjects, topics
from muster.core.telemetry import log
from muster.message import codec, destinations, messages, moved_messages, protocol
from muster.message.dispatcher import delivery
from muster.message.dispatcher.log import journal, message_log

events = log.EventLog("message")


class TopicCapture:
    def __init__(
        self,
        bus: api.Bus,
        log: message_log.MessageLog,
        delivery_queue: delivery.DeliveryQueue,
        on_dropped: Callable[[str], None],
    ) -> None:
        """``on_dropped`` is called with the reason why a message is not stored."""
        self._bus = bus
        self._log = log
        self._delivery = delivery_queue
        self._captured: dict[str, api.Subscription] = {}  # by subject
        self.patterns_changed = asyncio.Event()
        self._drop = on_dropped
        self._full = False

    async def run(self) -> None:
        while True:
            await self.patterns_changed.wait()
            self.patterns_changed.clear()
            patterns = self._log.patterns
            required = {subject for text in patterns for subject in topics.TopicPattern.parse(text).subjects}
            for subject in required - self._captured.keys():
                self._captured[subject] = await self._bus.subscribe(
                    subject, handler=functools.partial(self._capture_message, subject)
                )
            for subject in self._captured.keys() - required:
                await self._captured.pop(subject).close()
            self._delivery.retain_only(set(patterns))

    async def stop(self) -> None:
        for subscription in self._captured.values():
            await subscription.close()

    def _capture_message(self, via: str, message: api.Message) -> None:
        if protocol.LOGGED in message.headers:
            return
        try:
            topic = topics.Topic.from_subject(message.subject)
            meta = codec.meta_of(message.data, message.headers)
        except errors.MusterError:
            self._drop("malformed")
            return
        for other in self._captured:  # patterns may overlap: the first subscription captures it
            if other == via:
                break
            if subjects.matches(other, message.subject):
                return
        if not self._log.patterns.matching(topic):
            return
        full = not self._log.has_room(len(message.data))
        if full and not self._full:
            events.warning("plain-messages-dropped", topic=str(topic), reason="the log of messages is full")
        self._full = full
        if full or self._log.journal.is_full:
            self._drop("full")
            return
        destination = destinations.topic(str(topic))
        moved_messages.correct(meta, str(destination))
        meta.destination = str(destination)
        raw = messages.encode_meta(meta).decode()
        if len(raw) + len(message.data) > protocol.LARGE_BYTES + protocol.HEADER_BYTES_MAX:
            self._drop("too-large")
            return
        self._log.used_bytes += len(message.data)
        copies = [self._delivery.copy_to(destination, meta, raw, message.data, due=True)]
        self._log.journal.add(journal.JournalItem(copies, failed=lambda _: self._drop("not-stored")))
