"""`m.queue(…)`: persistent messages in queues, as in JMS."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

from muster.client import rows
from muster.core import errors
from muster.core.telemetry import trace
from muster.message import destinations, listings, protocol, values
from muster.message import messages as jms
from muster.message.client import api, producers
from muster.supervision import tasks

Connect = Callable[[], Awaitable[api.Connection]]


class AsyncQueue:
    """A queue; its messages survive the failure of any process.

    >>> orders = m.queue("orders")
    >>> sent = await orders.send("four chairs", priority=7)
    >>> (await orders.receive(timeout_s=10)).body()
    'four chairs'
    """

    def __init__(self, name: str, connect: Connect) -> None:
        self.name = name
        self._queue = destinations.queue(name)
        self._connect = connect

    async def send(
        self,
        body: producers.Body,
        *,
        properties: Mapping[str, values.Value] | None = None,
        priority: int = jms.DEFAULT_PRIORITY,
        ttl_s: float = 0.0,
        delay_s: float = 0.0,
    ) -> str:
        """Send a text, bytes, a mapping or a list; when this returns, the message is stored. Returns its id.

        ``delay_s``: deliver it so much later. ``ttl_s``: it expires after this time.
        """
        message = producers.to_message(body)
        if properties:
            message.properties.update(properties)
        if (working_for := trace.current.get()) is not None:
            message.properties.setdefault(trace.PARENT_HEADER, working_for.parent)
        session = (await self._connect()).session()
        async with session:
            producer = session.producer(self._queue, priority=priority, ttl_s=ttl_s, delay_s=delay_s)
            await producer.send(message)
        return message.message_id or ""

    async def receive(self, *, where: str | None = None, timeout_s: float | None = None) -> jms.JmsMessage:
        """Remove the next message that matches the selector ``where``; `errors.TimedOut` without one.

        ``timeout_s`` 0: only a message that waits.
        """
        connection = await self._connect()
        session = connection.session()
        try:
            consumer = await session.consumer(self._queue, where, prefetch=0)
            message = await (consumer.receive_nowait() if timeout_s == 0 else consumer.receive(timeout_s))
        except BaseException:
            await tasks.finish(session.close())
            raise
        # The message is removed. A caller that is cancelled while something is awaited here would lose it.
        connection.spawn(session.close())
        if message is None:
            raise errors.TimedOut(f"no message in the queue {self.name} in {timeout_s or 0:g} s")
        return message

    async def messages(
        self, *, where: str | None = None, timeout_s: float | None = None
    ) -> AsyncIterator[jms.JmsMessage]:
        """The messages as they arrive; ends after ``timeout_s`` without one.

        A message is removed from the queue when the next one is requested: if its handling fails, it is
        delivered again.
        """
        async with (
            (await self._connect()).session(api.AcknowledgeMode.CLIENT) as session,
            await session.consumer(self._queue, where, prefetch=1) as consumer,
        ):
            while (message := await consumer.receive(timeout_s)) is not None:
                yield message
                await message.acknowledge()

    async def browse(self, *, where: str | None = None) -> AsyncIterator[jms.JmsMessage]:
        """The waiting messages, which stay in the queue; `errors.NotFound` if there is no such queue."""
        async with (await self._connect()).session() as session:
            async for message in session.browse(self._queue, where, must_exist=True):
                yield message

    async def depth(self) -> int:
        """The number of waiting messages; 0 if there is no such queue."""
        connection = await self._connect()
        await connection.outbox.wait_idle()  # messages that were received are removed first
        listed = (await connection.request(protocol.ListQueues())).queues
        return next((row.depth for row in listed if row.queue == self.name), 0)

    async def scheduled(self) -> rows.Rows[listings.ScheduledRow]:
        """The messages that were sent with ``delay_s`` and are not in the queue yet."""
        connection = await self._connect()
        scheduled: list[listings.ScheduledRow] = []
        after = (0, 0)
        while page := (
            await connection.request(protocol.ListScheduled(str(self._queue), after, 1000))
        ).scheduled:
            scheduled += page
            after = page[-1].delivery_time_ms, page[-1].number
        return rows.Rows(scheduled)

    async def cancel(self, scheduled: listings.ScheduledRow) -> None:
        """Delete a message that is scheduled; `errors.NotFound` if it was delivered or cancelled before."""
        reply = await (await self._connect()).request(protocol.CancelScheduled(scheduled.number))
        if not reply.count:
            raise errors.NotFound(f"the message {scheduled.id} is not scheduled any more")

    def __repr__(self) -> str:
        return f"<queue {self.name!r}>"


class QueueConnector:
    """Opens one JMS connection, when it is first needed."""

    def __init__(self, bus: Any, stack: contextlib.AsyncExitStack) -> None:
        self._bus = bus
        self._stack = stack
        self._connection: api.Connection | None = None

    async def __call__(self) -> api.Connection:
        if self._connection is None:
            self._connection = api.Connection(self._bus)
            await self._stack.enter_async_context(self._connection)
        return self._connection

    async def queues(self) -> rows.Rows[listings.QueueRow]:
        return rows.Rows((await (await self()).request(protocol.ListQueues())).queues)
