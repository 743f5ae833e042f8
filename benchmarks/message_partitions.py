"""One dispatcher process and two, with the same two partitions and the same load: ``python -m
benchmarks.message_partitions ROLE URL [NUMBER]``; commands and answers in JSON.

The clients use the protocol directly and handle hundreds of messages at a time, so that the dispatchers, not
the clients, use most of the CPU: otherwise two cores are too few to show a difference. All processes share
the cores of the machine, so two dispatchers can be at most so much faster than one as the cores exceed the
CPU time of all processes together; the rows show both.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import astuple, dataclass

import msgspec

from benchmarks import harness, measure, message_peers, message_worker
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


@dataclass(frozen=True)
class _Round:
    """What was measured with so many dispatcher processes; CPU time in µs for each message."""

    rate: float
    dispatchers_us: float
    broker_us: float
    clients_us: float

    @property
    def all_us(self) -> float:
        return self.dispatchers_us + self.broker_us + self.clients_us


def rows(url: str, broker_pid: int, quick: bool) -> list[harness.Row]:
    seconds, rounds = (3, 3) if quick else (10, 5)
    sides = {
        f"{count}": functools.partial(_round, url, broker_pid, count, seconds) for count in (1, PARTITIONS)
    }
    measured = measure.in_turns(sides, rounds=rounds, seconds_max=240)
    single, both = (_median(measured[name]) for name in sides)
    cores = len(os.sched_getaffinity(0))
    bound = cores * single.dispatchers_us / single.all_us
    return harness.under(
        f"{PARTITIONS} partitions, a queue in each; {SENDERS} senders of {WORK} messages at a time and a "
        f"consumer for each queue, in one process; 100 B, persistent, stored, delivered and acknowledged; "
        f"{seconds} s; median of {len(measured['1'])} rounds in turns; dispatchers, broker and clients on "
        f"the same {cores} cores",
        [
            _row("queues in two dispatcher processes", both.rate, "/s", single.rate),
            _row("two dispatchers / one", both.rate / single.rate, "times", goal=1.5),
            _row(f"the same, at most: {cores} cores / CPU of all processes", max(1.0, bound), "times"),
            _row(
                "messages for each CPU second of the dispatchers, two processes",
                1e6 / both.dispatchers_us,
                "/s",
                1e6 / single.dispatchers_us,
            ),
            *(
                _row(f"CPU of a message, {name}", of(both), "µs", of(single), better="lower")
                for name, of in _PARTS.items()
            ),
        ],
    )


_PARTS: dict[str, Callable[[_Round], float]] = {
    "all dispatchers": lambda measured: measured.dispatchers_us,
    "broker": lambda measured: measured.broker_us,
    "clients": lambda measured: measured.clients_us,
}


def _row(
    metric: str,
    ours: float,
    unit: str,
    peer: float | None = None,
    goal: float | None = None,
    better: measure.Better = "higher",
) -> harness.Row:
    peer_name = None if peer is None else "one process"
    return harness.Row(
        metric=metric, ours=ours, unit=unit, better=better, peer=peer, peer_name=peer_name, goal=goal
    )


def _median(measured: list[_Round]) -> _Round:
    return _Round(*(statistics.median(values) for values in zip(*map(astuple, measured), strict=True)))


def _round(url: str, broker_pid: int, processes: int, seconds: float) -> _Round:
    workers = [measure.Worker(WORKER, "dispatcher", url, processes) for _ in range(processes)]
    try:
        for worker in workers:
            worker.hear(timeout_s=60)
        with measure.Worker(WORKER, "load", url) as load:
            load.hear()
            load.tell(1)  # warms up
            load.hear()
            parts = ([worker.pid for worker in workers], [broker_pid], [load.pid])
            before = [message_peers.cpu_seconds(*pids) for pids in parts]
            load.tell(seconds)
            result = load.hear(timeout_s=60 + seconds)
            used_s = [message_peers.cpu_seconds(*pids) for pids in parts]
    finally:
        for worker in workers:
            worker.__exit__()
    cpu_us = [1e6 * (after - start) / result["count"] for after, start in zip(used_s, before, strict=True)]
    return _Round(result["count"] / result["took_s"], *cpu_us)


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
    """For each number of seconds, how many messages were acknowledged, and the exact time."""
    bus = await bus_client.connect((url,), identity="load")
    queues = [
        QueueLoad(bus, next(name for name in _names() if partitions.of_queue(name, PARTITIONS) == partition))
        for partition in range(PARTITIONS)
    ]
    for queue in queues:
        await queue.open()
    await eventually.eventually(lambda: all(queue.acknowledged for queue in queues), timeout_s=60)
    message_worker.say({})
    while (seconds := await message_worker.hear()) is not None:
        before, began = sum(queue.acknowledged for queue in queues), time.perf_counter()
        await asyncio.sleep(seconds)
        done = sum(queue.acknowledged for queue in queues) - before
        message_worker.say({"count": done, "took_s": time.perf_counter() - began})
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
