"""Real networks of brokers: how they form, what crosses them, and what changes while they run."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from muster.bus import api
from muster.bus.brokers import broker, config, control, diagnosis, network, system_account, topology
from muster.bus.client import client
from muster.core import backoff, errors
from muster.testing.eventually import eventually
from muster.trust import certificates, keyring
from muster.trust.permissions import roles

Kind = topology.LinkKind


async def crosses(near: broker.Broker, far: broker.Broker, *, timeout_s: float = 30.0) -> None:
    """Fails unless a message published at one broker arrives at the other."""
    async with (
        await client.connect([near.url]) as sender,
        await client.connect([far.url]) as receiver,
        await receiver.subscribe("news") as news,
    ):

        async def delivered() -> bool:
            await sender.publish("news", b"hello")
            try:
                return (await news.next(timeout_s=0.05)).data == b"hello"
            except errors.TimedOut:
                return False

        await eventually(delivered, timeout_s=timeout_s, what=f"a message from {near.name} to {far.name}")


async def does_not_cross(near: broker.Broker, far: broker.Broker) -> None:
    """Fails if a message published at one broker arrives at the other; a second message ends the wait."""
    async with (
        await client.connect([near.url]) as sender,
        await client.connect([far.url]) as receiver,
        await receiver.subscribe("news") as news,
    ):
        await sender.publish("news", b"from afar")
        await sender.flush()
        await receiver.publish("news", b"from here")
        assert (await news.next(timeout_s=30)).data == b"from here"


def super_cluster(sizes: Mapping[str, int], directory: Path, **settings: Any) -> network.BrokerNetwork:
    """Clusters of these names and sizes, joined by gateways."""
    return network.BrokerNetwork(
        member
        for name, n in sizes.items()
        for member in network.members(
            n, directory, name=name, prefix=name, gateway=config.ClusterGateway(name=name), **settings
        )
    )


def leaf_tree(parents: Mapping[str, str | None], directory: Path, **settings: Any) -> network.BrokerNetwork:
    """Single brokers, each hanging on its parent by a leaf link; chains and stars are trees too.

    Storage, where ``settings`` give it, is each broker's own, in a domain of its name.
    """
    each = settings.pop("storage", config.BrokerStorage())
    return network.BrokerNetwork(
        [
            config.BrokerConfig(
                name=name,
                directory=directory / name,
                storage=None if each is None else dataclasses.replace(each, domain=name),
                **settings,
            )
            for name in parents
        ],
        leaves=[(child, parent) for child, parent in parents.items() if parent is not None],
    )


def ups(actual: list[control.LinkRow], kind: Kind) -> list[str]:
    return [link.id for link in actual if link.kind is kind and link.up]


# A mesh


async def test_a_mesh_of_three_starts_quickly_and_survives_the_loss_of_one(tmp_path):
    began_s = time.monotonic()
    async with network.BrokerNetwork(network.members(3, tmp_path), supervise=backoff.NO_RESTART) as mesh:
        # The goal is 3 s on a machine that does nothing else; an election that is lost takes longer.
        assert time.monotonic() - began_s < 25
        assert ups(await mesh.links(), Kind.ROUTE) == [
            "route:broker-1=broker-2",
            "route:broker-1=broker-3",
            "route:broker-2=broker-3",
        ]
        async with await client.connect(mesh.urls) as bus:
            stream = await bus.stream(api.StreamSettings("s", subjects=("s",), replicas=3))
            await stream.publish("s", b"before")
            victim = mesh["broker-2"]
            assert victim.pid
            os.kill(victim.pid, signal.SIGKILL)
            await victim.wait_for(broker.BrokerState.FAILED)
            await crosses(mesh["broker-1"], mesh["broker-3"])

            async def stored() -> bool:
                try:
                    await stream.publish("s", b"after", timeout_s=2)
                except errors.Unavailable:  # the storage may be electing a leader
                    return False
                return True

            await eventually(stored, timeout_s=30)
            assert (await stream.get(1)).data == b"before"
        links = {link.id: link.up for link in await mesh.links()}
        assert links == {
            "route:broker-1=broker-2": False,
            "route:broker-1=broker-3": True,
            "route:broker-2=broker-3": False,
        }


async def test_a_dead_member_is_forgotten_only_by_force(tmp_path):
    settings = network.members(3, tmp_path, system_secret="s")
    async with network.BrokerNetwork(settings, supervise=backoff.NO_RESTART) as mesh:
        victim = mesh["broker-2"]
        assert victim.pid
        os.kill(victim.pid, signal.SIGKILL)
        await victim.wait_for(broker.BrokerState.FAILED)
        with pytest.raises(errors.Refused, match="does not run, so its stored data cannot move"):
            await mesh.remove("broker-2")
        await mesh.remove("broker-2", force=True)
        assert ups(await mesh.links(), Kind.ROUTE) == ["route:broker-1=broker-3"]
        assert (await mesh["broker-1"].monitoring_page("jsz"))["meta_cluster"]["cluster_size"] == 2


async def test_a_member_that_fell_comes_back_by_itself(tmp_path):
    async with network.mesh(2, tmp_path, storage=None) as mesh:
        process = mesh["broker-1"]
        assert process.pid
        os.kill(process.pid, signal.SIGKILL)
        await eventually(lambda: process.restarts == 1)

        async def joined() -> bool:
            return len(ups(await mesh.links(), Kind.ROUTE)) == 1

        await eventually(joined)
        await crosses(process, mesh["broker-2"])


async def test_a_removal_that_is_refused_changes_nothing(tmp_path):
    brokers = [
        *network.members(2, tmp_path, system_secret="s"),
        config.BrokerConfig(name="leaf", directory=tmp_path / "leaf", storage=None),
    ]
    async with network.BrokerNetwork(brokers, leaves=[("leaf", "broker-1")]) as running:
        before = ups(await running.links(), Kind.LEAF)
        with pytest.raises(errors.Refused):
            await running.remove("broker-1")
        assert ups(await running.links(), Kind.LEAF) == before == ["leaf>broker-1"]


@pytest.mark.slow  # the cluster forgets a member only after a while
async def test_storage_is_removed_from_a_broker_that_is_about_to_start_again(tmp_path, monkeypatch):
    monkeypatch.setattr(backoff.CrashHistory, "crashed", lambda *_: 60.0)
    async with network.mesh(3, tmp_path, system_secret="s") as mesh:
        server = mesh["broker-2"]
        assert server.pid
        os.kill(server.pid, signal.SIGKILL)
        await server.wait_for(broker.BrokerState.RESTARTING)
        await mesh.remove_storage("broker-2", force=True)
        await server.wait_for(broker.BrokerState.RUNNING)
        assert server.config.storage is None
        assert not ((await server.monitoring_page("varz")).get("jetstream") or {}).get("config")


async def test_a_look_up_of_a_message_that_is_not_stored_leaves_a_replicated_stream_usable(tmp_path):
    """nats-server stops a stream if an expected last id does not hold when its replicas store a message."""
    async with network.mesh(3, tmp_path) as mesh, await client.connect(mesh.urls, identity="a") as bus:
        stream = await bus.stream(
            api.StreamSettings("kept", subjects=("kept",), replicas=3, max_bytes=1 << 20)
        )
        first = await stream.publish("kept", b"1", message_id="1")
        for id in ("2", "3"):
            with pytest.raises(errors.Conflict):
                await stream._committer._look_up(("kept", b"1", b"Nats-Msg-Id: %b\r\n" % id.encode()))
        assert await stream._committer._look_up(("kept", b"1", b"Nats-Msg-Id: 1\r\n")) == first
        assert await stream.publish("kept", b"2", message_id="2", timeout_s=5) == first + 1


async def test_a_broker_without_the_secret_does_not_join_the_cluster(tmp_path):
    inside = [
        dataclasses.replace(member, cluster=config.BrokerCluster(name="muster", secret="inside/only"))
        for member in network.members(2, tmp_path, storage=None)
    ]
    async with network.BrokerNetwork(inside) as mesh:
        door = mesh["broker-1"].config.cluster
        assert door
        stranger = config.BrokerConfig(
            name="stranger",
            directory=tmp_path / "stranger",
            storage=None,
            cluster=config.BrokerCluster(name="muster", routes=(config.peer_url("127.0.0.1", door.port),)),
        )
        async with broker.Broker(stranger) as server:
            log = mesh["broker-1"].config.log_path
            await eventually(lambda: "authentication error" in log.read_text())

            async def alone() -> bool:
                # A knock counts as a route until it is refused, and it knocks again and again.
                return bool((await server.monitoring_page("routez"))["num_routes"] == 0)

            await eventually(alone)
            assert ups(await mesh.links(), Kind.ROUTE) == ["route:broker-1=broker-2"]


async def test_a_network_that_cannot_start_leaves_nothing_behind(tmp_path):
    (tmp_path / "broker-2").write_text("in the way")
    mesh = network.mesh(3, tmp_path)
    with pytest.raises(diagnosis.BrokerFailed, match="broker broker-2"):
        await mesh.start()
    assert all(server.pid is None for server in mesh.brokers.values())


# Super-clusters


async def test_a_super_cluster_carries_messages_and_its_gateways_are_fixed(tmp_path):
    async with super_cluster({"east": 2, "west": 1}, tmp_path, storage=None) as world:
        await crosses(world["east-2"], world["west-1"])
        actual = ups(await world.links(), Kind.GATEWAY)
        assert actual == ["gateway:east-1>west", "gateway:east-2>west", "gateway:west-1>east"]
        with pytest.raises(errors.Refused, match="cannot be removed") as caught:
            await world.unlink(actual[0])
        assert "fixed by the engine" in str(caught.value.hint)
        with pytest.raises(errors.Refused, match="cannot join a super-cluster that runs"):
            await world.add(
                config.BrokerConfig(
                    name="north-1",
                    directory=tmp_path / "north-1",
                    storage=None,
                    cluster=config.BrokerCluster(name="north"),
                    gateway=config.ClusterGateway(name="north"),
                )
            )
        with pytest.raises(errors.Refused, match="joined already, as members of the super-cluster"):
            await world.link("east-1", "west-1")


# Leaf links


async def test_a_tree_of_leaf_links_carries_messages_from_leaf_to_leaf(tmp_path):
    parents = {"root": None, "left": "root", "right": "root", "left-1": "left"}
    async with leaf_tree(parents, tmp_path) as tree:
        assert ups(await tree.links(), Kind.LEAF) == ["left-1>left", "left>root", "right>root"]
        await crosses(tree["left-1"], tree["right"])
        with pytest.raises(errors.Refused, match="would close a ring: left-1 - left - root - right"):
            await tree.link("left-1", "right")


async def test_links_come_and_go_while_brokers_run_and_clients_stay(tmp_path):
    single = [config.BrokerConfig(name=name, directory=tmp_path / name, storage=None) for name in ("a", "b")]
    async with network.BrokerNetwork(single) as pair, await client.connect([pair["a"].url]) as stays:
        await does_not_cross(pair["a"], pair["b"])
        id = await pair.link("a", "b")
        (status,) = await pair.links()
        assert (status.id, status.near, status.far, status.up) == (id, "a", "b", True)
        await crosses(pair["a"], pair["b"])
        await crosses(pair["b"], pair["a"])
        with pytest.raises(errors.AlreadyExists):
            await pair.link("a", "b")
        await pair.unlink(id)
        assert await pair.links() == []
        await does_not_cross(pair["a"], pair["b"])
        await does_not_cross(pair["b"], pair["a"])
        with pytest.raises(errors.NotFound):
            await pair.unlink(id)
        await pair.link("b", "a")  # and the other way round
        await crosses(pair["a"], pair["b"])
        assert stays.statistics().reconnects == 0


async def test_a_link_is_down_with_its_far_end_and_up_again_with_it(tmp_path):
    async with leaf_tree({"hub": None, "spoke": "hub"}, tmp_path, storage=None) as pair:
        await pair["hub"].stop()

        async def up() -> bool:
            return bool(ups(await pair.links(), Kind.LEAF))

        async def down() -> bool:
            return not await up()

        await eventually(down)
        (status,) = await pair.links()
        assert (status.id, status.far, status.up) == ("spoke>hub", "hub", False)
        port = pair["hub"].config.leaf
        await pair["hub"].start()
        assert pair["hub"].config.leaf == port
        await eventually(up)
        await pair["spoke"].restart()  # its links are its configuration: they come back with it
        await eventually(up)


async def test_a_link_to_nowhere_is_taken_back_and_explained(tmp_path):
    async with broker.Broker(config.BrokerConfig(name="a", directory=tmp_path / "a", storage=None)) as lonely:
        nowhere = config.LeafRemote(id="x", urls=("nats-leaf://127.0.0.1:9",))
        with pytest.raises(diagnosis.BrokerFailed, match="the remote broker does not respond") as caught:
            await lonely.link(nowhere, timeout_s=0.5)
        assert caught.value.fault is diagnosis.BrokerFault.DEAD_LINK
        assert lonely.config.remotes == ()
        unknown = config.LeafRemote(id="y", urls=(f"tls://{'x' * 64}.example:7422",))
        with pytest.raises(diagnosis.BrokerFailed, match=r"no address is known for the host x+\.example"):
            await lonely.link(unknown)
        await lonely.link(nowhere, timeout_s=None)  # it may be kept up in hope
        assert [link.up for link in await lonely.links()] == [False]


async def test_two_members_of_a_cluster_may_link_to_one_hub_and_nothing_arrives_twice(tmp_path):
    hub = config.BrokerConfig(name="hub", directory=tmp_path / "hub", storage=None)
    async with network.BrokerNetwork([hub, *network.members(2, tmp_path, storage=None)]) as world:
        await world.link("broker-1", "hub")
        await world.link("broker-2", "hub")
        async with (
            await client.connect([world["hub"].url]) as receiver,
            await client.connect([world["broker-1"].url]) as sender,
            await receiver.subscribe("news.>") as news,
        ):
            await crosses(world["broker-2"], world["hub"])
            await sender.publish("news.once", b"")
            await sender.publish("news.end", b"")
            assert [(await news.next(timeout_s=30)).subject for _ in "12"] == ["news.once", "news.end"]


# Durable storage


async def test_storage_moves_while_the_network_runs_and_loses_nothing(tmp_path):
    settings = network.members(4, tmp_path, system_secret="s")
    async with network.BrokerNetwork(settings) as mesh, await client.connect(mesh.urls) as bus:
        single = await bus.stream(api.StreamSettings("single", subjects=("single",)))
        triple = await bus.stream(api.StreamSettings("triple", subjects=("triple",), replicas=3))
        for number in range(20):
            await single.publish("single", b"%d" % number)
            await triple.publish("triple", b"%d" % number)
        (holder,) = await holders(mesh, "single")
        await mesh.remove_storage(holder)
        assert (await mesh[holder].monitoring_page("jsz")).get("disabled")
        for stream in (single, triple):

            async def kept(stream: api.Stream = stream) -> bool:
                try:
                    return (await stream.get(20)).data == b"19"
                except errors.Unavailable:
                    return False

            await eventually(kept)
        assert holder not in await holders(mesh, "single") + await holders(mesh, "triple")
        with pytest.raises(errors.Refused, match="a stream has 3 replicas, and 2 other brokers"):
            await mesh.remove_storage(next(name for name in mesh.brokers if name != holder))


async def test_one_broker_alone_is_not_given_the_storage_of_a_cluster(tmp_path):
    first, *others = network.members(3, tmp_path)
    without = [dataclasses.replace(item, storage=None) for item in others]
    with pytest.raises(errors.InvalidInput, match="the only one of its cluster with storage"):
        await network.BrokerNetwork([first, *without]).start()
    async with network.BrokerNetwork([first, others[0], without[1]]) as mesh:
        with pytest.raises(errors.Refused, match="would be the only one left"):
            await mesh.remove_storage("broker-1")


async def holders(mesh: network.BrokerNetwork, stream: str) -> list[str]:
    pages = {
        server.name: await server.monitoring_page("jsz?accounts=true&streams=true")
        for server in mesh.brokers.values()
    }
    return [
        name
        for name, page in pages.items()
        for account in page.get("account_details") or ()
        if any(held["name"] == stream for held in account.get("stream_detail") or ())
    ]


async def test_members_join_and_leave_a_running_cluster(tmp_path, trust):
    trust.issue("steward", roles.Role.SYSTEM)
    settings = network.members(4, tmp_path, trust=believed(trust))
    steward = trust.credentials("steward", domain=keyring.SYSTEM)
    async with network.BrokerNetwork(settings[:3], system_credentials=steward) as mesh:
        await mesh.add(settings[3])
        await mesh.remove("broker-2")
        assert ups(await mesh.links(), Kind.ROUTE) == [
            "route:broker-1=broker-3",
            "route:broker-1=broker-4",
            "route:broker-3=broker-4",
        ]
        assert (await mesh["broker-1"].monitoring_page("jsz"))["meta_cluster"]["cluster_size"] == 3
        # Each knows the others by its own configuration too, for the day it is restarted alone.
        newest = mesh["broker-4"].config.cluster
        assert newest
        assert f":{newest.port}" in mesh["broker-1"].config.config_path.read_text()


# Trust and TLS between brokers


@pytest.fixture
def trust(tmp_path):
    return keyring.Keyring.create(tmp_path / "keys", "acme")


def believed(trust: keyring.Keyring) -> config.OperatorTrust:
    known = trust.broker()
    return config.OperatorTrust(
        operator_jwt=known.operator_jwt, system_account=known.system_account, accounts=known.accounts
    )


async def test_a_broker_that_was_down_learns_a_revocation_from_the_others(tmp_path, trust):
    for identity, role in (("alice", roles.Role.USER), ("steward", roles.Role.SYSTEM)):
        trust.issue(identity, role)
    alice, steward = trust.credentials("alice"), trust.credentials("steward", domain=keyring.SYSTEM)
    settings = network.members(2, tmp_path, storage=None, trust=believed(trust))
    async with network.BrokerNetwork(settings, system_credentials=steward) as mesh:
        absent = mesh["broker-2"]
        async with await client.connect([absent.url], creds=alice):
            pass
        await absent.stop()
        trust.revoke("alice")
        access = system_account.SystemAccess(credentials=steward)
        await system_account.request([mesh["broker-1"].address], access, *trust.claims_update())
        await absent.start()  # with the account as it was

        async def refused() -> bool:
            try:
                async with await client.connect([absent.url], creds=alice):
                    return False
            except errors.Unauthorized:
                return True

        await eventually(refused, timeout_s=30)


async def test_routes_and_links_with_tls_and_credentials(tmp_path, trust):
    authority = certificates.CertificateStore.create(
        tmp_path / "certs", "acme", lifetime_s=certificates.DAY_S
    )
    authority.ensure("broker", ["127.0.0.1", "localhost"])
    pair = authority.pair("broker")
    tls = config.BrokerTls(cert_file=pair.path, key_file=pair.path, ca_file=authority.bundle)
    trust.issue("edge", roles.Role.LINK)
    trust.issue("steward", roles.Role.SYSTEM)
    known = believed(trust)
    (account,) = set(known.accounts) - {known.system_account}
    settings = network.members(2, tmp_path, storage=None, tls=tls, trust=known)
    edge = config.BrokerConfig(name="edge", directory=tmp_path / "edge", storage=None, tls=tls, trust=known)
    async with network.BrokerNetwork([*settings, edge]) as world:
        assert ups(await world.links(), Kind.ROUTE) == ["route:broker-1=broker-2"]
        id = await world.link(
            "edge", "broker-1", account=account, credentials_file=trust.credentials_path("edge")
        )
        assert ups(await world.links(), Kind.LEAF) == [id]
        steward = system_account.SystemAccess(
            credentials=trust.credentials("steward", domain=keyring.SYSTEM), tls=tls
        )
        answers = await system_account.gather(
            [world["broker-1"].address], steward, "$SYS.REQ.SERVER.PING", enough=2
        )
        assert {answer["server"]["name"] for answer in answers} >= {"broker-1", "broker-2"}
        assert authority.ensure("broker", ["127.0.0.1", "localhost", "::1"])
        await asyncio.gather(*(server.reload() for server in world.brokers.values()))
        await world.unlink(id)
        await world.link("edge", "broker-2", account=account, credentials_file=trust.credentials_path("edge"))


# Which links may be made


def test_a_ring_is_found_however_long_and_another_account_is_another_graph():
    sites = {name: name for name in "abcde"}
    chain = [("a", "b", None), ("c", "b", None), ("c", "d", None), ("d", "e", None)]
    with pytest.raises(errors.Refused, match="a - b - c - d - e"):
        topology.check_new("a", "e", None, sites, chain)
    topology.check_new("a", "e", "other", sites, chain)
    topology.check_new("a", "e", None, sites, chain[1:])


def test_durations_are_read_as_the_engine_writes_them():
    assert topology.seconds("1m2.5s") == 62.5
    assert topology.seconds("467µs") == pytest.approx(0.000467)
    assert topology.seconds("1h0m0s") == 3600
    assert topology.seconds("3d0h0m5s") == 3 * 86400 + 5
    assert topology.seconds("1y2d0h0m7s") == 367 * 86400 + 7
    assert topology.seconds("") is None


def test_all_connections_of_a_route_count_for_it():
    """The engine keeps several to each peer, and some of them carry nothing."""
    page = {
        "routes": [
            {"remote_name": "b", "rtt": "300µs", "in_msgs": 0, "out_msgs": 0},
            {"remote_name": "c", "rtt": "1ms", "in_msgs": 1, "out_msgs": 1},
            {
                "remote_name": "b",
                "rtt": "500µs",
                "in_msgs": 5,
                "out_msgs": 7,
                "in_bytes": 50,
                "out_bytes": 70,
            },
            {"remote_name": "b", "rtt": "500µs", "in_msgs": 1, "out_msgs": 2, "in_bytes": 3, "out_bytes": 4},
        ]
    }
    actual = [
        (
            route_link.far,
            route_link.in_messages,
            route_link.out_messages,
        )
        for route_link in topology.route_links("a", page)
    ]
    assert actual == [("b", 6, 9), ("c", 1, 1)]


def test_a_connection_to_a_member_we_never_named_is_the_link_to_its_cluster():
    remotes = [
        config.LeafRemote(id=id, urls=(f"nats-leaf://{id}:7422",), account=account)
        for id, account in (("here", None), ("cluster", None), ("other", "ACC"))
    ]
    addresses = {"here": {("10.0.0.1", 7422)}, "cluster": {("10.0.0.2", 7422)}, "other": {("10.0.0.1", 7422)}}
    page = {
        "leafs": [
            {"is_spoke": True, "account": "$G", "ip": "10.0.0.9", "port": 7422, "name": "unnamed"},
            {"is_spoke": True, "account": "$G", "ip": "10.0.0.1", "port": 7422, "name": "here-1"},
            {"is_spoke": False, "account": "ACC", "ip": "10.0.0.1", "port": 7422, "name": "guest"},
        ]
    }
    actual = {
        leaf_link.id: (leaf_link.up, leaf_link.far)
        for leaf_link in topology.leaf_links("near", remotes, addresses, page)
    }
    assert actual == {
        "here": (True, "here-1"),
        "cluster": (True, "unnamed"),
        "other": (False, "nats-leaf://other:7422"),
    }


# Changes at the same time


async def test_brokers_are_removed_at_the_same_time_and_twice(tmp_path, monkeypatch):
    """Each removal unlinks others, and a broker leaves meanwhile."""
    configs = network.members(1, tmp_path, prefix="hub") + network.members(1, tmp_path, prefix="other")
    remote = config.LeafRemote(id="leaf>hub", urls=("nats://127.0.0.1:1",), far="hub-1")
    leaf = config.BrokerConfig(name="leaf", directory=tmp_path / "leaf", remotes=(remote,))
    tree = network.BrokerNetwork([leaf, *configs])

    async def unlink(_: broker.Broker, id: str) -> None:
        assert id == remote.id
        await asyncio.sleep(0)
        if "other-1" in tree.brokers:
            await tree.remove("other-1")

    monkeypatch.setattr(broker.Broker, "unlink", unlink)
    await asyncio.gather(tree.remove("hub-1"), tree.remove("hub-1"))
    assert list(tree.brokers) == ["leaf"]
