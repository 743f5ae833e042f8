"""A subscription on the reader's side: a bounded queue with a policy, in front of an iterator or a handler.

The receiver (the read loop of the connection, or the simulated network) calls `accept`, which never waits: a
slow reader loses its own messages, by its policy, and does not block the connection. Every dropped message is
counted.

A handler that is a plain function is called directly: no queue, no task. The first time a handler returns an
awaitable, a task awaits it while later messages are queued, and continues until the queue is empty; so
handlers of one subscription never overlap and never change order.

A bulk handler receives the messages of a whole block that was read from the socket at once, without an object
for each of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Self

from muster.bus import api
from muster.bus.client import broker_errors, counters
from muster.core import errors, lifecycle
from muster.core.telemetry import log, trace

events = log.EventLog("bus")

LOG_INTERVAL_S = 10.0  # between two lines about failed handlers of a subscription


def _call_bulk(bulk: api.BulkHandler, message: api.Message) -> None:
    bulk([message.subject.encode()], [message.data])


class BoundedSubscription(lifecycle.ClosingContext):
    """See `api.Subscription`."""

    def __init__(
        self,
        subject: str,
        *,
        handler: api.Handler | None,
        bulk: api.BulkHandler | None = None,
        max_pending: int,
        max_pending_bytes: int,
        overflow: api.OverflowPolicy,
        counts: counters.ConnectionCounters,
    ) -> None:
        if max_pending < 1 or max_pending_bytes < 1:
            raise errors.InvalidInput("a subscription must be allowed at least one pending message")
        self._subject = subject
        if bulk is not None:
            if handler is not None:
                raise errors.InvalidInput("a subscription has one handler")
            handler = functools.partial(_call_bulk, bulk)
        self._handler = handler
        self._bulk = bulk
        self._max_pending = max_pending
        self._max_pending_bytes = max_pending_bytes
        self._overflow = overflow
        self._counts = counts
        self._queue: deque[api.Message] = deque()
        self._queued_bytes = 0
        self._arrived = asyncio.Event()
        self._pump: asyncio.Task[None] | None = None
        self._ended = False
        self._error: errors.MusterError | None = None
        self._unsubscribe: Callable[[], Awaitable[None]] | None = None
        self.on_end: Callable[[], None] | None = None
        self._delivered = self._dropped = self._failed = 0
        self._next_log_s = 0.0
        self.renewed = 0

    @property
    def subject(self) -> str:
        return self._subject

    def __repr__(self) -> str:
        return f"<subscription {self._subject!r} {self.statistics()}>"

    def statistics(self) -> api.SubscriptionStatistics:
        return api.SubscriptionStatistics(
            delivered=self._delivered,
            dropped=self._dropped,
            pending=len(self._queue),
            failed=self._failed,
            renewed=self.renewed,
        )

    # The receiving side.

    def started(self, unsubscribe: Callable[[], Awaitable[None]]) -> None:
        self._unsubscribe = unsubscribe

    def accept(self, message: api.Message) -> None:
        """Receive a message: call the handler, queue it, or drop one by the policy."""
        if self._ended:
            return
        if self._handler is not None and self._pump is None:
            # Invariant: without a pump the queue of a handler's subscription is empty.
            self._delivered += 1
            before, current = None, trace.current
            if (parent := message.trace) is not None or current.get() is not None:
                before = current.set(parent)
            try:
                waiting = self._handler(message)
                if waiting is not None:  # the task inherits the trace
                    self._pump = asyncio.get_running_loop().create_task(self._pump_rest(message, waiting))
            except broker_errors.READER_ERRORS as error:
                self._handler_failed(message.subject, error)
            finally:
                if before is not None:
                    current.reset(before)
            return
        size = message.size
        if self._is_full_for(size) and not self._make_room(size):
            return
        self._queue.append(message)
        self._queued_bytes += size
        self._arrived.set()

    def accept_all(self, subjects: Sequence[bytes], data: Sequence[bytes]) -> None:
        """As `accept`, for the bulk handler."""
        if self._ended or self._bulk is None:
            return
        self._delivered += len(data)
        try:
            self._bulk(subjects, data)
        except broker_errors.READER_ERRORS as error:
            self._handler_failed(subjects[0].decode("utf-8", "replace"), error)

    def _is_full_for(self, size: int) -> bool:
        return len(self._queue) >= self._max_pending or self._queued_bytes + size > self._max_pending_bytes

    def _make_room(self, size: int) -> bool:
        """Apply the policy to a full queue; False where the new message is the one to go."""
        if self._overflow is api.OverflowPolicy.DROP_OLDEST and size <= self._max_pending_bytes:
            while self._is_full_for(size):
                self._queued_bytes -= self._queue.popleft().size
                self._drop()
            return True
        self._drop()
        if self._overflow is api.OverflowPolicy.CLOSE:
            self.end(
                errors.Overloaded(
                    f"the reader of {self._subject!r} is more than {self._max_pending} messages or "
                    f"{self._max_pending_bytes} bytes behind; its policy is to close the subscription "
                    "instead of dropping messages"
                )
            )
            if self._unsubscribe is not None:
                self._closing = asyncio.get_running_loop().create_task(self._leave())
        return False

    def _drop(self) -> None:
        if self._dropped == 0:
            events.warning("slow-reader", subscription=self._subject, policy=self._overflow.value)
        self._dropped += 1
        self._counts.add(counters.ConnectionCounter.DROPPED)

    def end(self, error: errors.MusterError | None = None) -> None:
        """No more messages arrive. Queued ones can still be read; then ``error`` is raised, if any."""
        if not self._ended:
            self._ended = True
            self._error = error
            self._arrived.set()
            if self.on_end is not None:
                self.on_end()

    async def drained(self) -> None:
        """Return when the handler has processed the queue."""
        if self._pump is not None:
            await asyncio.wait([self._pump])

    async def _pump_rest(self, message: api.Message, waiting: Awaitable[None] | None) -> None:
        handler = self._handler
        assert handler is not None
        while True:
            try:
                if waiting is not None:
                    await waiting
            except broker_errors.READER_ERRORS as error:
                task = asyncio.current_task()
                if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                    raise  # the pump remains in its place: later messages do not overtake the queued ones
                self._handler_failed(message.subject, error)
            if not self._queue:
                self._pump = None
                return
            message, waiting = self._pop(), None
            trace.current.set(message.trace)
            try:
                waiting = handler(message)
            except broker_errors.READER_ERRORS as error:
                self._handler_failed(message.subject, error)

    def _handler_failed(self, subject: str, error: BaseException) -> None:
        self._failed += 1
        self._counts.add(counters.ConnectionCounter.HANDLER_FAILED)
        now_s = asyncio.get_running_loop().time()
        if now_s >= self._next_log_s:  # other clients choose how many of their messages fail
            self._next_log_s = now_s + LOG_INTERVAL_S
            events.event(
                "handler-failed",
                level=logging.ERROR,
                error=error,
                subscription=self._subject,
                subject=subject,
                failed=self._failed,
            )

    # The reading side.

    def _pop(self) -> api.Message:
        message = self._queue.popleft()
        self._queued_bytes -= message.size
        self._delivered += 1
        return message

    def __aiter__(self) -> Self:
        self._check_readable()
        return self

    def _check_readable(self) -> None:
        if self._handler is not None:
            raise errors.InvalidInput(f"{self._subject!r} has a handler and cannot be iterated")

    async def __anext__(self) -> api.Message:
        while not self._queue:
            if self._ended:
                if self._error is not None:
                    raise self._error
                raise StopAsyncIteration
            self._arrived.clear()
            await self._arrived.wait()
        return self._pop()

    async def next(self, *, timeout_s: float | None = None) -> api.Message:
        self._check_readable()
        if self._queue:
            return self._pop()
        try:
            async with asyncio.timeout(timeout_s):
                return await self.__anext__()
        except StopAsyncIteration:
            raise errors.NotConnected(f"the subscription to {self._subject!r} has ended") from None
        except TimeoutError:
            raise errors.TimedOut(f"no message on {self._subject!r} within {timeout_s} s") from None

    async def close(self) -> None:
        self.end()
        await self._leave()

    async def _leave(self) -> None:
        unsubscribe, self._unsubscribe = self._unsubscribe, None
        if unsubscribe is not None:
            with contextlib.suppress(errors.Unavailable):  # without a connection there is nothing to leave
                await unsubscribe()
