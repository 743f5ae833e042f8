"""A domain in this process, with real brokers."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import types
from collections.abc import Sequence
from typing import Any

import pytest

from muster.app import domain, home, identities
from muster.app.brokers import broker_set
from muster.app.components import component, context, information_nodes
from muster.bus import api
from muster.bus.brokers import broker, config, control, network
from muster.bus.client import client
from muster.bus.http import client as http_client
from muster.bus.http import server
from muster.core import errors, health, topics
from muster.supervision import tasks
from muster.testing.eventually import eventually
from muster.trust.permissions import roles


async def test_a_domain_starts_serves_and_stops(made):
    running = domain.Domain(made())
    async with running:
        assert running.ready
        alice = await running.connect("alice", roles.Role.USER)
        bob = await running.connect("bob", roles.Role.USER)
        async with (
            alice,
            bob,
            await bob.subscribe(topics.TopicPattern.parse("a/*").subjects[0]) as subscription,
        ):
            await alice.publish(topics.Topic.parse("a/b").subject, b"hello")
            assert (await subscription.next(timeout_s=30)).data == b"hello"
        (described,) = (await running.status())["brokers"]
        assert described["state"] == "running"
        pid = described["pid"]
    assert running.state is domain.DomainState.STOPPED
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert running.folder.holder() is None


async def test_what_was_stored_is_there_at_the_next_start(made):
    subject = topics.Topic.parse("log").subject
    for round_ in (1, 2):
        async with domain.Domain(made()) as running, await running.connect("op", roles.Role.OPERATOR) as bus:
            stream = await bus.stream(api.StreamSettings("log", subjects=(subject,), max_bytes=1 << 20))
            assert await stream.publish(subject, b"x") == round_


async def test_two_domains_in_one_process_are_isolated(made):
    item, other = made(domain__name="one"), made(domain__name="other")
    async with (
        domain.Domain(item) as first,
        domain.Domain(other) as second,
        await first.connect("alice", roles.Role.USER) as alice,
        await second.connect("alice", roles.Role.USER) as namesake,
        await namesake.subscribe("topic.>") as subscription,
    ):
        await alice.publish("topic.a", b"for the first only")
        await alice.flush()
        await namesake.publish("topic.b", b"for the second")
        assert (await subscription.next(timeout_s=30)).subject == "topic.b"


async def test_a_second_start_on_the_same_folder_is_refused_and_harmless(made):
    async with domain.Domain(made()) as running:
        with pytest.raises(errors.AlreadyExists, match=f"pid {os.getpid()}"):
            await domain.Domain(made()).start()
        assert running.ready


async def test_a_port_that_is_taken_is_named_and_nothing_is_left_behind(made):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(errors.Unavailable, match=str(port)):
            await domain.Domain(made(bus__port=port)).start()
    async with domain.Domain(made(bus__port=port)) as running:
        assert running.servers == (f"nats://127.0.0.1:{port}",)


async def test_a_killed_broker_comes_back_and_so_do_its_clients(made):
    async with domain.Domain(made()) as running, await running.connect("a", roles.Role.USER) as bus:
        (described,) = (await running.status())["brokers"]
        os.kill(described["pid"], signal.SIGKILL)

        async def back() -> bool:
            (now,) = (await running.status())["brokers"]
            return now["restarts"] == 1 and now["state"] == "running" and running.ready

        await eventually(back, timeout_s=30)
        await bus.flush()
        assert running.metrics.value("muster_broker_restarts", broker="local-1") == 1


# -- health pages


async def page(running: domain.Domain, path: str) -> server.HttpResponse:
    return await http_client.get(f"{running.running.health_url}{path}")


class FaultyPart:
    """A part that fails on request."""

    name = "fault"
    depends_on: Sequence[str] = ()

    def __init__(self, *, vital: bool) -> None:
        self.vital = vital
        self.now = asyncio.Event()

    async def start(self, context: context.ComponentContext) -> None:
        context.tasks.spawn("work", self._work(), on_failure=tasks.OnFailure.FATAL)

    async def _work(self) -> None:
        await self.now.wait()
        raise errors.Unavailable("failed on purpose")

    async def stop(self) -> None:
        pass

    def health(self) -> component.ComponentHealth:
        return component.ComponentHealth()


async def test_the_health_pages(made):
    async with domain.Domain(made()) as running:
        assert (await page(running, "/livez")).body == b"ok\n"
        ready = await page(running, "/readyz")
        assert (ready.status, ready.json()["ready"]) == (200, True)
        metrics = await page(running, "/metrics")
        assert b"muster_budget_limit_bytes" in metrics.body
        assert b"process_resident_memory_bytes" in metrics.body
        assert (await page(running, "/nothing")).status == 404


async def test_the_domain_runs_without_a_part_that_is_not_vital_and_reports_it(made):
    part = FaultyPart(vital=False)
    async with domain.Domain(made(), components=[part]) as running:
        part.now.set()

        async def fault_is_reported() -> bool:
            answer = await page(running, "/readyz")
            assert answer.status == 200
            failed: bool = answer.json()["parts"]["fault"] == {
                "state": "failed",
                "reason": "failed on purpose",
            }
            return failed

        await eventually(fault_is_reported)
        assert running.metrics.value("muster_part_failures_total", failed="fault") == 1


async def test_a_part_whose_port_was_in_use_starts_later_and_is_announced(made, monkeypatch):
    monkeypatch.setattr(component, "RETRY_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        settings = made(bus__locator=True, bus__locator_port=port)
        running = domain.Domain(settings)
        await running.start()
        try:
            parts = (await page(running, "/readyz")).json()["parts"]
            assert parts["locator"]["state"] == "failed"
            described = await asyncio.to_thread(running.folder.running)
            assert described is not None
            assert described.locator_url is None
            other.close()

            async def is_announced() -> bool:
                described = await asyncio.to_thread(running.folder.running)
                return described is not None and described.locator_url is not None

            await eventually(is_announced)
            assert (await page(running, "/readyz")).json()["parts"]["locator"]["state"] == "up"
        finally:
            await running.stop()


async def test_a_vital_part_takes_the_domain_down(made):
    part = FaultyPart(vital=True)
    async with domain.Domain(made(), components=[part]) as running:
        part.now.set()
        with pytest.raises(errors.Unavailable, match="failed on purpose"):
            await running.wait()
        assert (await page(running, "/readyz")).status == 503


# -- trust


async def test_a_revoked_identity_is_cut_off_and_refused(made):
    async with domain.Domain(made()) as running:
        alice = await running.connect("alice", roles.Role.USER)
        kept = await asyncio.to_thread(running.trust.credentials, "alice")
        await asyncio.to_thread(running.trust.revoke, "alice")
        await identities.publish_accounts(running.trust, running.servers)

        await eventually(lambda: alice.state is not api.ConnectionState.CONNECTED)
        with pytest.raises(errors.Unauthorized):
            await client.connect(running.servers, creds=kept)
        with pytest.raises(errors.Unauthorized, match="revoked"):
            await running.connect("alice", roles.Role.USER)
        await alice.close()


async def test_a_revocation_reaches_brokers_that_are_in_no_cluster(made, monkeypatch):
    """A leaf, and a broker that was started later."""
    monkeypatch.setattr(broker_set, "ACCOUNTS_S", 0.05)
    leaf_tree = made(bus__layout="leaf-tree", bus__leaves=1)
    async with (
        domain.Domain(leaf_tree) as running,
        await running.connect("admin", roles.Role.OPERATOR) as admin,
    ):
        early, late = [
            await asyncio.to_thread(identities.credentials, running.trust, name, roles.Role.USER)
            for name in ("alice", "bob")
        ]
        await asyncio.to_thread(running.trust.revoke, "alice")
        edge = await control.BrokerControl(admin).start("edge", storage=False)
        with pytest.raises(errors.Unauthorized):
            await client.connect([edge.url or ""], creds=early)
        await asyncio.to_thread(running.trust.revoke, "bob")
        assert running.brokers is not None
        servers = [member.url for member in running.brokers.running.brokers.values()]
        for server in servers:

            async def refused(server: str = server) -> bool:
                try:
                    async with await client.connect([server], creds=late):
                        return False
                except errors.Unauthorized:
                    return True

            await eventually(refused)
        assert len(servers) == 3
        assert "no link to the other brokers" in (edge.problem or "")
        assert set(servers) - set(running.brokers.urls) == {edge.url}, "no client is sent to an island"


@pytest.mark.virtual_time
async def test_a_broker_that_rejects_an_account_does_not_keep_it_from_others(made, monkeypatch, tmp_path):
    published: list[str] = []

    async def publish(_: Any, servers: list[str], **__: Any) -> None:
        published.extend(servers)
        if servers == ["first"]:
            raise errors.Refused("the brokers rejected the new account")

    monkeypatch.setattr(identities, "publish_accounts", publish)
    brokers = broker_set.BrokerSet(made(), home.DomainFolder(tmp_path))
    members = {
        name: types.SimpleNamespace(state=broker.BrokerState.RUNNING, url=name)
        for name in ("first", "second")
    }
    brokers._network = types.SimpleNamespace(brokers=members)  # type: ignore[assignment]
    brokers._trust = types.SimpleNamespace(claims_update=lambda: ("", b"claims"))  # type: ignore[assignment]
    passing = brokers._tasks.loop("accounts", brokers._pass_on_accounts)
    await eventually(lambda: published.count("first") == 2, timeout_s=60)
    assert published == ["first", "second", "first"], "the second has it, the first is asked again"
    assert not passing.done()
    assert "rejected" in (brokers._tasks.problem() or "")
    await brokers._tasks.close()


async def test_brokers_come_and_go_while_they_are_listed_and_stopped(made, monkeypatch, tmp_path):
    brokers = broker_set.BrokerSet(made(), home.DomainFolder(tmp_path))
    configs = [config.BrokerConfig(name=name, directory=tmp_path / name) for name in ("first", "second")]
    running = brokers._network = network.BrokerNetwork(configs)

    async def problem(_: broker.Broker) -> None:
        await asyncio.sleep(0)

    monkeypatch.setattr(broker.Broker, "problem", problem)
    ends = await asyncio.gather(*(brokers.stop_one("first") for _ in range(2)), return_exceptions=True)
    assert [type(end) for end in ends if isinstance(end, Exception)] in ([], [errors.NotFound])
    listed, _ = await asyncio.gather(brokers.describe(), running.remove("second"))
    assert [row.name for row in listed] == ["second"]
    assert not running.brokers


async def test_only_an_operator_changes_brokers(made):
    async with domain.Domain(made()) as running:
        async with await running.connect("mallory", roles.Role.AGENT) as agent:
            with pytest.raises(errors.Forbidden, match="agent"):
                await control.BrokerControl(agent).brokers()
        async with await running.connect("admin", identities.OWN["admin"]) as admin:
            assert [row.name for row in await control.BrokerControl(admin).brokers()] == ["local-1"]
            with pytest.raises(errors.NotFound, match="no operation 'destroy'"):
                await control.BrokerControl(admin).request(object, "destroy")
            with pytest.raises(errors.InvalidInput):
                await control.BrokerControl(admin).request(object, "link", nearest="x")
            with pytest.raises(errors.Refused, match="settings"):
                await control.BrokerControl(admin).stop("local-1")


async def test_a_bug_in_an_operation_is_not_reported_as_the_callers_input(made, monkeypatch):
    async def describe(self: object) -> object:
        raise TypeError("describe() takes no such thing")

    monkeypatch.setattr(broker_set.BrokerSet, "describe", describe)
    async with domain.Domain(made()) as running, await running.connect("admin", roles.Role.OPERATOR) as admin:
        with pytest.raises(errors.InvariantViolation, match="internal error"):
            await control.BrokerControl(admin).brokers()


async def crosses(sender: api.Bus, subject: str, subscription: api.Subscription) -> None:
    """A fresh link carries messages as soon as the interest at its far end is known at the near one."""

    async def arrives() -> bool:
        await sender.publish(subject, b"x")
        try:
            return (await subscription.next(timeout_s=0.2)).data == b"x"
        except errors.TimedOut:
            return False

    await eventually(arrives)


async def test_a_broker_is_started_linked_unlinked_and_stopped_while_the_domain_runs(made, monkeypatch):
    monkeypatch.setattr(control, "RETRY_S", 1.0)
    async with domain.Domain(made()) as running, await running.connect("admin", roles.Role.OPERATOR) as admin:
        leaf = await control.BrokerControl(admin).start("edge", below="local-1", storage=False)
        creds = await asyncio.to_thread(running.trust.credentials, "admin")
        async with (
            await client.connect([leaf.url or ""], creds=creds, identity="admin") as far,
            await far.subscribe("topic.across") as subscription,
        ):
            await crosses(admin, "topic.across", subscription)
        assert [link.id for link in await control.BrokerControl(admin).links()] == ["edge>local-1"]
        await control.BrokerControl(admin).unlink("edge>local-1")
        assert await control.BrokerControl(admin).links() == []
        # The broker that carries the answer is the one that reads its configuration again.
        await control.BrokerControl(admin).link("local-1", "edge")
        assert [link.id for link in await control.BrokerControl(admin).links()] == ["local-1>edge"]
        await control.BrokerControl(admin).unlink("local-1>edge")
        for url, words in (
            ("tls://", "no host"),
            ("tls://h:99999", "no URL"),
            ("tls://me:secret@h:1", "must not hold a password"),  # it would stand in the link's name
            (f"tls://{'x' * 64}:1", "xx"),
        ):
            with pytest.raises(errors.MusterError, match=words) as refused:
                await control.BrokerControl(admin).link("local-1", url)
            assert isinstance(refused.value, errors.InvalidInput | errors.Unavailable)
        await control.BrokerControl(admin).stop("edge")
        assert [row.name for row in await control.BrokerControl(admin).brokers()] == ["local-1"]


async def test_tls_is_set_up_and_used_when_it_is_enabled(made, caplog):
    async with domain.Domain(made(bus__tls="on")) as running:
        assert running.servers[0].startswith("tls://")
        async with await running.connect("alice", roles.Role.USER) as bus:
            await bus.flush()
        certificates = (await running.status())["certificates"]
        assert {certificate["name"] for certificate in certificates} == {"ca", "brokers"}
    assert [record.getMessage() for record in caplog.records if record.name == "asyncio"] == []


async def test_three_brokers_are_one_bus(made):
    async with domain.Domain(made(bus__brokers=3)) as running:
        assert len(running.servers) == 3
        async with await running.connect("op", roles.Role.OPERATOR) as bus:
            stream = await bus.stream(
                api.StreamSettings("s", subjects=("topic.s",), replicas=3, max_bytes=1 << 20)
            )
            assert await stream.publish("topic.s", b"x") == 1


async def test_a_leaf_tree_carries_messages_from_leaf_to_leaf(made):
    expected = made(bus__layout="leaf-tree", bus__leaves=2, bus__fan_out=2)
    async with domain.Domain(expected) as running:
        assert running.brokers is not None
        root, *leaves = running.brokers.urls
        assert running.servers == (root,), "leaves have their own storage"
        creds = await asyncio.to_thread(identities.credentials, running.trust, "alice", roles.Role.USER)
        async with (
            await client.connect([leaves[0]], creds=creds) as near,
            await client.connect([leaves[1]], creds=creds) as far,
            await far.subscribe("topic.x") as subscription,
        ):
            await crosses(near, "topic.x", subscription)


async def test_an_information_node_that_ends_again_and_again_has_failed(made, monkeypatch):
    def broken(*_: object) -> None:
        raise errors.Unavailable("its view cannot be opened")

    monkeypatch.setattr(information_nodes, "_config", broken)
    monkeypatch.setattr(information_nodes, "START_S", 0.1)
    settings = made(inform__nodes=1)
    nodes = information_nodes.InformationNodesComponent(settings.inform)
    async with domain.Domain(settings, components=[nodes]):
        await eventually(lambda: nodes.health().state is health.HealthState.FAILED, timeout_s=60)
        assert "times in a row: its view cannot be opened" in nodes.health().reason
