"""Messages of plain clients, captured for the durable subscriptions that want them."""

from __future__ import annotations

import asyncio
import functools

from muster.bus import api
from muster.core import errors, subjects, topics
from muster.core.telemetry import log
from muster.message import destinations, messages, protocol
from muster.message.dispatcher import delivery, state
from muster.message.dispatcher.log import journal

events = log.EventLog("message")


class TopicCapture:
    def __init__(self, over: state.DispatcherState, deliver: delivery.DeliveryQueue) -> None:
        self._desk = over
        self._deliver = deliver
        self._captured: dict[str, api.Subscription] = {}  # by subject
        self.wanted = asyncio.Event()  # the patterns have changed
        self.dropped = 0
        self._full = False

    async def run(self) -> None:
        while True:
            await self.wanted.wait()
            self.wanted.clear()
            patterns = self._desk.patterns
            required = {subject for text in patterns for subject in topics.TopicPattern.parse(text).subjects}
            for subject in required - self._captured.keys():
                self._captured[subject] = await self._desk.bus.subscribe(
                    subject, handler=functools.partial(self._overhear, subject)
                )
            for subject in self._captured.keys() - required:
                await self._captured.pop(subject).close()
            self._deliver.forget_all_but(set(patterns))

    async def stop(self) -> None:
        for subscription in self._captured.values():
            await subscription.close()

    def _overhear(self, via: str, message: api.Message) -> None:
        if protocol.LOGGED in message.headers:
            return
        try:
            topic = topics.Topic.from_subject(message.subject)
            meta = messages.meta_of(message.data, message.headers)
        except errors.MusterError:
            self.dropped += 1
            return
        for other in self._captured:  # patterns may overlap: the first subscription takes it
            if other == via:
                break
            if subjects.matches(other, message.subject):
                return
        if not self._desk.patterns.matching(topic):
            return
        full = not self._desk.has_room(len(message.data))
        if full and not self._full:
            events.warning("plain-messages-dropped", topic=str(topic), reason="the log of messages is full")
        self._full = full
        if full or self._desk.journal.is_full:
            self.dropped += 1
            return
        self._desk.used_bytes += len(message.data)
        destination = destinations.topic(str(topic))
        if meta.destination is None:
            meta.destination = str(destination)
        raw = messages.encode_meta(meta).decode()
        copies = [self._deliver.copy_to(destination, meta, raw, message.data, due=True)]
        self._desk.journal.add(journal.JournalItem(copies))
