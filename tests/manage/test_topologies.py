"""Networks of brokers by manifest: topologies, and real ones deployed, changed, repaired and deleted."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from muster.bus.client import client as bus_client
from muster.core import errors, messages
from muster.manage import manifest, protocol, topologies
from muster.manage.adapters import plugins
from muster.testing.eventually import eventually
from muster.trust.permissions import roles


def shape(kind: str, size: int, **more: Any) -> topologies.Topology:
    return topologies.Topology(name="t", shape=kind, size=size, agent="host-a", **more)  # type: ignore[arg-type]


def test_the_paper_s_cluster_has_eight_brokers_and_seven_links():
    links = topologies.links(shape("cluster", 8))
    assert len(links) == 7
    assert links == [(1, 0), (2, 1), (3, 0), (4, 3), (5, 4), (6, 0), (7, 6)]


@pytest.mark.parametrize("kind", ["ring", "chain", "star", "tree", "cluster"])
@pytest.mark.parametrize("size", [1, 3, 8, 21])
def test_every_shape_is_one_network_without_a_circle(kind, size):
    links = topologies.links(shape(kind, size))
    assert len(links) == size - 1
    reached = {0}
    for near, far in sorted(links):
        assert far in reached
        reached.add(near)
    assert reached == set(range(size))


def test_a_ring_keeps_one_link_in_reserve():
    entries = topologies.expand(shape("ring", 4))
    assert [entry["config"].get("reserve") for entry in entries] == ["t-4", None, None, None]
    with pytest.raises(errors.InvalidInput):
        topologies.expand(shape("ring", 2))


def test_a_manifest_unfolds_it():
    text = "topologies: [{name: t, shape: chain, size: 3, agent: host-a}]"
    entries = manifest.read(text, plugins.config_validators())
    assert [(entry.name, entry.depends_on) for entry in entries] == [
        ("t-1", ()),
        ("t-2", ("t-1",)),
        ("t-3", ("t-2",)),
    ]


async def test_a_ring_is_deployed_mended_and_torn_down(fleet, trust, broker_access):
    await fleet.registry()
    await fleet.manager()
    host = await fleet.agent(broker_access=broker_access)
    await fleet.client.apply("topologies: [{name: t, shape: ring, size: 4, agent: host-a}]")
    for number in range(1, 5):
        await fleet.client.wait(f"t-{number}", "up")

    for name in ("a", "b"):
        trust.issue(name, roles.Role.USER)
    creds = {name: trust.credentials(name) for name in ("a", "b")}

    def url(number: int) -> Any:
        return host.hosted[f"t-{number}"].observed.properties.get("url", "nats://127.0.0.1:1")

    async def passes(sender: int, other: int) -> bool:
        """Whether a message goes from one broker to the other."""
        try:
            async with (
                await bus_client.connect([url(sender)], creds=creds["a"], audit_s=0) as near,
                await bus_client.connect([url(other)], creds=creds["b"], audit_s=0) as far,
                await far.subscribe("topic.x") as subscription,
            ):
                await near.publish("topic.x", b"hello")
                return (await subscription.next(timeout_s=0.3)).data == b"hello"
        except (
            errors.Unavailable,
            errors.Unauthorized,
        ):  # another process may have the port meanwhile
            return False

    await eventually(lambda: passes(1, 4))
    with pytest.raises(errors.Unauthorized):
        await bus_client.connect([url(1)], identity="a", audit_s=0)
    first = host.hosted["t-1"].adapter
    assert not first._observed().properties["reserve_closed"]
    await eventually(lambda: first.context.runtime.get("armed"))  # it has seen the ring whole

    await host.hosted["t-3"].adapter.do_unlink("t-2")  # the chain is broken in the middle
    await eventually(lambda: first._observed().properties["reserve_closed"])
    await eventually(lambda: passes(1, 3))  # the other way round

    os.kill(host.hosted["t-2"].observed.properties["pid"], signal.SIGKILL)
    await eventually(lambda: passes(2, 4), timeout_s=30)

    await fleet.client.delete(*(f"t-{number}" for number in range(1, 5)))
    await fleet.client.wait_gone(*(f"t-{number}" for number in range(1, 5)))


async def test_a_network_is_changed_made_smaller_and_torn_down_by_manifest(fleet, broker_access):
    await fleet.registry()
    await fleet.manager()
    host = await fleet.agent(broker_access=broker_access)

    def text(shape: str, size: int) -> str:
        return f"topologies: [{{name: t, shape: {shape}, size: {size}, agent: host-a}}]"

    def links() -> dict[str, set[str]]:
        return {
            name: {remote.id for remote in resource.adapter.broker.config.remotes}
            for name, resource in host.hosted.items()
            if resource.adapter is not None and resource.adapter.broker is not None
        }

    async def settled() -> bool:
        rows = await fleet.client.get()
        return all(row.state == "up" and row.applied for row in rows)

    await fleet.client.apply(text("chain", 4))
    await eventually(settled, timeout_s=30)
    await eventually(lambda: links() == {"t-1": set(), "t-2": {"t-1"}, "t-3": {"t-2"}, "t-4": {"t-3"}})
    pids = {name: resource.observed.properties["pid"] for name, resource in host.hosted.items()}

    await fleet.client.apply(text("star", 4))
    await eventually(settled, timeout_s=30)
    await eventually(lambda: links() == {"t-1": set(), "t-2": {"t-1"}, "t-3": {"t-1"}, "t-4": {"t-1"}})
    assert pids == {name: resource.observed.properties["pid"] for name, resource in host.hosted.items()}, (
        "none restarted"
    )

    planned = await fleet.client.plan(text("star", 2))
    assert {line.name for line in planned if line.act == "delete"} == {"t-3", "t-4"}
    await fleet.client.apply(text("star", 2))
    await fleet.client.wait_gone("t-3", "t-4")
    await eventually(lambda: set(links()) == {"t-1", "t-2"})

    await fleet.client.delete_manifest(text("star", 2))
    await fleet.client.wait_gone("t-1", "t-2")
    assert not links()


async def test_an_agent_without_the_domain_s_documents_makes_no_broker(fleet):
    host = await fleet.agent()
    made = await host.execute(
        protocol.Operation(id="1", verb=protocol.Verb.CREATE, resource="t", epoch=1, type="broker", config={})
    )
    assert made.outcome is not messages.DecisionOutcome.DONE
    assert "may not run brokers" in made.reason


async def test_a_revocation_reaches_the_brokers_of_a_network(fleet, trust, broker_access):
    host = await fleet.agent(broker_access=broker_access)
    await host.execute(
        protocol.Operation(id="1", verb=protocol.Verb.CREATE, resource="t", epoch=1, type="broker", config={})
    )
    trust.issue("a", roles.Role.USER)
    creds, adapter = trust.credentials("a"), host.hosted["t"].adapter
    async with await bus_client.connect([adapter.broker.url], creds=creds, audit_s=0):
        pass
    trust.revoke("a")
    await adapter.refresh_trust()
    with pytest.raises(errors.Unauthorized):
        await bus_client.connect([adapter.broker.url], creds=creds, audit_s=0)
