"""A node's stored replicas, on both engines; and a store that fails."""

from __future__ import annotations

import asyncio
import pathlib
import secrets
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from muster.core import errors
from muster.inform import client, protocol
from muster.inform.node.log import context_log, unsaved, view_writer
from muster.inform.node.log import view as log_view
from muster.store import api, database
from muster.testing.eventually import eventually
from tests import postgres

postgres_server = postgres.postgres_server


@pytest_asyncio.fixture(params=["sqlite", "postgresql"])
async def store(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> AsyncIterator[database.Store]:
    if request.param == "sqlite":
        opened = await database.open(f"sqlite:{tmp_path}/store.db")
    else:
        server = request.getfixturevalue("postgres_server")
        settings = api.StoreOptions(namespace=f"t_{secrets.token_hex(6)}")
        opened = await database.open(server.url, settings=settings, password=server.password)
    async with opened:
        yield opened


def entry(key: str, sequence: int) -> context_log.ContextLogEntry:
    return context_log.ContextLogEntry(
        protocol.ContextRecord(key, ("n",), 1 << 16, "n", b"\0\xff" * 100), sequence
    )


async def test_what_is_saved_is_loaded_with_its_position(store):
    view, other = log_view.ReplicaView(store, "n"), log_view.ReplicaView(store, "m")
    await view.save({"a": entry("a", 1), "b/é": entry("b/é", 2), "c": entry("c", 3)}, 3)
    await view.save({"a": None}, 4)
    await other.save({"x": entry("x", 9)}, 9)
    assert await view.position() == 4
    loaded = {item.record.key: item async for page in view.load() for item in page}
    assert loaded == {"b/é": entry("b/é", 2), "c": entry("c", 3)}
    assert await view.value("c") == entry("c", 3)
    assert await view.value("a") is None
    await view.clear()
    assert [page async for page in view.load() if page] == []
    assert await other.value("x") == entry("x", 9)


async def test_a_node_starts_again_with_its_view(store, start_node, inform):
    first = await start_node("n1", store=store)
    for number in range(30):
        await inform.put(f"k{number}", b"%d" % number, attributes={"n": number})
    await first.close()
    again = await start_node("n1", store=store)
    assert again.state.replicas.permanent == 30
    assert again.reader.local("k7").value == b"7"


@pytest.mark.parametrize(
    ("collection", "key", "value"),
    [("inform.node.n1", "k3", b"\0" * 8 + b"rubbish"), ("inform.positions", "n1", b"rubbish")],
)
async def test_a_damaged_view_is_made_again_from_the_log(
    start_node, inform, tmp_path, collection, key, value
):
    async with await database.open(f"sqlite:{tmp_path}/damaged.db") as store:
        first = await start_node("n1", store=store)
        for number in range(10):
            await inform.put(f"k{number}", b"%d" % number)
        await first.close()
        async with store.transaction() as tx:
            tx.put(collection, key, value)
        again = await start_node("n1", store=store)
        assert [again.reader.local(f"k{number}").value for number in range(10)] == [
            b"%d" % number for number in range(10)
        ]
        await again.close()
        kept = await log_view.ReplicaView(store, "n1").value("k3")
        assert kept is not None
        assert kept.record.value == b"3"


async def test_what_the_view_cannot_give_is_read_from_the_log(start_node, inform, tmp_path, monkeypatch):
    async def lost(*_: object) -> None:
        raise errors.NotConnected("the store is gone")

    async with await database.open(f"sqlite:{tmp_path}/lost.db") as store:
        node = await start_node("n1", store=store)
        await inform.put("k", b"v", attributes={"a": 1})
        await eventually(lambda: not node.state.unsaved, timeout_s=30)
        node.state.replicas._forget_value(node.state.replicas.index["k"])
        monkeypatch.setattr(log_view.ReplicaView, "value", lost)
        assert [context.value for context in (await inform.find("a = 1")).contexts] == [b"v"]


@pytest.mark.slow
async def test_a_store_that_is_lost_takes_no_value_with_it(start_node, inform):
    with postgres.running() as server:
        async with await database.open(server.url, password=server.password) as store:
            node = await start_node("n1", store=store, memory_bytes=1 << 20)
            for number in range(20):
                await inform.put(f"k{number:02}", b"%d" % number * 50_000, attributes={"a": 1})
            await eventually(lambda: not node.state.unsaved, timeout_s=30)
            assert node.state.replicas.evicted
            await asyncio.to_thread(server.stop)
            assert (await inform.get("k00")).value == b"0" * 50_000
            assert len((await inform.find("a = 1")).contexts) == 20
            await inform.put("later", b"v")
            await eventually(lambda: node.view_failure is not None, timeout_s=30)
            await asyncio.to_thread(server.start)
            await eventually(lambda: node.view_failure is None and not node.state.unsaved, timeout_s=60)
            assert node.failure() is None


async def test_nodes_whose_long_names_begin_alike_have_views_of_their_own(tmp_path):
    async with await database.open(f"sqlite:{tmp_path}/long.db") as store:
        view, other = log_view.ReplicaView(store, "n" * 60 + "1"), log_view.ReplicaView(store, "n" * 60 + "2")
        await view.save({"a": entry("a", 1)}, 1)
        await other.save({"a": None}, 2)
        assert await view.value("a") == entry("a", 1)
        assert await view.position() == 1


async def test_a_store_that_is_full_stops_neither_reads_nor_writes(start_node, inform, tmp_path):
    """The view is behind then; the log has everything, and a node that starts again reads on from there."""
    small = api.StoreOptions(bytes_max=20_000)
    async with await database.open(f"sqlite:{tmp_path}/small.db", settings=small) as store:
        node = await start_node("n1", store=store)
        for number in range(40):
            await inform.put(f"k{number}", b"x" * 2_000)
        assert (await inform.get("k39")).value == b"x" * 2_000
        await eventually(lambda: node.view_failure is not None, timeout_s=30)
        assert len(node.state.unsaved) > 20
        assert node.failure() is None
        await node.close()
        again = await start_node("n1", store=store)
        assert again.state.replicas.permanent == 40


async def test_a_node_that_catches_up_does_not_outrun_its_view(start_node, inform, tmp_path, monkeypatch):
    monkeypatch.setattr(unsaved, "BYTES_MAX", 100 * unsaved.ENTRY_BYTES)
    first = await start_node("n1")
    for number in range(300):
        await first.writer.write(protocol.PutContext(f"k{number}", b"v"), "ann")
    async with await database.open(f"sqlite:{tmp_path}/late.db") as store:
        most = 0
        view_save = log_view.ReplicaView.save

        async def save(self: log_view.ReplicaView, entries: Any, position: int) -> None:
            nonlocal most
            most = max(most, len(entries))
            await view_save(self, entries, position)

        monkeypatch.setattr(log_view.ReplicaView, "save", save)
        await first.close()
        again = await start_node("n1", store=store)
        assert again.state.replicas.permanent == 300
        assert 0 < most <= 100
        await again.close()
        assert await log_view.ReplicaView(store, "n1").position() == 300


def test_beyond_its_bytes_only_keys_are_remembered(monkeypatch):
    monkeypatch.setattr(unsaved, "BYTES_MAX", 2 * unsaved.ENTRY_BYTES)
    lacking = unsaved.UnsavedChanges()
    for number in range(4):
        lacking.note(f"k{number}", entry(f"k{number}", number))
    lacking.note("gone", None)
    taken = lacking.first(10, 1 << 20)
    known = {key: change for key, change in taken.items() if not isinstance(change, unsaved.DeferredChange)}
    assert known == {"k0": entry("k0", 0), "k1": entry("k1", 1), "gone": None}
    assert lacking.get("k2") is None
    lacking.note("k2", entry("k2", 9))  # while they are being saved
    lacking.saved(taken)
    assert list(lacking.first(10, 1 << 20)) == ["k2"]
    assert not lacking.is_full
    assert list(lacking.first(1, 0)) == ["k2"], "one at least"


async def test_a_damaged_view_and_a_kill_leave_nothing_out(start_node, inform, tmp_path, monkeypatch):
    """Neither what was read of the view before the damage, nor what was to be saved before the kill."""
    monkeypatch.setattr(log_view, "PAGE", 2)
    async with await database.open(f"sqlite:{tmp_path}/damaged.db") as store:
        node = await start_node("n1", store=store)
        for number in range(10):
            await inform.put(f"k{number}", b"v", attributes={"x": 1})
        await node.close()
        await store.put("inform.node.n1", "k7", b"\0" * 8 + b"rubbish")
        with monkeypatch.context() as killed:
            killed.setattr(view_writer.ViewWriter, "save", lambda _: asyncio.sleep(0))
            await (await start_node("n1", store=store)).close()
        node = await start_node("n1", store=store)
        assert len((await inform.find("x = 1")).contexts) == 10
        await node.close()
        await store.put("inform.node.n1", "k7", b"\0" * 8 + b"rubbish")
        await (await start_node("n1", store=store)).close()  # reads all from the log, and saves it
        again = await start_node("n1", store=store)
        assert again.state.replicas.permanent == 10
        assert len((await inform.find("x = 1")).contexts) == 10


async def test_what_an_interrupted_clearing_left_is_not_loaded(start_node, inform, tmp_path):
    async with await database.open(f"sqlite:{tmp_path}/left.db") as store:
        view = log_view.ReplicaView(store, "n1")
        record = protocol.ContextRecord("gone", ("n1",), 1 << 16, "n1", b"v")
        await view.save({"gone": context_log.ContextLogEntry(record, 1)}, 1)
        await store.delete("inform.positions", "n1")
        node = await start_node("n1", store=store)
        await inform.put("k", b"v")
        await node.close()
        again = await start_node("n1", store=store)
        assert list(again.state.replicas.index) == ["k"]


DAY_NS = 86_400 * 10**9


@pytest.mark.parametrize("hours", [-25, 0, 25])
async def test_a_view_that_missed_a_forgotten_deletion_is_not_loaded(
    start_node, inform, tmp_path, monkeypatch, hours
):
    """For any age of the view by the node's clock: stepped back, ahead, or correct."""
    async with await database.open(f"sqlite:{tmp_path}/old.db") as store:
        first, other = await start_node("n1"), await start_node("n2", store=store)
        await eventually(lambda: first.state.directory.nodes == ["n2"])
        await client.InformClient(inform._bus, node="n1").put("gone", b"v", ack="replicated")
        await other.close()  # the view of n2 has it
        await inform.delete("gone")
        monkeypatch.setattr(first.state, "log_now_ns", lambda: time.time_ns() + 2 * DAY_NS)
        await eventually(lambda: "gone" not in first.state.replicas.index, timeout_s=30)
        now_ns = time.time_ns() + hours * 3_600 * 10**9
        again = await start_node("n2", store=store, now_ns=lambda: now_ns)
        assert "gone" not in again.state.replicas.index
        assert (await inform.find("TRUE")).contexts == []


async def test_a_view_is_loaded_however_old_it_is_while_no_deletion_is_forgotten(
    start_node, inform, tmp_path
):
    async with await database.open(f"sqlite:{tmp_path}/kept.db") as store:
        node = await start_node("n1", store=store)
        await inform.put("k", b"v")
        await eventually(lambda: node.state.position == 1)
        await node.close()
        loaded: list[int] = []
        real = view_writer.ViewWriter.load

        async def load(self: view_writer.ViewWriter) -> None:
            await real(self)
            loaded.append(self._state.position)

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(view_writer.ViewWriter, "load", load)
            later_ns = time.time_ns() + 3 * DAY_NS
            again = await start_node("n1", store=store, now_ns=lambda: later_ns)
        assert loaded == [1]
        assert again.reader.local("k").value == b"v"


async def test_deletions_forgotten_while_a_node_starts_are_noticed(start_node, inform, tmp_path, monkeypatch):
    """After the view was found usable, and before the follower came to the deletion."""
    async with await database.open(f"sqlite:{tmp_path}/race.db") as store:
        first, other = await start_node("n1"), await start_node("n2", store=store)
        await eventually(lambda: first.state.directory.nodes == ["n2"])
        await client.InformClient(inform._bus, node="n1").put("gone", b"v", ack="replicated")
        await other.close()
        deleted = await inform.delete("gone")
        real = view_writer.ViewWriter.load

        async def load(self: view_writer.ViewWriter) -> None:
            await real(self)
            assert self._state.position < deleted.version
            await first.state.log.record_purge(deleted.version, timeout_s=10)
            await first.state.log.purge("gone", deleted.version)

        monkeypatch.setattr(view_writer.ViewWriter, "load", load)
        again = await start_node("n2", store=store)
        assert "gone" not in again.state.replicas.index


async def test_what_is_forgotten_is_recorded_and_never_taken_back(start_node, connect):
    node = await start_node()
    log = node.state.log
    assert await log.purged_up_to() == 0
    await asyncio.gather(*(log.record_purge(number, timeout_s=10) for number in (3, 9, 5)))
    await log.record_purge(4, timeout_s=10)
    assert await log.purged_up_to() == 9
    assert (
        await context_log.ContextLog(await (await connect("b")).open_stream("contexts")).purged_up_to() == 9
    )
    assert not node.state.replicas.index
    assert node.follower.malformed == 0


@pytest.mark.parametrize("is_superseded", [False, True])
async def test_a_view_of_another_log_is_not_loaded(start_node, inform, connect, tmp_path, is_superseded):
    """The log was restored from a backup, and has gone on beyond the view's position with other records."""
    async with await database.open(f"sqlite:{tmp_path}/restored.db") as store:
        node = await start_node("n1", store=store)
        for number in range(5):
            await inform.put(f"old{number}", b"v", attributes={"x": 1})
        await node.close()
        await (await connect("operator")).delete_stream(protocol.STREAM)
        node = await start_node("n1")
        if is_superseded:
            await inform.put("old4", b"w", attributes={"x": 1})
        for number in range(9):
            await inform.put(f"new{number}", b"w", attributes={"x": 1})
        keys = {context.key for context in (await inform.find("x = 1")).contexts}
        await node.close()
        again = await start_node("n1", store=store)
        assert {context.key for context in (await inform.find("x = 1")).contexts} == keys
        assert again.state.replicas.permanent == len(keys)


async def test_what_is_read_again_for_the_view_is_bounded_by_its_bytes(
    start_node, inform, tmp_path, monkeypatch
):
    """Marks take no memory themselves; what the log has in their place does."""
    monkeypatch.setattr(unsaved, "BYTES_MAX", 1)
    monkeypatch.setattr(view_writer, "SAVE_BYTES", 3_000)
    sizes: list[int] = []
    view_save = log_view.ReplicaView.save

    async def save(self: log_view.ReplicaView, entries: Any, position: int) -> None:
        sizes.append(sum(map(unsaved.size, entries.values())))
        await view_save(self, entries, position)

    monkeypatch.setattr(log_view.ReplicaView, "save", save)
    async with await database.open(f"sqlite:{tmp_path}/marks.db") as store:
        node = await start_node("n1", store=store)
        with monkeypatch.context() as full:
            full.setattr(view_writer.ViewWriter, "save", lambda _: asyncio.sleep(0))
            full.setattr(view_writer.ViewWriter, "wait_for_space", lambda _: asyncio.sleep(0))
            for number in range(20):
                await inform.put(f"k{number:02}", b"v" * 1_000)
        await eventually(lambda: not node.state.unsaved, timeout_s=30)
        await node.close()
        assert max(sizes) <= 3_000 + 1_000 + unsaved.ENTRY_BYTES
        again = await start_node("n1", store=store)
        assert again.state.replicas.permanent == 20
        assert again.state.position == 20
