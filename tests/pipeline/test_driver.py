"""Which driver may act, and where the next one continues: pure parts, a real broker, real tables."""

import asyncio
import errno
import shutil
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from muster.bus import api, leases
from muster.bus.client import client
from muster.bus.memory import network
from muster.core import errors, health
from muster.core.telemetry import log, metrics
from muster.pipeline import protocol, settings
from muster.pipeline.alerts import tracker
from muster.pipeline.history import delta, tables
from muster.pipeline.job import commit_state, progress, service
from muster.pipeline.job.driver import continuation, driver_lease, driver_terms, fenced_stream, state_files
from muster.testing.eventually import eventually


def T(**fields) -> driver_terms.DriverTerm:
    return driver_terms.DriverTerm(run="r", **fields)


def test_a_driver_continues_after_the_last_committed_batch_and_repeats_a_planned_one_exactly():
    stored = {"reports": 5}
    first = driver_terms.next_term(1, "r", None, stored)
    assert first == T(epoch=1, after=stored)
    nothing = driver_terms.TermProgress(first)
    assert driver_terms.next_term(2, "r", nothing, {"reports": 9}) == T(epoch=2, after=stored)
    planned = driver_terms.TermProgress(first, None, None, {"reports": 8})
    second = driver_terms.next_term(2, "r", planned, {"reports": 8})
    assert second == T(epoch=2, after=stored, until={"reports": 8})
    # Killed before it planned anything: the batch of its predecessor is still to be repeated.
    assert driver_terms.next_term(3, "r", driver_terms.TermProgress(second), {}).until == {"reports": 8}
    done = driver_terms.TermProgress(second, 6, {"reports": 40}, {"reports": 44})
    third = driver_terms.next_term(3, "r", done, {})
    assert third == T(
        epoch=3,
        first=7,
        state=driver_terms.StatePosition(2, 6),
        after={"reports": 40},
        until={"reports": 44},
    )
    begun = driver_terms.TermProgress(third, None, None, {"reports": 44})
    assert driver_terms.next_term(4, "r", begun, {}) == T(
        epoch=4, first=7, state=third.state, after=third.after, until=third.until
    )


def test_terms_are_read_from_sparks_files(tmp_path):
    checkpoint = str(tmp_path)
    assert driver_terms.read_last(checkpoint, "r") is None
    driver_terms.begin(checkpoint, T(epoch=1))
    spark = tmp_path / "drivers" / "00000001" / "spark"
    for folder in ("offsets", "commits"):
        (spark / folder).mkdir(parents=True)
    for batch in (8, 9, 10):
        (spark / "offsets" / str(batch)).write_text(f'v1\n{{"conf":{{}}}}\n{{"reports":{batch * 10}}}')
    for name in ("8", "9", ".9.crc", ".10.tmp"):
        (spark / "commits" / name).write_text("v1\n{}")
    assert driver_terms.read_last(checkpoint, "r") == driver_terms.TermProgress(
        T(epoch=1), 9, {"reports": 90}, {"reports": 100}
    )
    (tmp_path / "drivers" / "00000002").mkdir()  # killed before it stored its record
    last = driver_terms.read_last(checkpoint, "r")
    assert last is not None
    assert last.term.epoch == 1
    assert driver_terms.read_last(checkpoint, "renewed") is None
    driver_terms.begin(checkpoint, T(epoch=3))
    driver_terms.remove_before(checkpoint, 3)
    last = driver_terms.read_last(checkpoint, "r")
    assert last is not None
    assert last.term.epoch == 3


def test_a_former_driver_cannot_write_to_its_checkpoint_any_more(tmp_path):
    for epoch in range(1, 4 + driver_terms.FENCED):
        driver_terms.begin(str(tmp_path), T(epoch=epoch))
        offsets = tmp_path / "drivers" / f"{epoch:08}" / "spark" / "offsets"
        offsets.mkdir(parents=True)
        (offsets / "0").write_text("v1\n{}\n{}")
        for _ in range(2):
            driver_terms.remove_before(str(tmp_path), epoch)
    terms = sorted((tmp_path / "drivers").iterdir())
    assert len(terms) == driver_terms.FENCED + 1
    for former in terms[:-1]:
        assert [path.name for path in former.iterdir()] == ["spark"]
        with pytest.raises(NotADirectoryError):
            (former / "spark" / "offsets").mkdir(parents=True)
    assert (terms[-1] / "spark" / "offsets" / "0").is_file()


def test_the_state_of_shards_is_kept_for_some_batches_and_not_written_by_a_former_driver(tmp_path):
    checkpoint = str(tmp_path / "checkpoint")
    driver_terms.begin(checkpoint, driver_terms.DriverTerm(epoch=1))
    folder = state_files.folder_of(driver_terms.spark_folder(checkpoint, 1))
    assert folder is not None
    with pytest.raises(FileNotFoundError):
        state_files.write(folder, 0, 0, [b"before Spark has begun"])
    folder.parent.mkdir()
    # Between batches 18 and 50 no message was read, so the state was not written.
    names = [state_files.write(folder, batch, 0, [b"%d" % batch]) for batch in (*range(19), 50)]
    again = state_files.write(folder, 50, 0, [b"a repeated batch"])
    state_files.remove_former(folder)
    kept = names[-state_files.KEPT :]
    assert [state_files.read(folder, name) for name in kept] == [b"%d" % n for n in (*range(10, 19), 50)]
    assert state_files.read(folder, again) == b"a repeated batch"
    assert len(list(folder.iterdir())) == state_files.KEPT
    driver_terms.remove_before(checkpoint, 2)
    with pytest.raises(OSError, match="Not a directory"):
        state_files.write(folder, 20, 0, [b"of a former driver"])
    assert state_files.folder_of("s3a://bucket/spark") is None


def test_the_state_of_attempts_that_failed_does_not_accumulate(tmp_path):
    folder = tmp_path / "spark" / state_files.FOLDER
    (folder.parent / "commits").mkdir(parents=True)
    state_files.remove_uncommitted(folder)  # the first query: there are no files
    first = state_files.write(folder, 0, 0, [b"state"])
    (folder.parent / "commits" / "0").touch()
    for _ in range(3):
        state_files.remove_uncommitted(folder)
        state_files.write(folder, 1, 0, [b"of an attempt that fails"])
    assert len([path for path in folder.rglob("*") if path.is_file()]) == 2
    assert state_files.read(folder, first) == b"state"

    def shards() -> Iterator[bytes]:
        yield b"state"
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        state_files.write(folder, 2, 0, shards())
    assert not list((folder / "2").iterdir())


def test_a_table_refuses_the_commits_of_a_former_driver_and_the_same_epoch_twice(tmp_path):
    old, new = (delta.HistoryTable(tmp_path, tables.NODES) for _ in range(2))
    old.claim(4)
    assert old.commit([], ("r", 0), {"p": 1}, epoch=4)
    old.refresh()
    new.claim(5)
    for epoch in (4, 5):
        with pytest.raises(errors.StaleEpoch):
            old.claim(epoch)
    before = new.version()
    with pytest.raises(errors.StaleEpoch) as refused:
        old.commit([], ("r", 1), {"p": 2}, epoch=4)
    assert (refused.value.epoch, refused.value.current) == (4, 5)
    new.refresh()
    assert new.version() == before
    assert new.commit([], ("r", 1), {"p": 2}, epoch=5)
    assert not new.commit([], ("r", 1), epoch=5)


def test_two_drivers_that_claim_the_same_epoch_at_once_do_not_both_get_it(tmp_path, monkeypatch):
    first, other = (delta.HistoryTable(tmp_path, tables.NODES) for _ in range(2))
    monkeypatch.setattr(other, "refresh", lambda: None)  # both read the table before either writes
    first.claim(7)
    with pytest.raises(errors.Conflict):
        other.claim(7)


@pytest.mark.parametrize("lost", ["the last batches", "all terms"])
def test_a_checkpoint_that_is_older_than_the_history_is_not_continued(tmp_path, lost):
    """Copied back by hand it repeated numbers of batches, so the history refused reports it did not have."""
    checkpoint, history = str(tmp_path / "checkpoint"), str(tmp_path / "history")
    lease: Any = SimpleNamespace(lease_epoch=1, epoch=0, check=lambda: None)
    where = continuation.Continuation(
        lease, log.EventLog("test"), folder=tmp_path, checkpoint=checkpoint, history=history, keep_s=3600.0
    )
    where.begin()
    run = where.label.run
    spark = tmp_path / "checkpoint" / "drivers" / f"{where.term.epoch:08}" / "spark"
    for folder in ("offsets", "commits"):
        (spark / folder).mkdir(parents=True)
    table, epoch = delta.HistoryTable(history, tables.NODES, keep_s=3600.0), where.term.epoch
    for batch in range(3):
        (spark / "offsets" / str(batch)).write_text(f'v1\n{{"conf":{{}}}}\n{{"reports":{batch * 10}}}')
        assert table.commit([], (run, batch), {"stream-reports": batch * 10}, epoch=epoch)
        if batch < 2:  # the third one is interrupted
            (spark / "commits" / str(batch)).write_text("v1\n{}")
    where.begin()
    assert (where.label.run, where.term.first, where.term.until) == (run, 2, {"reports": 20})
    shutil.rmtree(tmp_path / "checkpoint" / "drivers" / f"{where.term.epoch:08}")
    if lost == "all terms":
        shutil.rmtree(tmp_path / "checkpoint" / "drivers")
    else:
        (spark / "commits" / "1").unlink()
    where.begin()
    assert where.label.run != run
    assert (where.term.first, where.term.state) == (0, None)
    assert where.term.after == {"reports": 20, "summaries": 0}  # as the history


def alerts_at(now_ms: int) -> bytes:
    return msgspec.json.encode(commit_state.CommitState(tracker.AlertTrackerState(now_ms=now_ms)))


def test_each_driver_writes_an_alert_state_of_its_own_and_reads_the_newest(tmp_path):
    old, new = (commit_state.CommitStateStore(str(tmp_path), epoch) for epoch in (9, 10))
    assert old.load().alerts.now_ms == 0
    old.save(alerts_at(1))
    assert new.load().alerts.now_ms == 1
    new.save(alerts_at(2))
    old.save(alerts_at(3))  # a former driver
    assert new.load().alerts.now_ms == 2
    new.remove_before()
    assert [path.name for path in tmp_path.iterdir()] == ["alerts-00000010.json"]
    commit_state.CommitStateStore(str(tmp_path), 11).remove_before()  # it could not save its own yet
    assert new.load().alerts.now_ms == 2


class PausedLease:
    """A driver that was paused: it acts as the holder of its lease until it reads the record."""

    epoch = 1

    def __init__(self) -> None:
        self.is_former = False

    def check(self) -> None:
        pass

    async def confirm(self) -> None:
        if self.is_former:
            raise errors.StaleEpoch("another process is the driver", epoch=1, current=2)


def messages(*ids: str) -> list[api.OutgoingMessage]:
    return [api.OutgoingMessage("r.x", id.encode(), message_id=id) for id in ids]


async def test_a_former_driver_publishes_nothing(bus):
    stream = await bus.stream(api.StreamSettings("r", ("r.>",)))
    authorities = PausedLease(), PausedLease()
    old, new = (fenced_stream.FencedStream(stream, authority) for authority in authorities)
    await old.fence("r.marker")
    await old.publish(messages("a", "b"))
    authorities[0].is_former = True
    await new.fence("r.marker")
    for late in (messages("c"), messages("c", "d")):
        with pytest.raises(errors.StaleEpoch):
            await old.publish(late)
    await new.publish(messages("c"))
    await new.publish(messages("a", "b", "c", "d", "d"))  # repeated after a crash
    stored = [message.data async for message in stream.read(1) if message.data]
    assert stored == [b"a", b"b", b"c", b"d"]


async def test_the_driver_continues_when_another_writer_uses_the_stream(bus):
    stream = await bus.stream(api.StreamSettings("r", ("r.>",)))
    fenced = fenced_stream.FencedStream(stream, PausedLease())
    await fenced.fence("r.marker")
    await stream.publish("r.other", b"other")
    await fenced.publish(messages(*(f"m{n}" for n in range(1200))))
    assert (await stream.state()).messages == 1202


async def test_a_standby_is_listed_and_takes_over_and_the_former_driver_notices(broker):
    async def current() -> bool:
        return True

    async with (
        await client.connect([broker.url], identity="pipeline") as one,
        await client.connect([broker.url], identity="pipeline") as two,
        await leases.Leases.open(one, ttl_s=2) as one_leases,
        await leases.Leases.open(two, ttl_s=2) as two_leases,
    ):
        driver = driver_lease.DriverLease(one, one_leases)
        standby = driver_lease.DriverLease(two, two_leases)
        assert await driver.try_acquire()
        driver.keep(current)
        assert not await standby.try_acquire()
        waiting = asyncio.create_task(standby.acquire())
        await eventually(lambda: driver.standbys == (f"{standby.process} (starting)",))
        standby.prepared = True
        await eventually(lambda: driver.standbys == (standby.process,))
        await driver.confirm()
        # As a process that was stopped: its lease expires although it knows nothing of it.
        bucket = await two.key_value(api.KeyValueSettings(leases.BUCKET, max_bytes=16 << 20))
        await bucket.delete(protocol.driver_lease("pipeline"))
        await waiting
        with pytest.raises(errors.StaleEpoch):
            await driver.confirm()
        await driver.superseded.wait()
        with pytest.raises(errors.StaleEpoch):
            driver.check()
        await standby.confirm()
        await two_leases.announce(f"{protocol.driver_lease('pipeline')}.standby.x", "host:1")
        standby.keep(current)
        await eventually(lambda: standby.standbys)
        assert standby.standbys == ("host:1",), "not itself"
        await driver.close()
        await standby.close()


@pytest.mark.virtual_time
@pytest.mark.parametrize(
    "failure", [errors.Unavailable("the storage does not respond"), OSError("input/output error")]
)
async def test_a_driver_that_cannot_read_its_checkpoint_for_a_moment_stays_the_driver(failure):
    failures: list[Exception] = [failure]

    async def current() -> bool:
        if failures:
            raise failures.pop()
        return True

    net = network.SimulatedNetwork(seed=1)
    async with await net.connect("pipeline") as bus, await leases.Leases.open(bus, ttl_s=2) as all_leases:
        driver = driver_lease.DriverLease(bus, all_leases)
        assert await driver.try_acquire()
        driver.keep(current)
        before = driver.lease_epoch
        bucket = await bus.key_value(api.KeyValueSettings(leases.BUCKET, max_bytes=16 << 20))
        await bucket.delete(protocol.driver_lease("pipeline"))
        await eventually(lambda: driver.lease_epoch > before, timeout_s=60)
        driver.check()
        assert (failures, driver.superseded.is_set()) == ([], False)
        await driver.close()


async def test_a_former_driver_whose_files_were_removed_ends_as_superseded(bus, tmp_path, monkeypatch):
    """Its successor removes its term: whatever fails then is a consequence, not an error of its own."""
    chosen = settings.PipelineSettings()
    running = service.PipelineService(bus, chosen, service.PipelinePaths(tmp_path, ()))

    async def be_replaced() -> None:
        successor = driver_terms.next_term(99, running._continuation.label.run, None, {})
        driver_terms.begin(chosen.checkpoint_root(tmp_path), successor)
        raise FileNotFoundError("the folder of the term")

    monkeypatch.setattr(running, "_begin_spark", lambda: None)
    monkeypatch.setattr(running, "_run_query", be_replaced)
    with pytest.raises(errors.StaleEpoch):
        await running.run()


async def test_an_error_of_the_driver_itself_is_reported(bus, tmp_path, monkeypatch):
    running = service.PipelineService(
        bus,
        settings.PipelineSettings(),
        service.PipelinePaths(tmp_path, ()),
    )

    async def fail() -> None:
        raise FileNotFoundError("rules.yaml")

    monkeypatch.setattr(running, "_begin_spark", lambda: None)
    monkeypatch.setattr(running, "_run_query", fail)
    with pytest.raises(FileNotFoundError):
        await running.run()


async def test_a_standby_that_takes_over_is_not_up_before_its_first_batch(bus, tmp_path, monkeypatch):
    """A driver that was restarted was shown as up while Spark was still starting."""
    shown: list[protocol.BatchProgress] = []
    measured = progress.ProgressMetrics(metrics.Metrics())
    paths = service.PipelinePaths(tmp_path, ())
    running = service.PipelineService(bus, settings.PipelineSettings(), paths, on_progress=measured.update)

    async def no_spark() -> None:
        await asyncio.Event().wait()

    async def look() -> None:
        shown.append(measured._last)
        assert measured.report().state is health.HealthState.STARTING

    monkeypatch.setattr(running, "_prepare", no_spark)
    monkeypatch.setattr(running, "_begin_spark", lambda: None)
    monkeypatch.setattr(running, "_run_query", look)
    async with await leases.Leases.open(bus) as others:
        former = await others.acquire(protocol.driver_lease(bus.identity))
        taking_over = asyncio.create_task(running.run())
        await eventually(lambda: measured._last.state == "standby")
        await former.release()
        await taking_over
    assert [progress.state for progress in shown] == ["starting"]


def test_a_query_that_ends_again_and_again_is_failed_with_the_last_reason():
    measured = progress.ProgressMetrics(metrics.Metrics())
    seen = []
    for failures in (1, 2, 3):
        measured.update(protocol.BatchProgress(state="failed", reason="no table", failures=failures))
        spark = measured.report()
        seen.append((spark.state.value, spark.reason))
    assert seen == [("late", "no table"), ("late", "no table"), ("failed", "no table")]
    measured.update(protocol.BatchProgress())
    assert measured.report().state is health.HealthState.UP
