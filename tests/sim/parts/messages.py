"""Dispatchers of persistent messages, and clients that send, receive, acknowledge and commit.

Some messages belong to a group, are large, delayed, or expire. One worker may have a selector. Beside a
durable subscription that stays, two clients share one, and another replaces and ends its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable
from typing import Any

from muster.core import errors
from muster.message import destinations, messages, settings
from muster.message import errors as message_errors
from muster.message.client import api, consumers
from muster.message.dispatcher import leadership
from tests.sim import domain as domain_
from tests.sim import history, host
from tests.sim.checkers import messages as message_checker

DISPATCHERS = 2
QUEUE = destinations.queue("orders")
TOPICS = (destinations.topic("news/a"), destinations.topic("news/b"))
ALL_TOPICS = destinations.topic("news/*")
SUBSCRIPTION = "journal"
WORKERS = ("worker-1", "worker-2")
SUBSCRIBER = "subscriber"
SHARERS = ("sharer-1", "sharer-2")
CHANGES_MAX = 12
LARGE = 1 << 20
SENDS_MAX = 120
RECEIVE_S = 1.0
WORK_S = (0.0, 0.0, 0.0, 0.5, 3.0)  # between receiving and acknowledging
SETTINGS = settings.MessageSettings(checkpoint_records=20, connection_timeout_s=6.0, max_deliveries=0)


class MessagePart:
    def __init__(self, domain: domain_.Domain) -> None:
        self._domain = domain
        self._history = domain.history
        self._subscribed, self._shared = asyncio.Event(), asyncio.Event()
        domain.tolerates_loss = False  # lost deliveries: tests/message/test_lost_deliveries.py
        for number in range(1, DISPATCHERS + 1):
            domain.add_host(f"dispatcher-{number}", self._dispatcher, role="dispatcher")
        for name in WORKERS:
            domain.add_host(name, self._worker, role="worker")
        domain.add_host(SUBSCRIBER, self._subscriber, role="subscriber")
        for name in SHARERS:
            domain.add_host(name, self._sharer, role="sharer")
        domain.add_host("changer", self._changer)
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
        # The durable subscriptions exist first: they get what is sent from then on.
        await self._subscribed.wait()
        await self._shared.wait()
        while number < SENDS_MAX and await self._domain.pause(chance, 0.05, 1.0):
            if chance.random() < 0.3:
                count = chance.choice([2, 5, 20])
                chosen = [chance.choice((QUEUE, *TOPICS)) for _ in range(count)]
                operations = [self._begin(machine, to, number + place) for place, to in enumerate(chosen)]
                number += count
                for operation, to in zip(operations, chosen, strict=True):
                    await together.send(_message(operation), to=to, **_options(operation))
                await self._end(operations, transacted.commit())
            else:
                to = chance.choice((QUEUE, QUEUE, *TOPICS))
                operation = self._begin(machine, to, number)
                number += 1
                sending = producer.send(_message(operation), to=to, **_options(operation))
                await self._end([operation], sending)
        await _forever()

    def _begin(self, machine: host.Host, to: destinations.Destination, number: int) -> history.Operation:
        chance = machine.chance
        return self._history.begin(
            machine.name,
            "send",
            key=str(to),
            id=f"{number:04}",
            n=chance.randrange(10),
            group=chance.choice(["", "", "g"]) if to.is_queue else "",
            large=chance.random() < 0.03,
            delay_s=chance.choice([1.0, 8.0]) if chance.random() < 0.1 else 0.0,
            ttl_s=5.0 if to.is_queue and chance.random() < 0.1 else 0.0,
        )

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
        # The other worker takes what this one does not select.
        selector = machine.chance.choice([None, "n < 5"]) if machine.name == WORKERS[1] else None
        consumer = await _patiently(
            lambda: session.consumer(QUEUE, selector, prefetch=machine.chance.choice([0, 1, 3, 50]))
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

    async def _sharer(self, machine: host.Host) -> None:
        chance = machine.chance
        session = api.Connection(await machine.connect()).session(
            chance.choice([api.AcknowledgeMode.CLIENT, api.AcknowledgeMode.TRANSACTED])
        )
        prefetch = chance.choice([0, 1, 3, 50])
        consumer = await _patiently(
            lambda: session.shared_durable_consumer(ALL_TOPICS, message_checker.SHARED, prefetch=prefetch)
        )
        self._shared.set()
        await self._consume(machine, session, consumer, message_checker.SHARED)

    async def _changer(self, machine: host.Host) -> None:
        chance, below, version, source = machine.chance, 0, 0, ""
        session = api.Connection(await machine.connect(), client_id="changer").session()
        for change in range(changes := chance.randrange(1, CHANGES_MAX)):
            wanted, prefetch = chance.choice([10, 10, 5]), chance.choice([0, 1, 50])
            selector = f"n < {wanted}" if wanted < 10 else None
            consumer = await _patiently(
                lambda: session.durable_consumer(ALL_TOPICS, "changes", selector, prefetch=prefetch)  # noqa: B023
            )
            if wanted != below:
                below, version = wanted, version + 1
                source = f"{message_checker.CHANGED}-{version}"
                self._history.event(machine.name, "subscribed", source=source, below=below)
            reading = asyncio.ensure_future(self._read(machine, consumer, source))
            if change == changes - 1:
                await reading
            await asyncio.sleep(chance.choice([0.01, 0.5, 10.0]))
            await consumer.close()
            await reading
            if chance.random() < 0.3:
                below = 0
                with contextlib.suppress(errors.Unavailable, message_errors.IllegalState):
                    await session.unsubscribe("changes")

    async def _read(self, machine: host.Host, consumer: consumers.Consumer, source: str) -> None:
        with contextlib.suppress(message_errors.IllegalState):  # closed
            while not consumer.closed:
                if (message := await consumer.receive(RECEIVE_S)) is not None:
                    self._received(machine, message, source)

    def _received(self, machine: host.Host, message: messages.JmsMessage, source: str) -> str:
        id = str(message.body()).partition(" ")[0]
        self._history.event(
            machine.name,
            "received",
            key=source if source == str(QUEUE) else str(message.destination),
            source=source,
            id=id,
            redelivered=message.redelivered,
        )
        return id

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
                batch.append(self._received(machine, message, source))
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
                await (session.recover() if rejects else session.acknowledge())
        except errors.Unavailable as error:
            self._history.end(operation, "unknown", error)
        except errors.MusterError as error:
            self._history.end(operation, error.code, error)
        else:
            self._history.end(operation, "ok")

    # The end.

    def missing(self) -> str | None:
        return next(message_checker.lost(self._history), None)

    async def finish(self) -> None:
        """Nothing is left to be read."""


async def _patiently(attach: Callable[[], Awaitable[consumers.Consumer]]) -> consumers.Consumer:
    """Attach a consumer as soon as a dispatcher replies, and has noticed the end of the last process, or of
    the last consumer."""
    while True:
        try:
            return await attach()
        except (errors.Unavailable, message_errors.InvalidClientId, message_errors.IllegalState):
            await asyncio.sleep(0.5)


def _message(send: history.Operation) -> messages.JmsMessage:
    padding = "x" * LARGE if send.facts["large"] else ""
    message = messages.TextMessage(f"{send.facts['id']} {padding}", properties={"n": send.facts["n"]})
    if send.facts["group"]:
        message.properties["JMSXGroupID"] = send.facts["group"]
    return message


def _options(send: history.Operation) -> dict[str, Any]:
    return {name: send.facts[name] for name in ("delay_s", "ttl_s")}


async def _forever() -> None:
    await asyncio.get_running_loop().create_future()
