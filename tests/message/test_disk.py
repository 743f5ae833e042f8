"""A broker with a full disk: senders wait or get an error, nothing accepted is lost, and it recovers."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import pytest

from muster.bus.brokers import broker as brokers
from muster.bus.brokers import config, diagnosis
from muster.bus.client import client as bus_client
from muster.core import errors
from muster.message import destinations, protocol
from muster.message.client import api
from muster.testing import eventually
from muster.trust.login import passwords
from tests import disks
from tests.message import conftest

ORDERS = destinations.queue("orders")
NEWS = destinations.topic("news")


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_a_full_disk_slows_senders_down_and_loses_nothing(small_disk: Path, tmp_path: Path):
    storage = config.BrokerStorage(directory=small_disk / "store")
    settings = config.BrokerConfig(name="one", directory=tmp_path / "one", storage=storage)
    async with contextlib.AsyncExitStack() as stack:
        broker = await stack.enter_async_context(brokers.Broker(settings))

        async def connect(identity: str) -> bus_client.NatsBus:
            made = await bus_client.connect((broker.url,), identity=identity)
            stack.push_async_callback(made.close)
            return made

        async def dial(name: str) -> api.Connection:
            made = api.Connection(await connect(name), client_id=name)
            return await stack.enter_async_context(made)

        await stack.enter_async_context(conftest.serving(connect, max_bytes=8 << 20))
        reader, patient, hasty = await dial("reader"), await dial("patient"), await dial("hasty")
        following = await reader.session().durable_consumer(NEWS, "all")
        hasty.in_doubt_s = 5.0
        accepted: list[str] = []

        async def send(connection: api.Connection, name: str) -> None:
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
        assert "disk is full" in str(refusal.hint)
        waiting = asyncio.create_task(send(patient, "waiting"))
        problem = await eventually.eventually(broker.problem, timeout_s=60)
        assert isinstance(problem, diagnosis.BrokerFailed)
        assert problem.fault is diagnosis.BrokerFault.DISK_FULL
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


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_a_flood_of_amqp_producers_on_a_full_disk_is_held_back_and_loses_nothing(
    small_disk: Path, tmp_path: Path
):
    proton = pytest.importorskip("proton", reason="python-qpid-proton is not installed")
    from muster.gateways.amqp import gateway as amqp_gateway
    from muster.gateways.amqp.links import producers
    from tests.gateways.amqp import raw_client

    each, size = 2_500, 2_000  # more than their credit
    storage = config.BrokerStorage(directory=small_disk / "store")
    settings = config.BrokerConfig(name="one", directory=tmp_path / "one", storage=storage)

    def flood(port: int, name: str) -> set[str]:
        """Send as fast as credit comes; what was accepted."""
        raw = raw_client.Raw(port, name)
        raw.socket.settimeout(120)
        sender = raw.session.sender("out")
        sender.target.address = "queue:orders"
        sender.open()
        sent: dict[str, Any] = {}
        for number in range(each):
            raw.until(lambda: sender.credit > 0)
            body = f"{name} {number}"
            sent[body] = sender.delivery(f"{number}")
            sender.send(proton.Message(body=body.ljust(size), durable=True).encode())
            sender.advance()
        raw.until(lambda: all(delivery.settled for delivery in sent.values()))
        raw.socket.close()
        return {body for body, delivery in sent.items() if delivery.remote_state == proton.Delivery.ACCEPTED}

    async with contextlib.AsyncExitStack() as stack:
        broker = await stack.enter_async_context(brokers.Broker(settings))
        numbers = iter(range(100))

        async def connect(identity: str) -> bus_client.NatsBus:
            made = await bus_client.connect((broker.url,), identity=f"{identity}-{next(numbers)}")
            stack.push_async_callback(made.close)
            return made

        async def join(login: passwords.PasswordLogin) -> bus_client.NatsBus:
            return await connect(login.name)

        await stack.enter_async_context(conftest.serving(connect, max_bytes=26 << 20))
        gateway = await stack.enter_async_context(amqp_gateway.AmqpGateway(join, None, anonymous="client"))
        looking = await stack.enter_async_context(api.Connection(await connect("looking")))
        flooding = [
            asyncio.create_task(asyncio.to_thread(flood, gateway.port, name)) for name in ("a", "b", "c")
        ]

        async def depth() -> int:
            rows = (await looking.request(protocol.ListQueues())).queues
            return rows[0].depth if rows else 0

        async def has_begun() -> bool:
            return await depth() > 100

        await eventually.eventually(has_begun)
        ballast = disks.fill(small_disk)
        problem = await eventually.eventually(broker.problem, timeout_s=60)
        assert isinstance(problem, diagnosis.BrokerFailed)
        assert problem.fault is diagnosis.BrokerFault.DISK_FULL
        assert not any(task.done() for task in flooding), "they are slowed down"
        for bridge in gateway.connections:
            for inlet in bridge.producer_links.values():
                assert inlet.under_way <= producers.CREDIT + producers.CREDIT // 2
        ballast.unlink()
        accepted = set().union(*await asyncio.gather(*flooding))
        session = looking.session()
        kept = [str(message.body()).strip() async for message in session.browse(ORDERS)]
        assert accepted <= set(kept), "what was accepted is there"
        assert len(kept) == len(set(kept)), "and once"
        assert accepted, "it went on"
