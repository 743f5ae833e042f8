"""Real networks of brokers."""

from __future__ import annotations

import nats

from muster.bus.brokers import network


async def test_a_mesh_of_three_carries_messages(tmp_path):
    async with network.mesh(3, tmp_path) as mesh:
        first, _, third = mesh.urls
        sender, receiver = await nats.connect(first), await nats.connect(third)
        subscription = await receiver.subscribe("news")
        await receiver.flush()
        while not (message := None):
            await sender.publish("news", b"hello")
            try:
                message = await subscription.next_msg(timeout=0.2)
                break
            except nats.errors.TimeoutError:
                continue
        assert message is not None
        assert message.data == b"hello"
        await sender.close()
        await receiver.close()
