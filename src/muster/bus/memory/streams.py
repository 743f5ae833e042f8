"""Handles on simulated streams: each call is a request over the simulated network."""

from __future__ import annotations

import abc
import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Self

from muster.bus import api, message_format
from muster.bus.streams import key_value, publisher
from muster.core import errors, lifecycle

if TYPE_CHECKING:
    from muster.bus.memory import connection

PAGE = 500
LOOK_AGAIN_S = 5.0
REPLAYED_AT_ONCE = 2  # a replay takes several steps, between which others write, as with brokers
RETRY_S = 0.25


class SimulatedStream(publisher.StreamPublisher):
    """See `api.Stream`."""

    def __init__(self, bus: connection.SimulatedBus, name: str) -> None:
        self._bus = bus
        self._net = bus.net
        self._name = name

    @property
    def name(self) -> str:
        return self._name

    # Writing.

    async def publish_batch(
        self, messages: Sequence[api.OutgoingMessage], *, timeout_s: float = api.DURABLE_TIMEOUT_S
    ) -> int:
        message_format.check_count(len(messages))
        log = self._net.logs.get(self._name)
        for message in messages:
            message_format.check_outgoing(message)
            if log is not None and not log.covers(message.subject):
                raise errors.InvalidInput(f"the stream {self._name!r} does not cover {message.subject!r}")
        traced = [_traced(message) for message in messages]
        try:
            return await self._bus.call(
                lambda: self._net.store(self._name, traced, self._bus.node),
                timeout_s=timeout_s,
                repeat=all(message.message_id is not None for message in messages),
            )
        except errors.LimitExceeded:
            self._bus.count_full()
            raise

    async def delete(self, sequence: int) -> None:
        await self._bus.call(lambda: self._net.log(self._name).remove(sequence))

    async def purge(self, *, subject: str | None = None, before: int | None = None) -> int:
        return await self._bus.call(lambda: self._net.log(self._name).purge(subject, before))

    # Reading.

    async def state(self) -> api.StreamState:
        return await self._bus.call(lambda: self._net.log(self._name).state(self._net.now_ns()))

    async def get(self, sequence: int) -> api.StoredMessage:
        if sequence < 1:
            raise errors.InvalidInput("sequences begin with 1")
        message = await self._bus.call(lambda: self._net.log(self._name).messages.get(sequence))
        if message is None:
            raise errors.NotFound(f"{self._name!r} does not hold {sequence}")
        return message

    async def last_for(self, subject: str) -> api.StoredMessage | None:
        message_format.check_subject(subject)

        def operation() -> api.StoredMessage | None:
            log = self._net.log(self._name)
            return log.messages.get(log.last_of(subject))

        return await self._bus.call(operation)

    async def page(
        self, first: int, patterns: Sequence[str]
    ) -> tuple[list[api.StoredMessage], api.StreamState]:
        def operation() -> tuple[list[api.StoredMessage], api.StreamState]:
            log = self._net.log(self._name)
            return log.page(first, patterns, PAGE), log.state(self._net.now_ns())

        return await self._bus.call(operation)

    async def read(
        self, first: int, last: int | None = None, *, subject: str | None = None, gaps: bool = False
    ) -> AsyncIterator[api.StoredMessage]:
        if first < 1:
            raise errors.InvalidInput("sequences begin with 1")
        end = (await self.state()).last_sequence
        if last is not None and last > end:
            raise errors.NotFound(f"{self._name!r} ends at {end}: {last} is not stored yet")
        last = end if last is None else last
        strict = subject is None and not gaps
        position = first
        while position <= last:
            page, state = await self.page(position, (subject,) if subject else ())
            if not strict and state.first_sequence > position:
                raise self.dropped(position, state.first_sequence - 1)
            for message in page:
                if strict and message.sequence != position:
                    raise self.dropped(position, min(last, message.sequence - 1))
                if message.sequence > last:
                    return
                yield message
                position = message.sequence + 1
            if not page:
                break
        if strict and position <= last:
            raise self.dropped(position, last)

    def check_open(self) -> None:
        self._bus.check_open()

    def dropped(self, first: int, last: int) -> errors.Dropped:
        return errors.Dropped(
            f"{self._name!r} does not hold {first} to {last} any more", first=first, last=last
        )

    def follow(
        self, first: int, *, subject: str | None = None, gaps: bool = False
    ) -> SimulatedOrderedConsumer:
        if first < 1:
            raise errors.InvalidInput("sequences begin with 1")
        patterns = (subject,) if subject is not None else ()
        return SimulatedOrderedConsumer(self, first, patterns, strict=subject is None and not gaps)

    def last_of_each(self, pattern: str, *, headers_only: bool) -> LastOfEach:
        del headers_only  # nothing to be saved here
        return LastOfEach(self, pattern)

    async def wait_for_change(self, seen: int, timeout_s: float) -> None:
        """Return when the stream has changed since its last sequence was ``seen``, or soon."""
        log = self._net.logs.get(self._name)
        if log is not None and log.last == seen:
            try:
                async with asyncio.timeout(timeout_s):
                    await self._net.changed(self._name).wait()
            except TimeoutError:
                return

    async def newest_of_each(self, pattern: str) -> list[int]:
        return await self._bus.call(lambda: self._net.log(self._name).last_of_each(pattern))

    async def some_of(
        self, sequences: Sequence[int], first: int, patterns: Sequence[str]
    ) -> tuple[list[api.StoredMessage], int, api.StreamState]:
        """A few of ``sequences`` that still exist, or of those from ``first`` on if none is left; and how
        many of ``sequences`` have been processed."""

        def operation() -> tuple[list[api.StoredMessage], int, api.StreamState]:
            log = self._net.log(self._name)
            if sequences:
                count = self._net.random.randint(1, REPLAYED_AT_ONCE + len(sequences) // 4)
                looked_at = sequences[:count]
                there = (log.messages.get(sequence) for sequence in looked_at)
                return (
                    [message for message in there if message],
                    len(looked_at),
                    log.state(self._net.now_ns()),
                )
            return log.page(first, patterns, PAGE), 0, log.state(self._net.now_ns())

        return await self._bus.call(operation)

    @property
    def connection(self) -> api.ConnectionId | None:
        return self._bus.connection


def _traced(message: api.OutgoingMessage) -> api.OutgoingMessage:
    headers = dict(message_format.with_trace_headers(message.headers))
    message_format.encode_headers(headers)
    return api.OutgoingMessage(
        message.subject,
        message.data,
        headers,
        message.message_id,
        message.expected_last_sequence,
        message.expected_last_subject_sequence,
        message.ttl_s,
    )


class _Reading(lifecycle.ClosingContext):
    """Reads the stream repeatedly, and waits for its next change in between."""

    def __init__(self, stream: SimulatedStream) -> None:
        self._stream = stream
        self._ready: deque[api.StoredMessage | key_value.Mark] = deque()
        self._closed = asyncio.Event()

    async def step(self) -> api.StoredMessage | key_value.Mark:
        while not self._ready:
            if self._closed.is_set():
                raise StopAsyncIteration
            try:
                await self._look()
            except errors.Unavailable:
                self._stream.check_open()
                await asyncio.sleep(RETRY_S)
        return self._ready.popleft()

    @abc.abstractmethod
    async def _look(self) -> None:
        """Return the next `_ready` message, or wait for it."""

    async def _change(self, last: int) -> None:
        """Wait until the stream does not end with ``last`` any more, or this is closed, or for a while."""
        changing = asyncio.ensure_future(self._stream.wait_for_change(last, LOOK_AGAIN_S))
        closing = asyncio.ensure_future(self._closed.wait())
        try:
            await asyncio.wait((changing, closing), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for waiting in (changing, closing):
                waiting.cancel()
            await asyncio.gather(changing, closing, return_exceptions=True)

    async def close(self) -> None:
        self._closed.set()


class SimulatedOrderedConsumer(_Reading):
    """See `api.OrderedConsumer`."""

    def __init__(self, stream: SimulatedStream, first: int, patterns: Sequence[str], *, strict: bool) -> None:
        super().__init__(stream)
        self._next = first
        self._patterns = tuple(patterns)
        self._strict = strict

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> api.StoredMessage:
        message = await self.step()
        assert isinstance(message, api.StoredMessage)
        return message

    async def _look(self) -> None:
        page, state = await self._stream.page(self._next, self._patterns)
        if state.first_sequence > self._next:
            position = self._next
            if not self._strict:
                self._next = state.first_sequence  # a new iteration gets the remaining messages
            raise self._stream.dropped(position, state.first_sequence - 1)
        for message in page:
            if self._strict and message.sequence != self._next:
                raise self._stream.dropped(self._next, message.sequence - 1)
            self._ready.append(message)
            self._next = message.sequence + 1
        if not page:
            await self._change(state.last_sequence)


class LastOfEach(_Reading):
    """See `key_value.BucketMessages`: as weak as a broker's consumer.

    A replay has the sequences that existed at its start, and takes time: a value that is replaced during the
    replay is missing from it, and follows later. Over a new connection, and after a failure, another replay
    begins.
    """

    def __init__(self, stream: SimulatedStream, pattern: str) -> None:
        super().__init__(stream)
        self._pattern = pattern
        self._over: api.ConnectionId | None = None
        self._replay: list[int] = []
        self._current = False
        self._next = 1

    async def _look(self) -> None:
        if self._over is None or self._over != self._stream.connection:
            over = self._stream.connection
            self._replay = await self._stream.newest_of_each(self._pattern)
            self._over, self._next, self._current = over, 1, False
            self._ready.append(key_value.Mark.REPLAY)
            if self._replay:
                self._next = self._replay[-1] + 1
            return
        try:
            page, looked_at, state = await self._stream.some_of(self._replay, self._next, (self._pattern,))
        except errors.Unavailable:
            self._over = None
            raise
        del self._replay[:looked_at]
        for message in page:
            self._ready.append(message)
            self._next = max(self._next, message.sequence + 1)
        if not self._replay and not looked_at and not page:
            if self._current:
                await self._change(state.last_sequence)
            else:
                self._current = True
                self._ready.append(key_value.Mark.CURRENT)
