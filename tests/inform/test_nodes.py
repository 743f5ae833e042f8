"""Several nodes: discovery, placement, silent primaries, restored replicas, demand."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from muster.core import errors
from muster.inform import client, protocol
from muster.inform.node import node as node_node
from muster.testing.eventually import eventually

Fleet = dict[str, node_node.InformationNode]


async def fleet(start_node: Any, names: Sequence[str] = ("n1", "n2", "n3", "n4"), **options: Any) -> Fleet:
    nodes = {name: await start_node(name, **options) for name in names}
    await eventually(lambda: all(len(node.directory.nodes) == len(names) - 1 for node in nodes.values()))
    return nodes


def holders(nodes: Fleet, key: str) -> dict[str, str]:
    return {
        name: node.replicas.kind(copy)
        for name, node in nodes.items()
        if (copy := node.replicas.index.get(key)) is not None
    }


async def test_nodes_find_each_other_with_load_and_proximity(start_node, inform):
    nodes = await fleet(start_node, ("n1", "n2", "n3"))
    await eventually(
        lambda: all(
            0 < view.proximity_ms < 500 for view in nodes["n1"].directory.views(0.0) if view.node != "n1"
        )
    )
    assert {view.node for view in await inform.nodes()} == {"n1", "n2", "n3"}


async def test_a_new_context_gets_its_copies_and_the_writers_node_is_primary(start_node, inform):
    nodes = await fleet(start_node)
    written = await client.InformClient(inform._bus, node="n2").put("k", b"v", ack="replicated")
    assert (written.primary, written.replicas, written.status) == ("n2", 3, "normal")
    actual = holders(nodes, "k")
    assert sorted(actual.values()) == ["permanent", "permanent", "primary"]
    views = (await inform.where("k")).replicas
    assert {view.node: view.replica_kind for view in views} == actual
    assert {view.version for view in views} == {written.version}


async def test_a_node_above_its_watermark_forwards_new_contexts(start_node, inform):
    nodes = await fleet(start_node, ("n1", "n2"), replicas=1, refresh_s=30.0, lost_after_s=70.0)
    nodes["n1"].directory.load = protocol.NodeLoad(0, 0.0, 0.95)
    written = await client.InformClient(inform._bus, node="n1").put("k", b"v")
    assert written.primary == "n2"
    assert holders(nodes, "k") == {"n2": "primary"}


async def test_full_replication_by_setting(start_node, inform):
    nodes = await fleet(start_node, full_replication=True, replicas=1)
    await inform.put("k", b"v", ack="replicated")
    assert len(holders(nodes, "k")) == 4


async def test_a_node_without_a_copy_asks_the_holders_and_only_they_answer(start_node, inform):
    nodes = await fleet(start_node)
    await client.InformClient(inform._bus, node="n1").put("k", b"v", ack="replicated")
    (other,) = set(nodes) - set(holders(nodes, "k"))
    entry = await client.InformClient(inform._bus, node=other).get("k")
    assert entry.value == b"v"
    assert entry.source in holders(nodes, "k")
    await eventually(lambda: nodes["n1"].demand.by_origin("k") == {other: 1})
    with pytest.raises(errors.NotFound):
        await client.InformClient(inform._bus, node=other).get("no such")


async def test_writes_from_anywhere_go_to_the_primary(start_node, inform):
    nodes = await fleet(start_node)
    await client.InformClient(inform._bus, node="n1").put("k", b"0")
    written = [await client.InformClient(inform._bus, node=name).put("k", name.encode()) for name in nodes]
    assert {write.primary for write in written} == {"n1"}
    assert [write.version for write in written] == sorted(write.version for write in written)
    stamps = [write.stamp for write in written]
    assert stamps == sorted(stamps)


async def test_concurrent_writers_lose_nothing(start_node, inform):
    await fleet(start_node)
    contexts = [client.InformClient(inform._bus, node=name) for name in ("n1", "n2", "n3", "n4")]
    done = await asyncio.gather(
        *(contexts[number % 4].put("k", b"%d" % number) for number in range(12)), return_exceptions=True
    )
    versions = {outcome.version for outcome in done if isinstance(outcome, protocol.WriteResult)}
    assert len(versions) == 12, done
    assert {change.version for change in (await inform.history("k")).changes} == versions


async def test_a_silent_primary_is_replaced_and_cannot_write_any_more(start_node, inform, connect):
    """The connection of the primary's process is gone; what it still appends fails."""
    nodes = await fleet(start_node, timeout_s=1.0, lost_after_s=60.0)
    await client.InformClient(inform._bus, node="n1").put("k", b"1", ack="replicated")
    deposed = nodes["n1"]
    for subscription in deposed._subscriptions:  # it receives nothing, but can still write to the log
        await subscription.close()
    deposed._subscriptions.clear()
    stale = deposed.replicas.index["k"]
    written = await client.InformClient(inform._bus, node="n3").put("k", b"2")
    assert written.primary != "n1"
    deposed.replicas.index["k"] = stale  # as if it had not received that yet
    with pytest.raises(protocol.PrimaryMoved):
        await deposed.primary.update(protocol.UpdateContext(protocol.PutContext("k", b"forked"), "ann"))
    assert (await client.InformClient(inform._bus, node="n2").get("k", max_staleness_s=0)).value == b"2"
    assert [
        change.value for change in (await client.InformClient(inform._bus, node="n2").history("k")).changes
    ] == [
        b"1",
        b"2",
    ]


async def test_lost_copies_are_made_again_elsewhere(start_node, inform):
    nodes = await fleet(start_node)
    await client.InformClient(inform._bus, node="n1").put("k", b"v", ack="replicated")
    await nodes.pop("n1").close()
    await eventually(
        lambda: len(holders(nodes, "k")) == 3 and "primary" in holders(nodes, "k").values(), timeout_s=30
    )
    assert (await inform.get("k", max_staleness_s=0)).value == b"v"


async def test_a_temporary_copy_appears_where_the_readers_are_and_goes_with_them(start_node, inform):
    nodes = await fleet(  # of all demand, none migrates: the last reads are of one origin
        start_node, ("n1", "n2", "n3"), replicas=1, interval_s=1.0, migration_ratio=1.0
    )
    await client.InformClient(inform._bus, node="n1").put("k", b"v")
    near = {name: client.InformClient(inform._bus, node=name) for name in nodes}

    async def read() -> bool:
        await asyncio.gather(*(near[name].get("k") for name in ("n1", "n2", "n1", "n2")))
        return holders(nodes, "k").get("n2") == "temporary"

    await eventually(read, timeout_s=30)
    entry = await near["n2"].get("k")
    assert (entry.replica_kind, entry.source) == ("temporary", "n2")
    await near["n1"].put("k", b"newer")
    fresh = await near["n2"].get("k", max_staleness_s=0)
    assert fresh.value == b"newer"
    await eventually(lambda: "n2" not in holders(nodes, "k"), timeout_s=30)


@pytest.mark.parametrize("change", ["delete", "put"])
async def test_a_temporary_replica_that_is_being_read_follows_deletions_and_new_versions(
    start_node, inform, change
):
    nodes = await fleet(start_node, ("n1", "n2"), replicas=1)
    near = {name: client.InformClient(inform._bus, node=name) for name in nodes}
    await near["n1"].put("k", b"v")
    await nodes["n2"].maintenance.store("k")
    assert (await near["n2"].get("k")).replica_kind == "temporary"

    async def is_gone() -> bool:
        try:
            return bool((await near["n2"].get("k")).value == b"newer")
        except errors.NotFound:
            return bool(change == "delete")

    if change == "delete":
        await near["n1"].delete("k")
    else:
        await near["n1"].put("k", b"newer")
    await eventually(is_gone)


async def test_a_record_that_passes_while_a_temporary_replica_is_made_is_not_lost(
    start_node, inform, monkeypatch
):
    nodes = await fleet(start_node, ("n1", "n2"), replicas=1)
    near = {name: client.InformClient(inform._bus, node=name) for name in nodes}
    await near["n1"].put("k", b"v")
    shared = nodes["n2"].records
    current = shared.current

    async def outdated(key: str):
        entry = await current(key)
        with monkeypatch.context() as once:
            once.setattr(shared, "current", current)
            if entry is not None and entry.record.value == b"v":
                await near["n1"].put("k", b"newer")
                await nodes["n2"].freshness.catch_up(10.0)
        return entry

    monkeypatch.setattr(shared, "current", outdated)
    await nodes["n2"].maintenance.store("k")
    assert (await near["n2"].get("k")).value == b"newer"


async def test_a_context_migrates_to_where_nearly_all_demand_is(start_node, inform):
    nodes = await fleet(start_node, ("n1", "n2"), replicas=1, interval_s=1.0)
    await client.InformClient(inform._bus, node="n1").put("k", b"v")
    near = client.InformClient(inform._bus, node="n2")

    async def moved() -> bool:
        await near.get("k")
        return holders(nodes, "k") == {"n2": "primary"}

    await eventually(moved, timeout_s=30)
    assert (await near.put("k", b"w")).primary == "n2"
