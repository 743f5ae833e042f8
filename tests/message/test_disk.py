"""A broker whose disk is really full: senders wait or hear it, nothing accepted is lost, and all goes on."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import pytest

from muster.bus import client as bus_client
from muster.bus.brokers import broker as brokers
from muster.bus.brokers import config, faults
from muster.core import errors
from muster.message import client, destinations
from muster.testing import eventually
from tests import disks
from tests.message import conftest

ORDERS = destinations.queue("orders")
NEWS = destinations.topic("news")


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_a_full_disk_slows_senders_down_and_loses_nothing(small_disk: Path, tmp_path: Path):
    storage = config.Storage(directory=small_disk / "store")
    settings = config.BrokerConfig(name="one", directory=tmp_path / "one", storage=storage)
    async with contextlib.AsyncExitStack() as stack:
        one = await stack.enter_async_context(brokers.Broker(settings))

        async def connect(identity: str) -> bus_client.Client:
            made = await bus_client.connect((one.url,), identity=identity)
            stack.push_async_callback(made.close)
            return made

        async def dial(name: str) -> client.Connection:
            made = client.Connection(await connect(name), client_id=name)
            return await stack.enter_async_context(made)

        await stack.enter_async_context(conftest.serving(connect, max_bytes=8 << 20))
        reader, patient, hasty = await dial("reader"), await dial("patient"), await dial("hasty")
        following = await reader.session().durable_consumer(NEWS, "all")
        hasty.in_doubt_s = 5.0
        accepted: list[str] = []

        async def send(connection: client.Connection, name: str) -> None:
            producer = connection.session().producer()
            body = f"{name} {len(accepted)} " + "x" * 20_000
            await producer.send(body, to=ORDERS)
            await producer.send(body, to=NEWS)
            accepted.append(body)

        for _ in range(10):
            await send(patient, "before")
        ballast = disks.fill(small_disk)

        async def until_it_is_told() -> errors.MusterError:
            while True:
                try:
                    await send(hasty, "meanwhile")
                except errors.MusterError as error:
                    return error

        refusal = await until_it_is_told()
        assert isinstance(refusal, errors.TimedOut)
        assert "without room on its disk" in str(refusal.hint)
        waiting = asyncio.create_task(send(patient, "waiting"))
        problem = await eventually.eventually(one.problem, timeout_s=60)
        assert isinstance(problem, faults.BrokerFailed)
        assert problem.fault is faults.Fault.DISK_FULL
        assert not waiting.done(), "it is slowed down"
        ballast.unlink()
        await waiting
        hasty.in_doubt_s = 60.0
        await send(hasty, "after")

        session = reader.session()
        kept = [str(message.body()) async for message in session.browse(ORDERS)]
        assert set(accepted) <= set(kept), "what was accepted is there"
        assert len(kept) == len(set(kept)), "and once"
        news: list[str] = []
        while not set(accepted) <= set(news):
            message = await following.receive(60)
            assert message is not None, f"only {len(news)} of {len(accepted)} came"
            news.append(str(message.body()))
        assert len(news) == len(set(news))
