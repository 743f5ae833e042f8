"""Queues: persistent messages from three senders, and three consumers that acknowledge each."""

from __future__ import annotations

import asyncio

from muster.core import errors
from muster.message import destinations
from muster.message import errors as message_errors
from muster.message.client import api as message_api
from muster.message.client import consumers, producers
from tests.faults import deployment
from tests.faults.workloads import workload

RECEIVE_S = 1.0
DRAIN_S = 60.0


class MessageWorkload(workload.Workload):
    name = "queues"
    guarantee = "no accepted message is lost, and none is delivered again after its acknowledgement"
    measured = ("send", "received")

    async def start(self) -> None:
        self._drained = asyncio.Event()
        self._received: set[str] = set()
        self._consumers: list[asyncio.Task[None]] = []
        for number in range(1, deployment.CLIENTS + 1):
            connection = await self.stack.enter_async_context(
                message_api.Connection(await self.connect("user", number))
            )
            session = await self.stack.enter_async_context(
                connection.session(message_api.AcknowledgeMode.CLIENT)
            )
            queue = destinations.queue(f"{self.tag}-{number}")
            consumer = await workload.patiently(session.consumer, queue, prefetch=10)
            self._consumers.append(
                asyncio.create_task(self._consume(f"consumer-{number}", session, consumer, str(queue)))
            )
            sending = await self.stack.enter_async_context(
                message_api.Connection(await self.connect("publisher", number))
            )
            plain = await self.stack.enter_async_context(sending.session())
            self.run(self._send(f"sender-{number}", plain.producer(queue), str(queue)))

    async def _send(self, actor: str, producer: producers.Producer, queue: str) -> None:
        number = 0

        async def send() -> None:
            nonlocal number
            number += 1
            operation = self.history.begin(actor, "send", key=queue, id=f"{actor}.{number:06}")
            await self.operate(operation, producer.send(operation.facts["id"]), unknown=errors.Unavailable)

        await self.repeat(send)

    async def _consume(
        self, actor: str, session: message_api.Session, consumer: consumers.Consumer, queue: str
    ) -> None:
        while not self._drained.is_set():
            try:
                message = await consumer.receive(RECEIVE_S)
            except (errors.Unavailable, message_errors.InvalidClientId):
                await asyncio.sleep(workload.PACE_S)  # pace
                continue
            if message is None:
                continue
            id = str(message.body())
            self._received.add(id)
            self.history.event(
                actor, "received", key=queue, source=queue, id=id, redelivered=message.redelivered
            )
            operation = self.history.begin(actor, "acknowledge", source=queue, ids=[id])
            await self.operate(operation, session.acknowledge(), unknown=errors.Unavailable)

    async def finish(self) -> None:
        """Receive what is left."""
        await workload.wait_for(lambda: not self._missing(), DRAIN_S)
        await asyncio.sleep(2 * RECEIVE_S)  # pace: for what should not come
        self._drained.set()
        await asyncio.gather(*self._consumers)

    def _missing(self) -> bool:
        return any(
            send.outcome == "ok" and send.facts["id"] not in self._received
            for send in self.history.of("send")
        )

    async def close(self) -> None:
        for task in self._consumers:
            task.cancel()
        await asyncio.gather(*self._consumers, return_exceptions=True)
        await super().close()
