"""The processes of bench-message: ``python -m benchmarks.message_worker ROLE URL``; commands and
answers in JSON.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

from muster.bus import api
from muster.bus import client as bus_client
from muster.message import client, consuming, destinations, service

TOPIC = destinations.topic("bench/topic")
QUEUE = destinations.queue("bench")


async def _connect(url: str, identity: str) -> client.Connection:
    return client.Connection(await bus_client.connect((url,), identity=identity), owns_bus=True)


async def dispatcher(url: str) -> None:
    running = service.Service(await bus_client.connect((url,), identity="dispatcher"))
    task = asyncio.create_task(running.run())
    await running.acting.wait()
    say({})
    await asyncio.to_thread(sys.stdin.read)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


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

    async def drop(consumer: consuming.Consumer) -> None:
        async for _ in consumer:
            pass

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
    """``[messages, senders]``: persistent, each sender waiting for each to be stored."""
    connection = await _connect(url, "sender")
    producer = connection.session().producer(QUEUE)
    say({})
    while (asked := await hear()) is not None:
        count, senders = asked

        async def send(times: int) -> None:
            for _ in range(times):
                await producer.send("x" * 100)

        began = time.perf_counter()
        await asyncio.gather(*(send(count // senders) for _ in range(senders)))
        say({"took_s": time.perf_counter() - began})
    await connection.close()


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
}

if __name__ == "__main__":
    asyncio.run(ROLES[sys.argv[1]](sys.argv[2]))  # type: ignore[arg-type]
