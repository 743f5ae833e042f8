"""Requests that no library of ours sends: the dispatcher refuses them, and continues for all others."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
from collections.abc import AsyncIterator
from typing import Any

import pytest

from muster.bus import api as bus_api
from muster.bus.memory import network
from muster.bus.rpc import error_replies
from muster.core import errors
from muster.message import destinations, messages, partitions, protocol, selectors, settings
from muster.message import errors as message_errors
from muster.message.client import api
from muster.message.dispatcher import large_bodies, leadership
from muster.message.dispatcher.peers import peer_protocol
from muster.predicates import limits
from muster.testing import eventually
from tests.message import conftest

pytestmark = pytest.mark.virtual_time

COUNT = 3


def queue_in(partition: int) -> destinations.Destination:
    names = (f"jobs-{suffix}" for suffix in itertools.count())
    return destinations.queue(next(name for name in names if partitions.of_queue(name, COUNT) == partition))


@contextlib.asynccontextmanager
async def serving(net: network.SimulatedNetwork, *, count: int = 1) -> AsyncIterator[None]:
    started = leadership.DispatcherLeadership(
        await net.connect("dispatcher"), settings.MessageSettings(partitions=count), lease_ttl_s=2
    )
    running = asyncio.create_task(started.run())
    try:
        await started.acting.wait()
        yield
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


class RawClient:
    """Sends requests without a library."""

    def __init__(self, bus: bus_api.Bus, partition: int = 0) -> None:
        self._bus = bus
        self._partition = partition
        self.name = f"{bus.identity}-{secrets.token_hex(4)}"

    async def request(self, request: protocol.DispatcherRequest) -> protocol.DispatcherReply:
        subject = protocol.request_subject(self._bus.identity, self._partition)
        reply = await self._bus.request(subject, protocol.encode(request), timeout_s=5)
        answer = protocol.decode_reply(reply.data)
        if answer.error is not None:
            raise error_replies.from_error_reply(answer.error)
        return answer

    async def notify(self, request: protocol.DispatcherRequest) -> None:
        subject = protocol.notify_subject(self._bus.identity, self._partition)
        await self._bus.publish(subject, protocol.encode(request))

    async def attach(self, to: destinations.Destination, **options: Any) -> protocol.DispatcherReply:
        return await self.request(protocol.AttachConsumer(self.name, 1, str(to), credit=10, **options))


@contextlib.asynccontextmanager
async def hostile(net: network.SimulatedNetwork, partition: int = 0) -> AsyncIterator[RawClient]:
    client = RawClient(await net.connect("mallory"), partition)

    async def registered() -> bool:
        with contextlib.suppress(errors.Unavailable):  # it is still starting
            await client.request(protocol.ClientHello(client.name))
            return True
        return False

    await eventually.eventually(registered)
    yield client


async def test_a_consumer_has_one_destination(simulated_network: network.SimulatedNetwork):
    net = simulated_network
    first, second = destinations.queue("first"), destinations.queue("second")
    async with serving(net), api.Connection(await net.connect("ann")) as ann, hostile(net) as mallory:
        epoch = (await mallory.attach(first)).epoch
        with pytest.raises(errors.InvalidInput, match="another destination"):
            await mallory.attach(second)
        with pytest.raises(errors.InvalidInput, match="another destination"):
            await mallory.attach(destinations.topic("news"), subscription="all", durable=True, shared=True)
        await mallory.attach(first)  # a repeated request
        await mallory.request(protocol.Disconnect(mallory.name))
        for queue in (first, second):
            await ann.session().producer(queue).send("work")
            assert await (await ann.session().consumer(queue)).receive(20) is not None
        assert (await ann.request(protocol.Ping(ann.name))).epoch == epoch, "the same dispatcher continues"


@pytest.mark.parametrize("chunk", [*range(1, 7), 10**6, 1 << 62])
async def test_a_large_body_consists_of_its_own_chunks_only(
    simulated_network: network.SimulatedNetwork, chunk: int
):
    """Each page of the log in place of its chunk: one of them has the message of another identity."""
    net = simulated_network
    here, elsewhere = queue_in(1), queue_in(2)
    async with serving(net, count=COUNT), api.Connection(await net.connect("ann")) as ann:
        await ann.session().producer(here).send("a secret")
        async with hostile(net, 1) as mallory:
            body = secrets.token_hex(16)
            await mallory.request(protocol.StoreChunk(mallory.name, body, b"mine", 1))
            large = messages.LargeBody(body, 4, [chunk], 1)
            meta = messages.MessageMeta(kind="b", destination=str(elsewhere), persistent=True, large=large)
            send = protocol.SendMessage(str(elsewhere), messages.encode_meta(meta).decode(), b"")
            await mallory.request(protocol.CommitWork(mallory.name, 1, [send]))
        for queue in (here, elsewhere):
            await ann.session().producer(queue).send("more")
        assert await conftest.take(await ann.session().consumer(here), 2) == ["a secret", "more"]
        consumer = await ann.session().consumer(elsewhere)
        bodies = [message.body() if (message := await consumer.receive(20)) else None for _ in range(2)]
        assert bodies in (["more", None], [b"mine", "more"])


async def test_an_identity_stores_a_limited_number_of_bodies_without_their_messages(
    simulated_network: network.SimulatedNetwork, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(large_bodies, "UPLOADS_MAX", 3)
    net = simulated_network
    async with serving(net), hostile(net) as mallory, api.Connection(await net.connect("ann")) as ann:
        stored = [secrets.token_hex(16) for _ in range(3)]
        for body in stored * 2:
            await mallory.request(protocol.StoreChunk(mallory.name, body, b"x"))
        with pytest.raises(errors.LimitExceeded, match="without their messages"):
            await mallory.request(protocol.StoreChunk(mallory.name, secrets.token_hex(16), b"x"))
        await ann.session().producer(destinations.queue("orders")).send(b"x" * (1 << 20))
        await mallory.notify(protocol.ReleaseBody(stored[0]))
        await mallory.request(protocol.StoreChunk(mallory.name, secrets.token_hex(16), b"x"))


async def test_a_refused_work_is_refused_again(simulated_network: network.SimulatedNetwork):
    net = simulated_network
    async with serving(net, count=COUNT), hostile(net) as mallory:
        for _ in range(2):
            send = protocol.SendMessage("temporary-queue:" + "x" * 400, "{}", b"")
            with pytest.raises(message_errors.InvalidDestination):
                await mallory.request(protocol.CommitWork(mallory.name, 1, [send]))


def test_a_large_body_refers_to_no_chunk_twice():
    with pytest.raises(message_errors.FormatError, match="twice"):
        messages.decode_meta(f'{{"large":["{secrets.token_hex(16)}",8,[7,7]]}}')


async def test_a_large_body_continues_where_its_transfer_was_interrupted(
    simulated_network: network.SimulatedNetwork, monkeypatch: pytest.MonkeyPatch
):
    net = simulated_network
    monkeypatch.setattr(protocol, "LARGE_BYTES", 1000)
    monkeypatch.setattr(protocol, "CHUNK_BYTES", 700)
    body = bytes(range(256)) * 10
    chunks = -(-len(body) // 700)
    stored: list[str] = []
    store = large_bodies.LargeBodies.store

    async def store_after_failures(
        self: large_bodies.LargeBodies, request: protocol.StoreChunk | peer_protocol.StoreBody, *of: str
    ) -> protocol.DispatcherReply:
        if isinstance(request, peer_protocol.StoreBody):
            stored.append(request.body)
            if len(stored) in (2, 4):
                raise message_errors.LogFull("the log of messages is full")
        return await store(self, request, *of)

    monkeypatch.setattr(large_bodies.LargeBodies, "store", store_after_failures)
    async with serving(net, count=COUNT), api.Connection(await net.connect("ann")) as ann:
        await ann.session().producer(queue_in(1)).send(body)
        await ann.request(protocol.MoveMessages(queue_in(1).name, str(queue_in(2))))
        message = await (await ann.session().consumer(queue_in(2))).receive(20)
        assert message is not None
        assert message.body() == body
        assert len(stored) == chunks + 2
        assert len(set(stored)) == 1


async def test_only_stored_messages_are_acknowledged(simulated_network: network.SimulatedNetwork):
    net = simulated_network
    orders = destinations.queue("orders")
    async with serving(net), api.Connection(await net.connect("ann")) as ann:
        async with hostile(net) as mallory:
            await mallory.attach(orders)
            later = [*(sequence << 10 for sequence in range(2, 200)), (1 << 64) - 1]
            await mallory.request(protocol.CommitWork(mallory.name, 1, acks={f"q:{orders.name}": later}))
            await mallory.request(protocol.Disconnect(mallory.name))
        for number in range(3):
            await ann.session().producer(orders).send(f"{number}")
        (row,) = (await ann.request(protocol.ListQueues())).queues
        assert row.depth == 3
        assert await conftest.take(await ann.session().consumer(orders), 3) == ["0", "1", "2"]


async def test_an_acknowledgement_of_a_message_of_another_queue_does_not_change_the_depth(
    simulated_network: network.SimulatedNetwork,
):
    net = simulated_network
    orders, others = destinations.queue("orders"), destinations.queue("others")
    async with api.Connection(await net.connect("ann")) as ann:

        async def depths() -> dict[str, int]:
            return {row.queue: row.depth for row in (await ann.request(protocol.ListQueues())).queues}

        async with serving(net):
            for destination in (orders, others, others):
                await ann.session().producer(destination).send("x")
        async with serving(net):  # a later dispatcher has not indexed them
            async with hostile(net) as mallory:
                every = [sequence << 10 for sequence in range(1, 50)]
                await mallory.request(protocol.CommitWork(mallory.name, 1, acks={f"q:{orders.name}": every}))
            consumer = await ann.session().consumer(orders)
            assert await consumer.receive_nowait() is None
            assert await depths() == {"orders": 0, "others": 2}
            await ann.session().producer(orders).send("next")
            assert await depths() == {"orders": 1, "others": 2}


def test_names_that_are_too_long_are_not_cached():
    name = "x" * (1 << 20)
    before = destinations._parse.cache_info().currsize
    for text in (name, f"topic:{name}", f"queue:{name}", f"temporary-topic:{name}"):
        with pytest.raises(message_errors.InvalidDestination):
            destinations.Destination.parse(text)
    assert destinations._parse.cache_info().currsize == before


@pytest.mark.parametrize("forged", ["destination", "property", "both"])
@pytest.mark.parametrize("by_topic", [False, True])
async def test_a_sender_does_not_choose_where_a_dead_letter_returns_to(
    simulated_network: network.SimulatedNetwork, forged: str, by_topic: bool
):
    net = simulated_network
    orders, secret = destinations.queue("orders"), destinations.queue("secret")
    source = destinations.topic("news") if by_topic else orders
    meta = messages.MessageMeta(
        kind="t",
        persistent=True,
        destination=str(secret) if forged != "property" else str(source),
        properties={messages.DEAD_FROM: str(secret)} if forged != "destination" else {},
    )
    header = messages.encode_meta(meta).decode()
    async with serving(net), api.Connection(await net.connect("ann"), client_id="desk") as ann:
        session = ann.session(api.AcknowledgeMode.CLIENT)
        consumer = await (session.durable_consumer(source, "all") if by_topic else session.consumer(source))
        async with hostile(net) as mallory:
            if by_topic:
                bus = await net.connect("mallory")
                await bus.publish(source.subject, b"forged", headers={messages.HEADER: header})
            else:
                send = protocol.SendMessage(str(source), header, b"forged")
                await mallory.request(protocol.CommitWork(mallory.name, 1, [send]))
        for _ in range(settings.MessageSettings().max_deliveries):
            assert await consumer.receive(20) is not None
            await session.recover()
        await consumer.close()

        async def moved() -> int:
            return (await ann.request(protocol.MoveMessages(destinations.DEAD_LETTERS))).count

        assert await eventually.eventually(moved) == 1
        rows = {row.queue: row.depth for row in (await ann.request(protocol.ListQueues())).queues}
        assert secret.name not in rows
        assert by_topic or rows[orders.name] == 1


@pytest.mark.parametrize("partition", range(COUNT))
async def test_a_client_id_has_a_largest_size_in_every_partition(
    simulated_network: network.SimulatedNetwork, partition: int
):
    net = simulated_network
    async with serving(net, count=COUNT), hostile(net, partition) as mallory:
        with pytest.raises(message_errors.InvalidClientId, match="1024 bytes"):
            await mallory.request(protocol.ClientHello(f"{mallory.name}x", "x" * 1025))


TOO_LONG = "a = '" + "x" * 8_187 + "'"
TOO_MANY = " OR ".join(["a"] * 257)


@pytest.mark.parametrize(("selector", "limit"), [(TOO_LONG, "8,192 are allowed"), (TOO_MANY, "256 clauses")])
async def test_a_selector_has_a_largest_size_in_every_request(
    simulated_network: network.SimulatedNetwork, selector: str, limit: str
):
    net = simulated_network
    queue, topic = destinations.queue("jobs"), destinations.topic("news")
    async with (
        serving(net),
        hostile(net) as mallory,
        api.Connection(await net.connect("ann"), client_id="office") as ann,
    ):
        session = ann.session()
        durable = {"subscription": "all", "durable": True, "shared": True, "selector": selector}
        before = selectors.cache.characters
        for refused in (
            mallory.attach(queue, selector=selector),
            mallory.attach(topic, **durable),
            mallory.attach(topic, **durable | {"durable": False}),
            mallory.request(protocol.BrowseQueue(queue.name, selector)),
            mallory.request(protocol.PurgeQueue(queue.name, selector)),
            mallory.request(protocol.MoveMessages(queue.name, "queue:others", selector)),
            session.consumer(queue, selector),
            session.consumer(topic, selector),
            session.durable_consumer(topic, "mine", selector),
            anext(session.browse(queue, selector)),
        ):
            with pytest.raises((errors.LimitExceeded, message_errors.IllegalState), match=limit):
                await refused
        assert selectors.cache.characters == before
        await mallory.attach(queue, selector=" OR ".join(["a"] * 256))


async def test_a_consumer_whose_selector_a_new_version_refuses_does_not_stop_the_others(
    simulated_network: network.SimulatedNetwork, monkeypatch: pytest.MonkeyPatch
):
    """The dispatcher of an earlier version had larger limits, and the client still has them."""
    net = simulated_network
    refused: list[Exception] = []
    async with api.Connection(await net.connect("ann")) as ann:
        ann.on_error = refused.append
        session = ann.session()
        with monkeypatch.context() as earlier:
            earlier.setattr(selectors, "LIMITS", limits.DEFAULT)
            async with serving(net):
                large = await session.consumer(destinations.queue("large"), TOO_MANY)
                other = await session.consumer(destinations.queue("other"))
        monkeypatch.setattr(selectors, "cache", selectors.SelectorCache())
        async with serving(net):
            producer = ann.session().producer(destinations.queue("other"))
            await producer.send("text")
            received = await other.receive(timeout_s=20)
            assert received is not None
            assert large.closed
            assert len(refused) == 1
            assert "256 clauses" in str(refused[0])


def test_the_total_length_of_cached_selectors_is_limited():
    cache = selectors.SelectorCache()
    used = "region = 'north'"
    length = 8_000
    kept = cache.get(used)
    for number in range(3 * selectors.CACHED_CHARACTERS_MAX // length):
        cache.get(f"{number} = {number}".ljust(length))
        assert cache.get(used) is kept, "the least recently used are dropped first"
        assert cache.characters <= selectors.CACHED_CHARACTERS_MAX
    assert len(cache) == (selectors.CACHED_CHARACTERS_MAX - len(used)) // length + 1


def test_the_number_of_cached_selectors_is_limited():
    cache = selectors.SelectorCache()
    for number in range(selectors.CACHED_MAX + 10):
        cache.get(f"a={number}")
    assert len(cache) == selectors.CACHED_MAX


@pytest.mark.parametrize(
    "decode", [protocol.decode_request, protocol.decode_reply, peer_protocol.decode_request]
)
def test_a_request_that_is_nested_too_deeply_is_malformed(decode: Any):
    nested = b"\x82\xa7request\xa6queues\xa1x" + b"\x91" * 5000 + b"\x01"
    with pytest.raises(errors.MusterError):
        decode(nested)


def test_a_header_that_is_nested_too_deeply_is_malformed():
    with pytest.raises(message_errors.FormatError):
        messages.decode_meta('{"x":' + "[" * 3000 + "]" * 3000 + "}")
