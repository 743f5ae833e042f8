"""Dispatchers of persistent messages, and clients that send, receive, acknowledge and commit."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

from muster.core import errors
from muster.message import destinations, settings
from muster.message import errors as message_errors
from muster.message.client import api, consumers
from muster.message.dispatcher import leadership
from tests.sim import domain as domain_
from tests.sim import history, host

DISPATCHERS = 2
QUEUE = destinations.queue("orders")
TOPICS = (destinations.topic("news/a"), destinations.topic("news/b"))
ALL_TOPICS = destinations.topic("news/*")
SUBSCRIPTION = "journal"
WORKERS = ("worker-1", "worker-2")
SUBSCRIBER = "subscriber"
SENDS_MAX = 120
RECEIVE_S = 1.0
WORK_S = (0.0, 0.0, 0.0, 0.5, 3.0)  # between receiving and acknowledging
SETTINGS = settings.MessageSettings(checkpoint_records=20, connection_timeout_s=6.0, max_deliveries=0)


class MessagePart:
    def __init__(self, domain: domain_.Domain) -> None:
        self._domain = domain
        self._history = domain.history
        self._subscribed = asyncio.Event()
        domain.tolerates_loss = False  # lost deliveries: tests/message/test_lost_deliveries.py
        for number in range(1, DISPATCHERS + 1):
            domain.add_host(f"dispatcher-{number}", self._dispatcher, role="dispatcher")
        for name in WORKERS:
            domain.add_host(name, self._worker, role="worker")
        domain.add_host(SUBSCRIBER, self._subscriber, role="subscriber")
        domain.add_host("producer", self._producer)

    # Programs.

    async def _dispatcher(self, machine: host.Host) -> None:
        bus = await machine.connect()
        await leadership.DispatcherLeadership(bus, SETTINGS, lease_ttl_s=4.0).run()

    async def _producer(self, machine: host.Host) -> None:
        chance = machine.chance
        connection = api.Connection(await machine.connect())
        plain, transacted = connection.session(), connection.session(api.AcknowledgeMode.TRANSACTED)
        producer, together = plain.producer(), transacted.producer()
        number = 0
        # The durable subscription exists first: it gets what is sent from then on.
        await self._subscribed.wait()
        while number < SENDS_MAX and await self._domain.pause(chance, 0.05, 1.0):
            if chance.random() < 0.3:
                count = chance.choice([2, 5, 20])
                chosen = [chance.choice((QUEUE, *TOPICS)) for _ in range(count)]
                operations = [
                    self._begin(machine.name, to, number + place) for place, to in enumerate(chosen)
                ]
                number += count
                for operation, to in zip(operations, chosen, strict=True):
                    await together.send(operation.facts["id"], to=to)
                await self._end(operations, transacted.commit())
            else:
                to = chance.choice((QUEUE, QUEUE, *TOPICS))
                operation = self._begin(machine.name, to, number)
                number += 1
                await self._end([operation], producer.send(operation.facts["id"], to=to))
        await _forever()

    def _begin(self, actor: str, to: destinations.Destination, number: int) -> history.Operation:
        return self._history.begin(actor, "send", key=str(to), id=f"{number:04}")

    async def _end(self, operations: list[history.Operation], work: Awaitable[None]) -> None:
        outcome, result = "ok", ""
        try:
            await work
        except errors.Unavailable as error:
            outcome, result = "unknown", str(error)
        except errors.MusterError as error:
            outcome, result = error.code, str(error)
        for operation in operations:
            self._history.end(operation, outcome, result)

    async def _worker(self, machine: host.Host) -> None:
        mode = machine.chance.choice([api.AcknowledgeMode.CLIENT, api.AcknowledgeMode.TRANSACTED])
        connection = api.Connection(await machine.connect())
        session = connection.session(mode)
        consumer = await _patiently(
            lambda: session.consumer(QUEUE, prefetch=machine.chance.choice([1, 3, 50]))
        )
        await self._consume(machine, session, consumer, str(QUEUE))

    async def _subscriber(self, machine: host.Host) -> None:
        chance = machine.chance
        connection = api.Connection(await machine.connect(), client_id=SUBSCRIBER)
        session = connection.session(
            chance.choice([api.AcknowledgeMode.CLIENT, api.AcknowledgeMode.TRANSACTED])
        )
        prefetch = chance.choice([1, 3, 50])
        consumer = await _patiently(
            lambda: session.durable_consumer(ALL_TOPICS, SUBSCRIPTION, prefetch=prefetch)
        )
        self._subscribed.set()
        await self._consume(machine, session, consumer, str(ALL_TOPICS))

    async def _consume(
        self, machine: host.Host, session: api.Session, consumer: consumers.Consumer, source: str
    ) -> None:
        """Receive for ever, and acknowledge a few at a time; now and then, reject instead."""
        chance = machine.chance
        batch: list[str] = []
        size = chance.choice([1, 1, 4])
        while True:
            message = await consumer.receive(RECEIVE_S)
            if message is not None:
                batch.append(str(message.body()))
                self._history.event(
                    machine.name,
                    "received",
                    key=str(message.destination) if source == str(ALL_TOPICS) else source,
                    source=source,
                    id=batch[-1],
                    redelivered=message.redelivered,
                )
            if batch and (message is None or len(batch) >= size):
                # Others may get the messages meanwhile, if this machine stands still or is cut off.
                await asyncio.sleep(chance.choice(WORK_S))
                await self._settle(machine, session, batch, source, chance)
                batch = []

    async def _settle(
        self,
        machine: host.Host,
        session: api.Session,
        batch: list[str],
        source: str,
        chance: random.Random,
    ) -> None:
        rejects = chance.random() < 0.1
        action = "return" if rejects else "commit" if session.transacted else "acknowledge"
        operation = self._history.begin(machine.name, action, source=source, ids=batch)
        try:
            if session.transacted:
                await (session.rollback() if rejects else session.commit())
            else:
                await (session.recover() if rejects else session._acknowledge())
        except errors.Unavailable as error:
            self._history.end(operation, "unknown", error)
        except errors.MusterError as error:
            self._history.end(operation, error.code, error)
        else:
            self._history.end(operation, "ok")

    # The end.

    def missing(self) -> str | None:
        received = {(event.facts["key"], event.facts["id"]) for event in self._history.of("received")}
        for send in self._history.of("send"):
            if send.outcome == "ok" and (send.key, send.facts["id"]) not in received:
                return f"{send.facts['id']} was not received from {send.key}"
        return None

    async def finish(self) -> None:
        """Nothing is left to be read."""


async def _patiently(attach: Callable[[], Awaitable[consumers.Consumer]]) -> consumers.Consumer:
    """Attach a consumer as soon as a dispatcher replies, and has noticed the end of the last process."""
    while True:
        try:
            return await attach()
        except (errors.Unavailable, message_errors.InvalidClientId):
            await asyncio.sleep(0.5)


async def _forever() -> None:
    await asyncio.get_running_loop().create_future()
