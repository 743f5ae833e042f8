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
from muster.inform.node.log import context_log, unsaved, view_writer
from muster.inform.node.log import view as log_view
from muster.testing.eventually import eventually


def change(file: pathlib.Path, statement: str) -> None:
    with contextlib.closing(sqlite3.connect(file)) as db:
        db.execute(statement)
        db.commit()


async def position_of(file: pathlib.Path) -> int:
    view = log_view.ReplicaView(file, "n1")
    try:
        return await view.position()
    finally:
        await view.close()


def entry(key: str, sequence: int) -> context_log.ContextLogEntry:
    return context_log.ContextLogEntry(
        protocol.ContextRecord(key, ("n",), 1 << 16, "n", b"\0\xff" * 100), sequence
    )


async def test_what_is_saved_is_loaded_with_its_position(tmp_path):
    view = log_view.ReplicaView(tmp_path / "folder" / "n.db", "n")
    assert await view.position() == 0
    await view.save({"a": entry("a", 1), "b/é": entry("b/é", 2), "c": entry("c", 3)}, 3)
    await view.save({"a": None, "c": entry("c", 4)}, 4)
    await view.close()
    assert (tmp_path / "folder" / "n.db").stat().st_mode & 0o777 == 0o600
    view = log_view.ReplicaView(tmp_path / "folder" / "n.db", "n")
    assert await view.position() == 4
    loaded = {item.record.key: item async for page in view.load() for item in page}
    assert loaded == {"b/é": entry("b/é", 2), "c": entry("c", 4)}
    assert await view.value("c") == entry("c", 4)
    assert await view.value("a") is None
    await view.clear()
    assert await view.position() == 0
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
                await view.position()
            await view.clear()
        assert await view.position() == 0
        assert (tmp_path / "n.db.discarded").exists() == (damage == other)
        await view.save({"a": entry("a", 1)}, 1)
        await view.close()
    file.write_bytes(b"a file of somebody else" * 100)
    view = log_view.ReplicaView(file, "n")
    with pytest.raises(errors.InvalidInput, match="is damaged"):
        await view.position()
    await view.clear()
    assert await view.position() == 0
    await view.close()
    assert (tmp_path / "n.db.discarded").read_bytes().startswith(b"a file")


async def test_a_node_starts_again_with_its_view(start_node, inform, tmp_path):
    file = tmp_path / "n1.db"
    first = await start_node("n1", view=file)
    for number in range(30):
        await inform.put(f"k{number}", b"%d" % number, attributes={"n": number})
    await first.close()
    again = await start_node("n1", view=file)
    assert again.state.replicas.permanent == 30
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
    await again.close()
    assert await position_of(file) == 10


async def test_what_the_view_cannot_give_is_read_from_the_log(start_node, inform, tmp_path, monkeypatch):
    async def lost(*_: object) -> None:
        raise errors.NotConnected("the view is gone")

    file = tmp_path / "lost.db"
    node = await start_node("n1", view=file)
    await inform.put("k", b"v", attributes={"a": 1})
    await eventually(lambda: not node.state.unsaved, timeout_s=30)
    node.state.replicas._forget_value(node.state.replicas.index["k"])
    monkeypatch.setattr(log_view.ReplicaView, "value", lost)
    assert [context.value for context in (await inform.find("a = 1")).contexts] == [b"v"]


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
        assert node.state.replicas.evicted
        assert (await inform.get("k00")).value == b"0" * 50_000
        assert len((await inform.find("a = 1")).contexts) == 30
        assert node.failure() is None
        await node.close()
        other.execute("ROLLBACK")
    again = await start_node("n1", view=file, memory_bytes=1 << 20)
    assert again.state.replicas.permanent == 30
    await eventually(lambda: not again.state.unsaved, timeout_s=30)
    with contextlib.closing(sqlite3.connect(file, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        await inform.put("later", b"v")
        await eventually(lambda: again.view_failure is not None, timeout_s=30)
        other.execute("ROLLBACK")
    await eventually(lambda: again.view_failure is None and not again.state.unsaved, timeout_s=60)
    assert again.failure() is None


async def test_a_node_that_catches_up_does_not_outrun_its_view(start_node, inform, tmp_path, monkeypatch):
    monkeypatch.setattr(unsaved, "BYTES_MAX", 100 * unsaved.ENTRY_BYTES)
    first = await start_node("n1")
    for number in range(300):
        await first.writer.write(protocol.PutContext(f"k{number}", b"v"), "ann")
    file = tmp_path / "late.db"
    most = 0
    view_save = log_view.ReplicaView.save

    async def save(self: log_view.ReplicaView, entries: Any, position: int) -> None:
        nonlocal most
        most = max(most, len(entries))
        await view_save(self, entries, position)

    monkeypatch.setattr(log_view.ReplicaView, "save", save)
    await first.close()
    again = await start_node("n1", view=file)
    assert again.state.replicas.permanent == 300
    assert 0 < most <= 100
    await again.close()
    assert await position_of(file) == 300


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
    assert again.state.replicas.permanent == 10
    assert len((await inform.find("x = 1")).contexts) == 10


DAY_NS = 86_400 * 10**9


@pytest.mark.parametrize("hours", [-25, 0, 25])
async def test_a_view_that_missed_a_forgotten_deletion_is_not_loaded(
    start_node, inform, tmp_path, monkeypatch, hours
):
    """For any age of the view by the node's clock: stepped back, ahead, or correct."""
    file = tmp_path / "old.db"
    first, other = await start_node("n1"), await start_node("n2", view=file)
    await eventually(lambda: first.state.directory.nodes == ["n2"])
    await client.InformClient(inform._bus, node="n1").put("gone", b"v", ack="replicated")
    await other.close()  # the view of n2 has it
    await inform.delete("gone")
    monkeypatch.setattr(first.state, "log_now_ns", lambda: time.time_ns() + 2 * DAY_NS)
    await eventually(lambda: "gone" not in first.state.replicas.index, timeout_s=30)
    now_ns = time.time_ns() + hours * 3_600 * 10**9
    again = await start_node("n2", view=file, now_ns=lambda: now_ns)
    assert "gone" not in again.state.replicas.index
    assert (await inform.find("TRUE")).contexts == []


async def test_a_view_is_loaded_however_old_it_is_while_no_deletion_is_forgotten(
    start_node, inform, tmp_path
):
    file = tmp_path / "kept.db"
    node = await start_node("n1", view=file)
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
        again = await start_node("n1", view=file, now_ns=lambda: later_ns)
    assert loaded == [1]
    assert again.reader.local("k").value == b"v"


async def test_deletions_forgotten_while_a_node_starts_are_noticed(start_node, inform, tmp_path, monkeypatch):
    """After the view was found usable, and before the follower came to the deletion."""
    file = tmp_path / "race.db"
    first, other = await start_node("n1"), await start_node("n2", view=file)
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
    again = await start_node("n2", view=file)
    assert "gone" not in again.state.replicas.index


async def test_what_is_forgotten_is_recorded_and_never_taken_back(start_node, connect):
    node = await start_node()
    log = node.state.log
    assert await log.purged_up_to() == 0
    await asyncio.gather(*(log.record_purge(number, timeout_s=10) for number in (3, 9, 5)))
    await log.record_purge(4, timeout_s=10)
    assert await log.purged_up_to() == 9
    assert (
        await context_log.ContextLog(await (await connect("b")).open_stream("contexts"), "b").purged_up_to()
        == 9
    )
    assert not node.state.replicas.index
    assert node.follower.malformed == 0


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
    file = tmp_path / "marks.db"
    node = await start_node("n1", view=file)
    with monkeypatch.context() as full:
        full.setattr(view_writer.ViewWriter, "save", lambda _: asyncio.sleep(0))
        full.setattr(view_writer.ViewWriter, "wait_for_space", lambda _: asyncio.sleep(0))
        for number in range(20):
            await inform.put(f"k{number:02}", b"v" * 1_000)
    await eventually(lambda: not node.state.unsaved, timeout_s=30)
    await node.close()
    assert max(sizes) <= 3_000 + 1_000 + unsaved.ENTRY_BYTES
    again = await start_node("n1", view=file)
    assert again.state.replicas.permanent == 20
    assert again.state.position == 20
