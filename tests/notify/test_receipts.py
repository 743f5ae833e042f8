"""Receipts of durable events in a client."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from muster.bus.memory import network
from muster.core import messages
from muster.notify import protocol, receipts
from muster.testing.eventually import eventually


def delivery(epoch: int, sequence: int) -> protocol.EventDelivery:
    event = protocol.AdmittedEvent(id=f"{epoch}-{sequence}", type="news", sender="a/b")
    return protocol.EventDelivery(to=("r",), event=event, shard=3, epoch=epoch, sequence=sequence)


@pytest.fixture
async def kept() -> Any:
    return receipts.EventReceipts(await network.SimulatedNetwork(1).connect("ann"))


@pytest.mark.virtual_time
async def test_a_former_holder_is_rejected_while_the_present_one_delivers(kept):
    assert not kept.is_stale(delivery(900, 5_000))
    for number in range(100):
        assert kept.is_stale(delivery(800, 4_000 + number))
        await asyncio.sleep(receipts.RESTORED_S / 2)
        assert not kept.is_stale(delivery(900, 5_001 + number))


@pytest.mark.virtual_time
async def test_a_former_holder_that_wakes_up_again_and_again_is_rejected(kept):
    assert not kept.is_stale(delivery(900, 5_000))
    for number in range(100):
        assert kept.is_stale(delivery(800, 4_000 + number))
        await asyncio.sleep(receipts.RESTORED_S + 1)


@pytest.mark.virtual_time
async def test_a_restored_domain_delivers_again_although_its_epochs_are_lower(kept):
    assert not kept.is_stale(delivery(900, 5_000))
    kept.add("r", delivery(900, 5_000))
    while kept.is_stale(delivery(100, 5_000)):  # it is repeated until it is acknowledged
        assert asyncio.get_running_loop().time() <= receipts.RESTORED_S + 10
        await asyncio.sleep(5)
    assert not kept.has("r", delivery(100, 5_000)), "another event has that number now"
    assert not kept.is_stale(delivery(100, 5_001))
    assert kept.is_stale(delivery(99, 5_001))


@pytest.mark.virtual_time
async def test_any_number_of_acknowledgements_is_sent():
    net = network.SimulatedNetwork(1)
    kept = receipts.EventReceipts(await net.connect("ann"))
    received: list[str] = []

    def take(message: Any) -> None:
        for names in messages.decode(message.data, protocol.EventAcks).events.values():
            received.extend(names)

    notifier = await net.connect("n1")
    await notifier.subscribe("muster.notify.from.ann.ack.3", handler=take)
    names = [f"receiver-{number:06}" for number in range(100_000)]
    for name in names:
        kept.acknowledge(3, 7, name)
    await kept.close()
    await eventually(lambda: len(received) == len(names))
    assert received == names
