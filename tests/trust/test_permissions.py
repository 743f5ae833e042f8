"""What the broker lets each role do, and what it refuses: always both directions."""

import asyncio
import contextlib
import json
import shutil
from typing import Any

import pytest
from nats import errors as nats_errors

from muster.testing.eventually import eventually
from muster.trust import keyring
from muster.trust.permissions import roles
from tests.trust import servers

WHO = {
    "a1": roles.Role.AGENT,
    "a2": roles.Role.AGENT,
    "m1": roles.Role.MANAGER,
    "r1": roles.Role.REGISTRY,
    "c1": roles.Role.CHANNEL,
    "p1": roles.Role.PIPELINE,
    "n1": roles.Role.NOTIFIER,
    "u1": roles.Role.USER,
    "op": roles.Role.OPERATOR,
    "v1": roles.Role.VIEWER,
}


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    """Made once: every file of it is synced."""
    trust = keyring.Keyring.create(tmp_path_factory.mktemp("template") / "keys", "north")
    for identity, role in WHO.items():
        trust.issue(identity, role)
    return trust


@pytest.fixture
def trust(template, tmp_path):
    shutil.copytree(template.folder, tmp_path / "keys")
    return keyring.Keyring.open(tmp_path / "keys")


@contextlib.asynccontextmanager
async def fleet(folder, trust, *identities):
    """Connections under these identities, each with the list of the broker's complaints about it."""
    async with contextlib.AsyncExitStack() as stack:
        server = await stack.enter_async_context(servers.server(folder, trust))
        yield [
            await stack.enter_async_context(servers.connected(server, trust.credentials(identity)))
            for identity in identities
        ]


PUBLISH = {
    "a1": (
        [
            "muster.manage.from.a1.heartbeat",
            "muster.monitor.from.a1.report",
            "muster.notify.from.a1.event.p7",
            "muster.inform.from.a1.read.any.get",
        ],
        [
            "muster.manage.from.a2.heartbeat",  # another's heartbeat
            "muster.monitor.from.a2.report",
            "muster.notify.from.a2.event.p7",
            "muster.manage.from.a1",  # incomplete: the subject has no kind
            "muster.manage.from.a1.renew",  # as if it were a manager
            "muster.manage.from.a1.vouch.a2",
            "muster.manage.from.a1.vouch.a2.secret",
            "muster.monitor.from.a1.batch.root.0",  # reports of whole fleets, as if it were a channel
            "muster.monitor.from.a1.summary.c1",
            "muster.pipeline.from.a1.alert.hot",  # which would set the domain's responses off
            "muster.pipeline.from.a1.report.system",
            "muster.pipeline.from.a1.progress",
            "muster.manage.to.a2.command",  # a command, which is a manager's to give
            "muster.manage.to.a1.command",
            "muster.monitor.all.report",
            "muster.inform.log.key",
            "muster.inform.from.a1.write.any.put",  # contexts are written by users
            "muster.inform.from.a1.write.n1.delete",
            "muster.bus.all.connections.disconnect",  # another's death
            "_INBOX.m1.answer",
            "_INBOX.a1.answer",  # only the broker sends to inboxes
            "_R.a2.m1.x.1",  # a reply as another
            "_R.@manage.op.x.1",
            "_R.app.u1.x",
            "topic.orders",
            "$KV.leases.manage.m1",
            "$JS.API.STREAM.CREATE.mine",
            "$JS.API.STREAM.INFO.reports",
            "$JS.API.DIRECT.GET.reports",
            "$JS.API.CONSUMER.CREATE.reports.c1",
            "$JS.API.CONSUMER.MSG.NEXT.reports.c1",
            "$JS.ACK.reports.c1.1.1.1.1.0",
            "$JS.API.INFO",
            "$SYS.REQ.ACCOUNT.PING.CONNZ",
            "$SYS.REQ.CLAIMS.UPDATE",
        ],
    ),
    "m1": (
        [
            "muster.manage.to.a1.command",
            "muster.manage.from.m1.renew",
            "muster.manage.all.epoch",
            "_R.@manage.a1.x.1",
        ],
        [
            "muster.manage.from.a1.heartbeat",
            "muster.manage.log.decision.apply",
            "muster.notify.to.a1.event",
            "muster.notify.all.x",
            "$KV.leases.manage.shard7",
            "$JS.API.STREAM.INFO.decisions",
            "topic.orders",
        ],
    ),
    "r1": (
        [
            "muster.manage.log.decision.apply",
            "$KV.leases.manage.shard7",
            "$JS.API.STREAM.CREATE.decisions",
        ],
        [
            "$KV.leases.notify.shard7",  # a lease of another part
            "$KV.notify.x",
            "$JS.API.STREAM.DELETE.KV_leases",
            "$JS.API.STREAM.DELETE.decisions",  # the audit
            "$JS.API.STREAM.PURGE.decisions",
            "$JS.API.STREAM.MSG.GET.decisions",
            "$JS.API.STREAM.CREATE.reports",
            "$JS.API.STREAM.NAMES",
        ],
    ),
    "p1": (
        [
            "muster.pipeline.from.p1.alert.hot",
            "muster.monitor.from.p1.batch.root.tick",
            "muster.pipeline.all.alert",
            "$JS.API.DIRECT.GET.reports",
            "$JS.API.CONSUMER.CREATE.reports.p",
        ],
        [
            "$JS.API.CONSUMER.MSG.NEXT.reports.p",  # nothing of Muster keeps a position at the brokers
            "$JS.ACK.reports.p.1.1.1.1.0",
            "muster.manage.from.p1.renew",
            "muster.monitor.all.report",
            "$JS.API.STREAM.DELETE.reports",
            "$JS.API.STREAM.PURGE.reports",
        ],
    ),
    "u1": (
        ["topic.orders.new", "muster.manage.from.u1.apply", "_R.app.op.x"],
        [
            "muster.manage.from.u1.renew",
            "muster.pipeline.from.u1.alert.hot",
            "orders.new",
            "muster.manage.from.op.apply",
            "$JS.API.STREAM.INFO.messages",
            "$KV.leases.manage.x",
        ],
    ),
    "op": (
        ["topic.orders", "muster.manage.from.op.apply", "$JS.API.STREAM.NAMES", "$KV.leases.manage.x"],
        ["muster.manage.from.m1.apply", "muster.manage.to.a1.command", "$SYS.REQ.CLAIMS.UPDATE"],
    ),
    "v1": (
        ["muster.manage.from.v1.read.resources"],
        ["_R.app.u1.x", "muster.manage.from.v1.apply", "topic.orders", "$JS.API.STREAM.NAMES"],
    ),
}

SUBSCRIBE = {
    "a1": (
        [
            "muster.manage.to.a1.>",
            "muster.notify.to.a1.event.p7",
            "muster.monitor.all.>",
            "_INBOX.a1.*",
            "_R.*.a1.>",
        ],
        [
            "_R.*.a2.>",
            "_R.*.*.>",
            "_R.>",
            "_R.a1.>",
            "muster.manage.to.a2.>",
            "muster.manage.to.*.>",
            "muster.*.from.*.>",
            "muster.>",
            ">",
            "_INBOX.a2.>",
            "_INBOX.*.>",
            "_INBOX.>",
            "topic.orders",
            "$JS.API.>",
            "$KV.leases.>",
            "$SYS.>",
            "muster.bus.all.connections.>",
        ],
    ),
    "m1": (
        ["muster.manage.from.*.beat.m1", "muster.manage.from.*.event.m1", "muster.manage.to.m1.>"],
        ["muster.manage.from.*.>", "muster.manage.from.*.beat.m2", "muster.bus.all.connections.disconnect"],
    ),
    "r1": (
        ["muster.manage.from.*.>", "muster.bus.all.connections.disconnect"],
        ["muster.monitor.from.*.>", "muster.manage.to.a1.>", "_INBOX.a1.>", "muster.notify.log.>", ">"],
    ),
    "p1": (["muster.monitor.from.*.>"], ["muster.manage.from.*.>"]),
    "u1": (["topic.>"], ["muster.manage.from.*.>", "muster.>", "_INBOX.>"]),
    "op": (["muster.>", "topic.>"], ["_INBOX.a1.>", ">", "$SYS.>"]),
    "v1": (["muster.*.all.>"], ["topic.>", "muster.>", "muster.*.to.*.>"]),
}


@pytest.mark.parametrize("identity", PUBLISH)
async def test_each_role_does_its_own_and_no_other(tmp_path, trust, identity):
    async with (
        servers.server(tmp_path, trust) as server,
        servers.line(server, trust.credentials(identity)) as (line, answer),
    ):
        assert not answer
        for act, (allowed, forbidden) in (
            (line.publish, PUBLISH[identity]),
            (line.subscribe, SUBSCRIBE[identity]),
        ):
            for subject in allowed:
                assert not await act(subject)
            for subject in forbidden:
                complaint = await act(subject)
                assert "Permissions Violation" in complaint, subject
                assert subject in complaint


async def test_a_heartbeat_contains_the_identity_of_its_sender(tmp_path, trust):
    async with fleet(tmp_path, trust, "a1", "a2", "r1") as ((a1, _), (a2, complaints), (manager, _)):
        subscription = await manager.subscribe("muster.manage.from.*.>")
        await servers.settle(manager)
        await a2.publish("muster.manage.from.a1.heartbeat", b"forged")
        assert "permissions violation" in await complaints.get()
        await a1.publish("muster.manage.from.a1.heartbeat", b"true")
        message = await subscription.next_msg(5)
        assert (message.subject, message.data) == ("muster.manage.from.a1.heartbeat", b"true")


async def test_a_reply_goes_from_the_responder_to_the_requester_and_nowhere_else(tmp_path, trust):
    async with servers.server(tmp_path, trust) as server, contextlib.AsyncExitStack() as stack:

        async def connect(identity: str, **options: Any) -> Any:
            actual = servers.connected(server, trust.credentials(identity), **options)
            return await stack.enter_async_context(actual)

        user, _ = await connect("u1", inbox_prefix="_R.@manage.u1")
        manager, complaints = await connect("r1")
        agent, refusals = await connect("a1")
        subscription = await manager.subscribe("muster.manage.from.*.>")
        await servers.settle(manager)
        question = asyncio.ensure_future(user.request("muster.manage.from.u1.get", b"?", timeout=5))
        message = await subscription.next_msg(5)
        await agent.publish(message.reply, b"forged")  # the agent does not serve manage
        assert message.reply.lower() in await refusals.get()
        await message.respond(b"answer")
        assert (await question).data == b"answer"
        for reply in (
            "_INBOX.u1.unasked",
            "_INBOX.r1.own",
            "_R.@notify.u1.x",
            "_R.u1.r1.x",
            "_R.app.u1.x",
        ):
            await manager.publish(reply, b"")
            assert reply.lower() in await complaints.get()


FORBIDDEN = (
    "muster.manage.from.op.request.apply",
    "muster.manage.to.a2.command",
    "_INBOX.op.1",
    "_R.@manage.op.1.1",
    "$JS.API.STREAM.DELETE.reports",
    "$JS.API.STREAM.NAMES",
)


@pytest.mark.parametrize("identity", ["v1", "u1", "a1"])
async def test_a_reply_subject_chosen_by_the_sender_gives_no_permission(tmp_path, trust, identity):
    """Issue 13, finding 1: with `allow_responses` a client that sends itself a message whose reply is a
    forbidden subject may then publish there."""
    async with fleet(tmp_path, trust, identity) as ((client, complaints),):
        own = [
            f"_INBOX.{identity}.self",
            f"_R.{identity}.{identity}.self",
            f"muster.manage.to.{identity}.self",
        ]
        if identity == "u1":
            own += ["topic.self", "_R.app.u1.self"]
        for subject in own:
            subscription = await client.subscribe(subject)
            for forbidden in FORBIDDEN:
                await client.publish(subject, b"", reply=forbidden)
                await servers.settle(client)
                with contextlib.suppress(nats_errors.TimeoutError):
                    assert (await subscription.next_msg(0.01)).reply == forbidden
                while not complaints.empty():
                    complaints.get_nowait()
                await client.publish(forbidden, b"")
                await servers.settle(client)
                assert forbidden.lower() in complaints.get_nowait(), (subject, forbidden)
            await subscription.unsubscribe()


async def test_a_late_reply_passes_after_the_broker_has_restarted(tmp_path, trust):
    """A permission that is the broker's memory of the request would be lost with it."""
    async with contextlib.AsyncExitStack() as stack:
        first = contextlib.AsyncExitStack()
        server = await first.enter_async_context(servers.server(tmp_path, trust))
        options = {"allow_reconnect": True, "reconnect_time_wait": 0.05, "max_reconnect_attempts": -1}
        user, _ = await stack.enter_async_context(
            servers.connected(server, trust.credentials("u1"), inbox_prefix="_R.@manage.u1", **options)
        )
        manager, _ = await stack.enter_async_context(
            servers.connected(server, trust.credentials("r1"), **options)
        )
        subscription = await manager.subscribe("muster.manage.from.*.>")
        await servers.settle(manager)
        question = asyncio.ensure_future(user.request("muster.manage.from.u1.get", b"?", timeout=30))
        message = await subscription.next_msg(5)
        await first.aclose()
        again = servers.server(tmp_path, trust, listen=f"127.0.0.1:{server.ports['client']}")
        await stack.enter_async_context(again)
        await eventually(lambda: user.is_connected and manager.is_connected)
        await servers.settle(user)
        await message.respond(b"late")
        assert (await question).data == b"late"


async def test_connection_events_reach_only_roles_with_leases(tmp_path, trust):
    async with servers.server(tmp_path, trust) as server:

        def connect(identity: str) -> Any:
            return servers.connected(server, trust.credentials(identity))

        async with connect("a1") as (agent, _), connect("r1") as (manager, _):
            to_agent = await agent.subscribe("muster.*.all.>")
            to_manager = await manager.subscribe("muster.bus.all.connections.disconnect")
            await servers.settle(agent)
            await servers.settle(manager)
            async with connect("n1"):
                pass
            event = json.loads((await to_manager.next_msg(5)).data)
            assert "role:notifier" in event["client"]["tags"]
            assert event["client"]["user"] == trust.show("n1").public_key
            # If the agent had received it, that message would have come first.
            await manager.publish("muster.manage.all.done", b"")
            assert (await to_agent.next_msg(5)).subject == "muster.manage.all.done"


async def test_jetstream_belongs_to_the_part_that_serves_it(tmp_path, trust):
    async with fleet(tmp_path, trust, "c1", "a1", "p1", "n1") as ((channel, _), (agent, _), *others):
        (pipeline, _), (notifier, _) = others
        await channel.jetstream().add_stream(name="reports", subjects=["muster.monitor.from.*.report"])
        # The agent's report is stored and acknowledged to its inbox, although it may not request any stream.
        ack = json.loads((await agent.request("muster.monitor.from.a1.report", b"load=1", timeout=5)).data)
        assert (ack["stream"], ack["seq"]) == ("reports", 1)
        assert (await pipeline.jetstream().get_msg("reports", 1)).data == b"load=1"
        for stranger in (agent, notifier):
            with pytest.raises(nats_errors.TimeoutError):
                await stranger.jetstream(timeout=0.2).stream_info("reports")
            with pytest.raises(nats_errors.TimeoutError):
                await stranger.jetstream(timeout=0.2).get_msg("reports", 1)


async def test_leases_are_kept_by_part(tmp_path, trust):
    async with fleet(tmp_path, trust, "r1", "n1") as ((manager, _), (notifier, complaints)):
        bucket = await manager.jetstream().create_key_value(bucket="leases", storage="memory")
        revision = await bucket.create("manage.shard", b"m1")
        assert await bucket.update("manage.shard", b"m1", revision) > revision
        same = await notifier.jetstream().key_value("leases")
        assert (await same.get("manage.shard")).value == b"m1"
        await same.create("notify.shard", b"n1")
        await notifier.publish("$KV.leases.manage.shard", b"n1")
        assert "permissions violation" in await complaints.get()
        assert (await same.get("notify.shard")).value == b"n1"
        assert (await same.get("manage.shard")).value == b"m1"


async def test_domains_do_not_receive_messages_of_each_other(tmp_path, trust):
    trust.add_domain("south")
    trust.issue("u1", roles.Role.USER, domain="south")
    async with servers.server(tmp_path, trust) as server:
        here, there = trust.credentials("u1"), trust.credentials("u1", domain="south")
        async with (
            servers.connected(server, here) as (north, _),
            servers.connected(server, there) as (south, _),
        ):
            in_north, in_south = await north.subscribe("topic.x"), await south.subscribe("topic.x")
            await servers.settle(north)
            await servers.settle(south)
            await north.publish("topic.x", b"north")
            await servers.settle(north)
            await south.publish("topic.x", b"south")
            assert (await in_north.next_msg(5)).data == b"north"
            assert (await in_south.next_msg(5)).data == b"south"


async def test_topics_can_be_narrowed(tmp_path, trust):
    trust.issue("u2", roles.Role.USER, topics=("topic.orders.>",))
    async with (
        servers.server(tmp_path, trust) as server,
        servers.line(server, trust.credentials("u2")) as (line, _),
    ):
        for act in (line.publish, line.subscribe):
            assert not await act("topic.orders.new")
            assert "Permissions Violation" in await act("topic.payroll.new")
        assert not await line.publish("muster.manage.from.u2.get")
        assert not await line.publish("muster.inform.from.u2.read.any.get")
        assert "Permissions Violation" in await line.publish("muster.inform.from.u2.write.any.put")


async def test_a_link_joins_two_brokers_and_is_no_client(tmp_path, trust):
    trust.issue("l1", roles.Role.LINK)
    for name in ("hub", "leaf"):
        (tmp_path / name).mkdir()
    account = next(key for key in trust.broker().accounts if key != trust.broker().system_account)
    async with servers.server(tmp_path / "hub", trust, leafnodes={"listen": "127.0.0.1:-1"}) as hub:
        assert "Authorization Violation" in await servers.knock(hub, trust.credentials("l1"))
        remote = {
            "url": f"nats-leaf://127.0.0.1:{hub.ports['leafnode']}",
            "credentials": str(trust.credentials_path("l1")),
            "account": account,
        }
        there = {"server_name": "leaf", "jetstream": False, "leafnodes": {"remotes": [remote]}}
        async with (
            servers.server(tmp_path / "leaf", trust, **there) as leaf,
            servers.connected(hub, trust.credentials("r1")) as (manager, _),
            servers.connected(leaf, trust.credentials("a1"), inbox_prefix="_R.@manage.a1") as (agent, _),
        ):
            subscription = await manager.subscribe("muster.manage.from.*.>")
            await servers.settle(manager)
            # The hub's subscription has to reach the leaf: until then, requests get no reply.
            question = asyncio.ensure_future(ask_until_answered(agent, "muster.manage.from.a1.hello"))
            message = await subscription.next_msg(10)
            assert message.subject == "muster.manage.from.a1.hello"
            await message.respond(b"welcome")
            assert (await question).data == b"welcome"


async def ask_until_answered(client: Any, subject: str) -> Any:
    while True:
        try:
            return await client.request(subject, b"", timeout=5)
        except nats_errors.NoRespondersError:
            await asyncio.sleep(0)
