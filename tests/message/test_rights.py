"""Rights on queues: of each role and of single credentials, for every protocol."""

from __future__ import annotations

import asyncio
import contextlib
import pathlib
from collections.abc import AsyncIterator

import pytest

from muster.app.components import dispatcher as app_message
from muster.bus import api
from muster.bus.memory import network
from muster.core import errors
from muster.message import destinations, messages, protocol
from muster.message.client import api as client_api
from muster.message.dispatcher import leadership
from muster.testing import fixtures
from muster.trust import keyring
from muster.trust.login import passwords
from muster.trust.permissions import queue_rights, roles
from tests.message import conftest

ORDERS = destinations.queue("orders")
DEAD = destinations.queue(destinations.DEAD_LETTERS)
RIGHTS = tuple(queue_rights.QueueRight)

#: Identities: their role, topics and queues, and what follows for `ORDERS` and for the dead letters.
WHO: dict[str, tuple[roles.Role, tuple[str, ...], tuple[str, ...], set[str], set[str]]] = {
    "user": (roles.Role.USER, (), (), {"send", "receive", "browse"}, set()),
    "meter": (roles.Role.USER, ("topic.meters.>",), (), set(), set()),
    "sender": (roles.Role.USER, (), ("orders:send",), {"send"}, set()),
    "worker": (roles.Role.USER, ("topic.meters.>",), ("or*:receive",), {"receive"}, set()),
    "stranger": (roles.Role.USER, (), ("orders-2:send,receive,browse,admin",), set(), set()),
    "keeper": (roles.Role.USER, (), ("orders:admin", "dead-letters:browse"), {"admin"}, {"browse"}),
    "agent": (roles.Role.AGENT, (), (), set(), set()),
    "viewer": (roles.Role.VIEWER, (), (), {"browse"}, {"browse"}),
    "operator": (roles.Role.OPERATOR, (), (), set(RIGHTS), set(RIGHTS)),
    "web": (roles.Role.WEB, (), (), set(RIGHTS), set(RIGHTS)),
    "gateway": (roles.Role.GATEWAY, (), (), set(RIGHTS), set(RIGHTS)),
    **{
        role.value: (role, (), (), set(), set())
        for role in roles.Role
        if role
        not in (
            *(roles.Role.USER, roles.Role.AGENT, roles.Role.VIEWER, roles.Role.OPERATOR),
            *(roles.Role.WEB, roles.Role.GATEWAY, roles.Role.SYSTEM),
        )
    },
}


@pytest.fixture(scope="module")
def trust(tmp_path_factory: pytest.TempPathFactory) -> keyring.Keyring:
    made = keyring.Keyring.create(tmp_path_factory.mktemp("trust") / "keys", "north")
    for identity, (role, topics, granted, _, _) in WHO.items():
        grants = tuple(map(queue_rights.QueueGrant.parse, granted)) or None
        made.issue(identity, role, topics=topics or None, queue_grants=grants)
    return made


@contextlib.asynccontextmanager
async def serving(net: network.SimulatedNetwork, trust: keyring.Keyring) -> AsyncIterator[None]:
    may = app_message.TopicPermissions(trust)
    started = leadership.DispatcherLeadership(await net.connect("dispatcher"), lease_ttl_s=2, may=may)
    running = asyncio.create_task(started.run())
    try:
        await started.acting.wait()
        yield
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def _attempt(right: str, connection: client_api.Connection, queue: destinations.Destination) -> None:
    session = connection.session()
    match right:
        case "send":
            await session.producer(queue).send("mine")
        case "receive":
            await session.consumer(queue)
        case "browse":
            assert [message async for message in session.browse(queue)]
        case "admin":
            await connection.request(protocol.PurgeQueue(queue.name))


async def _outcomes(connection: client_api.Connection, queue: destinations.Destination) -> set[str]:
    """Which rights it turns out to have."""
    outcomes = set()
    for right in ("send", "browse", "receive", "admin"):
        with contextlib.suppress(errors.Forbidden):
            await _attempt(right, connection, queue)
            outcomes.add(right)
    return outcomes


@pytest.mark.virtual_time
@pytest.mark.parametrize("identity", WHO)
async def test_each_identity_may_what_its_credentials_say(
    simulated_network: network.SimulatedNetwork, trust: keyring.Keyring, identity: str
):
    net = simulated_network
    _, _, _, on_orders, on_the_dead = WHO[identity]
    async with (
        serving(net, trust),
        client_api.Connection(await net.connect("operator")) as operator,
        client_api.Connection(await net.connect(identity)) as connection,
    ):
        for queue in (ORDERS, DEAD):
            await operator.session().producer(queue).send("theirs")
        rows = (await connection.request(protocol.ListQueues())).queues
        seen = {row.queue for row in rows}
        assert seen == {name for name, has in (("orders", on_orders), (DEAD.name, on_the_dead)) if has}
        assert await _outcomes(connection, ORDERS) == on_orders
        assert await _outcomes(connection, DEAD) == on_the_dead


@pytest.mark.virtual_time
async def test_rights_are_not_got_by_a_detour(
    simulated_network: network.SimulatedNetwork, trust: keyring.Keyring
):
    net = simulated_network
    async with (
        serving(net, trust),
        client_api.Connection(await net.connect("operator")) as operator,
        client_api.Connection(await net.connect("keeper")) as keeper,
        client_api.Connection(await net.connect("sender")) as sender,
    ):
        disguised = messages.TextMessage("theirs", properties={messages.DEAD_FROM: "queue:orders-2"})
        await operator.session().producer(ORDERS).send(disguised)
        (waiting,) = (await operator.request(protocol.BrowseQueue("orders"))).messages
        for to in ("queue:orders-2", "queue:dead-letters"):
            with pytest.raises(errors.Forbidden):  # it may administer the one, and not send to the other
                await keeper.request(protocol.MoveMessages("orders", to))
        with pytest.raises(errors.InvalidInput, match="not a dead letter"):
            await keeper.request(protocol.MoveMessages("orders", None))
        await sender.submit([], {"q:orders": [waiting.sequence]})
        with pytest.raises(errors.Refused):
            await sender.submit([], {"q:orders": [waiting.sequence]}, atomic=True)
        assert len((await operator.request(protocol.BrowseQueue("orders"))).messages) == 1, (
            "it was acknowledged"
        )
        transacted = sender.session(client_api.AcknowledgeMode.TRANSACTED)
        await transacted.producer(ORDERS).send("mine")
        await transacted.producer(destinations.queue("orders-2")).send("mine")
        with pytest.raises(errors.Refused):
            await transacted.commit()
        assert len((await operator.request(protocol.BrowseQueue("orders"))).messages) == 1, (
            "half of it was done"
        )


@pytest.mark.virtual_time
async def test_temporary_queues_are_for_those_who_have_queues_at_all(
    simulated_network: network.SimulatedNetwork, trust: keyring.Keyring
):
    net = simulated_network
    async with (
        serving(net, trust),
        client_api.Connection(await net.connect("worker")) as worker,
        client_api.Connection(await net.connect("sender")) as sender,
        client_api.Connection(await net.connect("agent")) as agent,
    ):
        session = worker.session()
        replies = await session.temporary_queue()
        consumer = await session.consumer(replies)
        await sender.session().producer(replies).send("a reply")
        with pytest.raises(errors.Forbidden):
            await agent.session().producer(replies).send("none")
        own = agent.session()
        with pytest.raises(errors.Forbidden):
            await own.consumer(await own.temporary_queue())
        for connection in (sender, agent):
            with pytest.raises(errors.Forbidden):
                await connection.request(protocol.BrowseQueue(replies.name))
        assert len((await worker.request(protocol.BrowseQueue(replies.name))).messages) == 1
        message = await consumer.receive(5)
        assert message is not None


@pytest.mark.virtual_time
async def test_a_subscription_is_ended_by_no_other_identity(
    simulated_network: network.SimulatedNetwork, trust: keyring.Keyring
):
    net = simulated_network
    async with serving(net, trust):
        async with client_api.Connection(await net.connect("user"), client_id="desk") as owner:
            consumer = await owner.session().durable_consumer(destinations.topic("news/eu"), "all")
            await consumer.close()
        for identity in ("agent", "meter", "stranger"):
            async with client_api.Connection(await net.connect(identity), client_id="desk") as connection:
                with pytest.raises(errors.NotFound):
                    await connection.session().unsubscribe("all")
                with pytest.raises(errors.Forbidden):
                    await connection.request(
                        protocol.EndSubscription(connection.name, "all", owner=("user", "desk"))
                    )
        async with client_api.Connection(await net.connect("user"), client_id="desk") as owner:
            await owner.session().unsubscribe("all")


@pytest.mark.virtual_time
async def test_a_connection_named_like_a_queue_does_not_own_it(
    simulated_network: network.SimulatedNetwork, trust: keyring.Keyring
):
    """``temporary-queue:X`` is the queue X, unless its name says that it is temporary."""
    net = simulated_network
    trust.issue("poster", roles.Role.USER, queue_grants=(queue_rights.QueueGrant.parse("poster-*:send"),))
    async with (
        serving(net, trust),
        client_api.Connection(await net.connect("operator")) as operator,
        client_api.Connection(await net.connect("poster")) as sender,
    ):
        sender.name = "poster-orders"  # which it chooses itself
        for name in (sender.name, f"{sender.name}:1"):
            await operator.session().producer(destinations.queue(name)).send("theirs")
            with pytest.raises(errors.Forbidden):
                await sender.request(
                    protocol.AttachConsumer(sender.name, 1, f"temporary-queue:{name}", credit=10)
                )


@pytest.mark.virtual_time
async def test_a_durable_subscription_is_no_wider_than_the_topics_of_its_identity(
    simulated_network: network.SimulatedNetwork, trust: keyring.Keyring
):
    net = simulated_network
    trust.issue("one-level", roles.Role.USER, topics=("topic.meters.*",))
    async with (
        serving(net, trust),
        client_api.Connection(await net.connect("one-level"), client_id="c") as it,
    ):
        session = it.session()
        await session.durable_consumer(destinations.topic("meters/*"), "mine")
        for wider in ("meters/>", ">", "*/*"):
            with pytest.raises(errors.Forbidden):
                await session.durable_consumer(destinations.topic(wider), "theirs")


@pytest.mark.virtual_time
async def test_temporary_queues_are_hidden_from_others(
    simulated_network: network.SimulatedNetwork, trust: keyring.Keyring
):
    net = simulated_network
    async with (
        serving(net, trust),
        client_api.Connection(await net.connect("worker")) as worker,
        client_api.Connection(await net.connect("user")) as user,
        client_api.Connection(await net.connect("viewer")) as viewer,
        client_api.Connection(await net.connect("operator")) as operator,
    ):
        replies = await worker.session().temporary_queue()
        await user.session().producer(replies).send("a reply")
        for other in (user, viewer):
            assert not (await other.request(protocol.ListQueues())).queues
            with pytest.raises(errors.Forbidden):
                await other.request(protocol.BrowseQueue(replies.name))
        for reader in (worker, operator):
            assert [row.queue for row in (await reader.request(protocol.ListQueues())).queues] == [
                replies.name
            ]
            assert len((await reader.request(protocol.BrowseQueue(replies.name))).messages) == 1


@pytest.mark.virtual_time
async def test_the_name_of_a_connection_stays_its_identitys(
    simulated_network: network.SimulatedNetwork, trust: keyring.Keyring
):
    """Other clients know its name from its temporary queues: when it is away, they must not
    become it."""
    net = simulated_network
    async with (
        serving(net, trust),
        client_api.Connection(await net.connect("worker")) as worker,
        client_api.Connection(await net.connect("user")) as user,
    ):
        replies = await worker.session().temporary_queue()
        await worker.request(protocol.Disconnect(worker.name))
        user.name = worker.name
        with pytest.raises(errors.Forbidden):
            await user.session().consumer(replies)


@pytest.mark.virtual_time
async def test_a_consumer_whose_right_was_withdrawn_ends_with_its_dispatcher(
    simulated_network: network.SimulatedNetwork,
):
    net = simulated_network
    allowed = {"receive"}
    started = leadership.DispatcherLeadership(
        await net.connect("dispatcher"), lease_ttl_s=2, may=lambda _, right, __: right in allowed
    )
    running = asyncio.create_task(started.run())
    await started.acting.wait()
    failures: list[errors.MusterError] = []
    async with client_api.Connection(await net.connect("user")) as connection:
        connection.on_error = failures.append
        consumer = await connection.session().consumer(ORDERS)
        allowed.clear()
        net.disconnect(connection.bus)  # type: ignore[arg-type]
        assert await consumer.receive(20) is None
        assert consumer.closed
        assert [type(error) for error in failures] == [errors.Forbidden]
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


def test_grants_are_written_as_they_are_read():
    for text in ("orders:send", "or*:send,receive", "a:b:browse,admin", "*:admin"):
        assert str(queue_rights.QueueGrant.parse(text)) == text
    for text in ("orders", "orders:", "orders:write", ":send", "orders:send,", ""):
        with pytest.raises(errors.InvalidInput):
            queue_rights.QueueGrant.parse(text)


def test_wildcards_stand_for_any_text_and_nothing_else():
    grants = (queue_rights.QueueGrant.parse("a.*-c:send"), queue_rights.QueueGrant.parse("*:browse"))
    assert queue_rights.allows(grants, "a.b-c", "send")
    assert not queue_rights.allows(grants, "axb-c", "send")
    assert not queue_rights.allows(grants, "a.b-cd", "send")
    assert queue_rights.allows(grants, "a\nb", "browse")
    assert not queue_rights.allows(grants, destinations.DEAD_LETTERS, "browse"), (
        "they are named, or not meant"
    )


def test_renewed_credentials_keep_their_queues(tmp_path: pathlib.Path):
    made = keyring.Keyring.create(tmp_path / "keys", "north")
    grants = (queue_rights.QueueGrant.parse("orders:send"), queue_rights.QueueGrant.parse("x-*:browse"))
    made.issue("shop", roles.Role.USER, queue_grants=grants, lifetime_s=60)
    made.renew("shop", lifetime_s=3600)
    assert made.show("shop").queues == grants


# Over AMQP.


@pytest.mark.parametrize("identity", ["user", "meter", "sender", "worker", "keeper", "agent", "operator"])
async def test_amqp_clients_may_what_their_login_may(
    connect: fixtures.Connect, trust: keyring.Keyring, identity: str
):
    proton = pytest.importorskip("proton", reason="python-qpid-proton is not installed")
    from muster.gateways.amqp import gateway as amqp_gateway
    from tests.gateways.amqp import raw_client

    may = app_message.TopicPermissions(trust)
    _, _, _, on_orders, on_the_dead = WHO[identity]

    async def dial(login: passwords.PasswordLogin) -> api.Bus:
        return await connect(login.name)

    def outcomes(port: int, queue: destinations.Destination) -> set[str]:
        raw = raw_client.Raw(port, f"{identity}-{queue.name}")

        def opened(link: object) -> bool:
            closed = proton.Endpoint.REMOTE_CLOSED
            link.open()  # type: ignore[attr-defined]
            raw.until(lambda: link.state & (closed | proton.Endpoint.REMOTE_ACTIVE))  # type: ignore[attr-defined]
            raw.session.receiver(f"after-{link.name}").open()  # type: ignore[attr-defined]
            refused = link.remote_source.address is None and link.remote_target.address is None  # type: ignore[attr-defined]
            if refused:
                raw.until(lambda: link.state & closed)  # type: ignore[attr-defined]
                assert link.remote_condition.name == "amqp:unauthorized-access"  # type: ignore[attr-defined]
            return not refused

        matches = set()
        sender = raw.session.sender("out")
        sender.target.address = str(queue)
        receiver, browser = raw.session.receiver("in"), raw.session.receiver("look")
        for link in (receiver, browser):
            link.source.address = str(queue)
        browser.source.distribution_mode = proton.Terminus.DIST_MODE_COPY
        for right, link in (("send", sender), ("receive", receiver), ("browse", browser)):
            if opened(link):
                matches.add(right)
        raw.socket.close()
        return matches

    async with (
        conftest.serving(connect, may=may) as dispatching,
        amqp_gateway.AmqpGateway(dial, None, anonymous=identity, may=may) as gateway,
    ):
        await dispatching.acting.wait()
        for queue, has in ((ORDERS, on_orders), (DEAD, on_the_dead)):
            actual = await asyncio.to_thread(outcomes, gateway.port, queue)
            assert actual == has - {"admin"}
