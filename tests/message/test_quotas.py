"""What one identity may create: queues and durable subscriptions."""

from __future__ import annotations

import pytest

from muster.core import errors
from muster.message import destinations, settings
from muster.message.client import api as client_api
from tests.message import conftest


async def test_an_identity_creates_a_number_of_queues_and_others_are_served(connect):
    async with conftest.serving(
        connect, "dispatcher", settings.MessageSettings(queues_per_identity=3)
    ) as started:
        await started.acting.wait()
        async with (
            client_api.Connection(await connect("eve")) as eve,
            client_api.Connection(await connect("ann")) as ann,
        ):
            session = eve.session()
            for number in range(3):
                await session.producer(destinations.queue(f"q{number}")).send("x")
            with pytest.raises(errors.LimitExceeded, match="eve has 3 queues, of 3") as refused:
                await session.producer(destinations.queue("q3")).send("x")
            assert "message.queues_per_identity" in (refused.value.hint or "")
            await session.producer(destinations.queue("q0")).send("x")
            await ann.session().producer(destinations.queue("q3")).send("x")
            await session.producer(destinations.queue("q3")).send("it exists now")
            temporary = await session.temporary_queue()
            await session.producer(temporary).send("x")


async def test_an_identity_has_a_number_of_durable_subscriptions(connect):
    limited = settings.MessageSettings(subscriptions_per_identity=2)
    async with conftest.serving(connect, "dispatcher", limited) as started:
        await started.acting.wait()
        async with (
            client_api.Connection(await connect("eve"), client_id="e") as eve,
            client_api.Connection(await connect("ann"), client_id="a") as ann,
        ):
            session, topic = eve.session(), destinations.topic("news")
            for name in ("one", "two"):
                await session.durable_consumer(topic, name)
            with pytest.raises(errors.LimitExceeded, match="eve has 2 durable subscriptions, of 2"):
                await session.durable_consumer(topic, "three")
            await ann.session().durable_consumer(topic, "three")
