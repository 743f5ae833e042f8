"""Copies of history, checkpoint and alert state, and a checkpoint whose streams were restored without it."""

import asyncio
import errno
import functools
import json
import os
import shutil
import types
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from pyspark.sql.streaming.datasource import ReadMaxRows
from pyspark.sql.types import StructType

from muster.bus import api
from muster.bus.client import client
from muster.bus.streams import snapshots
from muster.core import errors
from muster.core.reports import columns
from muster.core.telemetry import log
from muster.pipeline import client as pipeline_client
from muster.pipeline import settings
from muster.pipeline.alerts import tracker
from muster.pipeline.history import delta, tables
from muster.pipeline.job import checkpoint_label, commit_state, service, state_copy
from muster.pipeline.job.driver import continuation, driver_terms, state_files
from muster.pipeline.source import reader
from muster.testing.eventually import eventually
from tests.pipeline import test_checkpoint, test_history, test_job, traffic

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.may_leak("threads", "files", "processes", reason="Spark keeps its workers for later tests"),
]
RULES = """
rules:
  - {name: hot, scope: node, when: cpu_percent > 90}
  - {name: silent, scope: node, when: age_s > 600}  # longer than the test may take
"""
SETTINGS = settings.PipelineSettings()
TERM = Path("drivers", "00000004", "spark")
ALERTS = "alerts-00000004.json"


def write_batches(folder: Path, *, applied: int, planned: int, run: str = "") -> str:
    """A checkpoint, alert state and history: ``applied`` is the last batch of the alert state."""
    checkpoint = str(folder / "pipeline" / "checkpoint")
    label = checkpoint_label.open_(checkpoint)
    driver_terms.begin(checkpoint, driver_terms.DriverTerm(epoch=4, run=label.run))
    spark = folder / "pipeline" / "checkpoint" / TERM
    for name in ("offsets", "commits", "state/0/0/SSTs"):
        (spark / name).mkdir(parents=True)
    for batch in range(planned + 1):
        (spark / "offsets" / str(batch)).write_text(f'v1\n{{}}\n{{"reports":{batch + 1}}}')
        (spark / "state/0/0" / f"{batch}.changelog").write_text("x")
        if batch < planned:
            (spark / "commits" / str(batch)).write_text("v1\n{}")
            assert test_history.store(
                folder / "history", batch, test_checkpoint.rows(batch + 1), run=label.run
            )
    (spark / "offsets" / f".{planned}.crc").write_text("x")
    stored = commit_state.CommitState(tracker.AlertTrackerState(), batch=(run or label.run, applied))
    (folder / "pipeline" / ALERTS).write_bytes(msgspec.json.encode(stored))
    return label.run


def test_all_parts_of_a_copy_end_at_the_batch_of_the_alert_state(tmp_path):
    folder, target = tmp_path / "domain", tmp_path / "copy"
    run = write_batches(folder, applied=3, planned=6)
    assert state_copy.take(SETTINGS, folder, target) == {}
    spark = target / "checkpoint" / TERM
    assert sorted(path.name for path in (spark / "offsets").iterdir()) == ["0", "1", "2", "3"]
    assert sorted(path.name for path in (spark / "commits").iterdir()) == ["0", "1", "2"]
    assert len(list((spark / "state/0/0").glob("*.changelog"))) == 7
    assert test_checkpoint.stored(target / "history") == sorted(
        (f"m{n}", sequence) for sequence in (1, 2, 3, 4) for n in range(20)
    )
    assert delta.position(target / "history", tables.NODES, run) == 3
    assert (target / "state" / ALERTS).exists()
    # The original is still complete.
    assert len(test_checkpoint.stored(folder / "history")) == 120


def test_a_checkpoint_without_a_complete_batch_is_copied_as_new(tmp_path):
    folder, target = tmp_path / "domain", tmp_path / "copy"
    write_batches(folder, applied=5, planned=1, run="a former one")
    state_copy.take(SETTINGS, folder, target)
    assert [path.name for path in (target / "checkpoint").iterdir()] == [checkpoint_label.LABEL]
    assert not (target / "history" / "nodes").exists() or not test_checkpoint.stored(target / "history")


def test_a_copy_fails_clearly_when_the_pipeline_is_always_faster(tmp_path):
    folder = tmp_path / "domain"
    write_batches(folder, applied=3, planned=6)
    (folder / "pipeline" / "checkpoint" / TERM / "offsets" / "3").unlink()
    with pytest.raises(errors.Unavailable, match=r"deleted .*offsets/3"):
        state_copy.take(SETTINGS, folder, tmp_path / "copy")


def test_a_copy_is_repeated_when_a_successor_replaces_a_folder_by_a_file(tmp_path, monkeypatch):
    folder = tmp_path / "domain"
    write_batches(folder, applied=3, planned=6)
    link, failures = os.link, iter([NotADirectoryError(errno.ENOTDIR, "", "offsets/3")])

    def link_later(source: Path, target: Path) -> None:
        for failure in failures:
            raise failure
        link(source, target)

    def copy(source: Path, target: Path) -> None:
        raise AssertionError("the folder is a file")

    monkeypatch.setattr(os, "link", link_later)
    monkeypatch.setattr(shutil, "copyfile", copy)
    state_copy.take(SETTINGS, folder, tmp_path / "copy")
    assert (tmp_path / "copy" / "checkpoint" / TERM / "offsets" / "3").is_file()


def test_the_state_of_shards_belongs_to_a_copy(tmp_path):
    folder = tmp_path / "domain"
    write_batches(folder, applied=3, planned=6)
    shards = folder / "pipeline" / "checkpoint" / TERM / state_files.FOLDER
    written = [state_files.write(shards, batch, 1, [b"state"]) for batch in range(7)]
    state_copy.take(SETTINGS, folder, tmp_path / "copy")
    copied = tmp_path / "copy" / "checkpoint" / TERM / state_files.FOLDER
    assert state_files.read(copied, written[2]) == b"state"  # the batch after it is repeated
    for batch in range(7, 3 + state_files.KEPT):
        state_files.write(shards, batch, 1, [b"state"])
    state_files.remove_former(shards)
    with pytest.raises(errors.Unavailable, match="the pipeline deleted"):
        state_copy.take(SETTINGS, folder, tmp_path / "late")


def test_a_batch_without_messages_does_not_prevent_a_copy(tmp_path):
    """It has no state of its own: the next one reads that of an earlier batch."""
    folder = tmp_path / "domain"
    write_batches(folder, applied=3, planned=6)
    shards = folder / "pipeline" / "checkpoint" / TERM / state_files.FOLDER
    written = {batch: state_files.write(shards, batch, 1, [b"state"]) for batch in (0, 1, 3, 4)}
    state_copy.take(SETTINGS, folder, tmp_path / "copy")
    copied = tmp_path / "copy" / "checkpoint" / TERM / state_files.FOLDER
    assert state_files.read(copied, written[1]) == b"state"


def test_storage_that_is_not_local_is_named(tmp_path):
    elsewhere = settings.PipelineSettings(history_dir="s3://fleet/history")
    write_batches(tmp_path / "domain", applied=0, planned=1)
    named = state_copy.take(elsewhere, tmp_path / "domain", tmp_path / "copy")
    assert named == {"history": "s3://fleet/history"}
    assert not (tmp_path / "copy" / "history").exists()
    assert (tmp_path / "copy" / "checkpoint" / checkpoint_label.LABEL).exists()


@pytest.mark.parametrize(
    "content", [b"", b"v1\n{}", b"v1\n{}\n[]", b"v1\n{}\n\xff", b'v1\n{}\n{"reports":"x"}']
)
def test_offsets_that_cannot_be_read_are_named(content):
    with pytest.raises(checkpoint_label.CheckpointUnusable, match="offsets cannot be read"):
        driver_terms.parse_offsets(content)


def test_paths_in_a_checkpoint_that_was_moved_are_corrected(tmp_path):
    write_batches(tmp_path / "old", applied=0, planned=1)
    schema = f"{TERM}/state/0/_stateSchema/default/0_a"
    folder = tmp_path / "old" / "pipeline" / "checkpoint"
    metadata = folder / TERM / "state" / "0" / "_metadata" / "v2" / "0"
    metadata.parent.mkdir(parents=True)
    metadata.write_text(f'v2\n{{"stateSchemaFilePaths":["file:{folder}/{schema}"],"x":"file:/y"}}')
    metadata.with_name(".0.crc").touch()
    moved = tmp_path / "new one" / "checkpoint"
    moved.parent.mkdir()
    folder.rename(moved)
    path = moved / metadata.relative_to(folder)
    for _ in range(2):
        driver_terms.relocate(str(moved), 4)
        assert path.read_text() == f'v2\n{{"stateSchemaFilePaths":["file:{moved}/{schema}"],"x":"file:/y"}}'
    assert not path.with_name(".0.crc").exists()


async def test_the_first_new_message_of_a_stream_is_found_by_its_time(broker):
    await traffic.store(broker.url, *[b"x"] * 9)
    async with await client.connect([broker.url], identity="ann") as bus:
        stream = await bus.open_stream(columns.REPORTS_STREAM)
        stored = [message.stored_at_ns // 1_000_000 async for message in stream.read(1)]
        for clock_ms in (0, *stored, stored[-1] + 1):
            expected = sum(at_ms <= clock_ms for at_ms in stored)
            assert await continuation.last_stored_by(stream, clock_ms) == expected
        await stream.purge(before=4)
        assert await continuation.last_stored_by(stream, 0) == 3


def continue_from(folder: Path) -> continuation.Continuation:
    driver = types.SimpleNamespace(lease_epoch=0, epoch=0, check=lambda: None)
    continued = continuation.Continuation(
        driver,  # type: ignore[arg-type]
        log.EventLog("pipeline"),
        folder=folder,
        checkpoint=str(folder / "pipeline" / "checkpoint"),
        history=str(folder / "history"),
        keep_s=60,
    )
    assert not continued.begin()
    return continued


async def test_a_stream_that_was_created_again_is_read_from_its_start_although_it_has_grown(broker, tmp_path):
    write_batches(tmp_path, applied=6, planned=6)
    await traffic.store(broker.url, *[b"x"] * 9)
    continued = continue_from(tmp_path)
    async with await client.connect([broker.url], identity="ann") as bus:
        state = await (await bus.open_stream(columns.REPORTS_STREAM)).state()
        created_ms = state.created_ns // 1_000_000
        for clock_ms in (0, state.now_ns // 1_000_000):  # unknown; of a message of this stream
            assert not await continued.follow_shorter_streams(bus, clock_ms)
        assert await continued.follow_shorter_streams(bus, created_ms - 1)
        assert continued.label.after[columns.REPORTS_STREAM] == 0
        assert not await continued.follow_shorter_streams(bus, created_ms - 1)


async def test_a_stream_that_was_restored_is_read_on(broker, tmp_path):
    write_batches(tmp_path, applied=6, planned=6)
    await traffic.store(broker.url, *[b"x"] * 9)
    continued = continue_from(tmp_path)
    async with await client.connect([broker.url], identity="admin") as bus:
        clock_ms = (await (await bus.open_stream(columns.REPORTS_STREAM)).get(7)).stored_at_ns // 1_000_000
        snapshot = snapshots.StreamSnapshot(bus, columns.REPORTS_STREAM)
        pieces = [piece async for piece in snapshot]

        async def stored_pieces() -> AsyncIterator[bytes]:
            for piece in pieces:
                yield piece

        await bus.delete_stream(columns.REPORTS_STREAM)
        await snapshots.restore(bus, snapshot.config, snapshot.state, stored_pieces())
        assert not await continued.follow_shorter_streams(bus, clock_ms)


async def test_a_query_ends_when_its_stream_is_created_again(broker):
    def reader_of_query() -> reader.BusStreamReader:
        return reader.BusStreamReader(
            {"servers": broker.url, "streams": columns.REPORTS_STREAM}, StructType([])
        )

    async def latest_offset(reading: reader.BusStreamReader, start: dict[str, int]) -> dict[str, int]:
        return await asyncio.to_thread(reading.latestOffset, start, ReadMaxRows(10))

    async def fetched(part: reader.SequenceRange) -> list[api.StoredMessage]:
        return await reading._access.call(functools.partial(reading._fetch, part))

    reading, begun = reader_of_query(), {columns.REPORTS_STREAM: 2}
    await traffic.store(broker.url, *[b"x"] * 3)
    stored = await latest_offset(reading, begun)
    assert stored[columns.REPORTS_STREAM] == 3
    assert json.dumps(await latest_offset(reading, stored)) == json.dumps(stored), "Spark compares text"
    at_the_end = reader.BusStreamReader({"servers": broker.url, "after": "-1"}, StructType([]))
    assert json.dumps(await asyncio.to_thread(at_the_end.initialOffset)) == json.dumps(stored)
    (part,) = reading.partitions(begun, stored)
    (repeated,) = reader_of_query().partitions(begun, stored)  # after a restart
    assert len(await fetched(part)) == 1
    async with await client.connect([broker.url], identity="admin") as bus:
        await bus.delete_stream(columns.REPORTS_STREAM)
    await traffic.store(broker.url, *[b"x"] * 4)
    for another in (reading, reader_of_query()):
        with pytest.raises(errors.Conflict, match="created again"):
            await latest_offset(another, stored)
    for planned in (part, repeated):
        with pytest.raises(errors.Conflict, match="created again"):
            await fetched(planned)


@pytest.mark.slow
async def test_a_copy_of_a_running_pipeline_continues_without_loss_or_duplicates(broker, spark, tmp_path):
    lost, restored, copy = tmp_path / "lost", tmp_path / "restored", tmp_path / "copy"
    for folder in (lost, restored):
        folder.mkdir()
    await traffic.store(broker.url, traffic.body(test_checkpoint.rows(1)))
    async with test_job.running(broker, spark, lost) as ask:
        await eventually(lambda: test_job._read(ask, 20), timeout_s=300)
        await traffic.store(broker.url, traffic.body(test_checkpoint.rows(2)))
        state_copy.take(SETTINGS, lost, copy)
        await eventually(lambda: test_job._read(ask, 40), timeout_s=300)
    shutil.rmtree(lost)
    (copy / "history").rename(restored / "history")
    (restored / "pipeline").mkdir()
    (copy / "checkpoint").rename(restored / "pipeline" / "checkpoint")
    (alerts,) = (copy / "state").iterdir()
    alerts.rename(restored / "pipeline" / alerts.name)
    await traffic.store(broker.url, traffic.body(test_checkpoint.rows(3)))

    def has_all() -> bool:
        return len(test_checkpoint.stored(restored / "history")) >= 60

    async with test_job.running(broker, spark, restored) as ask:
        await eventually(has_all, timeout_s=300)
        assert service.STREAM_SHORTER not in (await ask.progress()).counts
    assert test_checkpoint.stored(restored / "history") == sorted(
        (f"m{n}", sequence) for sequence in (1, 2, 3) for n in range(20)
    )


async def counted_as_shorter(ask: pipeline_client.PipelineClient) -> bool:
    return (await ask.progress()).counts.get(service.STREAM_SHORTER) == 1


@pytest.mark.slow
async def test_streams_that_end_before_the_checkpoint_are_read_from_their_first_new_message(
    broker, spark, tmp_path
):
    """Once while the pipeline runs, once after a restore of the streams only."""
    for sequence in (1, 2, 3):
        await traffic.store(broker.url, traffic.body(test_checkpoint.rows(sequence)))
    root = tmp_path / "history"
    async with test_job.running(broker, spark, tmp_path, rules=RULES) as ask:
        await eventually(lambda: test_job._read(ask, 60), timeout_s=300)
        async with await client.connect([broker.url], identity="admin") as bus:
            await bus.delete_stream(columns.REPORTS_STREAM)
        # It grows beyond the position before the query looks at it.
        await traffic.store(broker.url, traffic.body(test_checkpoint.rows(4)), *[traffic.body([])] * 3000)
        await eventually(lambda: len(test_checkpoint.stored(root)) >= 80, timeout_s=300)
        await eventually(lambda: counted_as_shorter(ask), timeout_s=60)
        assert not await ask.alerts()
    # As after a restore in which the checkpoint and the history are kept: the stream is that of the backup.
    async with await client.connect([broker.url], identity="admin") as bus:
        await bus.delete_stream(columns.REPORTS_STREAM)
    await traffic.store(broker.url, traffic.body(test_checkpoint.rows(4)))
    state_copy.write_restored(tmp_path, {columns.REPORTS_STREAM: 1})
    for sequence in range(5, 30):  # more than before the restore: the sequences alone do not show it
        await traffic.store(broker.url, traffic.body(test_checkpoint.rows(sequence)))
    async with test_job.running(broker, spark, tmp_path, rules=RULES) as ask:
        await eventually(lambda: len(test_checkpoint.stored(root)) >= 580, timeout_s=300)
        await eventually(lambda: counted_as_shorter(ask), timeout_s=60)
        assert not await ask.alerts()
    assert test_checkpoint.stored(root) == sorted(
        (f"m{n}", sequence) for sequence in range(1, 30) for n in range(20)
    )
    assert state_copy.read_restored(tmp_path) is None


def test_a_term_without_a_committed_batch_is_copied_with_the_one_that_has_its_state(tmp_path):
    folder, target = tmp_path / "domain", tmp_path / "copy"
    run = write_batches(folder, applied=3, planned=4)
    checkpoint = folder / "pipeline" / "checkpoint"
    later = driver_terms.DriverTerm(epoch=5, run=run, first=3, state=driver_terms.StatePosition(4, 2))
    driver_terms.begin(str(checkpoint), later)
    offsets = checkpoint / "drivers" / "00000005" / "spark" / "offsets"
    offsets.mkdir(parents=True)
    (offsets / "0").write_text('v1\n{}\n{"reports":4}')
    state_copy.take(SETTINGS, folder, target)
    copied = driver_terms.read_last(str(target / "checkpoint"), run)
    assert copied == driver_terms.TermProgress(later, None, None, {"reports": 4})
    assert (target / "checkpoint" / TERM / "commits" / "2").exists()
    shutil.rmtree(checkpoint / "drivers" / "00000004")
    with pytest.raises(errors.Unavailable, match=r"deleted .*00000004"):
        state_copy.take(SETTINGS, folder, tmp_path / "other")
    (offsets.parent / "commits").mkdir()
    (offsets.parent / "commits" / "0").write_text("v1")
    state_copy.take(SETTINGS, folder, tmp_path / "third")
