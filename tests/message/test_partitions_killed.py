"""Processes that own partitions are killed, frozen and joined under load; a ledger has every message."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import signal
import sys
from collections import Counter

import pytest

from muster.bus.brokers import broker as brokers
from muster.core import errors
from muster.message import destinations, partitions
from muster.message import errors as message_errors
from muster.message.client import api
from muster.testing import child_process, eventually, fixtures
from tests.message import conftest

COUNT = 4
QUEUES = [destinations.queue(f"stock-{number}") for number in range(8)]
TOKENS = [f"token-{number}" for number in range(60)]
MOVES = 120  # transactions of each mover


@pytest.mark.slow
@pytest.mark.timeout(170)
async def test_no_message_is_lost_or_doubled_while_real_processes_are_killed_and_frozen(
    broker: brokers.Broker, start_process: fixtures.StartProcess, dial: conftest.Dial
):
    assert len({partitions.of_queue(queue.name, COUNT) for queue in QUEUES}) == COUNT
    numbers = itertools.count()

    async def begin() -> child_process.ChildProcess:
        return await start_process(
            sys.executable, "-m", "tests.message.run_dispatcher", broker.url, f"d{next(numbers)}", f"{COUNT}"
        )

    processes = [await begin(), await begin()]
    connection = await dial()
    for number, token in enumerate(TOKENS):
        await connection.session().producer(QUEUES[number % len(QUEUES)]).send(token)
    committed = 0

    async def move(number: int) -> None:
        nonlocal committed
        choice = random.Random(number)
        session = (await dial(identity=f"mover-{number}")).session(api.AcknowledgeMode.TRANSACTED)
        receivers = [await session.consumer(queue, prefetch=2) for queue in QUEUES]
        for _ in range(MOVES):
            try:
                taken = [
                    message
                    for receiver in choice.sample(receivers, 2)
                    if (message := await receiver.receive(0.3)) is not None
                ]
                for message in taken:
                    await session.producer(choice.choice(QUEUES)).send(str(message.body()))
                await session.commit()
                committed += bool(taken)
            except (errors.Unavailable, message_errors.TransactionRolledBack):
                with contextlib.suppress(errors.Unavailable):
                    await session.rollback()
        await session.connection.close()  # its consumers return what they hold

    async def progress() -> None:
        """Wait for some commits."""
        before = committed
        await eventually.eventually(lambda: committed > before + 15, timeout_s=60)

    async def disturb() -> None:
        """In turn: a process joins, one is killed, and one is frozen until others have its partitions."""
        for turn in itertools.count():
            await progress()
            if turn % 3 == 0:
                processes.append(await begin())
            elif turn % 3 == 1:
                await processes.pop(0).kill()
            else:
                frozen = processes[0]
                frozen.signal(signal.SIGSTOP)
                await progress()
                frozen.signal(signal.SIGCONT)

    disturbance = asyncio.create_task(disturb())
    try:
        await asyncio.gather(*(move(number) for number in range(4)))
    finally:
        disturbance.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await disturbance
        for process in processes:
            process.signal(signal.SIGCONT)
    assert committed > MOVES
    reader = await dial(identity="reader")
    drained = []
    async with reader.session() as session:
        for queue in QUEUES:
            async with await session.consumer(queue) as consumer:
                while (message := await consumer.receive(2)) is not None:
                    drained.append(str(message.body()))
    assert Counter(drained) == Counter(TOKENS)
