"""Each role at each operation of AMQP, against a gateway, a dispatcher and a broker that check credentials.

Every role that `muster gateway password` gives logs in with its password and tries every operation.
"""

from __future__ import annotations

import asyncio
import contextlib
import pathlib
from collections.abc import AsyncIterator, Callable, Collection
from typing import Any

import pytest

proton = pytest.importorskip("proton", reason="python-qpid-proton is not installed")

from muster.app import identities  # noqa: E402
from muster.app.components import dispatcher as app_message  # noqa: E402
from muster.bus import api  # noqa: E402
from muster.bus.client import client  # noqa: E402
from muster.cli.messages import gateway as gateway_command  # noqa: E402
from muster.core import errors  # noqa: E402
from muster.gateways.amqp import gateway as amqp_gateway  # noqa: E402
from muster.message import destinations  # noqa: E402
from muster.message.client import api as jms  # noqa: E402
from muster.message.dispatcher import leadership  # noqa: E402
from muster.trust import keyring  # noqa: E402
from muster.trust.login import password_checker, passwords  # noqa: E402
from muster.trust.permissions import queue_rights, roles  # noqa: E402
from tests.gateways.amqp import raw_client  # noqa: E402
from tests.trust import servers  # noqa: E402

PASSWORD = "a long secret"
ANONYMOUS = "anonymous"
OTHERS_SUBSCRIPTION = "everybodys"
OK, REFUSED = "ok", "amqp:unauthorized-access"
ACTIVE, CLOSED = proton.Endpoint.REMOTE_ACTIVE, proton.Endpoint.REMOTE_CLOSED


class Client:
    """One login. Each operation returns `OK` or the name of the condition with which it was refused.

    ``temporary`` is a temporary queue of another client, ``temporary_topic`` a temporary topic.
    """

    def __init__(self, port: int, identity: str, temporary: str, temporary_topic: str) -> None:
        self.others = f"temporary-queue:{temporary}"
        self.others_topic = f"temporary-topic:{temporary_topic}"
        login = raw_client.LOGIN if identity == ANONYMOUS else raw_client.plain(identity, PASSWORD)
        self._raw = raw_client.Raw(port, f"container-{identity}", login=login)
        self._numbers = iter(range(1000))

    def close(self) -> None:
        self._raw.socket.close()

    def opened(self) -> str:
        connection = self._raw.connection
        self._raw.until(lambda: connection.state & (ACTIVE | CLOSED))
        if connection.remote_properties:  # they announce that an error follows
            self._raw.until(lambda: connection.state & CLOSED)
        return self._condition(connection)

    def wait_for_end(self) -> None:
        with contextlib.suppress(AssertionError, ConnectionError):  # how `Raw` reports a closed socket
            self._raw.until(lambda: self._raw.connection.state & CLOSED)

    def _condition(self, endpoint: Any) -> str:
        if not endpoint.state & CLOSED:
            return OK
        return str(endpoint.remote_condition.name) if endpoint.remote_condition else "closed"

    def _until(self, link: Any, ready: Callable[[], object]) -> str:
        connection = self._raw.connection
        self._raw.until(lambda: (link.state | connection.state) & CLOSED or ready())
        lost = self._condition(connection)
        return self._condition(link) if lost == OK else f"connection: {lost}"

    def _sender(self, address: str | None) -> Any:
        link = self._raw.session.sender(f"out-{next(self._numbers)}")
        link.target.address = address
        return link

    def _send(self, link: Any, to: str | None = None) -> str:
        link.open()
        outcome = self._until(link, lambda: link.credit > 0)
        if outcome == OK:
            delivery = link.delivery("1")
            link.send(proton.Message("mine", address=to, durable=True).encode())
            link.advance()
            outcome = self._until(link, lambda: delivery.remote_state)
            if outcome == OK and delivery.remote_state != proton.Delivery.ACCEPTED:
                outcome = str(delivery.remote.condition.name)
            link.close()
        return outcome

    def send(self, address: str) -> str:
        return self._send(self._sender(address))

    def relay(self, address: str) -> str:
        return self._send(self._sender(None), address)

    def receive(self, address: str, *, takes: bool = False, **source: Any) -> str:
        link = self._raw.session.receiver(f"in-{next(self._numbers)}")
        link.source.address = address or None
        for name, value in source.items():
            setattr(link.source, name, value)
        link.open()
        outcome = self._until(link, lambda: link.remote_source.address)
        if outcome == OK and takes:
            link.flow(1)
            outcome = self._until(link, lambda: link.current is not None and link.current.readable)
            if outcome == OK:
                link.current.update(proton.Delivery.RELEASED)
                link.current.settle()
        if outcome == OK:
            link.close()
        return outcome

    def browse(self, address: str, *, takes: bool = True) -> str:
        return self.receive(address, takes=takes, distribution_mode=proton.Terminus.DIST_MODE_COPY)

    def subscribe(self, address: str) -> str:
        return self.receive(address, durability=proton.Terminus.DELIVERIES)

    def make_temporary(self, capability: str) -> str:
        link = self._sender(None)
        link.target.dynamic = True
        link.target.capabilities.put_symbol(capability)
        return self._send(link)

    def handle_on_subscription(self, name: str) -> str:
        """Closing it ends a durable subscription of the client; those of other clients are not visible."""
        link = self._raw.session.receiver(f"{name}|global")
        link.source.type = proton.Terminus.UNSPECIFIED
        link.open()
        outcome = self._until(link, lambda: link.remote_source.address)
        if outcome == OK:
            link.detach()
        return REFUSED if outcome == "amqp:not-found" else outcome

    def transaction(self) -> str:
        link = self._sender(None)
        link.target.type = proton.Terminus.COORDINATOR
        link.open()
        outcome = self._until(link, lambda: link.credit > 0)
        if outcome != OK:
            return outcome
        delivery = link.delivery("declare")
        body = proton.Described(proton.symbol("amqp:declare:list"), [None])
        link.send(proton.Message(body=body).encode())
        link.advance()
        return self._until(link, lambda: delivery.remote_state)


#: Identities with the rights of their role, and three more of the role ``user``.
EVERYTHING = ("operator", "gateway")
USERS = ("user", ANONYMOUS)
SENDER = "sender"  # limited by --queue orders:send
METER = "meter"  # limited by --topic meters/>
LIMITED = {
    SENDER: {"queue_grants": (queue_rights.QueueGrant.parse("orders:send"),)},
    METER: {"topics": ("topic.meters.>",)},
}
IDENTITIES = (*gateway_command.ROLES, ANONYMOUS, *LIMITED)
CANNOT_CONNECT = ("viewer", "reader")  # a messaging connection is more than reading

TOPICS = (*EVERYTHING, *USERS, SENDER)
QUEUES = (*EVERYTHING, *USERS, "web")
DEAD_LETTERS = (*EVERYTHING, "web")
TEMPORARY_QUEUES = (*QUEUES, SENDER)

#: The operations, and the identities that may carry them out.
TABLE: dict[str, tuple[Callable[[Client], str], Collection[str]]] = {
    "send to a topic": (lambda client: client.send("topic:news/eu"), TOPICS),
    "send to an allowed topic": (lambda client: client.send("topic:meters/7"), (*TOPICS, METER)),
    "send to a queue": (lambda client: client.send("queue:orders"), (*QUEUES, SENDER)),
    "send to another queue": (lambda client: client.send("queue:bills"), QUEUES),
    "send to dead letters": (lambda client: client.send("queue:dead-letters"), DEAD_LETTERS),
    "relay to a topic": (lambda client: client.relay("topic:news/eu"), TOPICS),
    "relay to a queue": (lambda client: client.relay("queue:orders"), (*QUEUES, SENDER)),
    "relay to dead letters": (lambda client: client.relay("queue:dead-letters"), DEAD_LETTERS),
    "receive from a topic": (lambda client: client.receive("topic:news/eu"), TOPICS),
    "receive from all topics": (lambda client: client.receive("topic:>"), TOPICS),
    "receive from an allowed topic": (lambda client: client.receive("topic:meters/7"), (*TOPICS, METER)),
    "receive from a queue": (lambda client: client.receive("queue:orders", takes=True), QUEUES),
    "receive dead letters": (lambda client: client.receive("queue:dead-letters", takes=True), DEAD_LETTERS),
    "browse a queue": (lambda client: client.browse("queue:orders"), QUEUES),
    "browse dead letters": (lambda client: client.browse("queue:dead-letters"), DEAD_LETTERS),
    "subscribe durably": (lambda client: client.subscribe("topic:news/eu"), TOPICS),
    "end another's subscription": (
        lambda client: client.handle_on_subscription(OTHERS_SUBSCRIPTION),
        ("operator",),
    ),
    "make a temporary queue": (lambda client: client.make_temporary("temporary-queue"), TEMPORARY_QUEUES),
    "make a temporary topic": (lambda client: client.make_temporary("temporary-topic"), (*TOPICS, METER)),
    "send to another's temporary topic": (lambda client: client.send(client.others_topic), (*TOPICS, METER)),
    "receive from another's temporary topic": (lambda client: client.receive(client.others_topic), ()),
    "receive from a new temporary queue": (lambda client: client.receive("", dynamic=True), TEMPORARY_QUEUES),
    "send to another's temporary queue": (lambda client: client.send(client.others), TEMPORARY_QUEUES),
    "receive from another's temporary queue": (lambda client: client.receive(client.others), ()),
    "browse another's temporary queue": (lambda client: client.browse(client.others), ()),
    "begin a transaction": (lambda client: client.transaction(), IDENTITIES),
}


@contextlib.asynccontextmanager
async def serving(
    trust: keyring.Keyring, folder: pathlib.Path
) -> AsyncIterator[tuple[str, int, tuple[str, str]]]:
    """The broker's address, the gateway's port, and a temporary queue and topic of another client.

    All queues hold a message.
    """
    may = app_message.TopicPermissions(trust)
    async with contextlib.AsyncExitStack() as stack:
        broker = await stack.enter_async_context(servers.server(folder, trust))

        async def dial(login: passwords.PasswordLogin) -> api.Bus:
            creds = await asyncio.to_thread(identities.login_credentials, trust, login.name, login.role)
            return await client.connect([broker.url], creds=creds)

        bus = await stack.enter_async_context(
            await dial(passwords.PasswordLogin("message", roles.Role.GATEWAY))
        )
        dispatching = leadership.DispatcherLeadership(bus, lease_ttl_s=2, may=may)
        running = asyncio.create_task(dispatching.run())
        try:
            await dispatching.acting.wait()
            bus = await stack.enter_async_context(
                await dial(passwords.PasswordLogin("other", roles.Role.OPERATOR))
            )
            other = await stack.enter_async_context(jms.Connection(bus))
            session = other.session()
            temporary = await session.temporary_queue()
            for queue in (destinations.queue("orders"), destinations.queue("dead-letters"), temporary):
                await session.producer(queue).send("theirs")
            topic = destinations.topic("news/eu")
            await (await session.shared_durable_consumer(topic, OTHERS_SUBSCRIPTION)).close()
            verifiers = password_checker.PasswordChecker(trust.passwords())
            async with amqp_gateway.AmqpGateway(dial, verifiers, anonymous=ANONYMOUS, may=may) as gateway:
                yield broker.url, gateway.port, (temporary.name, (await session.temporary_topic()).name)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


def outcomes(port: int, identity: str, temporary: tuple[str, str]) -> dict[str, str]:
    with contextlib.closing(Client(port, identity, *temporary)) as item:
        opened = item.opened()
        if opened != OK:
            return {"connect": opened}
        return {name: operation(item) for name, (operation, _) in TABLE.items()}


async def test_each_role_may_do_what_the_table_allows(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(passwords, "_SCRYPT_LOG_N", 8)  # twenty passwords
    trust = keyring.Keyring.create(tmp_path / "keys", "north")
    for identity in (*gateway_command.ROLES, *LIMITED):
        role = roles.Role.USER if identity in LIMITED else roles.Role(identity)
        trust.issue(identity, role, **LIMITED.get(identity, {}))  # type: ignore[arg-type]
        trust.passwords().set(identity, role, PASSWORD)
    wrong: dict[str, dict[str, str]] = {}
    async with serving(trust, tmp_path) as (_, port, temporary):
        for identity in IDENTITIES:
            actual = await asyncio.to_thread(outcomes, port, identity, temporary)
            expected = {name: OK if identity in may else REFUSED for name, (_, may) in TABLE.items()}
            for name in TABLE:
                if name.startswith(("receive from another's", "browse another's")):
                    expected[name] = "amqp:resource-locked"
            if identity in CANNOT_CONNECT:
                expected = {"connect": REFUSED}
            if differs := {name: got for name, got in actual.items() if expected.get(name) != got}:
                wrong[identity] = differs
    assert wrong == {}


async def test_a_login_that_is_narrowed_to_a_viewer_cannot_connect_as_a_viewer_cannot(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(passwords, "_SCRYPT_LOG_N", 8)
    trust = keyring.Keyring.create(tmp_path / "keys", "north")
    for name, role in (("ann", roles.Role.USER), ("boss", roles.Role.OPERATOR), ("vic", roles.Role.VIEWER)):
        trust.issue(name, role)
        trust.passwords().set(name, roles.Role.VIEWER, PASSWORD)
    async with serving(trust, tmp_path) as (_, port, temporary):
        for identity in ("ann", "boss", "vic"):
            assert await asyncio.to_thread(outcomes, port, identity, temporary) == {"connect": REFUSED}


async def test_a_revoked_login_is_cut_off_and_refused(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(passwords, "_SCRYPT_LOG_N", 8)
    trust = keyring.Keyring.create(tmp_path / "keys", "north")
    trust.passwords().set("ann", roles.Role.USER, PASSWORD)
    async with serving(trust, tmp_path) as (url, port, temporary):
        item = await asyncio.to_thread(Client, port, "ann", *temporary)
        with contextlib.closing(item):
            assert await asyncio.to_thread(item.opened) == OK
            await asyncio.to_thread(trust.revoke, "ann")
            await identities.publish_accounts(trust, [url])
            await asyncio.to_thread(item.wait_for_end)  # fails after 30 s
        with pytest.raises((AssertionError, ConnectionResetError), match=r"closed the connection|reset by"):
            await asyncio.to_thread(outcomes, port, "ann", temporary)  # it cannot even log in


async def test_a_temporary_topic_is_private_to_its_connection(tmp_path: pathlib.Path):
    """Its subject too, at the broker; and what is sent there goes to no subscription of all topics."""
    trust = keyring.Keyring.create(tmp_path / "keys", "north")
    for name in ("ann", "bob"):
        trust.issue(name, roles.Role.USER)
    async with contextlib.AsyncExitStack() as stack:
        url, _, _ = await stack.enter_async_context(serving(trust, tmp_path))

        async def dial(name: str) -> jms.Connection:
            creds = await asyncio.to_thread(identities.credentials, trust, name, roles.Role.USER)
            bus = await stack.enter_async_context(await client.connect([url], creds=creds))
            return await stack.enter_async_context(jms.Connection(bus, client_id=name))

        ann, bob = await dial("ann"), await dial("bob")
        topic = await ann.session().temporary_topic()
        with pytest.raises(errors.Forbidden):
            await bob.session().consumer(topic)
        bob.name, own = ann.name, bob.name  # as a client would that does not check it itself
        with pytest.raises(errors.Forbidden):
            await bob.session().consumer(topic)
        bob.name = own
        for pattern in (topic.subject, f"{topic.subject.rpartition('.')[0]}.>"):
            with pytest.raises(errors.Forbidden):
                await bob.bus.subscribe(pattern)
        everything = destinations.topic(">")
        spying = [
            await bob.session().consumer(everything),
            await bob.session().durable_consumer(everything, "all"),
        ]
        received = await ann.session().consumer(topic)
        for persistent in (True, False):
            await bob.session().producer(topic, persistent=persistent).send("a reply")
            message = await received.receive(30)
            assert message is not None
            assert (message.body(), message.destination) == ("a reply", topic)
        await bob.session().producer(destinations.topic("news")).send("for all")
        for spy in spying:
            message = await spy.receive(30)
            assert message is not None
            assert message.body() == "for all"
