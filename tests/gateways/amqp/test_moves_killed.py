"""Dispatchers and gateways killed and frozen while queues move; a history has all sends and deliveries."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import signal
import sys
import threading
from collections import Counter

import pytest

proton = pytest.importorskip("proton", reason="python-qpid-proton is not installed")

from proton import utils as proton_utils  # noqa: E402

from muster.bus.brokers import broker as brokers  # noqa: E402
from muster.core import errors  # noqa: E402
from muster.message import destinations, partitions  # noqa: E402
from muster.message.client import api  # noqa: E402
from muster.testing import child_process, eventually, fixtures  # noqa: E402
from tests.message import conftest  # noqa: E402

PARTITIONS = 4
QUEUES = [f"stock-{number}" for number in range(8)]
ROUNDS = 3


class DeliveryHistory:
    """What clients attempted, what was confirmed, and what arrived. Clients in threads share it."""

    def __init__(self) -> None:
        self.ending = threading.Event()  # producers stop
        self.ended = threading.Event()  # consumers stop
        self.attempted: set[str] = set()
        self.sent: set[str] = set()
        self.acknowledged: set[str] = set()
        self.deliveries: list[tuple[str, bool]] = []  # text, marked as a redelivery
        self._numbers = itertools.count()

    def next_text(self) -> str:
        text = f"{next(self._numbers)}"
        self.attempted.add(text)
        return text

    @property
    def received(self) -> set[str]:
        return {text for text, _ in list(self.deliveries)}

    def check(self) -> None:
        assert self.sent <= self.received, f"lost: {sorted(self.sent - self.received)}"
        assert self.received <= self.attempted
        unmarked = Counter(text for text, redelivered in self.deliveries if not redelivered)
        doubled = {text for text, count in unmarked.items() if count > 1}
        assert not doubled, f"more than one delivery that is not marked: {sorted(doubled)}"


async def produce(connection: api.Connection, history: DeliveryHistory) -> None:
    producer = connection.session().producer()
    for queue in itertools.cycle(QUEUES):
        if history.ending.is_set():
            return
        text = history.next_text()
        with contextlib.suppress(errors.Unavailable):
            await producer.send(text, to=destinations.queue(queue))
            history.sent.add(text)


async def consume(connection: api.Connection, queue: str, history: DeliveryHistory) -> None:
    session = connection.session(api.AcknowledgeMode.CLIENT)
    async with await session.consumer(destinations.queue(queue), prefetch=5) as consumer:
        while not history.ended.is_set():
            message = await consumer.receive(0.5)
            if message is not None:
                history.deliveries.append((str(message.body()), message.redelivered))
                with contextlib.suppress(errors.Unavailable):
                    await message.acknowledge()
                    history.acknowledged.add(str(message.body()))


async def drain(connection: api.Connection, history: DeliveryHistory) -> set[str]:
    """The messages that are left, which are deliveries as well."""
    rest = set()
    async with connection.session() as session:
        for queue in QUEUES:
            async with await session.consumer(destinations.queue(queue)) as consumer:
                while (message := await consumer.receive(2)) is not None:
                    rest.add(str(message.body()))
                    history.deliveries.append((str(message.body()), message.redelivered))
    return rest


def exchange_over_amqp(port: int, history: DeliveryHistory) -> None:
    """Send and receive through a gateway, and connect again whenever that fails."""
    queues = itertools.cycle(QUEUES)
    while not history.ended.is_set():
        with contextlib.suppress(proton.ProtonException, OSError):
            connection = proton_utils.BlockingConnection(
                f"amqp://127.0.0.1:{port}", timeout=5, allowed_mechs="ANONYMOUS", reconnect=False
            )
            try:
                _exchange(connection, queues, history)
            finally:
                with contextlib.suppress(proton.ProtonException, OSError):
                    connection.close()


def _exchange(
    connection: proton_utils.BlockingConnection, queues: itertools.cycle[str], history: DeliveryHistory
) -> None:
    receivers = [connection.create_receiver(f"queue:{queue}", credit=3) for queue in QUEUES[:2]]
    while not history.ended.is_set():
        if not history.ending.is_set():
            text = history.next_text()
            sender = connection.create_sender(f"queue:{next(queues)}")
            sender.send(proton.Message(body=text, durable=True))
            history.sent.add(text)
            sender.close()
        for receiver in receivers:
            with contextlib.suppress(proton.Timeout):
                message = receiver.receive(timeout=0.05)
                history.deliveries.append((str(message.body), message.delivery_count > 0))
                receiver.accept()


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", range(10))
async def test_nothing_is_lost_or_doubled_when_a_process_fails_while_queues_move(
    broker: brokers.Broker, start_process: fixtures.StartProcess, dial: conftest.Dial, seed: int
):
    assert len({partitions.of_queue(queue, PARTITIONS) for queue in QUEUES}) == PARTITIONS
    choice, names, history = random.Random(seed), itertools.count(), DeliveryHistory()

    async def begin() -> child_process.ChildProcess:
        return await start_process(
            sys.executable,
            "-m",
            "tests.message.run_dispatcher",
            broker.url,
            f"d{next(names)}",
            f"{PARTITIONS}",
        )

    async def begin_gateway(port: int = 0) -> tuple[child_process.ChildProcess, int]:
        module = "tests.gateways.amqp.run_gateway"
        made = await start_process(sys.executable, "-m", module, broker.url, f"g{next(names)}", f"{port}")
        return made, int((await made.line(r"serving (\d+)", timeout_s=60))[1])

    async def progress(deliveries: int) -> None:
        before = len(history.deliveries)
        await eventually.eventually(lambda: len(history.deliveries) >= before + deliveries, timeout_s=60)

    first = await begin()
    await first.line("acting", timeout_s=60)
    gateway, port = await begin_gateway()
    connections = [await dial(identity=f"client-{number}") for number in range(2)]
    tasks = [asyncio.create_task(produce(connection, history)) for connection in connections]
    tasks += [
        asyncio.create_task(consume(connections[number % 2], queue, history))
        for number, queue in enumerate(QUEUES)
    ]
    tasks.append(asyncio.create_task(asyncio.to_thread(exchange_over_amqp, port, history)))
    try:
        for _ in range(ROUNDS):
            second = await begin()  # half of the partitions move to it
            await second.line("acting", timeout_s=60)
            await progress(choice.choice([0, 1, 5, 20]))
            victim = choice.choice([first, second, gateway])
            if choice.random() < 0.5:
                victim.signal(signal.SIGSTOP)
                await progress(100)
                victim.signal(signal.SIGCONT)
                await progress(choice.choice([0, 20]))
            else:
                await victim.kill()
            if victim is gateway:
                await gateway.kill()
                gateway, _ = await begin_gateway(port)
                victim = choice.choice([first, second])
            await progress(20)
            await victim.kill()
            first = second if victim is first else first
        history.ending.set()
        await eventually.eventually(lambda: history.sent <= history.received, timeout_s=60)
    finally:
        history.ending.set()
        history.ended.set()
        await asyncio.gather(*tasks)
    rest = await drain(await dial(identity="reader"), history)
    history.check()
    again = rest & history.acknowledged
    assert not again, f"still there after the acknowledgement: {sorted(again)}"
