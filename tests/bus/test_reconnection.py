"""How clients come back after a broker restart: delays, timeouts, and the attempts of one process."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from typing import Any

import pytest

from muster.bus import api
from muster.bus.brokers import broker, config
from muster.bus.client import client, reconnection, transports
from muster.core import errors
from muster.core.net import hosts
from muster.testing.eventually import eventually
from tests.bus import sockets


@pytest.fixture
async def plain(tmp_path):
    async with broker.Broker(config.BrokerConfig(name="b", directory=tmp_path, storage=None)) as running:
        yield running


def delays(plan: reconnection.ReconnectionPlan, number: int, now_s: float = 0.0) -> list[float]:
    return [plan.next_delay_s(now_s, 1.0) for _ in range(number)]


def test_delays_double_up_to_a_cap_and_half_of_each_is_random():
    plan = reconnection.ReconnectionPlan()
    assert delays(plan, 9) == [0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]
    assert plan.next_delay_s(0.0, 0.0) == 2.5
    assert delays(plan, 2_000)[-1] == 5.0


def test_a_short_connection_does_not_shorten_the_delays():
    """An overloaded broker accepts clients and closes their connections soon after."""
    plan = reconnection.ReconnectionPlan()
    delays(plan, 5)
    plan.connected(100.0)
    assert delays(plan, 1, now_s=100.0 + reconnection.STABLE_S - 0.1) == [1.6]
    plan.connected(120.0)
    assert delays(plan, 2, now_s=120.0 + reconnection.STABLE_S) == [0.05, 0.1]


def test_a_connection_counts_once():
    plan = reconnection.ReconnectionPlan()
    plan.connected(0.0)
    assert delays(plan, 3, now_s=1_000.0) == [0.05, 0.1, 0.2]


def test_a_busy_broker_has_longer_for_the_handshake_after_failed_attempts():
    plan = reconnection.ReconnectionPlan()
    assert plan.handshake_s(3.0) == 3.0  # the first connection
    times = []
    for _ in range(6):
        plan.next_delay_s(0.0, 0.0)
        times.append(plan.handshake_s(3.0))
    assert times == [3.0, 3.0, 6.0, 12.0, 15.0, 15.0]
    assert plan.handshake_s(60.0) == 60.0


@pytest.mark.virtual_time
async def test_an_attempt_waits_for_a_slot_and_slow_ones_do_not_keep_theirs():
    slots = reconnection.AttemptSlots(2)
    release = await slots.take()
    await slots.take()
    release()
    release()  # counts once
    await slots.take()
    began_s = asyncio.get_running_loop().time()
    await slots.take()
    assert asyncio.get_running_loop().time() - began_s == pytest.approx(reconnection.SLOT_S)


async def test_the_connections_of_a_process_reconnect_a_few_at_a_time(plain, monkeypatch):
    monkeypatch.setattr(reconnection, "ATTEMPTS_AT_ONCE", 2)
    under_way, most = 0, 0
    connect = transports.connect

    async def count_begin(*arguments: Any) -> Any:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        return await connect(*arguments)

    def count_end() -> None:
        nonlocal under_way
        under_way -= 1

    buses = [await client.connect([plain.url], identity=f"c-{number}") for number in range(8)]
    monkeypatch.setattr(transports, "connect", count_begin)
    for bus in buses:
        bus._wire.on_state_change.add(count_end)
        sockets.cut(bus)
    await eventually(lambda: all(bus.statistics().reconnects for bus in buses))
    assert 1 <= most <= 2
    for bus in buses:
        await bus.close()


async def test_an_attempt_that_fails_in_its_handshake_leaves_nothing(plain, monkeypatch):
    failures, sockets_made = 2, list[Any]()
    connect = transports.connect

    async def fail_first(*arguments: Any) -> Any:
        nonlocal failures
        made: Any = await connect(*arguments)
        sockets_made.append(made._transport)
        if failures:
            failures -= 1
            made.write(b"NONSENSE\r\n")
        return made

    async with await client.connect([plain.url], identity="ann") as bus:
        monkeypatch.setattr(transports, "connect", fail_first)
        sockets.cut(bus)
        await eventually(lambda: bus.statistics().reconnects == 1)
        assert [made.is_closing() for made in sockets_made] == [True, True, False]
        assert await bus.audit() == 0


def test_a_client_does_not_reconnect_because_the_event_loop_ends(tmp_path):
    """`asyncio.run` cancels all tasks at its end, and does not wait for tasks that begin then."""
    buses: list[client.NatsBus] = []

    async def leave_it_open() -> None:
        async with broker.Broker(config.BrokerConfig(name="b", directory=tmp_path, storage=None)) as running:
            buses.append(await client.connect([running.url], identity="ann"))
            sockets.cut(buses[0])
            await eventually(lambda: buses[0].state is api.ConnectionState.RECONNECTING)

    asyncio.run(leave_it_open())
    assert buses[0].state is api.ConnectionState.RECONNECTING


INFO = b'INFO {"server_name": "b", "max_payload": 1048576, "headers": true}\r\n'
REPLIES = {
    "no end of the line": b"x" * 300_000,
    "not an object": b"INFO []\r\n",
    "not a list": b'INFO {"connect_urls": 5}\r\n',
    "not a URL": b'INFO {"connect_urls": ["[x"]}\r\n',
    "an error without words": INFO + b"-ERR\r\n",
    "an error that is not text": INFO + b"-ERR \xff\r\n",
}


@pytest.mark.parametrize("reply", REPLIES.values(), ids=REPLIES)
async def test_a_client_comes_back_after_another_program_had_the_port_of_its_broker(reply):
    writers: list[asyncio.StreamWriter] = []
    refused = 0
    is_broker = True

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal refused
        writers.append(writer)
        if not is_broker:
            refused += 1
            writer.write(reply)
            writer.write_eof()
            return
        writer.write(INFO)
        while line := await reader.readline():
            if line == b"PING\r\n":
                writer.write(b"PONG\r\n")

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        async with await client.connect([f"nats://127.0.0.1:{port}"], identity="ann") as bus:
            is_broker = False
            sockets.cut(bus)
            await eventually(lambda: refused >= 2)
            is_broker = True
            await eventually(lambda: bus.statistics().reconnects == 1)
        for writer in writers:
            writer.close()


@pytest.mark.parametrize("given", ["tls://", "certificates"])
async def test_nothing_is_accepted_from_a_broker_without_the_tls_that_it_needs(given, monkeypatch):
    """Anyone on the path may write before the TLS handshake, and may claim that there is none."""
    scheme, tls = ("tls", None) if given == "tls://" else ("nats", ssl.create_default_context())
    received: list[bytes] = []
    connections, heard = 0, b""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections, heard
        connections += 1
        with contextlib.suppress(OSError), contextlib.closing(writer):
            if connections > 1:
                writer.write(b'INFO {"tls_required": true}\r\nMSG s 1 1\r\nx\r\n')
                return
            writer.write(INFO)
            while line := await reader.readline():
                heard += line
                if line == b"PING\r\n":
                    writer.write(b"PONG\r\n")

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        place = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        monkeypatch.setattr(hosts, "is_loopback", lambda _: False)
        with pytest.raises(errors.Unavailable):
            await client.connect([f"{scheme}://{place}"], identity="ann", tls=tls, connect_timeout_s=0.2)
        assert b"CONNECT" not in heard
        monkeypatch.undo()
        connections = 0
        async with await client.connect([f"nats://{place}"], identity="ann", tls=tls) as bus:
            await bus.subscribe("s", handler=lambda message: received.append(message.data))
            sockets.cut(bus)
            await eventually(lambda: connections >= 3)
    assert not received


async def test_a_web_socket_has_tls_if_certificates_are_given(monkeypatch):
    first = bytearray()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError), contextlib.closing(writer):
            first.extend(await reader.read(3))

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        place = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        monkeypatch.setattr(hosts, "is_loopback", lambda _: False)
        with pytest.raises(errors.Unavailable):
            await client.connect([f"ws://{place}"], identity="ann", tls=ssl.create_default_context())
    assert bytes(first[:2]) == b"\x16\x03", "a TLS handshake"


def discovered(first: str, *reported: str) -> set[tuple[str, str]]:
    """Host, and the name that its certificate has to have, of what is tried next."""
    pool = reconnection.ServerPool(reconnection.parse_server(first))
    pool.discover({"connect_urls": list(reported), "tls_required": True})
    return {(address.host, address.tls_name) for address in pool.candidates()}


def test_a_broker_of_another_machine_has_a_certificate_of_its_own():
    """A client that expects that of the broker it has lost reaches no other one."""
    assert discovered("tls://10.0.0.3", "10.0.0.3:4222", "10.0.0.1:4222") == {("10.0.0.1", "")}


def test_a_broker_is_known_once():
    """It reports the others again and again, also to a client that reached it with another scheme."""
    pool = reconnection.ServerPool(reconnection.parse_server("nats://10.0.0.3"))
    pool.add([reconnection.parse_server("tls://10.0.0.1:4222")])
    for scheme in ("nats", "tls") * 3:
        pool.current = reconnection.parse_server(f"{scheme}://10.0.0.3/path")
        pool.discover({"connect_urls": ["10.0.0.1:4222", "10.0.0.2:4222"], "tls_required": True})
    assert len(pool) == 3
    assert next(each for each in pool.candidates() if each.host == "10.0.0.1").scheme == "tls"


def test_brokers_of_one_machine_may_have_a_name_in_their_certificate_only():
    tried = {("10.0.0.1", ""), ("10.0.0.1", "broker.example")}
    assert discovered("tls://broker.example", "10.0.0.1:4223") == tried
