"""The processes of bench-message: ``python -m benchmarks.message_worker ROLE URL``; commands and
answers in JSON.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

from benchmarks import measure
from muster.bus import api
from muster.bus.client import client as bus_client
from muster.message import destinations, messages
from muster.message.client import api as client_api
from muster.message.client import consumers
from muster.message.dispatcher import leadership

TOPIC = destinations.topic("bench/topic")
QUEUE = destinations.queue("bench")
REGIONS = destinations.topic("bench/regions")
QUIET_S = 20.0


async def _connect(url: str, identity: str) -> client_api.Connection:
    return client_api.Connection(await bus_client.connect((url,), identity=identity), owns_bus=True)


async def dispatcher(url: str, replicas: str = "1") -> None:
    """Says at each line how much CPU time it has used."""
    bus = await bus_client.connect((url,), identity="dispatcher")
    running = leadership.DispatcherLeadership(bus, replicas=int(replicas))
    task = asyncio.create_task(running.run())
    await running.acting.wait()
    say({})
    while await hear() is not None:
        say({"cpu_s": time.process_time()})
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await bus.close()


async def gateway(url: str) -> None:
    """Listens on a free port, and says at each line how much CPU time it has used."""
    from muster.gateways.amqp import gateway as amqp_gateway
    from muster.trust.login import passwords

    async def dial(login: passwords.PasswordLogin) -> api.Bus:
        return await bus_client.connect((url,), identity=login.name)

    async with amqp_gateway.AmqpGateway(dial, None, anonymous="bench-client") as started:
        say({"port": started.port})
        while await hear() is not None:
            say({"cpu_s": time.process_time()})


async def subscriber(url: str) -> None:
    """``[connections, subscribers]``: these share the connections evenly; then for each ``[messages]`` the
    delays of every subscriber, in µs.
    """
    connections, subscribers = await hear()
    made = [await _connect(url, f"sub{number}") for number in range(connections)]
    arrived = Arrivals(subscribers)
    measuring = [
        asyncio.create_task(arrived.watch(number, await made[number % connections].session().consumer(TOPIC)))
        for number in range(subscribers)
    ]
    say({})
    while (command := await hear()) is not None:
        say(await arrived.of_next(command[0]))
    for task in measuring:
        task.cancel()
    await asyncio.gather(*measuring, return_exceptions=True)
    for connection in made:
        await connection.close()


class Arrivals:
    """The transit delays of each subscriber, from one count of messages to the next."""

    def __init__(self, subscribers: int) -> None:
        self._delays_us: list[list[float]] = [[] for _ in range(subscribers)]
        self._missing = 0
        self._complete = asyncio.Event()
        self._first_s = self._first_cpu_s = 0.0

    async def watch(self, number: int, consumer: consumers.Consumer) -> None:
        async for message in consumer:
            delay_us = (time.monotonic_ns() - int(str(message.body())[:20])) / 1000
            if not self._first_s:
                self._first_s, self._first_cpu_s = time.perf_counter(), time.process_time()
            self._delays_us[number].append(delay_us)
            self._missing -= 1
            if self._missing == 0:
                self._complete.set()

    async def of_next(self, messages: int) -> dict[str, Any]:
        """Wait for so many at each subscriber; some may have arrived before this call.

        What has not arrived after a silence is lost: a consumer that falls too far behind loses messages that
        are not persistent.
        """
        self._missing += messages * len(self._delays_us)
        while self._missing > 0:
            before = self._missing
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._complete.wait(), QUIET_S)
            self._complete.clear()
            if self._missing == before:
                break
        lost, self._missing = max(0, self._missing), 0
        answer = {
            "delays_us": self._delays_us,
            "lost": lost,
            "took_s": time.perf_counter() - self._first_s,
            "cpu_s": time.process_time() - self._first_cpu_s,
        }
        self._delays_us = [[] for _ in self._delays_us]
        self._first_s = 0.0
        return answer


async def publisher(url: str) -> None:
    """``[messages, bytes, a second]``: non-persistent, 0 a second being as quickly as it goes.

    Where sending is held up, a delay counts from when the message was due.
    """
    connection = await _connect(url, "pub")
    producer = connection.session().producer(TOPIC, persistent=False)
    say({})
    while (command := await hear()) is not None:
        count, size, rate = command
        padding = "x" * max(0, size - 20)
        began, cpu = time.monotonic_ns(), time.process_time()
        for number in range(count):
            sent = time.monotonic_ns()
            if rate:
                due = began + 1_000_000_000 * number // rate
                if due > sent:
                    await asyncio.sleep((due - sent) / 1e9)
                    sent = time.monotonic_ns()
                else:
                    sent = due
            await producer.send(f"{sent:020d}{padding}")
        await connection.bus.flush()
        took_s = (time.monotonic_ns() - began) / 1e9
        say({"took_s": took_s, "cpu_s": time.process_time() - cpu})
    await connection.close()


async def sender(url: str) -> None:
    """``[messages, senders]``: persistent, each sender waiting for each to be stored.

    With a third figure they go to a topic, and so many in turn are the regions that durables select.
    """
    connection = await _connect(url, f"sender{os.getpid()}")
    session = connection.session()
    producer, topic = session.producer(QUEUE), session.producer(REGIONS)
    say({})
    while (command := await hear()) is not None:
        count, senders, *regions = command

        async def send(times: int, regions: list[int] = regions) -> None:
            for number in range(times):
                if regions:
                    region = f"r{number % regions[0]}"
                    await topic.send(messages.TextMessage("x" * 100, properties={"region": region}))
                else:
                    await producer.send("x" * 100)

        began = time.perf_counter()
        await asyncio.gather(*(send(count // senders) for _ in range(senders)))
        say({"took_s": time.perf_counter() - began})
    await connection.close()


async def transactions(url: str) -> None:
    """``[transactions, queues]``: of one persistent message to each queue, one after the other."""
    connection = await _connect(url, f"transactions{os.getpid()}")
    session = connection.session(client_api.AcknowledgeMode.TRANSACTED)
    say({})
    while (command := await hear()) is not None:
        count, queues = command
        producers = [session.producer(destinations.queue(f"together.{number}")) for number in range(queues)]
        took_ms = []
        for _ in range(count):
            for producer in producers:
                await producer.send("x" * 100)
            began = time.perf_counter()
            await session.commit()
            took_ms.append(1000 * (time.perf_counter() - began))
        say({"took_ms": took_ms})
    await connection.close()


async def durables(url: str) -> None:
    """A number: so many durable subscriptions there are then, each for a region of its own."""
    connections = [
        client_api.Connection(
            await bus_client.connect((url,), identity=f"durable{number}"),
            client_id=f"durable{number}",
            owns_bus=True,
        )
        for number in range(20)
    ]
    sessions = [connection.session(client_api.AcknowledgeMode.DUPS_OK) for connection in connections]
    made = 0
    say({})
    while (command := await hear()) is not None:
        began = time.perf_counter()

        async def make(session: client_api.Session, numbers: range) -> None:
            for number in numbers:
                consumer = await session.durable_consumer(
                    REGIONS, f"d{number}", f"region = 'r{number}'", prefetch=10
                )
                consuming_all.append(asyncio.create_task(drop(consumer)))

        await asyncio.gather(
            *(make(session, range(made + at, command, len(sessions))) for at, session in enumerate(sessions))
        )
        made = command
        say({"took_s": time.perf_counter() - began})
    os._exit(0)  # thousands of consumers need not say goodbye one by one


consuming_all: list[asyncio.Task[None]] = []


async def drop(consumer: consumers.Consumer) -> None:
    async for _ in consumer:
        pass


async def hear() -> Any:
    line = await asyncio.to_thread(sys.stdin.readline)
    return json.loads(line) if line else None


def say(answer: dict[str, Any]) -> None:
    print(json.dumps(answer), flush=True)


ROLES: dict[str, Callable[[str], Awaitable[None]]] = {
    "dispatcher": dispatcher,
    "gateway": gateway,
    "subscriber": subscriber,
    "publisher": publisher,
    "sender": sender,
    "transactions": transactions,
    "durables": durables,
}

if __name__ == "__main__":
    # The gateway's own command runs on uvloop too, where it is installed.
    run: Callable[[Any], object] = measure.run_fast if sys.argv[1] == "gateway" else asyncio.run
    run(ROLES[sys.argv[1]](*sys.argv[2:]))
