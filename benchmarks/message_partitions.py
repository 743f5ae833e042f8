"""One dispatcher process and two, with the same two partitions and the same load: ``python -m
benchmarks.message_partitions ROLE URL [NUMBER]``; commands and answers in JSON.

The clients use the protocol directly and handle hundreds of messages at a time, so that the dispatchers, not
the clients, use most of the CPU: otherwise two cores are too few to show a difference.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
import time

import msgspec

from benchmarks import harness, measure, message_worker
from muster.bus import api
from muster.bus.client import client as bus_client
from muster.core import errors
from muster.message import destinations, partitions, protocol, settings
from muster.message.dispatcher import leadership
from muster.testing import eventually

WORKER = "benchmarks.message_partitions"
PARTITIONS = 2
SENDERS = 3  # connections that send, for each queue
WORK = 300  # messages that a connection sends at one time
AHEAD = 6_000  # messages of a queue that are sent and not acknowledged
BODY = b"x" * 100


class _Delivered(msgspec.Struct, array_like=True):
    """The part of a `protocol.MessageDelivery` that an acknowledgement needs."""

    consumer: int
    key: str
    sequence: int
    count: int
    meta: msgspec.Raw
    data: msgspec.Raw


class _Batch(msgspec.Struct, array_like=True):
    epoch: int
    deliveries: list[_Delivered]
    due: msgspec.Raw = msgspec.Raw()


_decode = msgspec.msgpack.Decoder(_Batch).decode


def rows(url: str, quick: bool) -> list[harness.Row]:
    seconds = 3 if quick else 10
    rates = {}
    for processes in (1, 2):
        workers = [measure.Worker(WORKER, "dispatcher", url, processes) for _ in range(processes)]
        try:
            for worker in workers:
                worker.hear(timeout_s=60)
            with measure.Worker(WORKER, "load", url) as load:
                load.hear()
                load.tell(1)  # warms up
                load.hear()
                load.tell(seconds)
                rates[processes] = load.hear(timeout_s=60 + seconds)["rate"]
        finally:
            for worker in workers:
                worker.__exit__()
    return harness.under(
        f"{PARTITIONS} partitions, a queue in each; {SENDERS} senders of {WORK} messages at a time and a "
        f"consumer for each queue, in one process; 100 B, persistent, stored, delivered and acknowledged; "
        f"{seconds} s; all on the same cores",
        [
            harness.Row(
                metric="queues in two dispatcher processes",
                ours=rates[2],
                unit="/s",
                better="higher",
                peer=rates[1],
                peer_name="in one",
            ),
            harness.Row(
                metric="two dispatchers / one",
                ours=rates[2] / rates[1],
                unit="times",
                better="higher",
                goal=1.5,
            ),
        ],
    )


async def dispatcher(url: str, processes: str) -> None:
    """Reports when it owns its share of the partitions."""
    bus = await bus_client.connect((url,), identity="dispatcher")
    running = leadership.DispatcherLeadership(
        bus, settings.MessageSettings(partitions=PARTITIONS), lease_ttl_s=2
    )
    task = asyncio.ensure_future(running.run())
    share = PARTITIONS // int(processes)
    await eventually.eventually(lambda: len(running.owned) == share, timeout_s=60)
    message_worker.say({})
    await message_worker.hear()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await bus.close()


async def load(url: str) -> None:
    """For each number of seconds, the rate of messages that were acknowledged."""
    bus = await bus_client.connect((url,), identity="load")
    queues = [
        QueueLoad(bus, next(name for name in _names() if partitions.of_queue(name, PARTITIONS) == partition))
        for partition in range(PARTITIONS)
    ]
    for queue in queues:
        await queue.open()
    message_worker.say({})
    while (seconds := await message_worker.hear()) is not None:
        before, began = sum(queue.acknowledged for queue in queues), time.perf_counter()
        await asyncio.sleep(seconds)
        done = sum(queue.acknowledged for queue in queues) - before
        message_worker.say({"rate": done / (time.perf_counter() - began)})
    for queue in queues:
        queue.stop()
    await bus.close()


def _names() -> itertools.chain[str]:
    return itertools.chain(f"bench-{number}" for number in itertools.count())


class QueueLoad:
    def __init__(self, bus: api.Bus, name: str) -> None:
        self._bus = bus
        self._partition = partitions.of_queue(name, PARTITIONS)
        self._destination = str(destinations.queue(name))
        self._key = f"{partitions.QUEUE_MARK}{name}"
        self._received: list[int] = []
        self._arrived = asyncio.Event()
        self._room = asyncio.Semaphore(AHEAD // WORK)
        self._tasks: list[asyncio.Future[None]] = []
        self.acknowledged = 0

    async def open(self) -> None:
        consumer = self._connection_name("consumer")
        await self._hello(consumer)
        subject = protocol.deliver_subject(self._bus.identity, consumer, self._partition)
        await self._bus.subscribe(subject, handler=self._delivered)
        await self._request(protocol.AttachConsumer(consumer, 1, self._destination, credit=1 << 30))
        self._tasks.append(asyncio.ensure_future(self._acknowledge(consumer)))
        for number in range(SENDERS):
            self._tasks.append(asyncio.ensure_future(self._send(self._connection_name(f"s{number}"))))

    def stop(self) -> None:
        for task in self._tasks:
            task.cancel()

    def _connection_name(self, name: str) -> str:
        return f"{self._bus.identity}-{name}{self._partition}"

    async def _hello(self, connection: str) -> None:
        while True:
            try:
                await self._request(protocol.ClientHello(connection))
                return
            except errors.Unavailable:
                await asyncio.sleep(0.1)

    async def _request(self, request: protocol.DispatcherRequest) -> None:
        subject = protocol.request_subject(self._bus.identity, self._partition)
        reply = await self._bus.request(subject, protocol.encode(request), timeout_s=30)
        failure = protocol.decode_reply(reply.data).error
        if failure is not None:
            raise errors.Unavailable(f"{failure}")

    def _delivered(self, message: api.Message) -> None:
        self._received += [delivery.sequence for delivery in _decode(message.data).deliveries]
        self._arrived.set()

    async def _acknowledge(self, connection: str) -> None:
        left = 0
        for number in itertools.count(time.time_ns()):
            await self._arrived.wait()
            self._arrived.clear()
            received, self._received = self._received, []
            await self._request(protocol.CommitWork(connection, number, acks={self._key: received}))
            self.acknowledged += len(received)
            left += len(received)
            while left >= WORK:
                left -= WORK
                self._room.release()

    async def _send(self, connection: str) -> None:
        await self._hello(connection)
        meta = f'{{"t":"b","to":"{self._destination}"}}'
        sends = [protocol.SendMessage(self._destination, meta, BODY)] * WORK
        for number in itertools.count(time.time_ns()):
            await self._room.acquire()
            await self._request(protocol.CommitWork(connection, number, sends))


if __name__ == "__main__":
    role, *arguments = sys.argv[1:]
    measure.run_fast(dispatcher(*arguments) if role == "dispatcher" else load(*arguments))
