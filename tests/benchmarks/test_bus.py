"""bench-bus with few messages: the same processes and brokers as in a full run."""

from __future__ import annotations

import contextlib
import pathlib

import pytest

from benchmarks import bus, measure
from muster.bus.brokers import broker as brokers


@pytest.mark.parametrize("side", bus.SIDES)
async def test_messages_requests_and_durable_publishes(broker: brokers.Broker, side: str):
    with contextlib.ExitStack() as stack:
        first, two = (stack.enter_context(measure.Worker(bus.WORKER, side, broker.url)) for _ in range(2))
        assert first.hear() == two.hear() == {"connected": True}
        assert bus._one_to_many(first, [two], messages=200, size=512) > 0
        two.tell({"do": "answer", "subject": f"topic.answer.{side}"})
        two.hear()
        actual = bus._ask(side, first, requests=20)
        assert 0 < actual["p50_ns"] <= actual["p99_ns"]
        assert bus._store(first, seconds=0.1) > 0


async def test_requests_over_a_direct_connection(broker: brokers.Broker, tmp_path: pathlib.Path):
    with contextlib.ExitStack() as stack:
        answerer, asker = (
            stack.enter_context(measure.Worker(bus.WORKER, "ours", broker.url)) for _ in range(2)
        )
        for worker in (answerer, asker):
            worker.hear()
        bus._link(answerer, asker, tmp_path)
        answerer.tell({"do": "answer", "subject": f"topic.answer.{bus.DIRECT}"})
        answerer.hear()
        before = (await broker.monitoring_page("varz"))["in_msgs"]
        assert bus._ask(bus.DIRECT, asker, requests=500)["p50_ns"] > 0
        assert (await broker.monitoring_page("varz"))["in_msgs"] < before + 500, "they pass no broker"


async def test_idle_connections_are_counted_by_the_broker(broker: brokers.Broker):
    host, port = broker.url.removeprefix("nats://").split(":")
    with measure.Worker(bus.WORKER, "idle", host, port, 25) as holder:
        holder.hear()
        assert (await broker.monitoring_page("varz"))["connections"] == 25
