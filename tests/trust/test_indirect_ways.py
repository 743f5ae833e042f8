"""Indirect ways around the permission matrix: actions of the broker or its listeners on behalf of a client.

Each way is tried at a real broker by a plain client.  `matrix.INDIRECT` lists them
for docs/security.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import pathlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
from nats.aio.client import Client
from nats.js import errors as js_errors

from muster.bus import api, leases
from muster.bus.client import client
from muster.bus.rpc import server as rpc_server
from muster.core import errors
from muster.core.telemetry import metrics
from muster.manage import protocol
from muster.manage.registry import registry_log
from muster.testing.eventually import eventually
from muster.trust import jwt, keyring
from muster.trust.permissions import roles
from tests.trust import matrix, mqtt, servers

R = roles.Role
FORGED = "muster.manage.from.op.request.act"
UNPRIVILEGED = (R.AGENT, R.USER, R.VIEWER, R.AUTHORITY, R.MANAGER, R.JOINING)


@pytest.fixture(scope="module")
def trust(tmp_path_factory: pytest.TempPathFactory) -> keyring.Keyring:
    made = keyring.Keyring.create(tmp_path_factory.mktemp("indirect") / "keys", "north")
    for identity, role in (
        *((f"p-{role}", role) for role in UNPRIVILEGED),
        ("c", R.CHANNEL),
        ("l", R.LINK),
        ("op", R.OPERATOR),
        ("r", R.REGISTRY),
        ("rd", R.READER),
        ("u", R.USER),
    ):
        made.issue(identity, role)
    made.issue("m", R.USER, bearer=True)
    made.add_domain("south")
    made.issue("u", R.USER, domain="south")
    made.issue("op", R.OPERATOR, domain="south")
    return made


@pytest.fixture
async def broker(trust: keyring.Keyring, tmp_path: pathlib.Path) -> AsyncIterator[servers.SignedServer]:
    listeners: dict[str, Any] = {
        "websocket": {"listen": "127.0.0.1:-1", "no_tls": True},
        "mqtt": {"listen": "127.0.0.1:-1"},
        "leafnodes": {"listen": "127.0.0.1:-1"},
    }
    async with servers.server(tmp_path, trust, **listeners) as running:
        reading = asyncio.create_task(running.line("no such line"))  # or its log would fill the pipe
        yield running
        reading.cancel()
        await asyncio.wait([reading])


@contextlib.asynccontextmanager
async def observed(
    broker: servers.SignedServer, trust: keyring.Keyring
) -> AsyncIterator[tuple[Client, list[str]]]:
    """An operator, and the subjects of all messages it receives."""
    async with servers.connected(broker, trust.credentials("op")) as (operator, _):
        received: list[str] = []

        async def hear(message: Any) -> None:
            if not message.subject.startswith("muster.bus.all.connections."):
                received.append(message.subject)

        for subject in ("muster.>", "topic.>"):
            await operator.subscribe(subject, cb=hear)
        await servers.settle(operator)
        yield operator, received


async def _ask(asker: Client, subject: str, config: dict[str, Any]) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads((await asker.request(subject, json.dumps(config).encode())).data)
    assert "error" not in answer, answer
    return answer


# JetStream as a deputy: it publishes to any subject that the asker names.


async def _publish_acknowledgement(thief: Client, user: Client) -> None:
    await user.publish("topic.s", b"{}", reply=FORGED)


async def _direct_get(thief: Client, user: Client) -> None:
    await thief.publish("$JS.API.DIRECT.GET.s", b'{"seq": 1}', reply=FORGED)


async def _message_get(thief: Client, user: Client) -> None:
    await thief.publish("$JS.API.STREAM.MSG.GET.s", b'{"seq": 1}', reply=FORGED)


async def _push_consumer(thief: Client, user: Client) -> None:
    config = {"deliver_subject": FORGED, "ack_policy": "none"}
    await thief.subscribe(FORGED)  # it delivers only while a subscription names the subject literally
    await _ask(thief, "$JS.API.CONSUMER.CREATE.s", {"stream_name": "s", "config": config})


async def _pull_consumer(thief: Client, user: Client) -> None:
    config = {"durable_name": "p", "ack_policy": "explicit"}
    await _ask(thief, "$JS.API.CONSUMER.DURABLE.CREATE.s.p", {"stream_name": "s", "config": config})
    await thief.publish("$JS.API.CONSUMER.MSG.NEXT.s.p", b"1", reply=FORGED)


async def _republish(thief: Client, user: Client) -> None:
    made = {"name": "t", "subjects": ["topic.t"], "republish": {"src": "topic.t", "dest": FORGED}}
    await _ask(thief, "$JS.API.STREAM.CREATE.t", made)
    await thief.publish("topic.t", b"{}", reply="_R.@manage.op.s.1")


@pytest.mark.parametrize(
    ("deputy", "refused"),
    [
        (_publish_acknowledgement, "reply"),
        (_direct_get, "reply-of-broker"),
        (_message_get, "reply"),
        (_push_consumer, "other-subject"),  # by the connection, before the service
        (_pull_consumer, "other-subject"),
        (_republish, "reply-of-broker"),
    ],
)
async def test_a_service_takes_nothing_that_jetstream_sends_for_a_request(broker, trust, deputy, refused):
    """Each alone: the message arrives at the service, and is refused for this reason."""
    done = []
    measured = metrics.Metrics()

    async def act(call: rpc_server.RpcCall) -> None:
        done.append(call.identity)

    async with contextlib.AsyncExitStack() as stack:
        connection = await client.connect([broker.url], creds=trust.credentials("r"), measure=measured)
        service = await stack.enter_async_context(connection)
        serving = await stack.enter_async_context(
            rpc_server.RpcServer(service, "manage", [rpc_server.RpcOperation("request.act", act)])
        )
        thief, _ = await stack.enter_async_context(servers.connected(broker, trust.credentials("op")))
        user, _ = await stack.enter_async_context(servers.connected(broker, trust.credentials("u")))
        await thief.jetstream().add_stream(name="s", subjects=["topic.s"], allow_direct=True)
        await thief.jetstream().publish("topic.s", b"{}")
        assert not serving.refused
        await deputy(thief, user)
        if refused != "reply":
            counter = "muster_bus_refused_messages_total"
            await eventually(lambda: measured.value(counter, reason=refused))
            assert not serving.refused
        else:
            await eventually(lambda: serving.refused[refused])
            assert set(serving.refused) == {refused}
        assert not done


@pytest.mark.parametrize("role", UNPRIVILEGED)
async def test_a_role_below_service_level_has_no_deputy(broker, trust, role):
    """No request to JetStream is accepted, whatever it asks for."""
    configs = {
        "$JS.API.STREAM.CREATE.mine": {"name": "mine", "mirror": {"name": "reports"}},
        "$JS.API.STREAM.CREATE.more": {"name": "more", "sources": [{"name": "reports"}]},
        "$JS.API.STREAM.UPDATE.reports": {"name": "reports", "republish": {"src": ">", "dest": FORGED}},
        "$JS.API.CONSUMER.CREATE.reports": {"config": {"deliver_subject": FORGED}},
        "$JS.API.CONSUMER.DURABLE.CREATE.reports.p": {"config": {"durable_name": "p"}},
        "$JS.API.CONSUMER.MSG.NEXT.reports.p": {"batch": 1},
        "$JS.API.STREAM.MSG.GET.reports": {"seq": 1},
        "$JS.API.DIRECT.GET.reports": {"seq": 1},
        "$JS.API.STREAM.SNAPSHOT.reports": {"deliver_subject": FORGED},
        "$JS.API.STREAM.RESTORE.mine": {"config": {"name": "mine"}},
    }
    async with servers.line(broker, trust.credentials(f"p-{role}")) as (line, answer):
        assert not answer
        for subject, config in configs.items():
            data = json.dumps(config)
            refusal = await line.say(f"PUB {subject} _INBOX.p-{role}.1 {len(data)}\r\n{data}")
            assert "Permissions Violation" in refusal, subject


async def test_a_reader_has_only_copies_of_reports_sent(broker, trust):
    """They say what they are: those that a stream stores, too, whatever the sender of the first one chose."""
    subject = "muster.monitor.from.c.batch.root.0"
    async with (
        await client.connect([broker.url], creds=trust.credentials("c")) as channel,
        await client.connect([broker.url], creds=trust.credentials("rd")) as reader,
    ):
        settings = api.StreamSettings("reports", ("muster.monitor.from.*.batch.root.*",), max_bytes=1 << 20)
        stream = await channel.stream(settings)
        own = {"a": "b", "Nats-Sequence": "77", "Nats-Subject": FORGED}
        await channel.publish(subject, b"first", headers=own)
        await channel.flush()
        await reader.publish("$JS.API.DIRECT.GET.reports", b'{"seq": 1}', reply=subject)
        await eventually(lambda: _last_is(stream, 2))
        opened = await reader.open_stream("reports")
        read = [message async for message in opened.read(1)]
        assert [(m.sequence, m.subject, m.data, m.is_copy) for m in read] == [
            (1, subject, b"first", False),
            (2, subject, b"first", True),
        ]
        assert [message.headers for message in read] == [{"a": "b"}] * 2
        for name in ("alerts", "decisions"):
            with pytest.raises(errors.Forbidden):
                await reader.open_stream(name)


@pytest.mark.parametrize("question", [b'{"seq": 1}', b'{"seq": 77}'])
async def test_no_process_receives_what_a_reader_has_sent_to_it(broker, trust, question):
    """The handlers of managers and agents, too, which are no services, take the subject for the sender."""
    measured, received = metrics.Metrics(), []
    creds = trust.credentials(f"p-{R.AGENT}")
    subject = f"muster.manage.to.p-{R.AGENT}.claim"
    async with (
        await client.connect([broker.url], creds=trust.credentials("c")) as channel,
        await client.connect([broker.url], creds=creds, measure=measured) as agent,
        servers.connected(broker, trust.credentials("rd")) as (reader, _),
    ):
        await channel.stream(api.StreamSettings("reports", ("muster.monitor.from.*.batch.root.*",), 1 << 20))
        await channel.publish("muster.monitor.from.c.batch.root.0", b"first")
        await channel.flush()
        await agent.subscribe(subject, handler=lambda message: received.append(message))
        await reader.publish("$JS.API.DIRECT.GET.reports", question, reply=subject)
        await eventually(
            lambda: measured.value("muster_bus_refused_messages_total", reason="reply-of-broker")
        )
        assert not received


async def test_a_reader_can_have_a_copy_stored_in_any_stream(broker, trust):
    """A log skips it, and its owner stays the owner; a lease ends, and is acquired again."""
    async with (
        await client.connect([broker.url], creds=trust.credentials("c")) as channel,
        await client.connect([broker.url], creds=trust.credentials("r")) as registry,
        servers.connected(broker, trust.credentials("rd")) as (reader, _),
        await leases.Leases.open(registry, ttl_s=1.0) as all_leases,
        await registry_log.RegistryLog.open(registry) as log,
    ):
        await channel.stream(api.StreamSettings("reports", ("muster.monitor.from.*.batch.root.*",), 1 << 20))
        await channel.publish("muster.monitor.from.c.batch.root.0", b"first")
        await channel.flush()
        lease = await all_leases.acquire("manage.registry")
        await log.own(lease.epoch)
        stored = await registry.open_stream("registry")
        await log.write([("c", "k", b"v")])
        last = (await stored.state()).last_sequence
        for subject in (f"{protocol.REGISTRY_LOG}.page", "$KV.leases.manage.registry"):
            await reader.publish("$JS.API.DIRECT.GET.reports", b'{"seq": 1}', reply=subject)
        await eventually(lambda: _last_is(stored, last + 1))
        await log.write([("c", "k", b"w")])
        await eventually(lambda: lease.lost.is_set())
        again = await all_leases.acquire("manage.registry", timeout_s=20)
        assert again.epoch > lease.epoch
        await log.own(again.epoch)
        assert (record := log.get("c", "k")) is not None
        assert record.value == b"w"


async def test_a_service_can_copy_a_foreign_stream_into_its_own(broker, trust):
    """Why a stolen service is a stolen domain: the broker does not check what a stream's sources hold. A
    channel, which may not read the audit, reads it through its own stream."""
    async with (
        servers.connected(broker, trust.credentials("op")) as (operator, _),
        servers.connected(broker, trust.credentials("c")) as (channel, complaints),
        servers.connected(broker, trust.credentials("r")) as (registry, _),
    ):
        await operator.jetstream().add_stream(name="decisions", subjects=["muster.*.log.decision.>"])
        await registry.publish("muster.manage.log.decision.x", b"secret")
        await servers.settle(registry)
        await channel.publish("$JS.API.STREAM.MSG.GET.decisions", b'{"seq": 1}', reply="_INBOX.c.1")
        assert "permissions violation" in (await complaints.get()).lower()
        made = {"name": "reports", "sources": [{"name": "decisions"}]}
        await _ask(channel, "$JS.API.STREAM.CREATE.reports", made)

        async def copied() -> bool:
            with contextlib.suppress(js_errors.Error):
                return (await channel.jetstream().get_msg("reports", 1)).data == b"secret"
            return False

        await eventually(copied)


# Headers that JetStream acts on.

EXPECTATIONS = (
    "Nats-Expected-Stream: other",
    "Nats-Expected-Last-Sequence: 77",
    "Nats-Expected-Last-Subject-Sequence: 77",
    "Nats-Expected-Last-Msg-Id: other",
    "Nats-Rollup: all",
    "Nats-Rollup: sub",
)


async def test_headers_of_a_user_change_nothing_in_a_stream_but_its_own_message(broker, trust):
    """An expectation that is not met keeps the sender's own message out; a rollup, which would delete what is
    stored, is refused by streams as Muster makes them."""
    async with (
        await client.connect([broker.url], creds=trust.credentials("op")) as operator,
        servers.line(broker, trust.credentials("u")) as (line, _),
    ):
        stream = await operator.stream(
            api.StreamSettings(name="s", subjects=("topic.s",), max_bytes=1 << 20, max_age_s=60.0)
        )
        await stream.publish("topic.s", b"kept")
        for header in EXPECTATIONS:
            lines = f"NATS/1.0\r\n{header}\r\n\r\n"
            assert not await line.say(f"HPUB topic.s {len(lines)} {len(lines)}\r\n{lines}")
        assert not await line.publish("topic.s")
        await eventually(lambda: _last_is(stream, 2))
        assert [message.data async for message in stream.read(1)] == [b"kept", b""]


async def _last_is(stream: api.Stream, sequence: int) -> bool:
    return (await stream.state()).last_sequence == sequence


# Accounts: imports and exports.


async def test_a_domain_exports_nothing_and_imports_only_its_own_connections(broker, trust):
    documents = [jwt.read(account) for account in trust.broker().accounts.values()]
    (south_account,) = [document.nats for document in documents if document.name == "south"]
    assert isinstance(south_account, jwt.AccountClaims)
    assert not south_account.exports
    assert {item.local_subject for item in south_account.imports} == {
        "muster.bus.all.connections.connect",
        "muster.bus.all.connections.disconnect",
    }
    async with (
        servers.connected(broker, trust.credentials("op", domain="south")) as (south, _),
        servers.connected(broker, trust.credentials("u")) as (north, _),
        servers.connected(broker, trust.credentials("u", domain="south")) as (own, _),
    ):
        received: list[bytes] = []

        async def hear(message: Any) -> None:
            received.append(message.data)

        await south.subscribe("topic.>", cb=hear)
        await servers.settle(south)
        await north.publish("topic.x", b"north")
        await servers.settle(north)
        await own.publish("topic.x", b"south")
        await eventually(lambda: received == [b"south"])


# Listeners.


async def test_a_websocket_client_has_the_same_permissions(broker, trust):
    async with observed(broker, trust) as (_, received):
        url = f"ws://127.0.0.1:{broker.ports['websocket']}"
        async with await client.connect([url], creds=trust.credentials("u")) as user:
            await user.publish("muster.manage.to.other.command", b"")
            await user.publish(FORGED, b"")
            await user.publish("topic.x", b"")
            await eventually(lambda: received)
            assert received == ["topic.x"]
            for subject in ("muster.manage.to.other.>", "muster.>", ">"):
                with pytest.raises(errors.Forbidden):
                    await user.subscribe(subject)


async def test_an_mqtt_client_has_the_same_permissions(broker, trust):
    port, document = broker.ports["mqtt"], trust.credentials("m").user_jwt
    async with observed(broker, trust) as (_, received):
        async with mqtt.connected(port, "m", document) as (connection, code):
            assert code == mqtt.ACCEPTED
            assert await connection.subscribe("topic/x") == 0
            for topic in ("muster/manage/to/other/#", "muster/#", "#", "$JS/API/#", "_R/+/other/#"):
                assert await connection.subscribe(topic) == mqtt.FAILURE, topic
            await connection.publish("topic/x", b"own")
            assert await connection.receive() == ("topic/x", b"own")
            await eventually(lambda: received == ["topic.x"])
        for topic in ("muster/manage/to/other/command", FORGED.replace(".", "/"), "$JS/API/STREAM/NAMES"):
            async with mqtt.connected(port, "m", document) as (connection, code):
                assert code == mqtt.ACCEPTED
                await connection.publish(topic, b"")
                await connection.publish(topic, b"", retain=True)
                await connection.ping()
        # Its will is published for it when its connection breaks.
        async with mqtt.connected(port, "m", document, will=FORGED.replace(".", "/")) as (connection, _):
            connection.abort()
        async with mqtt.connected(port, "m", document, will="topic/will") as (connection, code):
            assert code == mqtt.ACCEPTED
            connection.abort()
        await eventually(lambda: "topic.will" in received)
        assert received == ["topic.x", "topic.will"]


async def test_an_mqtt_listener_takes_only_bearer_documents(broker, trust):
    for identity in ("u", "op", "l"):
        async with mqtt.connected(broker.ports["mqtt"], identity, trust.credentials(identity).user_jwt) as (
            _,
            code,
        ):
            assert code != mqtt.ACCEPTED, identity


async def test_a_leaf_listener_takes_only_links(broker, trust):
    assert not await servers.knock_as_leaf(broker, trust.credentials("l"))
    for identity in ("u", "op", "r", "c", "m"):
        refusal = await servers.knock_as_leaf(broker, trust.credentials(identity))
        assert refusal, identity


def test_every_indirect_way_on_the_page_is_tried():
    tested = {name for name, item in globals().items() if callable(item) and name.startswith("test_")}
    tested |= {"test_no_reply_subject_and_no_header_gives_a_permission"}  # test_permission_matrix.py
    assert {way.test for way in matrix.INDIRECT} <= tested
