"""The persistent view of a node: a file that may be behind, damaged, locked or of another log."""

from __future__ import annotations

import asyncio
import contextlib
import pathlib
import sqlite3
import time
from typing import Any

import pytest

from muster.core import errors
from muster.inform import client, protocol
from muster.inform.node import maintenance
from muster.inform.node import node as node_node
from muster.inform.node.log import context_log, fences, page_order, unsaved, view_writer
from muster.inform.node.log import view as log_view
from muster.testing.eventually import eventually


def change(file: pathlib.Path, statement: str) -> None:
    with contextlib.closing(sqlite3.connect(file)) as db:
        db.execute(statement)
        db.commit()


async def position_of(file: pathlib.Path) -> int:
    view = log_view.ReplicaView(file, "n1")
    try:
        return (await view.facts()).position
    finally:
        await view.close()


def entry(key: str, position: int, **more: Any) -> context_log.ContextLogEntry:
    record = protocol.ContextRecord(key, ("n",), 1 << 16, "n", b"\0\xff" * 100, **more)
    return context_log.ContextLogEntry(record, position)


def facts(position: int) -> log_view.ViewFacts:
    return log_view.ViewFacts("log", position, [])


async def test_what_is_saved_is_loaded_with_its_position(tmp_path):
    view = log_view.ReplicaView(tmp_path / "folder" / "n.db", "n", history=3)
    assert await view.facts() == log_view.ViewFacts("", 0, [])
    fence = fences.NodeFence(3, "m", [protocol.FenceCandidate("n", 0.5, 1.0, "z")])
    await view.save({"a": [entry("a", 1)], "b/é": [entry("b/é", 2)], "c": [entry("c", 3)]}, facts(3))
    forgotten = entry("a", 4, reason="forget")
    versions = [entry("c", number) for number in range(5, 9)]
    refused = entry("c", 9, reason="refuse")
    saved = log_view.ViewFacts("log", 9, [fence])
    await view.save({"a": [forgotten], "c": [*versions, refused]}, saved)
    await view.close()
    assert (tmp_path / "folder" / "n.db").stat().st_mode & 0o777 == 0o600
    view = log_view.ReplicaView(tmp_path / "folder" / "n.db", "n", history=3)
    assert await view.facts() == saved
    loaded = {item.record.key: item async for page in view.load() for item in page}
    assert loaded == {"b/é": entry("b/é", 2), "c": entry("c", 8)}
    assert await view.value("c") == entry("c", 8)
    assert await view.value("a") is None
    assert await view.versions("c") == [entry("c", 7), entry("c", 8), refused]
    assert await view.versions("c", 8) == [entry("c", 8), refused]
    assert await view.versions("c", 0, 1) == [entry("c", 7)]
    assert [item.position for item in await view.oldest(10, 1 << 20)] == [2, 8]
    assert [item.position for item in await view.after(2, 10, 1 << 20)] == [7, 8, 9]
    assert [item.position for item in await view.after(0, 2, 1 << 20)] == [2, 7]
    assert [item.position for item in await view.after(0, 10, 1)] == [2]
    assert await view.live_bytes() > 400
    await view.save({"c": [entry("c", 8), refused]}, saved)  # again, after a crash
    assert await view.versions("c") == [entry("c", 7), entry("c", 8), refused]
    await view.clear()
    assert (await view.facts()).position == 0
    assert [page async for page in view.load()] == []
    await view.close()


async def test_a_file_that_is_no_view_of_this_node_is_not_used(tmp_path):
    """A view of another node is discarded; a file of something else is moved aside."""
    file = tmp_path / "n.db"
    other = "PRAGMA application_id = 7"
    for damage in (None, "UPDATE facts SET node = 'm'", "PRAGMA user_version = 99", other):
        view = log_view.ReplicaView(file, "n")
        if damage is not None:
            change(file, damage)
            with pytest.raises(errors.InvalidInput, match="is not the view of n"):
                await view.facts()
            await view.clear()
        assert (await view.facts()).position == 0
        assert (tmp_path / "n.db.discarded").exists() == (damage == other)
        await view.save({"a": [entry("a", 1)]}, facts(1))
        await view.close()
    file.write_bytes(b"a file of somebody else" * 100)
    view = log_view.ReplicaView(file, "n")
    with pytest.raises(errors.InvalidInput, match="is damaged"):
        await view.facts()
    await view.clear()
    assert (await view.facts()).position == 0
    await view.close()
    assert (tmp_path / "n.db.discarded").read_bytes().startswith(b"a file")


async def test_a_process_that_continues_does_not_write_into_the_view_of_the_next(tmp_path):
    """It was frozen, and is behind: the file would have a position without all records up to there."""
    frozen = log_view.ReplicaView(tmp_path / "n.db", "n")
    await frozen.save({"a": [entry("a", 1)]}, facts(1))
    view = log_view.ReplicaView(tmp_path / "n.db", "n")
    await view.save({"a": [entry("a", 2)]}, facts(2))
    for _ in range(2):
        with pytest.raises(errors.Unavailable, match="another process writes"):
            await frozen.save({"a": [entry("a", 1)], "b": [entry("b", 1)]}, facts(1))
    assert await view.facts() == facts(2)
    assert await view.value("a") == entry("a", 2)
    assert await view.value("b") is None
    await view.save({"a": [entry("a", 3)]}, facts(3))
    for each in (frozen, view):
        await each.close()


async def test_a_view_of_another_log_is_not_loaded_if_it_was_being_made(start_node, tmp_path):
    """Its position is that of the first complete save; it may have records before."""
    view = log_view.ReplicaView(tmp_path / "n1.db", "n1")
    await view.save({"a": [entry("a", 1)]}, log_view.ViewFacts("another log", 0, []))
    await view.close()
    node = await start_node("n1", view=tmp_path / "n1.db")
    assert await node.records.current("a") is None


async def test_a_node_starts_again_with_its_view(start_node, inform, tmp_path):
    file = tmp_path / "n1.db"
    first = await start_node("n1", view=file)
    for number in range(30):
        await inform.put(f"k{number}", b"%d" % number, attributes={"n": number})
    await first.close()
    again = await start_node("n1", view=file)
    assert again.replicas.permanent == 30
    assert again.reader.local("k7").value == b"7"


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE records SET record = x'ff00' WHERE key = 'k3'",
        "UPDATE facts SET node = 'another'",
        "DROP TABLE records",
    ],
)
async def test_a_damaged_view_is_made_again_from_the_log(start_node, inform, tmp_path, damage):
    file = tmp_path / "damaged.db"
    first = await start_node("n1", view=file)
    for number in range(10):
        await inform.put(f"k{number}", b"%d" % number)
    await first.close()
    change(file, damage)
    again = await start_node("n1", view=file)
    assert [again.reader.local(f"k{number}").value for number in range(10)] == [
        b"%d" % number for number in range(10)
    ]
    applied = again.log.applied
    await again.close()
    assert await position_of(file) == applied


async def test_a_view_that_cannot_be_written_stops_neither_reads_nor_writes(
    start_node, inform, tmp_path, monkeypatch
):
    """It is behind then; the log has everything, and a node that starts again continues from there."""
    monkeypatch.setattr(log_view, "BUSY_S", 0.05)
    file = tmp_path / "locked.db"
    node = await start_node("n1", view=file, memory_bytes=1 << 20)
    with contextlib.closing(sqlite3.connect(file, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        for number in range(30):
            await inform.put(f"k{number:02}", b"%d" % number * 50_000, attributes={"a": 1})
        await eventually(lambda: node.view_failure is not None, timeout_s=30)
        assert node.replicas.evicted
        assert (await inform.get("k00")).value == b"0" * 50_000
        assert len((await inform.find("a = 1")).contexts) == 30
        assert node.failure() is None
        await node.close()
        other.execute("ROLLBACK")
    again = await start_node("n1", view=file, memory_bytes=1 << 20)
    assert again.replicas.permanent == 30
    await eventually(lambda: not again.records.unsaved, timeout_s=30)
    with contextlib.closing(sqlite3.connect(file, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        await inform.put("later", b"v")
        await eventually(lambda: again.view_failure is not None, timeout_s=30)
        other.execute("ROLLBACK")
    await eventually(lambda: again.view_failure is None and not again.records.unsaved, timeout_s=60)
    assert again.failure() is None


async def test_a_node_that_catches_up_does_not_outrun_its_view(start_node, inform, tmp_path, monkeypatch):
    monkeypatch.setattr(unsaved, "BYTES_MAX", 100 * unsaved.ENTRY_BYTES)
    first = await start_node("n1")
    for number in range(300):
        await first.writer.write(protocol.PutContext(f"k{number}", b"v"), "ann")
    file = tmp_path / "late.db"
    most = 0
    view_save = log_view.ReplicaView.save

    async def save(self: log_view.ReplicaView, changes: Any, now: log_view.ViewFacts) -> None:
        nonlocal most
        most = max(most, len(changes))
        await view_save(self, changes, now)

    await first.close()
    monkeypatch.setattr(log_view.ReplicaView, "save", save)
    again = await start_node("n1", view=file)
    assert again.replicas.permanent == 300
    assert 0 < most <= 200, "a page beyond the limit"
    applied = again.log.applied
    await again.close()
    assert await position_of(file) == applied


def test_beyond_its_bytes_only_positions_are_remembered(monkeypatch):
    monkeypatch.setattr(unsaved, "BYTES_MAX", 2 * unsaved.ENTRY_BYTES)
    lacking = unsaved.UnsavedChanges(history=2)
    for number in range(4):
        lacking.note(entry(f"k{number}", number))
    taken = lacking.first(10, 1 << 20)
    assert taken == {"k0": [entry("k0", 0)], "k1": [entry("k1", 1)], "k2": [2], "k3": [3]}
    lacking.note(entry("k2", 9))  # while they are being saved
    for key, changes in taken.items():
        lacking.saved(key, changes)
    assert lacking.first(1, 0) == {"k2": [9]}, "one at least"
    assert not lacking.is_full


def test_of_each_key_as_many_records_are_kept_as_versions():
    lacking = unsaved.UnsavedChanges(history=2)
    for number in range(5):
        lacking.note(entry("k", number))
    assert lacking.of("k") == [entry("k", 2), entry("k", 3), entry("k", 4)]
    lacking.note(entry("k", 5, reason="forget"))
    lacking.note(entry("k", 6))
    assert [unsaved.position(change) for change in lacking.of("k")] == [5, 6]


def test_changes_after_a_position_are_found_without_a_look_at_the_others(monkeypatch):
    """A watcher of a prefix asks for them after each page."""
    monkeypatch.setattr(unsaved, "ORDER_MIN", 8)
    lacking = unsaved.UnsavedChanges(history=2)
    for number in range(40):
        lacking.note(entry(f"k{number % 3}", number))
    assert lacking.after(36) == [
        (f"k{number % 3}", entry(f"k{number % 3}", number)) for number in (37, 38, 39)
    ]
    assert [unsaved.position(change) for _, change in lacking.after(-1)] == list(range(31, 40))
    assert len(lacking._order) <= 2 * 9, "also while nothing can be saved"
    for key, changes in lacking.first(1, 0).items():
        lacking.saved(key, changes)
    lacking.saved_until(33)
    lacking.note(entry("k1", 40, reason="forget"))
    assert [key for key, _ in lacking.after(33)] == ["k2", "k2", "k1"]
    lacking.clear()
    assert lacking.after(-1) == []


async def test_a_damaged_view_and_a_kill_leave_nothing_out(start_node, inform, tmp_path, monkeypatch):
    """Neither what was read of the view before the damage, nor what was to be saved before the kill."""
    monkeypatch.setattr(log_view, "PAGE", 2)
    file = tmp_path / "damaged.db"
    node = await start_node("n1", view=file)
    for number in range(10):
        await inform.put(f"k{number}", b"v", attributes={"x": 1})
    await node.close()
    change(file, "UPDATE records SET record = x'ff' WHERE key = 'k7'")
    with monkeypatch.context() as killed:
        killed.setattr(view_writer.ViewWriter, "save", lambda _: asyncio.sleep(0))
        await (await start_node("n1", view=file)).close()
    node = await start_node("n1", view=file)
    assert len((await inform.find("x = 1")).contexts) == 10
    await node.close()
    change(file, "UPDATE records SET record = x'ff' WHERE key = 'k7'")
    await (await start_node("n1", view=file)).close()  # reads all from the log, and saves it
    again = await start_node("n1", view=file)
    assert again.replicas.permanent == 10
    assert len((await inform.find("x = 1")).contexts) == 10


DAY_NS = 86_400 * 10**9


@pytest.mark.parametrize("hours", [-25, 0, 25])
async def test_a_view_that_missed_a_forgotten_deletion_is_not_loaded(
    start_node, inform, tmp_path, monkeypatch, hours
):
    """For any age of the view by the node's clock: stepped back, ahead, or correct."""
    file = tmp_path / "old.db"
    first, other = await start_node("n1"), await start_node("n2", view=file)
    await eventually(lambda: first.directory.nodes == ["n2"])
    await client.InformClient(inform._bus, node="n1").put("gone", b"v", ack="replicated")
    await other.close()  # the view of n2 has it
    await inform.delete("gone")
    monkeypatch.setattr(first.freshness, "log_now_ns", lambda: time.time_ns() + 2 * DAY_NS)
    await eventually(lambda: "gone" not in first.replicas.index, timeout_s=30)
    now_ns = time.time_ns() + hours * 3_600 * 10**9
    again = await start_node("n2", view=file, now_ns=lambda: now_ns)
    assert "gone" not in again.replicas.index
    assert (await inform.find("TRUE")).contexts == []


async def test_a_view_is_loaded_however_old_it_is_while_no_deletion_is_forgotten(
    start_node, inform, tmp_path
):
    file = tmp_path / "kept.db"
    node = await start_node("n1", view=file)
    await inform.put("k", b"v")
    await eventually(lambda: node.log.applied >= 1)
    applied = node.log.applied
    await node.close()
    loaded: list[int] = []
    real = view_writer.ViewWriter.load

    async def load(self: view_writer.ViewWriter) -> None:
        await real(self)
        loaded.append(self.log.applied)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(view_writer.ViewWriter, "load", load)
        later_ns = time.time_ns() + 3 * DAY_NS
        again = await start_node("n1", view=file, now_ns=lambda: later_ns)
    assert loaded == [applied]
    assert again.reader.local("k").value == b"v"


@pytest.mark.parametrize("has_view", [False, True])
async def test_a_trimmed_log_has_all_contexts(start_node, inform, tmp_path, monkeypatch, has_view):
    """Also for a node whose view is from before, and for one that begins; and nothing that was deleted."""
    monkeypatch.setattr(maintenance, "TRIM_BYTES_MIN", 100_000)
    monkeypatch.setattr(page_order, "WINDOW", 20)
    monkeypatch.setattr(node_node, "TRIM_S", 0.1)
    file = tmp_path / "n2.db"
    node = await start_node("n1", replicas=2, tombstone_s=0.3)
    other = await start_node("n2", replicas=2, view=file)
    await eventually(lambda: node.directory.nodes == ["n2"])
    near = client.InformClient(inform._bus, node="n1")
    await near.put("old", b"old", attributes={"x": 1})
    await near.put("gone", b"v")
    await other.close()
    await near.delete("gone")
    for number in range(400):
        await near.put(f"k{number % 5}", b"%d" % number * 1_000, attributes={"x": 1})

    async def trimmed() -> bool:
        stored = await node.log.state()
        return bool(stored.first_sequence > 100 and stored.bytes < 300_000)

    await eventually(trimmed, timeout_s=60)
    assert "gone" not in node.replicas.index
    kept = await near.find("x = 1")
    assert [context.key for context in kept.contexts] == ["k0", "k1", "k2", "k3", "k4", "old"]
    await node.close()
    await start_node("n2", view=file if has_view else None)
    for context in kept.contexts:
        read = await client.InformClient(inform._bus, node="n2").get(context.key, max_staleness_s=0.0)
        assert (read.value, read.version) == (context.value, context.version)
    with pytest.raises(errors.NotFound):
        await inform.get("gone", max_staleness_s=0.0)
    assert (await inform.put("old", b"new", expected_version=kept.contexts[-1].version)).version


async def test_another_node_trims_the_log_if_the_first_cannot_write_its_view(
    start_node, inform, tmp_path, monkeypatch
):
    monkeypatch.setattr(maintenance, "TRIM_BYTES_MIN", 100_000)
    monkeypatch.setattr(page_order, "WINDOW", 20)
    monkeypatch.setattr(node_node, "TRIM_S", 0.1)
    full, other = [
        await start_node(name, view=tmp_path / f"{name}.db", max_bytes=2_000_000) for name in ("n1", "n2")
    ]
    await eventually(lambda: full.directory.nodes == ["n2"])
    await full.records.view._run(lambda db: db.execute("PRAGMA query_only = ON"))
    for number in range(600):
        await inform.put(f"k{number % 5}", b"%d" % number * 1_000)
    await eventually(lambda: full.view_failure is not None)

    async def is_trimmed() -> bool:
        return bool((await other.log.state()).first_sequence > 100)

    await eventually(is_trimmed, timeout_s=30)


@pytest.mark.parametrize("is_superseded", [False, True])
async def test_a_view_of_another_log_is_not_loaded(start_node, inform, connect, tmp_path, is_superseded):
    """The log was restored from a backup, and has gone on beyond the view's position with other records."""
    file = tmp_path / "restored.db"
    node = await start_node("n1", view=file)
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
    again = await start_node("n1", view=file)
    assert {context.key for context in (await inform.find("x = 1")).contexts} == keys
    assert again.replicas.permanent == len(keys)


async def test_a_node_goes_on_with_a_stream_that_was_made_again(start_node, inform, connect, tmp_path):
    node = await start_node("n1", view=tmp_path / "again.db")
    for number in range(5):
        await inform.put(f"old{number}", b"v")
    operator = await connect("operator")
    await operator.delete_stream(protocol.STREAM)
    await context_log.open_stream(operator)

    async def is_read_again() -> bool:
        with contextlib.suppress(errors.Unavailable):
            await inform.put("new", b"w")
            return not node.replicas.index.keys() - {"new"}
        return False

    await eventually(is_read_again, timeout_s=30)
    assert (await inform.get("new", max_staleness_s=0.0)).value == b"w"
    with pytest.raises(errors.NotFound):
        await inform.get("old1", max_staleness_s=0.0)
    assert node.failure() is None


async def test_what_is_read_again_for_the_view_is_bounded_by_its_bytes(
    start_node, inform, tmp_path, monkeypatch
):
    """Marks take no memory themselves; what the log has in their place does."""
    monkeypatch.setattr(unsaved, "BYTES_MAX", 1)
    monkeypatch.setattr(view_writer, "SAVE_BYTES", 3_000)
    sizes: list[int] = []
    view_save = log_view.ReplicaView.save

    async def save(self: log_view.ReplicaView, changes: Any, now: log_view.ViewFacts) -> None:
        sizes.append(sum(unsaved.size(change) for each in changes.values() for change in each))
        await view_save(self, changes, now)

    monkeypatch.setattr(log_view.ReplicaView, "save", save)
    file = tmp_path / "marks.db"
    node = await start_node("n1", view=file)
    with monkeypatch.context() as full:
        full.setattr(view_writer.ViewWriter, "save", lambda _: asyncio.sleep(0))
        full.setattr(view_writer.ViewWriter, "wait_for_space", lambda _: asyncio.sleep(0))
        for number in range(20):
            await inform.put(f"k{number:02}", b"v" * 1_000)
    await eventually(lambda: not node.records.unsaved, timeout_s=30)
    await node.close()
    assert max(sizes) <= 3_000 + 1_000 + unsaved.ENTRY_BYTES
    again = await start_node("n1", view=file)
    assert again.replicas.permanent == 20
