"""The AMQP gateway, with the clients of proton and of Qpid JMS."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import shutil
import ssl
from pathlib import Path

import pytest

proton = pytest.importorskip("proton", reason="python-qpid-proton is not installed")

from proton import utils as proton_utils  # noqa: E402

from muster.gateways.amqp import gateway as amqp_gateway  # noqa: E402
from muster.message import destinations  # noqa: E402
from muster.testing import eventually  # noqa: E402
from muster.trust import certificates  # noqa: E402
from tests.gateways.amqp import java_project, raw_client  # noqa: E402
from tests.message import conftest  # noqa: E402


def _in_thread(gateway: amqp_gateway.AmqpGateway, work, **options):
    """Run a blocking client of proton's."""

    def run():
        made = proton_utils.BlockingConnection(f"amqp://127.0.0.1:{gateway.port}", timeout=30, **options)
        try:
            return work(made)
        finally:
            with contextlib.suppress(proton.ProtonException):
                made.close()

    return asyncio.to_thread(run)


async def test_a_queue_through_amqp_meets_the_python_api(
    gateway: amqp_gateway.AmqpGateway, dial: conftest.Dial
):
    def send(connection):
        sender = connection.create_sender("queue:orders")
        sender.send(proton.Message(body="four chairs", durable=True, properties={"amount": proton.int32(4)}))

    await _in_thread(gateway, send, allowed_mechs="ANONYMOUS")
    session = (await dial()).session()
    consumer = await session.consumer(destinations.queue("orders"), "amount = 4")
    message = await consumer.receive(30)
    assert message is not None
    assert message.body() == "four chairs"
    await session.producer(destinations.queue("answers")).send("sold")

    def receive(connection):
        receiver = connection.create_receiver("queue:answers")
        got = receiver.receive(timeout=30)
        receiver.accept()
        return got.body

    assert await _in_thread(gateway, receive, allowed_mechs="ANONYMOUS") == "sold"


async def test_wrong_credentials_are_refused(gateway: amqp_gateway.AmqpGateway):
    def nothing(connection):
        raise AssertionError("it was let in")

    with pytest.raises(proton.ProtonException):
        await _in_thread(
            gateway, nothing, user="ann", password="wrong", allowed_mechs="PLAIN", reconnect=False
        )


@pytest.mark.parametrize(
    ("sent_bytes", "headers"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", 1),
        (b"AMQP\x03\x01\x00\x00\xff\xff\xff\xff\x02\x01\x00\x00", 1),
        (b"AMQP", 0),
    ],
)
async def test_unknown_clients_are_refused(
    gateway: amqp_gateway.AmqpGateway, sent_bytes: bytes, headers: int
):
    """With the header that is expected, once."""
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    writer.write(sent_bytes[:8])
    received = await reader.readexactly(8 * headers)
    writer.write(sent_bytes[8:])
    with contextlib.suppress(OSError):  # the gateway may have closed the connection
        writer.write_eof()
    async with asyncio.timeout(30):
        received += await reader.read()
    writer.close()
    assert received.count(b"AMQP") == headers


async def test_work_that_is_cancelled_before_it_begins_is_closed(gateway: amqp_gateway.AmqpGateway):
    _, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    await eventually.eventually(lambda: gateway.connections)
    (client,) = gateway.connections
    work = asyncio.Event().wait()
    task = client.spawn(work)
    task.cancel()
    await asyncio.wait([task])
    assert inspect.getcoroutinestate(work) == inspect.CORO_CLOSED
    writer.close()


@pytest.mark.timeout(400)
async def test_qpid_jms_conforms(gateway: amqp_gateway.AmqpGateway, tmp_path: Path):
    classpath = await java_project.classpath(tmp_path)
    gateway.max_message_bytes = 8 << 20
    url = f"amqp://127.0.0.1:{gateway.port}"
    door, pair = _door(tmp_path)
    store = tmp_path / "believed.p12"
    store.write_bytes(_trust_store(pair.bundle.read_bytes()))
    async with amqp_gateway.AmqpGateway(
        gateway.connect, gateway.verifiers, anonymous="nobody", tls=door
    ) as with_tls:
        secure = (
            f"amqps://127.0.0.1:{with_tls.port}?transport.trustStoreLocation={store}"
            "&transport.trustStorePassword=believed&transport.storeType=PKCS12"
        )
        code, output = await java_project.output(
            *("java", "-cp", classpath),
            *("Conformance", url, secure),
            cwd=tmp_path,
        )
    assert code == 0, output
    assert "ok tls" in output


def _door(folder: Path) -> tuple[ssl.SSLContext, certificates.CertificatePair]:
    authority = certificates.CertificateStore.create(folder / "pki", "fleet", lifetime_s=86400)
    authority.ensure("door", ("127.0.0.1",))
    pair = authority.pair("door")
    door = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    door.load_cert_chain(pair.path)
    return door, pair


def _trust_store(bundle: bytes) -> bytes:
    """Certificates in the form that Java trusts."""
    from cryptography import x509
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.serialization import pkcs12

    believed = [
        pkcs12.PKCS12Certificate(pem_x509_certificate, b"authority")
        for pem_x509_certificate in x509.load_pem_x509_certificates(bundle)
    ]
    return pkcs12.serialize_java_truststore(believed, serialization.BestAvailableEncryption(b"believed"))


async def test_a_malformed_frame_ends_only_its_own_connection(gateway: amqp_gateway.AmqpGateway):
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    init = b"\x00\x53\x41\xc0\x0c\x01\xa3\x09ANONYMOUS"
    frame = (len(init) + 8).to_bytes(4, "big") + b"\x02\x01\x00\x00" + init
    writer.write(
        b"AMQP\x03\x01\x00\x00" + frame + b"AMQP\x00\x01\x00\x00" + b"\x00\x00\x00\x09\x02\x00\x00\x00\xff"
    )
    async with asyncio.timeout(30):
        content = await reader.read()
    _, header, closing = content.partition(b"AMQP\x00\x01\x00\x00")
    assert header, "it was let in"
    assert b"amqp:decode-error" in closing or b"amqp:not-allowed" in closing
    writer.close()
    await _in_thread(gateway, lambda connection: None, allowed_mechs="ANONYMOUS")


async def test_bad_topics_are_refused_with_a_condition(gateway: amqp_gateway.AmqpGateway):
    def misbehave(connection):
        with pytest.raises(proton_utils.LinkDetached, match="not-found"):
            connection.create_sender("topic:a/*", name="bad")

    await _in_thread(gateway, misbehave, allowed_mechs="ANONYMOUS")


async def test_a_client_over_tls_is_served(gateway: amqp_gateway.AmqpGateway, tmp_path: Path):
    door, pair = await asyncio.to_thread(_door, tmp_path)
    client_tls = ssl.create_default_context(cafile=pair.bundle)

    def work(port: int) -> None:
        raw = raw_client.Raw(port, "secret", client_tls)
        raw.until(lambda: raw.connection.state & proton.Endpoint.REMOTE_ACTIVE)
        raw.socket.close()

    async with amqp_gateway.AmqpGateway(gateway.connect, None, anonymous="nobody", tls=door) as with_tls:
        await asyncio.to_thread(work, with_tls.port)


async def test_a_topic_that_a_client_may_not_use_is_refused(gateway: amqp_gateway.AmqpGateway):
    def misbehave(connection):
        with pytest.raises(proton_utils.LinkDetached, match="unauthorized-access"):
            connection.create_sender("topic:secret/plans", name="bad")
        anywhere = connection.create_sender(None)
        with pytest.raises(proton_utils.SendException):
            anywhere.send(proton.Message(address="topic:secret/plans", body="x"))
        with pytest.raises(proton_utils.SendException):
            anywhere.send(proton.Message(body="to whom?"))

    await _in_thread(gateway, misbehave, allowed_mechs="ANONYMOUS")


async def test_rhea_sends_and_receives(gateway: amqp_gateway.AmqpGateway, tmp_path: Path):
    npm, node = shutil.which("npm"), shutil.which("node")
    if npm is None or node is None:
        pytest.skip("npm is not installed, so rhea was not tried")
    folder = java_project.CACHE.parent / "rhea-tests"
    if not (folder / "node_modules" / "rhea").exists():
        await asyncio.to_thread(folder.mkdir, parents=True, exist_ok=True)
        code, output = await java_project.output(
            npm, "install", "--no-audit", "--no-fund", "--prefix", str(folder), "rhea@3.0.5", cwd=folder
        )
        if code:
            pytest.skip(f"npm cannot reach its registry, so rhea was not tried: {output[-300:]}")
    script = Path(__file__).parent / "rhea.js"
    code, output = await java_project.output(
        "env", f"NODE_PATH={folder / 'node_modules'}", node, str(script), str(gateway.port), cwd=tmp_path
    )
    assert code == 0, output
    assert 'got hello {"n":4}' in output


@pytest.mark.slow
async def test_go_amqp_sends_and_receives(gateway: amqp_gateway.AmqpGateway, tmp_path: Path):
    go = shutil.which("go")
    if go is None:
        pytest.skip("Go is not installed, so go-amqp was not tried")
    project = tmp_path / "go"
    await asyncio.to_thread(shutil.copytree, Path(__file__).parent / "go", project)
    code, output = await java_project.output(go, "build", "-o", "client", ".", cwd=project)
    if code and "dial tcp" in output:
        pytest.skip(f"Go cannot reach its modules, so go-amqp was not tried: {output[-300:]}")
    assert code == 0, output
    url = f"amqp://127.0.0.1:{gateway.port}"
    code, output = await java_project.output(str(project / "client"), url, cwd=project)
    assert code == 0, output
    assert "all held" in output
