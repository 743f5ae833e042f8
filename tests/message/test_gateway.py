"""The AMQP gateway, with the clients of proton and of Qpid JMS."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

proton = pytest.importorskip("proton", reason="python-qpid-proton is not installed")

from proton import utils as proton_utils  # noqa: E402

from muster.bus import api  # noqa: E402
from muster.bus import client as bus_client  # noqa: E402
from muster.bus.brokers import broker as brokers  # noqa: E402
from muster.message import destinations, service  # noqa: E402
from muster.message.amqp import engine, links, server  # noqa: E402
from muster.testing import eventually, fixtures  # noqa: E402
from muster.trust import certificates, passwords, roles  # noqa: E402
from tests.message import conftest, java_project  # noqa: E402


@pytest.fixture(scope="module")
def verifiers(tmp_path_factory: pytest.TempPathFactory) -> passwords.Passwords:
    """Made once: that takes long on purpose."""
    made = passwords.Passwords(tmp_path_factory.mktemp("passwords"))
    made.set("ann", roles.Role.USER, "correct horse", mechanisms=("SCRAM-SHA-256", "SCRAM-SHA-512"))
    return made


@pytest_asyncio.fixture
async def gateway(
    dispatcher: service.Service, connect: fixtures.Connect, verifiers: passwords.Passwords
) -> AsyncIterator[server.Gateway]:
    numbers = iter(range(1000))

    async def dial(login: passwords.Login) -> api.Bus:
        return await connect(f"{login.name}-{next(numbers)}")

    def may(identity: str, action: str, subject: str) -> bool:
        return not subject.startswith("topic.secret.")

    async with server.Gateway(dial, verifiers, anonymous="nobody", may=may) as started:
        yield started


def _in_thread(gateway: server.Gateway, work, **options):
    """Run a blocking client of proton's."""

    def run():
        made = proton_utils.BlockingConnection(f"amqp://127.0.0.1:{gateway.port}", timeout=10, **options)
        try:
            return work(made)
        finally:
            with contextlib.suppress(proton.ProtonException):
                made.close()

    return asyncio.to_thread(run)


async def test_a_queue_through_amqp_meets_the_python_api(gateway: server.Gateway, dial: conftest.Dial):
    def send(connection):
        sender = connection.create_sender("queue:orders")
        sender.send(proton.Message(body="four chairs", durable=True, properties={"amount": proton.int32(4)}))

    await _in_thread(gateway, send, allowed_mechs="ANONYMOUS")
    session = (await dial()).session()
    consumer = await session.consumer(destinations.queue("orders"), "amount = 4")
    message = await consumer.receive(5)
    assert message is not None
    assert message.body() == "four chairs"
    await session.producer(destinations.queue("answers")).send("sold")

    def receive(connection):
        receiver = connection.create_receiver("queue:answers")
        got = receiver.receive(timeout=5)
        receiver.accept()
        return got.body

    assert await _in_thread(gateway, receive, allowed_mechs="ANONYMOUS") == "sold"


async def test_wrong_credentials_are_refused(gateway: server.Gateway):
    def nothing(connection):
        raise AssertionError("it was let in")

    with pytest.raises(proton.ProtonException):
        await _in_thread(
            gateway, nothing, user="ann", password="wrong", allowed_mechs="PLAIN", reconnect=False
        )


@pytest.mark.parametrize(
    "said", [b"GET / HTTP/1.1\r\n\r\n", b"AMQP\x03\x01\x00\x00\xff\xff\xff\xff\x02\x01\x00\x00", b"AMQP"]
)
async def test_strangers_are_shown_out(gateway: server.Gateway, said: bytes):
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    writer.write(said)
    writer.write_eof()
    async with asyncio.timeout(10):
        await reader.read()
    writer.close()


@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_qpid_jms_conforms(gateway: server.Gateway, tmp_path: Path):
    classpath = await java_project.classpath(tmp_path)
    url = f"amqp://127.0.0.1:{gateway.port}"
    door, pair = _door(tmp_path)
    store = tmp_path / "believed.p12"
    store.write_bytes(_trust_store(pair.bundle.read_bytes()))
    async with server.Gateway(gateway.connect, gateway.verifiers, anonymous="nobody", tls=door) as with_tls:
        secure = (
            f"amqps://127.0.0.1:{with_tls.port}?transport.trustStoreLocation={store}"
            "&transport.trustStorePassword=believed&transport.storeType=PKCS12"
        )
        code, said = await java_project.output(
            "java", "-cp", classpath, "Conformance", url, secure, cwd=tmp_path
        )
    assert code == 0, said
    assert "ok tls" in said


def _door(folder: Path) -> tuple[ssl.SSLContext, certificates.Pair]:
    authority = certificates.Certificates.create(folder / "pki", "fleet", lifetime_s=86400)
    authority.ensure("door", ("127.0.0.1",))
    pair = authority.pair("door")
    door = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    door.load_cert_chain(pair.path)
    return door, pair


def _trust_store(bundle: bytes) -> bytes:
    """Certificates in the form in which Java believes them."""
    from cryptography import x509
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.serialization import pkcs12

    believed = [
        pkcs12.PKCS12Certificate(one, b"authority") for one in x509.load_pem_x509_certificates(bundle)
    ]
    return pkcs12.serialize_java_truststore(believed, serialization.BestAvailableEncryption(b"believed"))


async def test_a_malformed_frame_ends_only_its_own_connection(gateway: server.Gateway):
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    init = b"\x00\x53\x41\xc0\x0c\x01\xa3\x09ANONYMOUS"
    frame = (len(init) + 8).to_bytes(4, "big") + b"\x02\x01\x00\x00" + init
    writer.write(
        b"AMQP\x03\x01\x00\x00" + frame + b"AMQP\x00\x01\x00\x00" + b"\x00\x00\x00\x09\x02\x00\x00\x00\xff"
    )
    async with asyncio.timeout(10):
        said = await reader.read()
    assert said.endswith(b"AMQP\x00\x01\x00\x00"), "it was let in, and shown out"
    writer.close()
    await _in_thread(gateway, lambda connection: None, allowed_mechs="ANONYMOUS")


async def test_oversized_messages_and_bad_topics_are_refused_with_a_condition(gateway: server.Gateway):
    def misbehave(connection):
        sender = connection.create_sender("queue:orders")
        with pytest.raises(proton_utils.SendException):
            sender.send(proton.Message(body=bytes(1 << 20), durable=True))
        sender.send(proton.Message(body="small", durable=True))
        with pytest.raises(proton_utils.LinkDetached, match="not-found"):
            connection.create_sender("topic:a/*", name="bad")

    await _in_thread(gateway, misbehave, allowed_mechs="ANONYMOUS")


async def test_what_a_vanished_client_had_comes_again_marked(gateway: server.Gateway, dial: conftest.Dial):
    session = (await dial()).session()
    await session.producer(destinations.queue("orders")).send("one")

    def vanish() -> None:
        raw = _Raw(gateway.port, "vanishing")
        receiver = raw.session.receiver("in")
        receiver.source.address = "queue:orders"
        receiver.open()
        receiver.flow(1)
        raw.until(lambda: receiver.current is not None and receiver.current.readable)
        raw.socket.close()

    await asyncio.to_thread(vanish)
    message = await (await session.consumer(destinations.queue("orders"))).receive(10)
    assert message is not None
    assert (message.body(), message.redelivered) == ("one", True)


_ANONYMOUS = b"\x00\x53\x41\xc0\x0c\x01\xa3\x09ANONYMOUS"
_LOGIN = b"AMQP\x03\x01\x00\x00" + (len(_ANONYMOUS) + 8).to_bytes(4, "big") + b"\x02\x01\x00\x00" + _ANONYMOUS
_OPEN = b"\x00\x53\x10\xc0\x0b\x01\xa1\x08half-way"


@pytest.mark.parametrize("said", [b"", b"AMQP\x03\x01\x00\x00", "opened"])
async def test_a_half_open_connection_is_given_up(
    gateway: server.Gateway, dispatcher: service.Service, said: bytes | str
):
    opened = said == "opened"
    async with server.Gateway(gateway.connect, None, anonymous="nobody", idle_s=1.0) as impatient:
        reader, writer = await asyncio.open_connection("127.0.0.1", impatient.port)
        if isinstance(said, bytes):
            writer.write(said)
        else:
            frame = (len(_OPEN) + 8).to_bytes(4, "big") + b"\x02\x00\x00\x00" + _OPEN
            writer.write(_LOGIN + b"AMQP\x00\x01\x00\x00" + frame)
        async with asyncio.timeout(30):
            with contextlib.suppress(ConnectionError):
                answer = await reader.read()
                assert (b"resource-limit-exceeded" in answer) == opened, "it was told why"
        writer.close()
        await eventually.eventually(lambda: not impatient.bridges)


async def test_a_client_that_does_not_wait_for_answers_is_served(gateway: server.Gateway):
    """Login, open, begin and attach in one write, as fast clients do."""

    def work() -> int:
        made = proton.Connection()
        made.container = "hasty"
        session = made.session()
        link = session.sender("hasty")
        link.target.address = "queue:hasty"
        for one in (made, session, link):
            one.open()
        transport = proton.Transport()
        transport.bind(made)
        with socket.create_connection(("127.0.0.1", gateway.port), timeout=20) as over:
            over.sendall(_LOGIN)
            got = b""
            while b"\x00\x53\x44" not in got:
                got += over.recv(4096)
            while not link.credit:
                while (size := transport.pending()) > 0:
                    over.sendall(transport.peek(size))
                    transport.pop(size)
                transport.push(over.recv(4096))
            return int(link.credit)

    assert await asyncio.to_thread(work) > 0


class _Raw:
    """A client that reads and writes when it wants to."""

    def __init__(self, port: int, name: str, tls: ssl.SSLContext | None = None) -> None:
        self.connection = proton.Connection()
        self.connection.container = name
        self.session = self.connection.session()
        self.session.incoming_capacity = 1 << 30
        self.transport = proton.Transport()
        self.transport.bind(self.connection)
        self.connection.open()
        self.session.open()
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=30)
        if tls is not None:
            self.socket = tls.wrap_socket(self.socket, server_hostname="127.0.0.1")
        self.socket.sendall(_LOGIN)
        got = b""
        while b"\x00\x53\x44" not in got:
            got += self.socket.recv(4096)

    def write(self) -> None:
        while (size := self.transport.pending()) > 0:
            self.socket.sendall(self.transport.peek(size))
            self.transport.pop(size)

    def read(self) -> None:
        data = self.socket.recv(1 << 16)
        assert data, "the gateway closed the connection"
        at = 0
        while at < len(data):
            room = self.transport.capacity()
            self.transport.push(data[at : at + room])
            at += room

    def until(self, ready) -> None:
        self.write()
        while not ready():
            self.read()
            self.write()


async def test_a_client_that_does_not_read_costs_little_and_misses_nothing(
    gateway: server.Gateway, connect: fixtures.Connect
):
    """It has given credit without end, and its socket is full."""
    count, size = 400, 40_000
    raw = await asyncio.to_thread(_Raw, gateway.port, "deaf")
    receiver = raw.session.receiver("in")
    receiver.source.address = "topic:flood"
    receiver.open()
    receiver.flow(1_000_000)
    await asyncio.to_thread(raw.until, lambda: receiver.state & proton.Endpoint.REMOTE_ACTIVE)
    (bridge,) = gateway.bridges
    bus = await connect("plain")
    for number in range(count):
        await bus.publish(destinations.topic("flood").subject, f"{number:06}".encode() + b"x" * size)
    await bus.flush()

    def held() -> int:
        return sum(len(part) for part in bridge.running._out)

    (link,) = bridge.running.links()
    await eventually.eventually(lambda: not bridge.running.may_send(link))
    assert held() < engine.OUT_BYTES_MAX + 2 * size
    got: list[int] = []

    def read_all() -> None:
        while len(got) < count:
            raw.read()
            while (current := receiver.current) is not None and current.readable and not current.partial:
                body = proton.Message()
                body.decode(receiver.recv(current.pending))
                receiver.advance()
                current.settle()
                got.append(int(body.body[:6]))
            raw.write()

    async with asyncio.timeout(60):
        await asyncio.to_thread(read_all)
    assert got == list(range(count))
    raw.socket.close()


async def test_a_client_over_tls_is_served(gateway: server.Gateway, tmp_path: Path):
    door, pair = await asyncio.to_thread(_door, tmp_path)
    believes = ssl.create_default_context(cafile=pair.bundle)

    def work(port: int) -> None:
        raw = _Raw(port, "secret", believes)
        raw.until(lambda: raw.connection.state & proton.Endpoint.REMOTE_ACTIVE)
        raw.socket.close()

    async with server.Gateway(gateway.connect, None, anonymous="nobody", tls=door) as with_tls:
        await asyncio.to_thread(work, with_tls.port)


async def test_no_copy_of_its_own_travels_to_a_client_that_does_not_want_it(
    gateway: server.Gateway, broker: brokers.Broker
):
    async def quiet(login: passwords.Login) -> api.Bus:
        return await bus_client.connect((broker.url,), identity="quiet", echo=False)

    def say(raw: _Raw, text: str) -> None:
        sender = raw.session.sender(text)
        sender.target.address = "topic:hall"
        sender.open()
        raw.until(lambda: sender.credit > 0)
        delivery = sender.delivery("1")
        sender.send(proton.Message(body=text).encode())
        sender.advance()
        raw.until(lambda: delivery.settled)

    def work(port: int) -> str:
        mine, other = _Raw(port, "mine"), _Raw(port, "other")
        receiver = mine.session.receiver("in")
        receiver.source.address = "topic:hall"
        descriptor = proton.symbol("apache.org:no-local-filter:list")
        receiver.source.filter.put_dict({proton.symbol("no-local"): proton.Described(descriptor, "NoLocal")})
        receiver.open()
        receiver.flow(10)
        mine.until(lambda: receiver.state & proton.Endpoint.REMOTE_ACTIVE)
        say(mine, "mine")
        say(other, "theirs")
        mine.until(lambda: receiver.current is not None and receiver.current.readable)
        got = proton.Message()
        got.decode(receiver.recv(receiver.current.pending))
        outlets = [one for bridge in deaf.bridges for one in bridge.outlets.values()]
        dropped = [one.rejected for one in outlets if isinstance(one, links.Tap)]
        for one in (mine, other):
            one.socket.close()
        return f"{got.body}, dropped {dropped}"

    async with server.Gateway(gateway.connect, None, anonymous="nobody", quiet=quiet) as deaf:
        assert await asyncio.to_thread(work, deaf.port) == "theirs, dropped [0]"


async def test_two_clients_cannot_have_one_id(gateway: server.Gateway):
    def work() -> str:
        first, second = _Raw(gateway.port, "only"), _Raw(gateway.port, "only")
        first.until(lambda: first.connection.state & proton.Endpoint.REMOTE_ACTIVE)
        second.until(lambda: second.connection.state & proton.Endpoint.REMOTE_CLOSED)
        condition = second.connection.remote_condition
        for one in (first, second):
            one.socket.close()
        return f"{condition.name} {condition.info}"

    said = await asyncio.to_thread(work)
    assert "amqp:invalid-field" in said
    assert "container-id" in said


async def test_a_topic_that_a_client_may_not_use_is_refused(gateway: server.Gateway):
    def misbehave(connection):
        with pytest.raises(proton_utils.LinkDetached, match="unauthorized-access"):
            connection.create_sender("topic:secret/plans", name="bad")
        anywhere = connection.create_sender(None)
        with pytest.raises(proton_utils.SendException):
            anywhere.send(proton.Message(address="topic:secret/plans", body="x"))
        with pytest.raises(proton_utils.SendException):
            anywhere.send(proton.Message(body="to whom?"))

    await _in_thread(gateway, misbehave, allowed_mechs="ANONYMOUS")


async def test_rhea_sends_and_receives(gateway: server.Gateway, tmp_path: Path):
    npm, node = shutil.which("npm"), shutil.which("node")
    if npm is None or node is None:
        pytest.skip("npm is not installed, so rhea was not tried")
    folder = java_project.CACHE.parent / "rhea-tests"
    if not (folder / "node_modules" / "rhea").exists():
        await asyncio.to_thread(folder.mkdir, parents=True, exist_ok=True)
        code, said = await java_project.output(
            npm, "install", "--no-audit", "--no-fund", "--prefix", str(folder), "rhea@3.0.5", cwd=folder
        )
        if code:
            pytest.skip(f"npm cannot reach its registry, so rhea was not tried: {said[-300:]}")
    script = Path(__file__).parent / "rhea.js"
    code, said = await java_project.output(
        "env", f"NODE_PATH={folder / 'node_modules'}", node, str(script), str(gateway.port), cwd=tmp_path
    )
    assert code == 0, said
    assert 'got hello {"n":4}' in said
