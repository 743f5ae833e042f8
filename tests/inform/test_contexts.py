"""Contexts through a client, one or a few nodes and a real broker."""

from __future__ import annotations

import asyncio
import time
import tracemalloc
from typing import Any

import msgspec
import pytest

from muster.core import errors
from muster.inform import access_rules, client, protocol
from muster.inform import settings as settings_
from muster.inform.node import node as node_node
from muster.inform.node import primary
from muster.testing.eventually import eventually


async def test_what_is_put_is_got_with_its_version_stamp_and_age(start_node, inform):
    await start_node("n1")
    written = await inform.put("printers/3", b"<printer/>", attributes={"floor": 2})
    context = await inform.get("printers/3")
    assert (context.value, context.attributes) == (b"<printer/>", {"floor": 2})
    assert (context.version, context.stamp) == (written.version, written.stamp)
    assert (context.source, context.replica_kind, context.writer) == ("n1", "primary", "ann")
    assert 0 <= context.age_s < 10


async def test_the_system_assigns_a_key_where_none_is_given(start_node, inform):
    await start_node()
    first, other = await inform.put(None, b"a"), await inform.put(None, b"b")
    assert first.key != other.key
    assert (await inform.get(first.key)).value == b"a"
    with pytest.raises(errors.InvalidInput, match="key of 0 bytes"):  # a variable that was not set
        await inform.put("", b"c")


async def test_versions_and_stamps_grow_and_compare_and_set_holds(start_node, inform):
    await start_node()
    first = await inform.put("k", b"1", expected_version=0)
    second = await inform.put("k", b"2", expected_version=first.version)
    assert second.version > first.version
    assert second.stamp > first.stamp
    with pytest.raises(errors.Conflict) as caught:
        await inform.put("k", b"3", expected_version=first.version)
    assert caught.value.actual == second.version
    with pytest.raises(errors.Conflict):
        await inform.put("k", b"3", expected_version=0)
    assert (await inform.get("k", max_staleness_s=0)).value == b"2"


async def test_deleted_is_not_found_and_may_be_written_again(start_node, inform):
    await start_node()
    with pytest.raises(errors.NotFound):
        await inform.get("k")
    with pytest.raises(errors.NotFound):
        await inform.delete("k")
    put = await inform.put("k", b"1")
    deleted = await inform.delete("k")
    with pytest.raises(errors.NotFound):
        await inform.get("k")
    again = await inform.put("k", b"2", expected_version=0)
    assert put.version < deleted.version < again.version
    changes = (await inform.history("k")).changes
    assert [(change.value, change.reason) for change in changes] == [
        (b"1", "put"),
        (None, "delete"),
        (b"2", "put"),
    ]


@pytest.mark.parametrize("size", [0, 1, 1 << 20])
async def test_sizes_from_nothing_to_a_mebibyte(start_node, inform, size):
    await start_node()
    value = b"x" * size
    await inform.put("k", value)
    assert (await inform.get("k", max_staleness_s=0)).value == value


async def test_what_is_too_large_or_malformed_is_refused_and_changes_nothing(start_node, inform, connect):
    node = await start_node()
    with pytest.raises(errors.LimitExceeded, match="1048576"):
        await inform.put("k", b"x" * ((1 << 20) + 1))
    for key in ("x" * 513, "a\0b", "\ud800"):
        with pytest.raises(errors.InvalidInput):
            await inform.put(key, b"")
    bus = await connect("bob")
    for verb in ("put", "get", "find", "changes", "where", "history"):
        answer = await bus.request(protocol.request_subject("bob", verb), b"\xff\x00 hostile")
        with pytest.raises(errors.InvalidInput):
            protocol.result_of(answer.data, object)
    answer = await bus.request(
        "muster.inform.from.bob.read.any.put", protocol.encode(protocol.PutContext("k", b""))
    )
    with pytest.raises(errors.NotFound, match="no operation"):  # a viewer cannot write by calling it reading
        protocol.result_of(answer.data, object)
    assert node.log.applied == 0


async def test_a_lease_ends_and_watchers_are_notified(start_node, inform):
    await start_node()
    await inform.put("k", b"1", lease_s=0.5)
    changes = inform.watch("k")
    assert (await anext(changes)).value == b"1"
    ended = await asyncio.wait_for(anext(changes), 10)
    assert (ended.value, ended.reason) == (None, "expire")
    with pytest.raises(errors.NotFound):
        await inform.get("k")
    await changes.aclose()


async def test_find_takes_predicates_over_all_nodes(start_node, inform):
    nodes = [await start_node(name) for name in ("n1", "n2")]
    await eventually(lambda: all(len(node.directory.nodes) == 1 for node in nodes))
    writers = [client.InformClient(inform._bus, node=node.name) for node in nodes]
    for number in range(6):
        await writers[number % 2].put(f"p/{number}", b"v", attributes={"floor": number, "tags": ["a"]})
    matches = await inform.find("floor >= 2 AND floor < 5 AND tags CONTAINS 'a'")
    assert [context.key for context in matches.contexts] == ["p/2", "p/3", "p/4"]
    assert matches.silent == []
    assert [context.key for context in (await inform.find("key LIKE 'p/%'", limit=2)).contexts] == [
        "p/0",
        "p/1",
    ]
    with pytest.raises(errors.ParseError):
        await inform.find("floor >>> 2")


async def test_watchers_receive_every_update_in_order_and_resume_from_a_version(start_node, inform, connect):
    await start_node("n1")
    await start_node("n2")
    versions = [(await inform.put("k", b"%d" % number)).version for number in range(5)]
    received = []
    async for change in inform.watch("k", after_version=versions[1]):
        received.append(change.value)
        if change.value == b"4":
            await inform.put("k", b"5")
        if change.value == b"5":
            break
    assert received == [b"2", b"3", b"4", b"5"]


async def test_a_watcher_learns_that_it_missed_changes(start_node, inform):
    await start_node(history=4)
    first = await inform.put("k", b"0")
    for number in range(8):
        await inform.put("k", b"%d" % number)
    changes = inform.watch("k", after_version=first.version)
    with pytest.raises(errors.NotFound, match="no longer in the log"):
        await anext(changes)


async def test_a_watcher_learns_that_the_log_was_restored_from_before_its_version(
    start_node, inform, monkeypatch
):
    monkeypatch.setattr(client, "WAIT_S", 0.1)
    await start_node("n1")
    written = await inform.put("k", b"v")
    assert await inform.changes("k", after_version=written.version) == []
    with pytest.raises(errors.NotFound, match="no longer in the log"):
        await inform.changes("k", after_version=written.version + (1_000 << 20))


async def test_a_version_that_no_log_can_have_is_invalid_input(start_node, inform):
    await start_node()
    await inform.put("k", b"v")
    for version in (1 << 63, -2):
        with pytest.raises(errors.InvalidInput, match="Expected `int`"):
            await inform.history("k", after_version=version)


async def test_a_deletion_stays_in_the_log_although_the_clock_of_its_node_is_behind(start_node, inform):
    node = await start_node("n1", now_ns=lambda: time.time_ns() - 10 * 86_400 * 10**9)
    await inform.put("k", b"v")
    await inform.delete("k")
    await node.maintenance.expire_due()
    assert await node.records.current("k") is not None, "another node may be offline"


async def test_a_watcher_that_missed_a_purged_deletion_learns_of_it(start_node, inform):
    node = await start_node(tombstone_s=0.3)
    written = await inform.put("k", b"1")
    received = inform.watch("k")
    assert (await anext(received)).value == b"1"
    await inform.delete("k")
    assert (await anext(received)).reason == "delete"

    async def is_forgotten() -> bool:
        return await node.records.current("k") is None

    await eventually(is_forgotten, timeout_s=30)
    with pytest.raises(errors.NotFound, match="no longer in the log"):
        await anext(inform.watch("k", after_version=written.version))
    await inform.put("k", b"2")
    assert (await asyncio.wait_for(anext(received), 30)).value == b"2", "who heard of it has missed nothing"
    await received.aclose()


async def test_a_context_written_while_its_deletion_is_forgotten_stays(start_node, inform, monkeypatch):
    await start_node(tombstone_s=0.3)
    await inform.put("k", b"1")
    await inform.delete("k")
    forget, forgotten = primary.PrimaryWriter.forget, asyncio.Event()

    async def late(self: primary.PrimaryWriter, *of: Any) -> None:
        await inform.put("k", b"2")
        await forget(self, *of)
        forgotten.set()

    monkeypatch.setattr(primary.PrimaryWriter, "forget", late)
    await asyncio.wait_for(forgotten.wait(), 30)
    assert (await inform.get("k", max_staleness_s=0.0)).value == b"2"
    assert [change.value for change in (await inform.history("k")).changes] == [b"1", None, b"2"]


@pytest.mark.parametrize("other", [True, False])
async def test_a_node_starts_where_the_end_of_the_log_is_forgotten(start_node, inform, other):
    node = await start_node(tombstone_s=0.3)
    if other:
        await inform.put("other", b"v")
    await inform.put("k", b"v")
    await inform.delete("k")

    async def is_forgotten() -> bool:
        return await node.records.current("k") is None

    await eventually(is_forgotten, timeout_s=30)
    await node.close()
    again = await asyncio.wait_for(start_node(), 30)
    assert list(again.replicas.index) == ["other"] * other
    await inform.put("k", b"again")
    assert (await inform.get("k", max_staleness_s=0.0)).value == b"again"


async def test_the_new_owner_of_a_key_cannot_read_earlier_values(start_node, connect):
    await start_node(
        rules=(access_rules.AccessRule("own/*", read=("owner",), write=("owner",)),), role_of=lambda _: None
    )
    ann, bob = client.InformClient(await connect("ann")), client.InformClient(await connect("bob"))
    await ann.put("own/1", b"ann's")
    await ann.delete("own/1")
    await bob.put("own/1", b"bob's")
    assert [change.value for change in (await bob.history("own/1")).changes] == [b"bob's"]
    assert (await anext(bob.watch("own/1"))).value == b"bob's"
    mine = await ann.history("own/1")
    assert [change.value for change in mine.changes] == [b"ann's", None]
    with pytest.raises(errors.Forbidden):
        await ann.history("own/1", after_version=mine.changes[-1].version)


async def test_a_context_stamped_by_a_clock_that_ran_ahead_is_written_on(start_node, inform):
    day_ns = 86_400_000_000_000
    wrong = await start_node(now_ns=lambda: time.time_ns() + day_ns)
    ahead = await inform.put("k", b"1")
    await wrong.close()
    node = await start_node()
    written = await inform.put("k", b"2")
    assert written.stamp > ahead.stamp, "its stamps only grow"
    other = await inform.put("other", b"1")
    assert other.stamp < ahead.stamp, "and stamps of other nodes do not follow them"
    await inform.delete("k")
    await inform.put("k", b"3", lease_s=0.3)
    await eventually(lambda: node.replicas.index["k"].deleted, timeout_s=30)


async def test_a_node_starts_with_its_view_and_reads_on(start_node, inform, tmp_path):
    file = tmp_path / "view.db"
    first = await start_node("n1", view=file)
    await inform.put("a", b"1")
    await inform.put("gone", b"1")
    await inform.delete("gone")
    await first.close()
    other = await start_node("n2")
    await client.InformClient(inform._bus, node="n2").put("b", b"2")
    again = await start_node("n1", view=file)
    assert again.reader.local("a").value == b"1"
    assert again.reader.local("gone") is None
    assert again.log.applied == other.log.applied


async def test_memory_is_bounded_and_what_was_evicted_is_read_again(start_node, inform, tmp_path):
    file = tmp_path / "view.db"
    node = await start_node("n1", view=file, memory_bytes=1 << 20)
    for number in range(60):
        await inform.put(f"k{number}", b"%d" % number + b"x" * 40_000)
    assert node.replicas.memory_bytes <= 1 << 20
    assert node.replicas.evicted > 0
    for number in (0, 30, 59):
        assert (await inform.get(f"k{number}")).value.startswith(b"%d" % number)


async def test_large_contexts_are_watched_listed_and_found_over_several_answers(start_node, inform):
    node = await start_node()
    large = b"x" * (1 << 20)
    for number in range(3):
        await inform.put("k", b"%d" % number + large[1:], attributes={"a": 1})
        await inform.put(f"k{number}", large, attributes={"a": 1})
    await eventually(lambda: not node.records.unsaved, timeout_s=60)
    assert [change.value[:1] for change in (await inform.history("k")).changes] == [b"0", b"1", b"2"]
    received = []
    async for change in inform.watch("k"):
        received.append(change.value[:1])
        if len(received) == 3:
            break
    assert received == [b"0", b"1", b"2"]
    matches = await inform.find("a = 1")
    assert [context.key for context in matches.contexts] == ["k", "k0", "k1", "k2"]
    assert all(len(context.value) == 1 << 20 for context in matches.contexts)
    assert [context.key for context in (await inform.find("a = 1", limit=3)).contexts] == ["k", "k0", "k1"]


async def test_a_watcher_without_changes_leaves_nothing_behind(start_node, connect):
    node = await start_node()
    bus = await connect("bob")
    for number in range(20):
        changes = protocol.WaitForChanges(f"never/{number}", 0, 0.01)
        answer = await bus.request(protocol.request_subject("bob", "changes"), protocol.encode(changes))
        assert protocol.result_of(answer.data, protocol.ContextHistory).changes == []
    await eventually(lambda: len(node.changes._waiting) == 0)


async def test_watchers_do_not_block_writers(start_node, inform, connect, monkeypatch):
    monkeypatch.setattr(node_node, "IN_FLIGHT_MAX", 10)
    monkeypatch.setattr(node_node, "WATCHING_MAX", 20)
    node = await start_node()
    watcher = client.InformClient(await connect("watcher"))
    waiting = [asyncio.ensure_future(anext(watcher.watch(f"k{number}"))) for number in range(30)]
    await eventually(lambda: node.refused > 0, timeout_s=30)
    for number in range(30):
        await inform.put(f"k{number}", b"v")
    assert len((await inform.find("TRUE")).contexts) == 30
    received = await asyncio.wait_for(asyncio.gather(*waiting), 60)  # those who had no room come again
    assert {change.value for change in received} == {b"v"}


async def test_an_unreadable_record_does_not_delay_expiry_of_others(start_node, inform, connect):
    node = await start_node()
    for key in ("a", "b"):
        await inform.put(key, b"v", lease_s=0.5)
    log = await (await connect("stranger")).open_stream(protocol.STREAM)
    await log.publish(protocol.page_subject("stranger"), b"rubbish")
    await eventually(lambda: node.replicas.index["b"].deleted, timeout_s=30)
    assert node.failure() is None


async def test_a_local_read_needs_no_message(start_node, inform):
    node = await start_node()
    await inform.put("k", b"1")
    assert node.reader.local("k").value == b"1"
    assert node.reader.local("k", max_staleness_s=0.0) is None  # only the log can say
    assert node.reader.local("other") is None


@pytest.mark.virtual_time
async def test_a_history_is_not_held_in_memory_whole(simulated_network):
    net = simulated_network
    settings = msgspec.structs.replace(settings_.DEFAULT, history=100)
    async with await node_node.start(await net.connect("p"), settings=settings, now_ns=net.now_ns) as node:
        contexts = client.InformClient(await net.connect("ann"))
        versions = [(await contexts.put("k", bytes([number]) * 300_000)).version for number in range(40)]
        for after_version in (0, versions[0]):
            tracemalloc.start()
            page = await node.reader.history(protocol.WaitForChanges("k", after_version), "ann")
            _, peak_bytes = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            assert page.more
            assert 0 < len(page.changes) <= 4
            assert peak_bytes < 4 << 20, "all of them are 12 MB"
        history = await contexts.history("k")
        assert ([change.version for change in history.changes], history.complete) == (versions, True)
