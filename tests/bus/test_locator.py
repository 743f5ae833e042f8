"""The locator: its ranking (pure), and its replies with real brokers."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import ipaddress
import itertools
import os
import re
import signal
import socket
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import muster
from muster.bus.brokers import broker, config, network, system_account
from muster.bus.client import client
from muster.bus.http import client as http_client
from muster.bus.locator import broker_order
from muster.bus.locator import client as locator_client
from muster.bus.locator import server as locator_server
from muster.core import backoff, errors
from muster.testing.eventually import eventually

HERE = ipaddress.ip_address("10.1.2.3")
_ids = itertools.count()


def candidate(**known: Any) -> broker_order.BrokerCandidate:
    number = next(_ids)
    host = known.pop("host", "10.1.2.9")
    defaults: dict[str, Any] = {
        "id": f"N{number}",
        "name": f"b{number}",
        "hosts": (broker_order.BrokerHost(host, host),),
        "port": 4222,
        "connections": 100,
        "connections_max": 1000,
        "cores": 4,
        "cpu_share": 0.2,
        "messages_per_s": 0.0,
        "uptime_s": 1e6,
    }
    return broker_order.BrokerCandidate(**(defaults | known))


def names(choices: list[broker_order.BrokerChoice]) -> list[str]:
    return [choice.candidate.name for choice in choices]


# The ranking, by the sentences of section 4 of the paper


@pytest.mark.parametrize(
    ("better", "worse"),
    [
        # the IP address of the requesting client
        ({"host": "10.1.2.3"}, {"host": "10.1.2.4"}),
        ({"host": "10.1.2.4"}, {"host": "10.1.9.4"}),
        ({"host": "10.1.9.4"}, {"host": "10.9.9.4"}),
        # the number of connections that are still available
        ({"connections": 10}, {"connections": 500}),
        ({"connections": 100, "connections_max": 10_000}, {"connections": 100, "connections_max": 200}),
        # … however near the broker that has none
        ({"host": "192.0.2.1"}, {"host": "10.1.2.3", "connections": 1000}),
        ({"host": "192.0.2.1"}, {"host": "10.1.2.3", "connections": 990}),
        ({"connections": 999}, {"connections": 1000}),
        # the computing capabilities, and what is left of them
        ({"cores": 16}, {"cores": 2}),
        ({"cpu_share": 0.1}, {"cpu_share": 0.6}),
        ({"host": "192.0.2.1"}, {"host": "10.1.2.3", "cpu_share": 0.95}),
        ({"messages_per_s": 1000.0}, {"messages_per_s": 700_000.0}),
        # when a new broker is available, that broker is the best available
        ({"uptime_s": 5.0, "connections": 0, "cores": 1}, {"cores": 16}),
        # … until it has taken its share
        ({"cores": 16, "connections": 100}, {"uptime_s": 5.0, "connections": 300, "cores": 4}),
        # what is not known is neither for nor against
        ({"connections": 100}, {"connections": None, "connections_max": None}),
        ({"connections": None, "connections_max": None}, {"connections": 900}),
    ],
)
def test_the_better_broker_comes_first(better, worse):
    good, bad = candidate(**better), candidate(**worse)
    assert names(broker_order.rank([bad, good], HERE)) == [good.name, bad.name]
    assert names(broker_order.rank([good, bad], HERE)) == [good.name, bad.name]


def test_a_broker_that_leaves_or_cannot_be_reached_is_no_candidate():
    leaving, loopback = candidate(leaving=True), candidate(host="127.0.0.1")
    assert broker_order.rank([leaving, loopback], HERE) == []
    assert names(broker_order.rank([leaving, loopback], ipaddress.ip_address("127.0.0.1"))) == [loopback.name]


def test_a_client_beside_the_locator_is_near_a_broker_beside_the_locator():
    beside, near = candidate(host="192.0.2.1", beside_locator=True), candidate(host="127.0.0.1", cores=1)
    by_distance = broker_order.rank([near, beside], ipaddress.ip_address("127.0.0.1"))
    assert names(by_distance) == [beside.name, near.name]
    assert {answer.distance for answer in by_distance} == {broker_order.BrokerDistance.MACHINE}


def test_clients_that_were_sent_count_as_connected():
    first, other = candidate(), candidate(connections=110)
    assert names(broker_order.rank([first, other], HERE))[0] == first.name
    assert names(broker_order.rank([first, other], HERE, sent={first.id: 20}))[0] == other.name


def test_the_nearest_of_a_brokers_addresses_is_named_and_the_protocol_asked_for():
    hosts = (
        broker_order.BrokerHost("far.example", "192.0.2.1"),
        broker_order.BrokerHost("near.example", "10.1.2.9"),
    )
    broker_candidate = candidate(hosts=hosts, tls=True, websocket_port=8443)
    (choice,) = broker_order.rank([broker_candidate], HERE, protocol=broker_order.BrokerProtocol.WEBSOCKET)
    assert choice.url == "wss://near.example:8443"
    assert broker_order.rank([broker_candidate], HERE, protocol=broker_order.BrokerProtocol.MQTT) == []
    (choice,) = broker_order.rank([candidate(host="2001:db8::1")], HERE)
    assert choice.url == "nats://[2001:db8::1]:4222"


def test_equally_near_addresses_are_returned_by_name_with_their_ports():
    def greeting(name: str, reached: str, port: int) -> locator_server.BrokerGreeting:
        info = {"server_id": "S", "server_name": "b", "tls_required": True}
        return locator_server.BrokerGreeting((name, port), reached, info, 0.001, same_machine=False)

    for greetings, url in (
        ([("10.1.2.9", "10.1.2.9", 4222), ("hub.example", "10.1.2.9", 4222)], "tls://hub.example:4222"),
        ([("hub.example", "10.1.2.9", 14222), ("172.17.0.2", "172.17.0.2", 4222)], "tls://hub.example:14222"),
    ):
        actual = locator_server.candidates([greeting(*item) for item in greetings], {})
        assert broker_order.rank(actual, HERE)[0].url == url


def test_brokers_on_all_addresses_of_the_machine_are_returned_to_others(monkeypatch):
    monkeypatch.setattr(locator_server, "_own_address", lambda client: "10.1.2.1")
    greeted = {"server_id": "S", "server_name": "b", "host": "0.0.0.0"}
    greeting = locator_server.BrokerGreeting(
        ("127.0.0.1", 4222), "127.0.0.1", greeted, 0.001, same_machine=True
    )

    def reachable(client: str, *, tls: bool = False, via: str | None = None) -> list[str]:
        info = {**greeted, "tls_required": tls}
        where = broker_order.parse_address(client)
        known = locator_server.candidates([dataclasses.replace(greeting, info=info)], {})
        actual = [locator_server._reachable(item, where, via) for item in known]
        return [choice.url for choice in broker_order.rank(actual, where)]

    assert reachable("10.1.2.3") == ["nats://10.1.2.1:4222"]
    assert reachable("10.1.2.3", tls=True) == [f"tls://{socket.gethostname()}:4222"]
    assert reachable("10.1.2.3", tls=True, via="hub.example") == ["tls://hub.example:4222"]
    assert reachable("127.0.0.1") == ["nats://127.0.0.1:4222"]


def test_the_reasons_of_a_ranking_are_shown():
    (choice,) = broker_order.rank([candidate(round_trip_s=0.0004, connections=960, uptime_s=3.0)], HERE)
    assert choice.why == (
        "same network; 40 of 1000 connections free; crowded; load 20% of 4 cores; new; response time 0.4 ms"
    )


@pytest.mark.parametrize("unknown", [("a",), ("b", "c"), ("a", "b", "c")])
def test_brokers_that_did_not_reply_to_the_survey_take_their_part_of_a_crowd(unknown):
    nothing = {"connections": None, "connections_max": None, "cores": None, "cpu_share": None}
    brokers = [candidate(name=name, **(nothing if name in unknown else {})) for name in ("a", "b", "c")]
    sent: collections.Counter[str] = collections.Counter()
    for _ in range(30):
        sent[broker_order.rank(brokers, HERE, sent=sent)[0].candidate.id] += 1
    assert [sent[broker.id] for broker in brokers] == [10, 10, 10]


addresses = st.ip_addresses().map(str)
candidates = st.builds(
    candidate,
    host=addresses,
    connections=st.none() | st.integers(0, 2000),
    connections_max=st.none() | st.integers(0, 2000),
    cores=st.none() | st.integers(1, 64),
    cpu_share=st.none() | st.floats(0, 2),
    messages_per_s=st.none() | st.floats(0, 1e9),
    uptime_s=st.none() | st.floats(0, 1e9),
    leaving=st.booleans(),
)


@given(st.lists(candidates, max_size=8), addresses, st.randoms(use_true_random=False))
def test_the_ranking_does_not_depend_on_the_order_of_brokers(candidates, asker, random):
    where = broker_order.parse_address(asker)
    ranked = broker_order.rank(candidates, where)
    random.shuffle(candidates)
    assert names(broker_order.rank(candidates, where)) == names(ranked)
    assert {item.candidate.id for item in ranked} <= {item.id for item in candidates if not item.leaving}
    full = [item.candidate.connections is not None and _is_full(item.candidate) for item in ranked]
    assert full == sorted(full)  # brokers with a free slot come before full ones


def _is_full(broker_candidate: broker_order.BrokerCandidate) -> bool:
    return bool(broker_candidate.connections_max) and (broker_candidate.connections or 0) >= (
        broker_candidate.connections_max or 0
    )


@pytest.mark.parametrize("text", ["", "x", "1.2.3", "1.2.3.4.5", "::g", "host.example", "1.2.3.4/24"])
def test_what_is_not_an_address_is_refused(text):
    with pytest.raises(errors.InvalidInput):
        broker_order.parse_address(text)


# With real brokers

ACCESS = system_account.SystemAccess(password="s")


@pytest.fixture
async def trio(tmp_path):
    settings = network.members(
        3, tmp_path, storage=None, system_secret="s", connections_max=100, websocket=config.BrokerListener()
    )
    async with network.BrokerNetwork(settings, supervise=backoff.NO_RESTART) as three:
        yield three


async def test_one_address_leads_to_all_brokers_and_the_emptiest_comes_first(trio):
    # Its own short connections may be counted too: so the steps are of five.
    crowd = ["broker-1"] * 10 + ["broker-2"] * 5
    clients = [await client.connect([trio[name].url]) for name in crowd]
    try:
        async with locator_server.Locator([trio["broker-1"].url], access=ACCESS) as here:
            listed = (await http_client.get(f"{here.url}/locate")).json()["brokers"]
            assert [row["name"] for row in listed] == ["broker-3", "broker-2", "broker-1"]
            best = trio["broker-3"]
            assert (
                listed[0]["url"],
                listed[0]["host"],
                listed[0]["port"],
                listed[0]["protocol"],
            ) == (
                best.url,
                "127.0.0.1",
                best.config.port,
                "nats",
            )
            assert re.search(r"(90|8\d) of 100 connections free", listed[2]["why"])
            assert await locator_client.locate(here.url, protocol="websocket", count=1) == [
                best.websocket_url
            ]
    finally:
        for item in clients:
            await item.close()


async def test_brokers_that_came_after_its_start_are_found(trio):
    known = ["nats://[::1"]
    async with locator_server.Locator(["nats://127.0.0.1:9"], later=lambda: known, refresh_s=0) as here:
        with pytest.raises(errors.Unavailable):
            await locator_client.locate(here.url)
        known += trio.urls
        assert set(await locator_client.locate(here.url)) == set(trio.urls)


async def test_gateways_that_accept_clients_are_a_failover_url_for_jms():
    async def end(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    servers = [await asyncio.start_server(end, "127.0.0.1", 0) for _ in range(2)]
    first, second = (f"amqps://127.0.0.1:{each.sockets[0].getsockname()[1]}" for each in servers)
    known = [first, "amqps://127.0.0.1:9", "amqps://:99999", "amqps://[::1", f"amqps://{70 * 'x'}:1", second]
    async with locator_server.Locator(["nats://127.0.0.1:9"], gateways=lambda: known) as here:

        async def located(query: str = "") -> Any:
            return await http_client.get(f"{here.url}/locate?protocol=amqp{query}")

        assert (await located()).json() == {
            "gateways": [first, second],
            "failover": f"failover:({first},{second})",
        }
        assert (await located()).json()["gateways"] == [second, first], "clients are distributed"
        assert (await located("&client=10.0.0.9")).status == 503, "they listen on loopback"
        servers[0].close()
        await servers[0].wait_closed()
        assert (await located()).json()["gateways"] == [second]
    servers[1].close()


async def test_a_crowd_that_comes_at_once_is_spread(trio, monkeypatch):
    monkeypatch.setattr(broker_order, "load", lambda value: 0.0)  # of their CPU, which other tests use too
    async with locator_server.Locator(trio.urls, access=ACCESS, refresh_s=60) as here:
        firsts = [(await locator_client.locate(here.url))[0] for _ in range(30)]
    counts = [firsts.count(url) for url in trio.urls]
    assert min(counts) >= 5, counts  # ten each, but for what live pings make of a busy machine


async def test_a_dead_broker_is_dropped_at_once_and_a_new_one_is_found(trio, tmp_path):
    async with locator_server.Locator([trio["broker-1"].url], access=ACCESS, refresh_s=60) as here:
        assert set(await locator_client.locate(here.url)) == set(trio.urls)
        for name in ("broker-1", "broker-3"):  # one of them the only address it was given
            process = trio[name]
            assert process.pid
            os.kill(process.pid, signal.SIGKILL)
            await process.wait_for(broker.BrokerState.FAILED)
        assert await locator_client.locate(here.url) == [trio["broker-2"].url]
    async with locator_server.Locator([trio["broker-2"].url], access=ACCESS, refresh_s=0) as here:
        (newcomer,) = network.members(
            1, tmp_path, prefix="new", storage=None, system_secret="s", connections_max=100
        )
        await trio.add(dataclasses.replace(newcomer, cluster=config.BrokerCluster(name="muster")))

        async def first() -> bool:
            return bool((await locator_client.locate(here.url))[0] == trio["new-1"].url)

        async with await client.connect([trio["broker-2"].url]):
            await eventually(first)


async def test_a_broker_that_drains_is_not_named(trio):
    async with locator_server.Locator(trio.urls, access=ACCESS, refresh_s=0) as here:
        leaving = trio["broker-2"]
        async with await client.connect([leaving.url]):
            stopping = asyncio.create_task(leaving.stop(drain_s=10))

            async def gone() -> bool:
                return leaving.url not in await locator_client.locate(here.url)

            await eventually(gone)
            await stopping


async def test_without_the_system_account_it_still_finds_all_that_live(trio):
    async with locator_server.Locator([trio["broker-3"].url]) as here:
        assert set(await locator_client.locate(here.url)) == set(trio.urls)


async def test_it_holds_no_connection_between_two_questions(trio):
    async with locator_server.Locator(trio.urls, access=ACCESS, refresh_s=0) as here:
        await locator_client.locate(here.url)

        async def none() -> bool:
            pages = [await server.monitoring_page("varz") for server in trio.brokers.values()]
            return all(page["connections"] == 0 for page in pages)

        await eventually(none)


async def test_any_of_several_locators_will_do(trio):
    async with locator_server.Locator(trio.urls) as first, locator_server.Locator(trio.urls) as second:
        await first.stop()
        both = ["http://127.0.0.1:9", second.url]
        assert set(await locator_client.locate(both)) == set(trio.urls)
        await second.stop()
        with pytest.raises(errors.Unavailable, match="no locator named a broker"):
            await locator_client.locate(both)
    with pytest.raises(errors.Unavailable, match="no locator is configured"):
        await locator_client.locate([])


async def test_connecting_by_a_locator_takes_the_best_and_does_without_it_if_it_must(trio, monkeypatch):
    monkeypatch.setattr(
        broker_order, "load", lambda value: 0.0
    )  # what other tests do costs these brokers CPU
    crowd = [await muster.connect(trio[name].url) for name in ("broker-1", "broker-3") * 5]
    async with (
        locator_server.Locator(trio.urls, access=ACCESS) as here,
        await muster.connect(locator=["http://127.0.0.1:9", here.url]) as bus,
    ):
        assert bus.broker == "broker-2"
    for connection in crowd:
        await connection.close()
    async with await muster.connect(trio["broker-3"].url, locator="http://127.0.0.1:9") as bus:
        assert bus.broker == "broker-3"
    with pytest.raises(errors.Unavailable, match="no locator named a broker"):
        await muster.connect(locator="http://127.0.0.1:9")


async def test_questions_that_make_no_sense_are_refused_and_nothing_else_happens(trio):
    async with locator_server.Locator(trio.urls) as here:
        for query, complaint in (
            ("client=nonsense", "is not an address"),
            ("protocol=smtp", "invalid request"),
            ("count=many", "invalid request"),
        ):
            response = await http_client.get(f"{here.url}/locate?{query}")
            assert response.status == 400
            assert complaint in response.body.decode()
        response = await http_client.get(f"{here.url}/locate?client=192.0.2.1")
        assert response.status == 503  # our brokers are on loopback: that client could not reach them
        assert (await http_client.get(f"{here.url}/elsewhere")).status == 404
        assert set(await locator_client.locate(here.url)) == set(trio.urls)


async def test_a_malformed_host_is_an_error_of_the_client():
    async with locator_server.Locator(["nats://127.0.0.1:9"]) as here:
        response = await http_client.request("GET", f"{here.url}/locate", headers={"Host": "["})
        assert (response.status, response.body[:15]) == (400, b"invalid request")


async def test_it_reports_that_no_broker_runs():
    async with locator_server.Locator(["nats://127.0.0.1:9"]) as here:
        with pytest.raises(errors.Unavailable, match="can reach responds"):
            await locator_client.locate(here.url)


@pytest.mark.parametrize("url", ["nats://", "nats://host:notaport", "//"])
def test_a_locator_refuses_what_is_not_an_address(url):
    with pytest.raises(errors.InvalidInput):
        locator_server.Locator([url])


async def test_a_server_that_reports_ever_more_addresses_ends_no_survey(monkeypatch):
    monkeypatch.setattr(locator_server, "ADDRESSES_MAX", 20)
    probed: list[locator_server.Address] = []

    async def probe(address: locator_server.Address) -> locator_server.BrokerGreeting:
        probed.append(address)
        others = [f"10.0.{len(probed)}.{number}:4222" for number in range(8)]
        info = {"server_id": str(len(probed)), "connect_urls": others}
        return locator_server.BrokerGreeting(address, address[0], info, 0.001, same_machine=False)

    monkeypatch.setattr(locator_server, "probe", probe)
    async with asyncio.timeout(5):
        assert len(await locator_server.greet_all([("10.0.0.1", 4222)])) == 20
    assert len(probed) == 20


@pytest.mark.parametrize("reported", [["[::1", 7, None, "127.0.0.1:2"], 7, {"127.0.0.1:2": 1}])
async def test_a_server_that_reports_no_addresses_does_not_hide_others(monkeypatch, reported):
    async def probe(address: locator_server.Address) -> locator_server.BrokerGreeting:
        info = {"server_id": str(address[1]), "connect_urls": reported}
        return locator_server.BrokerGreeting(address, address[0], info, 0.001, same_machine=False)

    monkeypatch.setattr(locator_server, "probe", probe)
    found = await locator_server.greet_all([("127.0.0.1", 1)])
    assert [greeting.address for greeting in found][:1] == [("127.0.0.1", 1)]
