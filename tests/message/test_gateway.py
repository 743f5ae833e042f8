"""The AMQP gateway, with the clients of proton and of Qpid JMS."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

proton = pytest.importorskip("proton", reason="python-qpid-proton is not installed")

from proton import utils as proton_utils  # noqa: E402

from muster.bus import api  # noqa: E402
from muster.message import destinations, service  # noqa: E402
from muster.message.amqp import server  # noqa: E402
from muster.testing import fixtures  # noqa: E402
from muster.trust import passwords, roles  # noqa: E402
from tests.message import conftest  # noqa: E402


@pytest_asyncio.fixture
async def gateway(
    dispatcher: service.Service, connect: fixtures.Connect, tmp_path: Path
) -> AsyncIterator[server.Gateway]:
    verifiers = passwords.Passwords(tmp_path)
    mechanisms = ("SCRAM-SHA-256", "SCRAM-SHA-512")
    await asyncio.to_thread(verifiers.set, "ann", roles.Role.USER, "correct horse", mechanisms=mechanisms)
    numbers = iter(range(1000))

    async def dial(login: passwords.Login) -> api.Bus:
        return await connect(f"{login.name}-{next(numbers)}")

    async with server.Gateway(dial, verifiers, anonymous="nobody") as started:
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


async def _output(*command: str, cwd: Path) -> tuple[int, str]:
    made = await asyncio.create_subprocess_exec(
        *command, cwd=cwd, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    said, _ = await made.communicate()
    return made.returncode or 0, said.decode()


@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_qpid_jms_conforms(gateway: server.Gateway, tmp_path: Path):
    import shutil

    if shutil.which("mvn") is None:
        pytest.skip("Maven is not installed, so the Java client was not tried")
    project = tmp_path / "java"
    await asyncio.to_thread(
        shutil.copytree, Path(__file__).parent / "java", project, ignore=shutil.ignore_patterns("target")
    )
    code, said = await _output(
        "mvn", "-q", "-B", "compile", "dependency:build-classpath", "-Dmdep.outputFile=classpath", cwd=project
    )
    if code and "resolve" in said:
        pytest.skip(f"Maven cannot reach its repository, so the Java client was not tried: {said[-300:]}")
    assert code == 0, said
    classpath = f"target/classes:{(project / 'classpath').read_text().strip()}"
    url = f"amqp://127.0.0.1:{gateway.port}"
    code, said = await _output("java", "-cp", classpath, "Conformance", url, cwd=project)
    assert code == 0, said


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

    def vanish(connection):
        receiver = connection.create_receiver("queue:orders")
        assert receiver.receive(timeout=5).body == "one"
        for bridge in list(gateway.bridges):
            loop.call_soon_threadsafe(bridge.connection_aborted)

    loop = asyncio.get_running_loop()
    await _in_thread(gateway, vanish, allowed_mechs="ANONYMOUS")
    message = await (await session.consumer(destinations.queue("orders"))).receive(10)
    assert message is not None
    assert (message.body(), message.redelivered) == ("one", True)
