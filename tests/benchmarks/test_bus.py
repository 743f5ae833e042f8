"""bench-bus with few messages: the same processes and brokers as in a full run."""

from __future__ import annotations

import contextlib

import pytest

from benchmarks import bus, measure
from muster.bus.brokers import broker as brokers


@pytest.mark.parametrize("side", bus.SIDES)
async def test_messages_requests_and_durable_publishes(broker: brokers.Broker, side: str):
    with contextlib.ExitStack() as stack:
        first, two = (stack.enter_context(measure.Worker(bus.WORKER, side, broker.url)) for _ in range(2))
        assert first.hear() == two.hear() == {"connected": True}
        assert bus._one_to_many(first, [two], messages=200, size=512) > 0
        two.tell({"do": "answer", "subject": f"bench.answer.{side}"})
        two.hear()
        actual = bus._ask(side, first, requests=20)
        assert 0 < actual["p50_ns"] <= actual["p99_ns"]
        assert bus._store(first, seconds=0.1) > 0


async def test_idle_connections_are_counted_by_the_broker(broker: brokers.Broker):
    host, port = broker.url.removeprefix("nats://").split(":")
    with measure.Worker(bus.WORKER, "idle", host, port, 25) as holder:
        holder.hear()
        assert (await broker.monitoring_page("varz"))["connections"] == 25
