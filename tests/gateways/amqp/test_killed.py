"""Gateways killed under load while Qpid JMS roams between them; a checker reads the whole history."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

pytest.importorskip("proton", reason="python-qpid-proton is not installed")

from muster.bus.brokers import broker as brokers
from muster.message import destinations, settings
from muster.message.client import api
from muster.testing import child_process, fixtures
from tests.gateways.amqp import java_project
from tests.message import conftest

TOTAL = 90
KILLS = 3
IN, OUT = destinations.queue("in"), destinations.queue("out")
NEWS = destinations.topic("news")


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_kill_9_of_gateways_keeps_transactions_whole_and_durable_subscriptions_lose_nothing(
    broker: brokers.Broker,
    connect: fixtures.Connect,
    start_process: fixtures.StartProcess,
    dial: conftest.Dial,
    tmp_path: Path,
):
    classpath = await java_project.classpath(tmp_path)

    async def begin(name: str, port: int = 0) -> tuple[child_process.ChildProcess, int]:
        made = await start_process(
            sys.executable, "-m", "tests.gateways.amqp.run_gateway", broker.url, name, str(port)
        )
        return made, int((await made.line(r"serving (\d+)", timeout_s=60))[1])

    message_settings = settings.MessageSettings(connection_timeout_s=5)
    async with conftest.serving(connect, message_settings=message_settings) as dispatcher:
        await dispatcher.acting.wait()
        gateways = [await begin("g0"), await begin("g1")]
        addresses = ",".join(f"amqp://127.0.0.1:{port}" for _, port in gateways)
        url = f"failover:({addresses})?failover.maxReconnectDelay=200"
        mover = await start_process("java", "-cp", classpath, "Mover", url)
        reader = await start_process("java", "-cp", classpath, "Reader", url)
        await mover.line("ready", timeout_s=60)
        await reader.line("ready", timeout_s=60)
        producer = (await dial()).session().producer()
        confirmed: set[int] = set()

        async def note(count: int) -> None:
            """Until so many moves were confirmed."""
            while len(confirmed) < count:
                confirmed.add(int((await mover.line(r"moved (\d+)", timeout_s=60))[1]))

        sent = 0
        for turn in range(KILLS):
            for sent in range(sent + 1, (turn + 1) * TOTAL // KILLS + 1):  # noqa: B020 - it goes on counting
                await producer.send(f"{sent}", to=IN)
                await producer.send(f"{sent}", to=NEWS)
            await note(len(confirmed) + 5)  # it is in the middle of its work
            for number, (gateway, port) in enumerate(gateways):
                await gateway.kill()
                gateways[number] = await begin(f"g{number}-{turn}", port)
        session = (await dial()).session(api.AcknowledgeMode.CLIENT)
        results = await session.consumer(OUT)
        actual: list[int] = []
        async with asyncio.timeout(120):
            while len(set(actual)) < TOTAL:
                message = await results.receive(60)
                assert message is not None, f"only {len(set(actual))} of {TOTAL} were moved"
                actual.append(int(str(message.body())))
                await message.acknowledge()
        await mover.kill()
        read: dict[int, None] = {}
        while len(read) < TOTAL:
            output = await reader.line(r"read (\d+)( again)?", timeout_s=60)
            assert int(output[1]) not in read or output[2], "what comes twice is marked"
            read[int(output[1])] = None
        assert list(read) == list(range(1, TOTAL + 1)), "in order"
        await reader.kill()
        assert sorted(actual) == list(range(1, TOTAL + 1)), "each once: neither lost nor moved twice"
        assert confirmed <= set(actual), "what was confirmed happened"
        assert [message.body() async for message in session.browse(IN)] == []
