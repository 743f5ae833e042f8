"""What only the real connection does: credentials, permissions, TLS, roaming, deaf subscriptions, traces."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import ssl
import time
from typing import Any, cast

import pytest

import muster
from muster.bus import api, silence
from muster.bus.brokers import broker, config, monitor, network
from muster.bus.client import broker_errors, client, connection, reconnection, requests
from muster.bus.locator import server as locator_server
from muster.bus.streams import group_commit
from muster.core import errors
from muster.core.telemetry import metrics, trace
from muster.testing.eventually import eventually
from muster.trust import certificates, keyring
from muster.trust.permissions import roles
from tests.bus import contract, sockets


def make_deaf(bus: client.NatsBus, subject: str) -> None:
    """The broker drops a subscription, and the client does not learn of it."""
    (number,) = [n for n, s in bus._subscriptions.items() if s.subject == subject]
    bus._wire._append(b"UNSUB %d\r\n" % number)


@pytest.fixture
async def plain(tmp_path):
    async with broker.Broker(config.BrokerConfig(name="b", directory=tmp_path, storage=None)) as running:
        yield running


@pytest.fixture
async def trusted(tmp_path):
    """A broker in operator mode, and the keyring it trusts."""
    trust = keyring.Keyring.create(tmp_path / "trust", "fleet")
    known = trust.broker()
    settings = config.BrokerConfig(
        name="b",
        directory=tmp_path / "b",
        trust=config.OperatorTrust(
            operator_jwt=known.operator_jwt, system_account=known.system_account, accounts=known.accounts
        ),
    )
    async with broker.Broker(settings) as running:
        yield running, trust


class TestCredentials:
    async def test_a_credentials_file_grants_access(self, trusted):
        running, trust = trusted
        trust.issue("m1", roles.Role.REGISTRY)
        async with await muster.connect(running.url, creds=trust.credentials_path("m1")) as bus:
            assert bus.identity == "m1"
            await bus.flush()

    async def test_none_wrong_and_expired_ones_are_refused_with_the_reason(self, trusted, tmp_path):
        running, _ = trusted
        with pytest.raises(errors.Unauthorized) as caught:
            await muster.connect(running.url)
        assert "Authorization Violation" in str(caught.value)
        stranger = keyring.Keyring.create(tmp_path / "other", "fleet")
        stranger.issue("m1", roles.Role.REGISTRY)
        with pytest.raises(errors.Unauthorized):
            await muster.connect(running.url, creds=stranger.credentials("m1"))
        late = keyring.Keyring.open(tmp_path / "trust", clock=lambda: time.time() - 3600)
        late.issue("m2", roles.Role.REGISTRY, lifetime_s=60)
        with pytest.raises(errors.Unauthorized):
            await muster.connect(running.url, creds=late.credentials("m2"))

    def test_a_handshake_that_took_too_long_is_no_refusal(self):
        """The client would give up for good, when a whole fleet reconnects to a busy broker."""
        error = broker_errors.BrokerError("Authentication Timeout")
        assert not broker_errors.is_credential_error(error)
        assert isinstance(broker_errors.connection_error(error), errors.NotConnected)

    async def test_credentials_that_expire_end_the_connection_with_the_reason(self, trusted):
        running, trust = trusted
        trust.issue("m1", roles.Role.REGISTRY, lifetime_s=4)
        bus = await muster.connect(running.url, creds=trust.credentials("m1"))
        subscription = await bus.subscribe("muster.manage.from.*.x")
        await eventually(lambda: bus.state is api.ConnectionState.CLOSED)
        with pytest.raises(errors.Unauthorized) as caught:
            await bus.publish("muster.manage.from.m1.x", b"")
        assert "xpired" in str(caught.value) or "uthorization" in str(caught.value)
        with pytest.raises(errors.Unauthorized):
            await subscription.next(timeout_s=30)
        await bus.close()

    async def test_credentials_renewed_in_time_are_read_again(self, trusted):
        running, trust = trusted
        trust.issue("m1", roles.Role.REGISTRY, lifetime_s=4)
        path = trust.credentials_path("m1")
        async with await muster.connect(running.url, creds=path) as bus:
            trust.renew("m1", lifetime_s=600)
            await eventually(lambda: bus.statistics().reconnects == 1)
            await bus.flush()

    async def test_a_file_that_cannot_be_read_for_a_while_ends_nothing(self, trusted):
        running, trust = trusted
        trust.issue("m1", roles.Role.REGISTRY)
        path = trust.credentials_path("m1")
        async with await muster.connect(running.url, creds=path) as bus:
            path.unlink()
            sockets.cut(bus)
            await eventually(lambda: bus.statistics().reconnects == 1)
            await bus.flush()

    async def test_a_missing_or_damaged_file(self, trusted, tmp_path):
        running, _ = trusted
        with pytest.raises(errors.NotFound):
            await muster.connect(running.url, creds=tmp_path / "nothing.creds")
        (tmp_path / "bad.creds").write_text("hello")
        with pytest.raises(errors.InvalidInput):
            await muster.connect(running.url, creds=tmp_path / "bad.creds")


async def test_single_reads_are_answered_by_the_leader(bus: client.NatsBus, monkeypatch):
    """Any replica answers a direct get, and the number of replicas can be raised while a handle is open."""
    requested: list[str] = []
    exchange = requests.RequestInbox.exchange

    async def note(
        self: requests.RequestInbox, subject: str, *arguments: Any, **options: Any
    ) -> requests.InboxReply:
        requested.append(subject)
        return await exchange(self, subject, *arguments, **options)

    bucket = await bus.key_value(api.KeyValueSettings("b"))
    revision = await bucket.put("k", b"v")
    stream = await bus.open_stream("KV_b")
    monkeypatch.setattr(requests.RequestInbox, "exchange", note)
    entry, last = await bucket.get("k"), await stream.last_for("$KV.b.k")
    assert entry is not None
    assert last is not None
    assert {entry.value, last.data, (await stream.get(revision)).data} == {b"v"}
    assert requested == ["$JS.API.STREAM.MSG.GET.KV_b"] * 3


class TestPermissions:
    async def test_a_forbidden_operation_raises(self, trusted):
        running, trust = trusted
        trust.issue("a1", roles.Role.AGENT)
        async with await muster.connect(running.url, creds=trust.credentials("a1")) as bus:
            with pytest.raises(errors.Forbidden):
                await bus.subscribe("muster.manage.from.a2.x")
            with pytest.raises(errors.Forbidden):
                await bus.request("muster.manage.from.a2.Ask", b"", timeout_s=30)
            await bus.publish("muster.manage.from.a2.x", b"")
            await eventually(lambda: bus.statistics().violations == 3)
            await bus.subscribe("muster.manage.to.a1.x")

    async def test_a_refusal_does_not_end_what_differs_by_case_only(self, trusted):
        running, trust = trusted
        trust.issue("a1", roles.Role.AGENT)
        async with await muster.connect(running.url, creds=trust.credentials("a1")) as bus:
            allowed = await bus.subscribe("muster.manage.to.a1.x")
            with pytest.raises(errors.Forbidden):
                await bus.subscribe("muster.manage.to.A1.x")
            with pytest.raises(errors.TimedOut):
                await allowed.next(timeout_s=0.1)

    async def test_storage_that_may_not_be_used(self, trusted):
        running, trust = trusted
        trust.issue("a1", roles.Role.AGENT)
        async with await muster.connect(running.url, creds=trust.credentials("a1")) as bus:
            with pytest.raises(errors.Forbidden):
                await bus.stream(api.StreamSettings("s", ("muster.manage.from.a1.s",)))

    async def test_a_stream_that_may_not_be_written(self, trusted):
        """One of many publishes of a connection is forbidden: it fails alone, and not by its deadline."""
        running, trust = trusted
        trust.issue("m1", roles.Role.REGISTRY)
        async with await muster.connect(running.url, creds=trust.credentials("m1")) as bus:
            bucket = await bus.key_value(api.KeyValueSettings("leases"))
            keys = [f"manage.k{n}" for n in range(40)]
            keys[17] = "monitor.k"
            outcomes = await asyncio.gather(*(bucket.put(key, b"") for key in keys), return_exceptions=True)
            assert isinstance(outcomes[17], errors.Forbidden)
            assert sum(isinstance(outcome, int) for outcome in outcomes) == 39


class TestConnecting:
    async def test_without_a_broker_the_connection_fails(self):
        with pytest.raises(errors.NotConnected) as caught:
            await muster.connect("nats://secret:word@127.0.0.1:1")
        assert "127.0.0.1:1" in str(caught.value)
        assert "word" not in str(caught.value)

    async def test_the_first_that_answers_is_taken(self, plain):
        async with await muster.connect(["nats://127.0.0.1:1", plain.url, "nats://127.0.0.1:2"]) as bus:
            assert bus.broker == "b"

    async def test_a_locator_returns_the_brokers(self, plain):
        async with (
            locator_server.Locator([plain.url]) as guide,
            await muster.connect(locator=["http://127.0.0.1:1", guide.url]) as bus,
        ):
            assert bus.broker == "b"
        with pytest.raises(errors.Unavailable):
            await muster.connect(locator="http://127.0.0.1:1")

    @pytest.mark.parametrize("server", ["", "nats://", "nats://h:port", "http://127.0.0.1:80"])
    async def test_bad_addresses(self, server):
        with pytest.raises((errors.InvalidInput, errors.NotConnected)):
            await muster.connect(server)

    async def test_bad_identity(self, plain):
        with pytest.raises(errors.InvalidInput):
            await muster.connect(plain.url, identity="a.b")

    async def test_storage_that_is_not_there(self, plain):
        async with await muster.connect(plain.url) as bus:
            asking = asyncio.wait_for(bus.stream(api.StreamSettings("s", ("s",))), 3)
            with pytest.raises(errors.Unavailable, match="no durable storage"):
                await asking

    async def test_tls_and_websocket(self, tmp_path):
        authority = certificates.CertificateStore.create(tmp_path / "pki", "fleet", lifetime_s=86400)
        authority.ensure("b", ("localhost", "127.0.0.1"))
        pair = authority.pair("b")
        settings = config.BrokerConfig(
            name="b",
            directory=tmp_path / "b",
            tls=config.BrokerTls(cert_file=pair.path, key_file=pair.path, ca_file=pair.bundle),
            websocket=config.BrokerListener(),
            storage=None,
        )
        async with broker.Broker(settings) as running:
            trusting = ssl.create_default_context(cafile=str(pair.bundle))
            assert running.websocket_url is not None
            for url in (running.url, running.websocket_url):
                async with await muster.connect(url, tls=trusting) as bus:
                    subscription = await bus.subscribe("s")
                    await bus.publish("s", b"x")
                    assert (await subscription.next(timeout_s=30)).data == b"x"
                with pytest.raises(errors.Unavailable, match="certificate"):
                    await muster.connect(url)


class TestReconnecting:
    async def test_over_websocket(self, tmp_path):
        settings = config.BrokerConfig(
            name="b", directory=tmp_path, websocket=config.BrokerListener(), storage=None
        )
        async with broker.Broker(settings) as running:
            assert running.websocket_url is not None
            async with await muster.connect(running.websocket_url) as bus:
                subscription = await bus.subscribe("s", max_pending_bytes=1 << 30)
                for size in (0, 10, 500_000, 1_000_000):  # with more, the socket is not writable
                    for _ in range(5):
                        await bus.publish("s", bytes(size))
                        await bus.publish("s", b"")
                sizes = [len((await subscription.next(timeout_s=30)).data) for _ in range(40)]
                assert sizes[::2] == [0] * 5 + [10] * 5 + [500_000] * 5 + [1_000_000] * 5
                socket: Any = cast(Any, bus)._wire._session._transport._socket
                socket._response.connection.transport.abort()
                await eventually(lambda: bus.statistics().reconnects == 1)
                await bus.publish("s", b"again")
                assert (await subscription.next(timeout_s=30)).data == b"again"

    async def test_a_lost_connection_is_restored_with_its_subscriptions(self, plain):
        async with await muster.connect(plain.url) as bus, await muster.connect(plain.url) as other:
            states: list[api.ConnectionState] = []
            bus.on_state(states.append)
            subscription = await bus.subscribe("s")
            before = bus.connection
            sockets.cut(bus)
            await eventually(lambda: len(states) == 2)
            assert states == [api.ConnectionState.RECONNECTING, api.ConnectionState.CONNECTED]
            await other.publish("s", b"x")
            assert (await subscription.next(timeout_s=30)).data == b"x"
            assert bus.connection != before
            assert bus.statistics().reconnects == 1

    async def test_what_is_published_while_away_is_sent_later_within_bounds(self, plain):
        async with await muster.connect(plain.url) as bus, await muster.connect(plain.url) as other:
            subscription = await other.subscribe("s")
            sockets.cut(bus)
            await eventually(lambda: bus.state is api.ConnectionState.RECONNECTING)
            await bus.publish("s", b"x")
            with pytest.raises(errors.NotConnected):
                await contract.fill(lambda _: bus.publish("other", b"x" * 100_000), 100)
            assert (await subscription.next(timeout_s=30)).data == b"x"

    async def test_it_can_be_closed_while_it_is_away(self, plain):
        bus = await muster.connect(plain.url)
        await plain.kill()
        await eventually(lambda: bus.state is api.ConnectionState.RECONNECTING)
        began = time.monotonic()
        await bus.close()
        assert time.monotonic() - began < client.CLOSE_TIMEOUT_S
        assert bus.state is api.ConnectionState.CLOSED

    async def test_complaints_that_leave_the_connection_open_do_too(self, plain):
        async with await muster.connect(plain.url) as bus:
            sockets.feed(bus, b"-ERR 'maximum subscriptions exceeded'\r\n")
            await bus.flush()
            assert bus.statistics().reconnects == 0

    async def test_what_was_given_up_is_not_done_later(self, tmp_path, monkeypatch):
        async with (
            broker.Broker(config.BrokerConfig(name="b", directory=tmp_path)) as running,
            await muster.connect(running.url) as bus,
            await muster.connect(running.url) as other,
        ):
            stream = await bus.stream(contract.settings())
            questions = await other.subscribe("q")
            monkeypatch.setattr(reconnection, "BASE_S", 2.0)
            sockets.cut(bus)
            await eventually(lambda: bus.state is api.ConnectionState.RECONNECTING)
            with pytest.raises(errors.TimedOut):
                await stream.publish("log.a", b"late", timeout_s=0.1)
            with pytest.raises(errors.NotConnected):
                await bus.request("q", b"late", timeout_s=0.1)
            await stream.publish("log.a", b"in time")
            assert (await stream.state()).messages == 1
            assert questions.statistics().pending == 0

    async def test_every_operation_can_be_cancelled(self, plain):
        """At any moment of connecting and subscribing: otherwise deadlines around them would never strike."""

        async def listen() -> None:
            async with await muster.connect(plain.url) as bus, await bus.subscribe("x") as subscription:
                await subscription.next()

        for tenths_ms in range(150):
            task = asyncio.create_task(listen())
            await asyncio.wait([task], timeout=tenths_ms / 20_000)
            task.cancel()
            done, _ = await asyncio.wait([task], timeout=30)
            task.cancel()
            assert done, f"cancelled after {tenths_ms / 20} ms"
            assert task.cancelled()

    async def test_a_request_under_way_survives_a_new_connection(self, plain):
        async with await muster.connect(plain.url) as bus, await muster.connect(plain.url) as server:
            questions = await server.subscribe("q")
            asking = asyncio.create_task(bus.request("q", b"", timeout_s=20))
            question = await questions.next(timeout_s=30)
            sockets.cut(bus)
            await eventually(lambda: bus.statistics().reconnects == 1)
            await question.respond(b"late")
            assert (await asking).data == b"late"

    async def test_a_request_that_was_cancelled_is_not_repeated(self, plain, monkeypatch):
        """Also if it waits for the socket, and its timer expires in the same moment."""
        async with await client.connect([plain.url]) as bus:
            received: list[api.Message] = []
            await bus.subscribe("work", handler=received.append)
            wire = bus._wire
            with monkeypatch.context() as full:
                full.setattr(wire, "send", lambda *_: True)
                full.setattr(wire, "ease", asyncio.Event().wait)
                asking = asyncio.create_task(
                    wire.requests.exchange("work", b"", timeout_s=20, repeat=api.Repetition(10))
                )
                await eventually(lambda: bool(wire.requests._calls))
            (question,) = wire.requests._calls.values()
            asking.cancel()
            await asyncio.wait([asking])
            wire.requests._late(cast(Any, question))
            await bus.flush()
            assert received == []

    async def test_a_repeatable_request_is_sent_again_over_a_new_connection(self, plain):
        async with await client.connect([plain.url]) as server, await client.connect([plain.url]) as bus:
            received: list[api.Message] = []
            await server.subscribe("work", handler=received.append)
            asking = asyncio.create_task(
                bus.request("work", b"x", timeout_s=30, repeat=api.Repetition(3600.0))
            )
            await eventually(lambda: len(received) == 1)  # and its reply is lost with the connection
            sockets.cut(bus)
            await eventually(lambda: len(received) == 2)
            await received[1].respond(b"done")
            assert (await asking).data == b"done"

    async def test_requests_are_freed_without_a_garbage_collection(self, plain):
        async with await client.connect([plain.url]) as server, await client.connect([plain.url]) as bus:
            await server.subscribe("work", handler=lambda message: message.respond(b""))
            gc.collect()
            gc.disable()
            try:
                for repeat in (None, api.Repetition(30.0), api.Repetition(60.0, "other", b"again")):
                    await bus.request("work", b"x", timeout_s=60, repeat=repeat)
                assert not [left for left in gc.get_objects() if isinstance(left, requests._Question)]
            finally:
                gc.enable()

    async def test_it_moves_to_a_broker_that_was_not_configured(self, tmp_path):
        async with network.mesh(2, tmp_path, storage=None) as mesh:
            first, second = mesh.brokers.values()
            async with await muster.connect(first.url) as bus, await muster.connect(second.url) as other:
                subscription = await bus.subscribe("s")
                await eventually(lambda: len(bus._wire._servers) == 2)
                await first.kill()
                await eventually(lambda: bus.broker == second.name)
                await other.publish("s", b"x")
                assert (await subscription.next(timeout_s=30)).data == b"x"

    async def test_a_broken_read_loop_does_not_look_alive(self, plain):
        async with await muster.connect(plain.url) as bus:
            sockets.feed(bus, b"NONSENSE\r\n")
            await eventually(lambda: bus.statistics().reconnects == 1)
            await bus.flush()


class TestDeafSubscriptions:
    async def test_one_that_the_broker_lost_is_noticed_and_renewed(self, plain):
        async with (
            await client.connect([plain.url], identity="ears", audit_s=0.2) as bus,
            await muster.connect(plain.url) as other,
        ):
            deaf = await bus.subscribe("deaf")
            fine = await bus.subscribe("fine", group="g")
            make_deaf(bus, "deaf")
            await bus.flush()
            await other.publish("deaf", b"lost")
            await other.flush()
            await eventually(lambda: deaf.statistics().renewed == 1)
            await bus.flush()
            await other.publish("deaf", b"heard")
            assert (await deaf.next(timeout_s=30)).data == b"heard"
            assert fine.statistics().renewed == 0
            assert bus.statistics().renewed == 1
            assert await bus.audit() == 0

    @pytest.mark.parametrize("knows_its_role", [True, False])
    async def test_subscriptions_are_repeated_if_the_broker_may_not_be_queried(
        self, trusted, knows_its_role, caplog
    ):
        running, trust = trusted
        for identity, role in (("a1", roles.Role.AGENT), ("m1", roles.Role.REGISTRY)):
            trust.issue(identity, role)
        async with (
            await client.connect([running.url], creds=trust.credentials("a1")) as bus,
            await client.connect([running.url], creds=trust.credentials("m1")) as other,
        ):
            assert (bus._may_list_subscriptions, other._may_list_subscriptions) == (False, True)
            bus._may_list_subscriptions = not knows_its_role
            subject = "muster.manage.to.a1.x"
            deaf = await bus.subscribe(subject)
            make_deaf(bus, subject)
            for _ in range(3):
                assert await bus.audit() == 0
            await bus.flush()
            await other.publish(subject, b"heard")
            assert (await deaf.next(timeout_s=30)).data == b"heard"
            assert bus.statistics().violations == (0 if knows_its_role else 1), "it asks once, not for ever"
        assert "forbidden" not in [record.getMessage() for record in caplog.records]

    async def test_a_result_without_a_waiter_is_logged(self, trusted, caplog):
        running, trust = trusted
        trust.issue("a1", roles.Role.AGENT)
        async with await client.connect([running.url], creds=trust.credentials("a1")) as bus:
            await bus.publish("muster.manage.to.a2.x", b"")
            with pytest.raises(errors.Forbidden):
                await bus.request("muster.manage.to.a3.x", b"", timeout_s=10)
            await eventually(lambda: bus.statistics().violations == 2)
        warned = [record.facts["subject"] for record in caplog.records if record.getMessage() == "forbidden"]
        assert warned == ["muster.manage.to.a2.x"]

    async def test_saying_it_again_changes_nothing_where_the_broker_has_it(self, plain):
        async with await muster.connect(plain.url) as bus:
            subscription = await bus.subscribe("s")
            for number in bus._wire.numbers():
                bus._wire.listen_again(number)
            await bus.publish("s", b"x")
            await bus.flush()
            assert subscription.statistics().pending == 1
            await subscription.close()
            with pytest.raises(errors.Unavailable):
                await bus.request("s", b"", timeout_s=5)


class TestTraces:
    HERE = trace.start(bytes(range(24)))

    async def test_a_trace_goes_with_what_is_sent_and_the_handler_runs_under_it(self, plain):
        async with await muster.connect(plain.url) as bus:
            seen: list[tuple[str, trace.TraceContext | None]] = []
            done = asyncio.Event()

            async def slow(message: api.Message) -> None:
                await asyncio.sleep(0)
                seen.append(("slow", trace.current.get()))
                if message.reply:
                    await message.respond(b"")
                if len(seen) == 6:
                    done.set()

            def quick(message: api.Message) -> None:
                seen.append(("quick", trace.current.get()))

            await bus.subscribe("s", handler=slow)
            await bus.subscribe("s", handler=quick)
            token = trace.current.set(self.HERE)
            await bus.publish("s", b"1", headers={"A": "b"})
            answer = await bus.request("s", b"2")
            trace.current.reset(token)
            await bus.publish("s", b"3")
            async with asyncio.timeout(30):
                await done.wait()
            assert answer.trace == self.HERE, "the answer goes on in it"
            for kind in ("slow", "quick"):
                assert [t for k, t in seen if k == kind] == [self.HERE, self.HERE, None]
            assert trace.current.get() is None

    async def test_a_malformed_one_costs_nothing_and_is_counted(self, plain):
        measured = metrics.Metrics()
        async with await client.connect([plain.url], identity="t", measure=measured) as bus:
            subscription = await bus.subscribe("s")
            await bus.publish("s", b"", headers={"traceparent": "00-nonsense"})
            assert (await subscription.next(timeout_s=30)).trace is None
        assert measured.value("muster_bus_ignored_headers_total", reason="malformed-trace") == 1

    async def test_stored_messages_keep_it(self, tmp_path):
        async with (
            broker.Broker(config.BrokerConfig(name="b", directory=tmp_path)) as running,
            await muster.connect(running.url) as bus,
        ):
            stream = await bus.stream(api.StreamSettings("log", ("log",)))
            token = trace.current.set(self.HERE)
            await stream.publish("log", b"")
            trace.current.reset(token)
            assert trace.extract((await stream.get(1)).headers) == self.HERE


async def test_what_is_dropped_is_in_the_metrics(plain):
    measured = metrics.Metrics()
    async with await client.connect([plain.url], identity="m", measure=measured) as bus:
        await bus.subscribe("s", max_pending=1)
        for _ in range(4):
            await bus.publish("s", b"")
        await bus.flush()
    assert measured.value("muster_bus_dropped_messages_total", reason="slow-reader") == 3


async def test_a_connection_refused_by_the_broker_for_its_slowness_comes_back(plain):
    """A client that does not read is cut off by the broker; it must not stay away."""
    async with await muster.connect(plain.url) as bus:
        sockets.feed(bus, b"-ERR 'Slow Consumer'\r\n")
        await eventually(lambda: bus.statistics().reconnects == 1)
        with contextlib.suppress(errors.Unavailable):
            await bus.flush()
        assert bus.state is api.ConnectionState.CONNECTED


async def test_a_cancelled_publish_does_not_delay_others(tmp_path, monkeypatch):
    monkeypatch.setattr(group_commit, "PATIENCE_S", 600.0)
    async with (
        broker.Broker(config.BrokerConfig(name="b", directory=tmp_path)) as running,
        await client.connect([running.url], identity="a", audit_s=0) as bus,
    ):
        stream = await bus.stream(api.StreamSettings("log", ("log",)))
        await stream.publish("log", b"first")
        await eventually(lambda: not bus._wire.requests._calls)
        given_up = asyncio.create_task(stream.publish("log", b"given up"))
        while not bus._wire.requests._calls:  # noqa: ASYNC110 - until it is on its way, and no longer
            await asyncio.sleep(0)
        assert given_up.cancel()
        async with asyncio.timeout(60):
            assert await stream.publish("log", b"next") == 3


class TestSeveralAtOnce:
    async def test_they_go_in_order_or_none_of_them(self, plain):
        async with (
            await client.connect((plain.url,), identity="one") as bus,
            await bus.subscribe("a.>") as subscription,
        ):
            assert bus.publish_now(
                [("a.1", b"first", {}), ("a.2", b"second", {"Kind": "x", "Place": "home"})]
            )
            first, second = await subscription.next(timeout_s=30), await subscription.next(timeout_s=30)
            assert (first.subject, first.data, first.header("Kind")) == ("a.1", b"first", None)
            assert (second.subject, second.data) == ("a.2", b"second")
            assert (second.header("Kind"), second.header("Place"), second.header("No")) == ("x", "home", None)
            with pytest.raises(errors.LimitExceeded):
                bus.publish_now([("a.3", b"small", {}), ("a.4", bytes(64 << 20), {})])
            await bus.publish("a.5", b"last")
            assert (await subscription.next(timeout_s=30)).subject == "a.5"


def lose_acknowledgements(bus: client.NatsBus, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """The next ``count`` publishes are stored, and their acknowledgements are lost."""
    expect, left = bus._wire.requests.expect, [count]

    def deaf(subjects: Any, take: Any, fail: Any, **kwargs: Any) -> Any:
        left[0] -= 1
        return expect(subjects, take if left[0] < 0 else lambda _: None, fail, **kwargs)

    monkeypatch.setattr(bus._wire.requests, "expect", deaf)
    monkeypatch.setattr(group_commit, "PATIENCE_S", 0.2)


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("expected", [None, 0])
async def test_what_was_stored_is_no_failure_when_its_acknowledgement_is_lost(
    bus: client.NatsBus, monkeypatch, size: int, expected: int | None
):
    stream = await bus.stream(contract.settings())
    await stream.publish("log.other", b"")
    lose_acknowledgements(bus, monkeypatch, 1)
    batch = [
        api.OutgoingMessage(f"log.{n}", b"", message_id=str(n), expected_last_subject_sequence=expected)
        for n in range(size)
    ]
    assert await stream.publish_batch(batch) == size + 1
    assert (await stream.state()).messages == size + 1


async def test_a_refusal_is_final_if_no_attempt_was_stored(bus: client.NatsBus, monkeypatch):
    stream = await bus.stream(contract.settings())
    taken = await stream.publish("log.a", b"")
    lose_acknowledgements(bus, monkeypatch, 1)
    with pytest.raises(errors.Conflict):
        await stream.publish("log.a", b"", message_id="1", expected_last_subject_sequence=taken - 1)
    assert (await stream.state()).messages == 1


# Frozen brokers: the socket stays open, and nothing arrives any more


async def test_a_client_leaves_a_frozen_broker(tmp_path, monkeypatch):
    monkeypatch.setattr(silence, "INTERVAL_S", 0.1)
    monkeypatch.setattr(monitor, "SILENT_S", 60.0)  # its supervisor does not kill it
    async with (
        network.mesh(2, tmp_path, storage=None) as brokers,
        await client.connect(brokers.urls) as bus,
        await bus.subscribe("a") as inbox,
    ):
        frozen = brokers[str(bus.broker)]
        assert frozen.pid
        os.kill(frozen.pid, signal.SIGSTOP)
        await eventually(lambda: bus.broker not in (None, frozen.name))
        await bus.publish("a", b"1")
        assert (await anext(inbox)).data == b"1"
        os.kill(frozen.pid, signal.SIGCONT)


async def test_a_repetition_that_is_too_large_for_another_broker_expires(plain):
    async with await muster.connect(plain.url) as bus:
        await bus.subscribe("s", handler=lambda message: bus._wire.info.update(max_payload=1))
        request = bus.request("s", b"large", timeout_s=0.3, repeat=api.Repetition(0.1))
        with pytest.raises(errors.TimedOut):
            await asyncio.wait_for(request, 10)


@pytest.mark.parametrize("place", [0, 1])
async def test_one_bad_address_among_good_ones_opens_no_connection(plain, place, monkeypatch):
    opened = []
    monkeypatch.setattr(connection.NatsConnection, "open", lambda *_: opened.append(1))
    servers = [plain.url]
    servers.insert(place, "http://h:1")
    with pytest.raises(errors.InvalidInput):
        await client.connect(servers, in_order=True)
    assert not opened
