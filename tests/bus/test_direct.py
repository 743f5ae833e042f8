"""Direct connections: the contract of requests, as over a broker, and what can go wrong."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import random
import signal
import ssl
import sys
import time
from typing import Any, cast

import pytest

from muster.bus import api, silence
from muster.bus.client import client, credential_source
from muster.bus.direct import bus as direct_bus
from muster.bus.direct import dialer, frames, link, listener, nearest
from muster.bus.memory import network
from muster.bus.rpc import admission, server
from muster.bus.rpc import client as rpc
from muster.core import errors, subjects
from muster.core.net import tls
from muster.testing.eventually import eventually
from muster.trust import certificates, credentials, keyring, peer_admission
from muster.trust.permissions import roles
from tests import cancellation
from tests.bus import rpc_contract

PART = rpc_contract.PART
SHARE = 0.05  # of an event loop: little, because a flood that a busy machine reads slowly is none


class DirectWorld:
    """Processes of a domain with a keyring; each listens, and connects to those that were there before."""

    def __init__(self, trust: keyring.Keyring, connect: Any, stack: contextlib.AsyncExitStack) -> None:
        self.trust = trust
        self.stack = stack
        self.server_tls: ssl.SSLContext | None = None
        self.client_tls: ssl.SSLContext | None = None
        self.listeners: dict[str, listener.DirectListener] = {}
        self.dialers: dict[str, dialer.DirectDialer] = {}
        self.buses: dict[str, direct_bus.DirectBus] = {}
        self._connect = connect

    def access(self, identity: str) -> credential_source.PeerAccess:
        return credential_source.PeerAccess(
            functools.partial(self.trust.credentials, identity), self.client_tls
        )

    async def bus(self, identity: str, role: roles.Role = roles.Role.OPERATOR) -> direct_bus.DirectBus:
        with contextlib.suppress(errors.AlreadyExists):
            await asyncio.to_thread(self.trust.issue, identity, role)
        made = direct_bus.DirectBus(await self._connect(identity), identity, _peer_of)
        self.buses[identity] = made
        return made

    async def listen(self, identity: str, **options: Any) -> direct_bus.DirectBus:
        made = await self.bus(identity)
        listening = listener.DirectListener(
            made,
            peer_admission.PeerAdmission(self.trust.folder),
            functools.partial(self.trust.credentials, identity),
            tls=self.server_tls,
            **options,
        )
        self.listeners[identity] = await self.stack.enter_async_context(listening)
        return made

    async def dial(
        self,
        identity: str,
        *peers: frames.PeerAddress,
        role: roles.Role = roles.Role.OPERATOR,
        access: credential_source.PeerAccess | None = None,
    ) -> direct_bus.DirectBus:
        made = await self.bus(identity, role)
        dialing = dialer.DirectDialer(made, access or self.access(identity))
        self.dialers[identity] = await self.stack.enter_async_context(dialing)
        for peer in peers:
            dialing.keep(peer)
        return made

    async def pair(self, **options: Any) -> tuple[direct_bus.DirectBus, direct_bus.DirectBus]:
        """A service that listens, and a client with a link to it."""
        service = await self.listen("service")
        ann = await self.dial("ann", self.listeners["service"].address, **options)
        await eventually(lambda: "service" in ann.links)
        return service, ann


def _peer_of(subject: str) -> str:
    """Requests to the service go to the service, and what is for one process to that."""
    levels = subject.split(".")
    if levels[0] != subjects.PREFIX:
        return ""
    return levels[3] if levels[2] == "to" else direct_bus.ANY


@pytest.fixture
async def world(tmp_path):
    trust = keyring.Keyring.create(tmp_path / "keys", "north")
    net = network.SimulatedNetwork(seed=1)
    async with contextlib.AsyncExitStack() as stack:

        async def connect(identity: str) -> api.Bus:
            return await stack.enter_async_context(await net.connect(identity))

        yield DirectWorld(trust, connect, stack)


class TestRpcOnDirectConnections(rpc_contract.RpcContract):
    """The contract of requests, where each client has a link to each server."""

    @pytest.fixture
    async def connect(self, tmp_path, connect):
        trust = keyring.Keyring.create(tmp_path / "keys", "north")
        async with contextlib.AsyncExitStack() as stack:
            made = DirectWorld(trust, connect, stack)

            async def join(identity: str) -> direct_bus.DirectBus:
                before = [other.address for other in made.listeners.values()]
                joined = await made.listen(identity)
                dialing = dialer.DirectDialer(joined, made.access(identity))
                await stack.enter_async_context(dialing)
                for peer in before:
                    dialing.keep(peer)
                await eventually(lambda: len(joined.links) == len(before))
                return joined

            yield join


async def echo(message: api.Message) -> None:
    await message.respond(message.data)


async def test_a_request_and_its_reply_take_the_link_and_headers_travel(world):
    service, ann = await world.pair()
    before = dict(direct_bus.fallbacks())
    seen: list[api.Message] = []

    def reply(message: api.Message) -> None:
        seen.append(message)
        message.respond_now(b"pong")

    await service.subscribe("muster.manage.from.*.read.ping", handler=reply)
    answer = await ann.request("muster.manage.from.ann.read.ping", b"ping", headers={"A": "b"})
    assert answer.data == b"pong"
    (message,) = seen
    assert (message.data, message.header("A")) == (b"ping", "b")
    assert (message.reply or "").startswith("_R.@manage.ann.")
    # the service reaches the client on the same link, and the client's handler is on it too
    await ann.subscribe("muster.manage.to.ann.echo", handler=echo)
    assert (await service.request("muster.manage.to.ann.echo", b"x" * 100_000)).data == b"x" * 100_000
    assert dict(direct_bus.fallbacks()) == before


@pytest.mark.may_block(reason="certificates are files")
async def test_over_tls_the_certificate_and_the_key_must_be_those_of_the_peer(world, tmp_path):
    made = certificates.CertificateStore.create(tmp_path / "tls", "north", lifetime_s=86400.0)
    made.ensure("service", ["127.0.0.1", "localhost"])
    world.server_tls = tls.for_server(made.pair("service").path)
    world.client_tls = ssl.create_default_context(cafile=str(made.bundle))
    service, ann = await world.pair()
    await service.subscribe("muster.manage.from.*.read.ping", handler=echo)
    assert (await ann.request("muster.manage.from.ann.read.ping", b"ping")).data == b"ping"
    world.client_tls = ssl.create_default_context()  # trusts no certificate of the domain
    bob = await world.bus("bob")
    dialing = dialer.DirectDialer(bob, world.access("bob"))
    with pytest.raises(errors.NotConnected, match="certificate"):
        await dialing.use(world.listeners["service"].address)


async def test_a_listener_outside_loopback_needs_tls(world):
    with pytest.raises(errors.InvalidInput, match="need TLS"):
        await world.listen("service", host="0.0.0.0")
    dialing = dialer.DirectDialer(await world.bus("ann"), world.access("ann"))
    with pytest.raises(errors.Refused, match="has no TLS"):
        await dialing.use(frames.PeerAddress(addresses=("192.0.2.1:1",), tls=False))


# Proof


async def test_a_process_at_a_stolen_address_gets_nothing(world):
    """Another process has the port: with its own valid identity, or passing the proof of the peer on."""
    await world.listen("service")
    await world.listen("eve")
    real, eve = (world.listeners[name].address for name in ("service", "eve"))
    dialing = dialer.DirectDialer(await world.bus("ann"), world.access("ann"))
    stolen = frames.PeerAddress(identity="service", key=real.key, addresses=eve.addresses, tls=False)
    with pytest.raises(errors.Unauthorized, match="is not service"):
        await dialing.use(stolen)
    heard: list[bytes] = []

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, _, port = real.addresses[0].rpartition(":")
        there, back = await asyncio.open_connection(host, int(port))

        async def copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter, note: list[bytes]) -> None:
            while data := await source.read(1 << 16):
                note.append(data)
                sink.write(data)
            sink.close()

        await asyncio.gather(copy(reader, back, heard), copy(there, writer, []))

    async with await asyncio.start_server(relay, "127.0.0.1", 0) as relaying:
        place = f"127.0.0.1:{relaying.sockets[0].getsockname()[1]}"
        with pytest.raises(errors.Unauthorized, match="is not service"):
            await dialing.use(
                frames.PeerAddress(identity="service", key=real.key, addresses=(place,), tls=False)
            )
    document = await asyncio.to_thread(world.trust.document, "ann")
    assert document.encode() not in b"".join(heard), "the client shows its document to no other process"
    forged = frames.PeerAddress(identity="service", key=eve.key, addresses=real.addresses, tls=False)
    with pytest.raises(errors.Unauthorized, match="signature"):
        await dialing.use(forged)


async def test_a_challenge_cannot_be_chosen_so_that_it_names_another_address(world):
    """A process at a stolen address has the peer sign its address as a part of the challenge."""
    await world.listen("service")
    real = world.listeners["service"].address
    dialing = dialer.DirectDialer(await world.bus("ann"), world.access("ann"))
    shown: list[frames.DirectProof] = []

    async def read(reader: asyncio.StreamReader, kind: type[Any]) -> Any:
        return frames.decode(
            await reader.readexactly(int.from_bytes(await reader.readexactly(4), "big")), kind
        )

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, _, port = real.addresses[0].rpartition(":")
        there, back = await asyncio.open_connection(host, int(port))
        with contextlib.suppress(asyncio.IncompleteReadError):
            hello = await read(reader, frames.DirectHello)
            back.write(frames.encode(frames.DirectHello(f"{hello.nonce} {place}")))
            challenge = await read(there, frames.DirectChallenge)
            passed_on = frames.DirectChallenge(
                challenge.identity, challenge.nonce, (place, *challenge.addresses), challenge.answer
            )
            writer.write(frames.encode(passed_on))
            shown.append(await read(reader, frames.DirectProof))
        back.close()
        writer.close()

    async with await asyncio.start_server(relay, "127.0.0.1", 0) as relaying:
        place = f"127.0.0.1:{relaying.sockets[0].getsockname()[1]}"
        with pytest.raises(errors.Unauthorized, match="signature"):
            await dialing.use(
                frames.PeerAddress(identity="service", key=real.key, addresses=(place,), tls=False)
            )
    assert not shown, "the client shows its document to no other process"


async def test_a_client_signs_no_text_of_a_broker_that_is_valid_elsewhere(world):
    await world.listen("service")
    creds = await asyncio.to_thread(world.trust.credentials, "service")
    received: list[bytes] = []

    async def broker(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        info = {"auth_required": True, "nonce": frames.signed_by_client("x" * 16, "service")}
        writer.write(f"INFO {json.dumps(info)}\r\n".encode())
        received.append(await reader.read())
        writer.close()

    async with await asyncio.start_server(broker, "127.0.0.1", 0) as fake:
        url = f"nats://127.0.0.1:{fake.sockets[0].getsockname()[1]}"
        with pytest.raises(errors.Unauthorized, match="not the challenge of a broker"):
            await client.connect((url,), creds=creds)
        await eventually(lambda: received)
    assert received == [b""]


async def test_only_valid_credentials_and_their_holder_are_admitted(world, tmp_path):
    await world.listen("service")
    await world.bus("ann")
    address = world.listeners["service"].address
    elsewhere = keyring.Keyring.create(tmp_path / "elsewhere", "north")
    await asyncio.to_thread(elsewhere.issue, "ann", roles.Role.OPERATOR)
    bearer = await asyncio.to_thread(
        lambda: world.trust.issue("device", roles.Role.USER, bearer=True, topics=("topic.a",))
    )
    own = await asyncio.to_thread(world.trust.credentials, "ann")
    foreign = await asyncio.to_thread(elsewhere.credentials, "ann")
    device = await asyncio.to_thread(world.trust.credentials, "device")
    assert device.user_jwt == bearer
    for creds in (foreign, credentials.Credentials(own.user_jwt, foreign.seed), device):
        dialing = dialer.DirectDialer(world.buses["ann"], _access(creds))
        with pytest.raises(errors.Unauthorized, match="service refuses"):
            await dialing.use(address)
    assert world.listeners["service"].refused["credentials"] == 3
    assert not len(world.listeners["service"])


def _access(creds: credentials.Credentials) -> credential_source.PeerAccess:
    return credential_source.PeerAccess(lambda: creds, None)


async def test_a_revoked_or_expired_identity_is_disconnected(world, tmp_path):
    service, ann = await world.pair()
    bob = await world.dial("bob", world.listeners["service"].address)
    await eventually(lambda: "service" in bob.links)
    was = ann.links["service"]
    await asyncio.to_thread(world.trust.revoke, "ann")
    async with asyncio.timeout(2 * listener.AUDIT_S + 3):
        await was.ended
    assert "revoked" in was.ended.result()
    await asyncio.sleep(0)
    assert "service" in bob.links
    assert list(service.links) == ["bob"]
    listening = world.listeners["service"]
    await asyncio.to_thread(world.trust.issue, "carl", roles.Role.OPERATOR, lifetime_s=3600.0)
    carl = await world.dial("carl", listening.address)
    await eventually(lambda: "service" in carl.links)
    listening._clock = lambda: time.time() + 4000
    await eventually(lambda: "carl" not in service.links)


# Rights


async def test_the_rights_are_those_of_a_broker(world):
    """A viewer may only read, and nobody sends under another name."""
    await world.listen("service")
    service = world.buses["service"]
    received: list[str] = []
    for pattern in ("muster.manage.from.>", "muster.manage.to.>", "topic.>"):
        await service.subscribe(pattern, handler=lambda message: received.append(message.subject))
    address = world.listeners["service"].address
    vic = await world.dial("vic", address, role=roles.Role.VIEWER)
    await eventually(lambda: "service" in vic.links)
    for subject in (
        "muster.manage.from.vic.request.apply",
        "muster.manage.from.ann.read.list",
        "muster.manage.to.service.poke",
        "muster.manage.from.vic.renew",
        "topic.orders",
    ):
        over, wait_s = vic.links["service"], 5.0
        reply, answer = over.ask(subject, b"", None, wait_s)
        with pytest.raises(errors.Forbidden):
            await answer
        over.forget(reply, answer, wait_s)
    await vic.publish("muster.manage.from.vic.read.list", b"")
    await eventually(lambda: received)
    assert received == ["muster.manage.from.vic.read.list"]
    assert service.refused["forbidden"] == 5
    assert vic.links, "as with a broker, the connection remains"


@pytest.mark.parametrize(
    ("role", "denied"),
    [
        (roles.Role.USER, "muster.manage.from.ann.renew"),  # only managers renew
        (roles.Role.AGENT, "muster.inform.from.ann.write.any.put"),  # machines write no contexts
    ],
)
async def test_what_the_credentials_deny_is_refused_although_the_name_is_the_own(world, role, denied):
    """Subjects that nothing but the deny list forbids."""
    await world.listen("service")
    received: list[str] = []
    await world.buses["service"].subscribe(
        "muster.>", handler=lambda message: received.append(message.subject)
    )
    ann = await world.dial("ann", world.listeners["service"].address, role=role)
    await eventually(lambda: "service" in ann.links)
    assert any(subjects.matches(allowed, denied) for allowed in roles.limits(role, "ann").pub.allow)
    over, wait_s = ann.links["service"], 5.0
    reply, answer = over.ask(denied, b"", None, wait_s)
    with pytest.raises(errors.Forbidden):
        await answer
    over.forget(reply, answer, wait_s)
    await ann.publish("muster.manage.from.ann.read.list", b"")
    await eventually(lambda: received)
    assert received == ["muster.manage.from.ann.read.list"]


async def test_a_peer_may_address_only_the_client_itself(world):
    """A listener is no broker: its client takes no message that is for another, or of another's name."""
    service, ann = await world.pair()
    received: list[str] = []
    await ann.subscribe("muster.>", handler=lambda message: received.append(message.subject))
    back = service.links["ann"]
    for subject in ("muster.manage.from.ann.request.apply", "muster.manage.to.bob.claim", "muster.a.all.b"):
        back.send(subject, b"")
    back.send("muster.manage.to.ann.claim", b"")
    await eventually(lambda: received)
    assert received == ["muster.manage.to.ann.claim"]


async def test_an_identity_has_one_share_for_both_ways(world):
    """What it used over a link is missing over the broker, and others have theirs on both ways."""
    service, ann = await world.pair()
    bob = await world.dial("bob", world.listeners["service"].address)
    await eventually(lambda: "service" in bob.links)
    operations = rpc_contract.LampState().operations()
    admission.of_loop(asyncio.get_running_loop()).share = 0.002
    async with server.RpcServer(service.as_bus(), PART, operations) as serving:
        subject = subjects.from_identity(PART, "ann", "read.state")

        async def ask() -> Any:
            return rpc.result_of((await ann.request(subject, b"{}", timeout_s=0.2)).data)

        outcomes = await asyncio.gather(*(ask() for _ in range(1000)), return_exceptions=True)
        assert any(isinstance(outcome, errors.Throttled) for outcome in outcomes)
        assert 1 < serving.outcomes["done"] < 1000
        refused = serving.refused["rate"]
        with pytest.raises(errors.TimedOut):  # dropped: it was told a moment ago
            await ann._bus.request(subject, b"{}", timeout_s=0.2)
        assert serving.refused["rate"] == refused + 1
        for way in (bob, bob._bus):
            assert await rpc_contract.ask(way, "read.state", timeout_s=5) == []


# Falling back


@contextlib.asynccontextmanager
async def silent_port() -> Any:
    """A port that accepts connections and replies nothing, as behind a firewall that drops packets."""
    held: list[asyncio.StreamWriter] = []
    serving = await asyncio.start_server(lambda _, writer: held.append(writer), "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{serving.sockets[0].getsockname()[1]}"
    finally:
        serving.close()
        for writer in held:
            writer.close()


@pytest.mark.parametrize("kind", ["refuses", "drops"])
async def test_behind_a_firewall_messages_use_the_broker_and_a_link_is_tried_again(world, monkeypatch, kind):
    monkeypatch.setattr(frames, "HANDSHAKE_S", 0.3)
    monkeypatch.setattr(dialer, "PAUSE_S", 0.05)
    monkeypatch.setattr(dialer, "PAUSE_S_MAX", 0.1)
    service = await world.listen("service")
    open_address = world.listeners["service"].address
    await service.subscribe("muster.manage.from.*.read.ping", handler=echo)
    async with contextlib.AsyncExitStack() as stack:
        place = await stack.enter_async_context(silent_port()) if kind == "drops" else "127.0.0.1:1"
        ann = await world.dial(
            "ann",
            frames.PeerAddress(identity="service", key=open_address.key, addresses=(place,), tls=False),
        )
        for number in range(3):
            async with asyncio.timeout(2):
                answer = await ann.request("muster.manage.from.ann.read.ping", b"%d" % number)
            assert answer.data == b"%d" % number
        await eventually(lambda: direct_bus.fallbacks()["unreachable",] >= 2, what="it is tried again")
        assert not ann.links
        world.dialers["ann"].keep(open_address)  # the firewall has opened
        await eventually(lambda: "service" in ann.links)


async def test_a_request_on_a_link_that_breaks_is_repeated_only_if_it_may_be(world):
    """The service has received the first attempt, and the link ends before its reply."""
    service, ann = await world.pair()
    executed: list[bytes] = []

    def cut(message: api.Message) -> None:
        executed.append(message.data)
        if "ann" in service.links:
            service.links["ann"].close("cut")
        else:
            tasks.append(asyncio.ensure_future(message.respond(message.data)))

    tasks: list[asyncio.Future[None]] = []
    await service.subscribe("muster.manage.from.*.read.ping", handler=cut)
    with pytest.raises(errors.TimedOut, match="it may have been done"):
        await ann.request("muster.manage.from.ann.read.ping", b"once", timeout_s=10)
    assert executed == [b"once"]
    await eventually(lambda: "ann" in service.links and ann.links["service"].is_open)
    repeat = api.Repetition(5.0, data=b"again")
    answer = await ann.request("muster.manage.from.ann.read.ping", b"first", timeout_s=10, repeat=repeat)
    assert (answer.data, executed) == (b"again", [b"once", b"first", b"again"])
    await asyncio.gather(*tasks)


async def test_without_a_subscriber_left_a_broken_request_is_in_doubt(world):
    """The first attempt may have been executed, so the broker's reply does not make it a clean refusal."""
    service, ann = await world.pair()

    async def cut(_: api.Message) -> None:
        await subscription.close()
        service.links["ann"].close("cut")

    subscription = await service.subscribe("muster.manage.from.*.request.switch", handler=cut)
    repeat = api.Repetition(0.5)
    with pytest.raises(errors.TimedOut, match=r"may have been (executed|done)"):  # done: on a busy machine
        await ann.request("muster.manage.from.ann.request.switch", b"", timeout_s=1, repeat=repeat)


async def test_a_late_reply_on_the_link_still_counts(world):
    service, ann = await world.pair()
    messages: list[api.Message] = []
    await service.subscribe("muster.manage.from.*.read.ping", handler=messages.append)
    repeat = api.Repetition(0.05)
    asked = asyncio.create_task(
        ann.request("muster.manage.from.ann.read.ping", b"", timeout_s=10, repeat=repeat)
    )
    await eventually(lambda: len(messages) >= 2, what="the repetition arrives")
    messages[0].respond_now(b"late")
    assert (await asked).data == b"late"
    assert ann.links["service"].is_responsive


async def test_a_frozen_peer_costs_the_time_of_a_repetition_once(
    broker, tmp_path, start_process, monkeypatch
):
    """SIGSTOP: the socket stays open. Requests go to another process of the service; the link ends."""
    monkeypatch.setattr(silence, "INTERVAL_S", 0.3)
    trust = await asyncio.to_thread(keyring.Keyring.create, tmp_path / "keys", "north")
    for identity in ("service-1", "ann"):
        await asyncio.to_thread(trust.issue, identity, roles.Role.OPERATOR)
    peer = await start_process(
        sys.executable, "-m", "tests.bus.direct_peer", broker.url, str(tmp_path / "keys")
    )
    async with (
        await client.connect((broker.url,), identity="ann") as bus,
        await client.connect((broker.url,), identity="service-2") as second,
    ):
        bus.peer_access = credential_source.PeerAccess(functools.partial(trust.credentials, "ann"), None)
        near = cast(nearest.NearestBus, nearest.of(bus, PART, lambda _: direct_bus.ANY))
        subject = "muster.manage.from.ann.read.ping"

        async def ping() -> bytes:
            repeat = api.Repetition(0.25)
            return (await near.request(subject, b"ping", timeout_s=10, repeat=repeat)).data

        async def linked() -> bool:
            with contextlib.suppress(errors.Unavailable):
                await ping()
            return bool(near.links)

        await eventually(linked, timeout_s=20)
        assert await ping() == b"service-1"

        async def reply(message: api.Message) -> None:
            await message.respond(b"service-2")

        # Of no group: the broker would pass each request to the frozen process or to this one at random.
        await second.subscribe("muster.manage.from.*.read.ping", handler=reply)
        late = direct_bus.fallbacks().get(("late",), 0)
        peer.signal(signal.SIGSTOP)
        try:
            for _ in range(10):
                assert await ping() == b"service-2"
            assert direct_bus.fallbacks()["late",] == late + 1, "the others do not use the link"
            await eventually(lambda: not near.links, timeout_s=10)
        finally:
            peer.signal(signal.SIGCONT)


# Hostile peers


async def test_an_unauthenticated_client_cannot_send_a_large_frame(world):
    await world.listen("service")
    host, _, port = world.listeners["service"].address.addresses[0].rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write((frames.HANDSHAKE_BYTES_MAX + 1).to_bytes(4, "big"))
    async with asyncio.timeout(frames.HANDSHAKE_S / 2):
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""
    writer.close()


async def test_connections_without_a_login_are_few_and_end(world, monkeypatch):
    monkeypatch.setattr(frames, "HANDSHAKE_S", 0.5)
    await world.listen("service")
    host, _, port = world.listeners["service"].address.addresses[0].rpartition(":")
    opened = [await asyncio.open_connection(host, int(port)) for _ in range(listener.OF_ADDRESS_MAX + 5)]
    listening = world.listeners["service"]
    await eventually(lambda: listening.refused["handshakes"] == 5)
    await eventually(lambda: listening.refused["handshake"] == listener.OF_ADDRESS_MAX)
    for reader, writer in opened:
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""
        writer.close()


async def test_an_identity_has_a_limited_number_of_connections(world, monkeypatch):
    monkeypatch.setattr(listener, "OF_IDENTITY_MAX", 2)
    await world.listen("service")
    address = world.listeners["service"].address
    ann = await world.bus("ann")
    dialing = [dialer.DirectDialer(ann, world.access("ann")) for _ in range(2)]
    for each in dialing:
        each.keep(address)
    await eventually(lambda: len(world.listeners["service"]) == 2)
    with pytest.raises(errors.Unauthorized, match="too many connections"):
        await dialer.DirectDialer(ann, world.access("ann")).use(address)
    for each in dialing:
        await each.close()


def hostile(chooser: random.Random) -> bytes:
    """Bytes that are a frame, nearly one, or none."""
    good = frames.encode(
        frames.DirectFrame(
            chooser.choice(["", "a", "muster.manage.from.ann.read.x", "_R.a.b", "a..b", "*", "a b", "\x00"]),
            chooser.randbytes(chooser.randrange(40)),
            chooser.choice(["", "ping", "pong", "welcome", "refused?", "_R.x", "\r\n"]),
            chooser.choice([None, b"", b"NATS/1.0 503\r\n\r\n", chooser.randbytes(20)]),
        )
    )
    match chooser.randrange(5):
        case 0:
            return good
        case 1:
            return good[: chooser.randrange(len(good))]
        case 2:
            spoilt = bytearray(good)
            spoilt[chooser.randrange(len(spoilt))] ^= 1 << chooser.randrange(8)
            return bytes(spoilt)
        case 3:
            return chooser.randbytes(chooser.randrange(1, 60))
    content = chooser.randbytes(chooser.randrange(30))
    return len(content).to_bytes(4, "big") + content


@pytest.mark.parametrize("seed", range(10))
async def test_hostile_frames_end_their_own_connection_only(world, seed):
    """Some hundred streams of frames, before and after the login: no error, and others are served."""
    service, ann = await world.pair()
    await service.subscribe("muster.manage.from.*.read.ping", handler=echo)
    chooser = random.Random(seed)
    host, _, port = world.listeners["service"].address.addresses[0].rpartition(":")
    for _ in range(20):
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"".join(hostile(chooser) for _ in range(10)))
        await writer.drain()
        if chooser.random() < 0.5:
            writer.close()
        else:
            writer.transport.abort()
        del reader
    for _ in range(20):
        made = link.DirectLink(service.deliver, payload_bytes_max=1000)
        made.connection_made(_Wire())
        made.open("eve", "service")
        made.may_send = lambda _: True
        for _ in range(20):
            made.data_received(hostile(chooser))
        made.close()
    assert (await ann.request("muster.manage.from.ann.read.ping", b"ping")).data == b"ping"


@pytest.mark.parametrize(
    "reply", ["_R.@manage.ann.\r\nx", "_R.@manage.ann.*", "_R.@manage.ann." + 4000 * "x"]
)
async def test_a_malformed_reply_subject_ends_the_connection_before_any_handler(world, reply):
    service, ann = await world.pair()
    received: list[api.Message] = []
    await service.subscribe("muster.manage.from.*.read.ping", handler=received.append)
    over = ann.links["service"]
    over.send("muster.manage.from.ann.read.ping", b"", reply)
    await asyncio.wait((over.ended,), timeout=5)
    assert over.ended.done()
    assert not received


class _Wire(asyncio.Transport):
    """Takes what is written."""

    def __init__(self) -> None:
        super().__init__()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...
    def get_write_buffer_size(self) -> int:
        return 0

    def write(self, data: Any) -> None: ...
    def abort(self) -> None: ...
    def close(self) -> None: ...


async def test_a_new_subject_is_compared_with_few_subscriptions(world, monkeypatch):
    """A peer chooses its subjects: each must cost little, however many subscriptions of other kinds exist."""
    service, ann = await world.pair()
    for number in range(300):
        await service.subscribe(f"muster.manage.all.bucket.{number}.*", handler=echo)
    await service.subscribe("muster.manage.from.*.read.ping", handler=echo)
    compared: list[str] = []
    matches = subjects.matches

    def counted(pattern: str, subject: str) -> bool:
        compared.append(pattern)
        return matches(pattern, subject)

    monkeypatch.setattr(subjects, "matches", counted)
    assert (await ann.request("muster.manage.from.ann.read.ping", b"ping")).data == b"ping"
    assert "muster.manage.from.*.read.ping" in compared
    assert not any("bucket" in pattern for pattern in compared)


async def test_a_late_request_that_may_not_be_repeated_takes_the_link_out_of_use_until_a_reply(world):
    """The next request uses the broker, unless the peer was only slow: it replies to a ping."""
    service, ann = await world.pair()
    messages: list[api.Message] = []
    await service.subscribe("muster.manage.from.*.read.ping", handler=messages.append)
    over = ann.links["service"]
    with pytest.raises(errors.TimedOut, match="may have been done"):
        await ann.request("muster.manage.from.ann.read.ping", b"", timeout_s=0.05)
    assert not over.is_responsive
    await eventually(lambda: over.is_responsive)


async def test_a_flood_of_refused_messages_ends_the_connection(world):
    service, ann = await world.pair()
    over = ann.links["service"]
    admission.of_loop(asyncio.get_running_loop()).share = 0.01
    with contextlib.suppress(errors.NotConnected):
        for _ in range(2000):
            over.send("muster.manage.from.bob.read.ping", b"")
            await asyncio.sleep(0)
    await asyncio.wait((over.ended,), timeout=5)
    assert over.ended.done()
    assert service.refused["forbidden"] < 2000


@pytest.mark.parametrize("size", [1, 3, 4, 7, 64])
def test_a_reader_finds_frames_in_blocks_of_any_size(size):
    contents = [frames.DirectFrame(f"s.{n}", b"x" * n, "r", b"h" if n % 2 else None) for n in range(40)]
    stream = b"".join(map(frames.encode, contents))
    reader = frames.FrameReader(1000)
    actual = [
        frames.decode(content, frames.DirectFrame)
        for at in range(0, len(stream), size)
        for content in reader.feed(stream[at : at + size])
    ]
    assert actual == contents


@pytest.mark.parametrize(
    "frame",
    [
        frames.DirectFrame("", b"", frames.PING),
        frames.DirectFrame("", b"", "unknown"),
        frames.DirectFrame("_R.@manage.ann.1.1", b""),
    ],
)
async def test_a_flood_of_frames_that_no_handler_charges_stays_in_the_socket(world, frame):
    service, ann = await world.pair()
    await service.subscribe("muster.manage.from.*.read.ping", handler=echo)
    bob = await world.dial("bob", world.listeners["service"].address)
    await eventually(lambda: "service" in bob.links)
    made = service.links["ann"]
    service.admission.share = SHARE
    frames_max = 1000 * SHARE / admission.RECEIVED
    ann.links["service"]._transport.write(frames.encode(frame) * int(3 * frames_max))
    await eventually(lambda: not made._transport.is_reading())
    assert (await bob.request("muster.manage.from.bob.read.ping", b"ping")).data == b"ping"
    assert not made._transport.is_reading()
    await eventually(lambda: made._transport.is_reading(), timeout_s=10)
    assert (await ann.request("muster.manage.from.ann.read.ping", b"ping")).data == b"ping"
    assert made is service.links["ann"]


async def four_links(world: DirectWorld, ann: direct_bus.DirectBus) -> list[link.DirectLink]:
    """Connections of one identity to the service, beside each other."""
    links = []
    for _ in range(4):
        dialing = await world.stack.enter_async_context(dialer.DirectDialer(ann, world.access("ann")))
        dialing.keep(world.listeners["service"].address)
        await eventually(lambda: "service" in ann.links)
        links.append(ann.links.pop("service"))
    return links


async def test_what_is_unsent_to_one_identity_is_bounded_over_all_its_connections(world, monkeypatch):
    """A peer that does not read: each connection stays below its own limit."""
    monkeypatch.setattr(listener, "HELD_BYTES_MAX", 4 << 20)
    await world.listen("service")
    listening = world.listeners["service"]
    ann = await world.bus("ann")
    for dialed in await four_links(world, ann):
        assert dialed._transport is not None
        dialed._transport.pause_reading()
    opened = list(listening._links)
    for _ in range(10):
        for made in opened:
            if made.is_open:
                made.send("muster.manage.to.ann.x", bytes(900 << 10))
        await asyncio.sleep(0)
        assert sum(made.unsent_bytes() for made in opened) <= listener.HELD_BYTES_MAX + (1 << 20)
    assert listening.refused["held"]


async def test_unfinished_frames_of_one_identity_are_bounded_over_all_its_connections(world, monkeypatch):
    monkeypatch.setattr(listener, "HELD_BYTES_MAX", 2 << 20)
    await world.listen("service")
    listening = world.listeners["service"]
    ann = await world.bus("ann")
    await four_links(world, ann)
    opened = list(listening._links)
    for made in opened:
        made.data_received((1 << 20).to_bytes(4, "big"))
    for _ in range(9):
        for made in opened:
            made.data_received(bytes(100 << 10))
    assert listening.refused["held"]
    assert sum(made.held_bytes() for made in opened if made.is_open) <= listener.HELD_BYTES_MAX
    assert sum(made.is_open for made in opened) == 2, "no more are closed than necessary"


async def test_a_flood_of_parts_of_a_frame_is_charged(world):
    """Each block costs the event loop as much as a message."""
    service, ann = await world.pair()
    made, over = service.links["ann"], ann.links["service"]
    service.admission.share = SHARE
    over._transport.write((1 << 20).to_bytes(4, "big"))
    for _ in range(int(1000 * SHARE / admission.RECEIVED) + 1):
        made.data_received(b"x")
    made.data_received(b"x")
    await eventually(lambda: not made._transport.is_reading())
    assert made.held_bytes() < 1 << 20


async def test_handshakes_of_an_address_have_a_share_of_the_loop(world, monkeypatch):
    monkeypatch.setattr(listener, "HANDSHAKE", 500 * admission.SHARE)  # the budget is used up at once
    await world.listen("service")
    listening = world.listeners["service"]
    host, _, port = listening.address.addresses[0].rpartition(":")

    async def attempt() -> None:
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(frames.encode(frames.DirectHello("x")) + b"\0\0\0\1\0")
        with contextlib.suppress(ConnectionError):
            await reader.read()
        writer.close()

    await asyncio.gather(*(attempt() for _ in range(10)))
    assert listening.refused["handshakes"] > 0
    assert await eventually(lambda: listening.refused["handshake"]), "those within the budget are served"


async def test_the_messages_for_any_peer_go_to_one_that_responds(world):
    """An agent without a broker must not wait for a manager that is frozen."""
    for name in ("first", "second"):
        served = await world.listen(name)

        async def reply(message: api.Message, name: str = name) -> None:
            await message.respond(name.encode())

        await served.subscribe("muster.manage.from.*.read.ping", handler=reply)
    alone = direct_bus.DirectBus(None, "ann", lambda _: "")
    await world.bus("ann")
    dialing = await world.stack.enter_async_context(dialer.DirectDialer(alone, world.access("ann")))
    for listening in world.listeners.values():
        dialing.keep(listening.address)
    await eventually(lambda: len(alone.links) == 2)
    frozen, other = alone.links.values()
    frozen.is_responsive = False
    answer = await alone.request("muster.manage.from.ann.read.ping", b"")
    assert answer.data.decode() == other.identity


async def test_a_closed_bus_makes_no_link(world):
    bus = await world._connect("ann")
    bus.peer_access = world.access("ann")
    near = nearest.of(bus, "manage", _peer_of)
    await bus.close()
    for _ in range(nearest.REQUESTS_MIN):
        with pytest.raises(errors.NotConnected):
            await near.request("muster.manage.from.ann.read.ping", b"")
    assert not any("link of ann" in task.get_name() for task in asyncio.all_tasks())


async def test_calls_that_are_cancelled_leave_no_request_and_no_link(world):
    service, ann = await world.pair()
    (opened,), repeat = ann.links.values(), api.Repetition(0.02)
    slow = subjects.from_identity(PART, "ann", "read", "slow")
    quick = subjects.from_identity(PART, "ann", "read", "quick")
    await service.subscribe(subjects.from_identity(PART, "*", "read", "slow"), handler=_late_echo)
    await service.subscribe(subjects.from_identity(PART, "*", "read", "quick"), handler=echo)

    async def check() -> None:
        assert not opened._pending
        assert (await ann.request(quick, b"x", timeout_s=5)).data == b"x"

    async def ask() -> None:
        await ann.request(slow, b"y", timeout_s=5, repeat=repeat)

    assert await cancellation.at_each_await(ask, check)
    address, access = world.listeners["service"].address, world.access("ann")

    async def use() -> None:
        async with dialer.DirectDialer(ann, access) as dialing:
            await dialing.use(address)

    async def unused() -> None:
        await eventually(lambda: len(world.listeners["service"]) <= 1)
        assert all(made.is_open for made in ann.links.values())

    cancelled = 0
    for place in range(200):
        steps = cancellation._Steps(use(), place, with_result=False)
        task = asyncio.ensure_future(cancellation._run(steps))
        await asyncio.wait({task}, timeout=0.3)
        if steps.cancelled_at is None:
            task.cancel()
        await asyncio.wait({task}, timeout=5)
        cancelled += task.cancelled()
        await unused()
        if steps.cancelled_at is None:
            break
    assert cancelled > 5


async def _late_echo(message: api.Message) -> None:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(asyncio.Event().wait(), 0.05)
    await message.respond(message.data)
