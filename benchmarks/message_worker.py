"""The processes of bench-message: ``python -m benchmarks.message_worker ROLE URL``; commands and
answers in JSON.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

from benchmarks import measure
from muster.bus import api
from muster.bus import client as bus_client
from muster.message import client, consuming, destinations, messages, service

TOPIC = destinations.topic("bench/topic")
QUEUE = destinations.queue("bench")
REGIONS = destinations.topic("bench/regions")


async def _connect(url: str, identity: str) -> client.Connection:
    return client.Connection(await bus_client.connect((url,), identity=identity), owns_bus=True)


async def dispatcher(url: str) -> None:
    """Says at each line how much CPU time it has used."""
    bus = await bus_client.connect((url,), identity="dispatcher")
    running = service.Service(bus)
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
    from muster.message.amqp import server
    from muster.trust import passwords

    async def dial(login: passwords.Login) -> api.Bus:
        return await bus_client.connect((url,), identity=login.name)

    async with server.Gateway(dial, None, anonymous="bench-client") as started:
        say({"port": started.port})
        while await hear() is not None:
            say({"cpu_s": time.process_time()})


async def subscriber(url: str) -> None:
    """``[connections, subscribers]``: then for each ``[messages]`` the delays of the last subscriber, in
    µs.
    """
    connections, subscribers = await hear()
    made = [await _connect(url, f"sub{number}") for number in range(connections)]
    idle = [await made[number % connections].session().consumer(TOPIC) for number in range(subscribers - 1)]
    measuring = await made[-1].session().consumer(TOPIC)

    dropping = [asyncio.create_task(drop(consumer)) for consumer in idle]
    say({})
    while (asked := await hear()) is not None:
        delays_us: list[float] = []
        began = cpu = 0.0
        for _ in range(asked[0]):
            message = await measuring.receive(20)
            if message is None:
                break
            if not delays_us:
                began, cpu = time.perf_counter(), time.process_time()
            delays_us.append((time.time_ns() - int(str(message.body())[:20])) / 1000)
        took_s = time.perf_counter() - began
        say({"delays_us": delays_us, "took_s": took_s, "cpu_s": time.process_time() - cpu})
    for task in dropping:
        task.cancel()
    await asyncio.gather(*dropping, return_exceptions=True)
    for one in made:
        await one.close()


async def publisher(url: str) -> None:
    """``[messages, bytes, a second]``: non-persistent, 0 a second being as quickly as it goes."""
    connection = await _connect(url, "pub")
    producer = connection.session().producer(TOPIC, persistent=False)
    say({})
    while (asked := await hear()) is not None:
        count, size, rate = asked
        padding = "x" * max(0, size - 20)
        began, cpu = time.perf_counter(), time.process_time()
        for number in range(count):
            if rate:
                await asyncio.sleep(max(0.0, began + number / rate - time.perf_counter()))
            await producer.send(f"{time.time_ns():020d}{padding}")
        await connection.bus.flush()
        say({"took_s": time.perf_counter() - began, "cpu_s": time.process_time() - cpu})
    await connection.close()


async def sender(url: str) -> None:
    """``[messages, senders]``: persistent, each sender waiting for each to be stored.

    With a third figure they go to a topic, and so many in turn are the regions that durables select.
    """
    connection = await _connect(url, f"sender{os.getpid()}")
    session = connection.session()
    producer, topic = session.producer(QUEUE), session.producer(REGIONS)
    say({})
    while (asked := await hear()) is not None:
        count, senders, *regions = asked

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


async def durables(url: str) -> None:
    """A number: so many durable subscriptions there are then, each for a region of its own."""
    connections = [
        client.Connection(
            await bus_client.connect((url,), identity=f"durable{number}"),
            client_id=f"durable{number}",
            owns_bus=True,
        )
        for number in range(20)
    ]
    sessions = [connection.session(client.Mode.DUPS_OK) for connection in connections]
    made = 0
    say({})
    while (asked := await hear()) is not None:
        began = time.perf_counter()

        async def make(session: client.Session, numbers: range) -> None:
            for number in numbers:
                consumer = await session.durable_consumer(
                    REGIONS, f"d{number}", f"region = 'r{number}'", prefetch=10
                )
                consuming_all.append(asyncio.create_task(drop(consumer)))

        await asyncio.gather(
            *(make(session, range(made + at, asked, len(sessions))) for at, session in enumerate(sessions))
        )
        made = asked
        say({"took_s": time.perf_counter() - began})
    os._exit(0)  # thousands of consumers need not say goodbye one by one


consuming_all: list[asyncio.Task[None]] = []


async def drop(consumer: consuming.Consumer) -> None:
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
    "durables": durables,
}

if __name__ == "__main__":
    # The gateway's own command runs on uvloop too, where it is installed.
    run: Callable[[Any], object] = measure.run_fast if sys.argv[1] == "gateway" else asyncio.run
    run(ROLES[sys.argv[1]](sys.argv[2]))
