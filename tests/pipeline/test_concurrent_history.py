"""Several processes change the history at the same time: no row is lost, doubled, or returns."""

import contextlib
import multiprocessing
import os
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable

from muster.core import errors
from muster.pipeline.history import data_files, delta, export, maintenance, search, sql, storage, tables
from tests.pipeline import test_history, traffic
from tests.pipeline.test_history import HOUR, T0, root, store  # noqa: F401 (a fixture)

LATER_S = T0 / 1000 + 3 * 86400


def count(root: Path, table: str = tables.NODES, where: str = "TRUE", **more: Any) -> int:  # noqa: F811
    text = f"SELECT count(*) AS n FROM {table} WHERE {where}"
    return int(sql.rows(sql.query(root, text, **more).table)[0]["n"])


@pytest.fixture
def before_commit(monkeypatch):
    """Runs a function once, when maintenance has read the table and has not committed yet."""

    def arrange(act):
        pending = [act]
        original = delta.HistoryTable.replace

        def replace(self, *words, **more):
            if pending:
                pending.pop()()
            return original(self, *words, **more)

        monkeypatch.setattr(delta.HistoryTable, "replace", replace)

    return arrange


@pytest.fixture
def after_reading(monkeypatch):
    """Runs a function once, when the reports of an hour have been opened and are not aggregated yet."""

    def arrange(act):
        pending = [act]
        original = maintenance._aggregated

        @contextlib.contextmanager
        def aggregated(nodes, hour):
            if pending:
                pending.pop()()
            with original(nodes, hour) as batches:
                yield batches

        monkeypatch.setattr(maintenance, "_aggregated", aggregated)

    return arrange


def test_rows_are_deleted_once_although_their_files_are_compacted_meanwhile(root, before_commit):  # noqa: F811
    before_commit(lambda: maintenance.compact(root, tables.NODES, LATER_S))
    assert export.forget(root, "m3") == {"nodes": 3}
    assert len(DeltaTable(root / "nodes").file_uris()) == 1
    assert (count(root), count(root, where="machine = 'm3'")) == (27, 0)


def test_rows_that_are_written_during_a_deletion_are_deleted_too(root, before_commit):  # noqa: F811
    before_commit(lambda: store(root, 3, [traffic.report(name, 9, T0) for name in ("m3", "new")]))
    assert export.forget(root, "m3") == {"nodes": 4}
    assert (count(root), count(root, where="machine = 'm3'")) == (28, 0)


def test_a_deletion_and_batches_at_the_same_time_do_not_disturb_each_other(root, monkeypatch):  # noqa: F811
    """A commit of the pipeline falls between the last look at the table and the commit of the deletion."""
    batches = iter(range(3, 6))
    original = delta.HistoryTable._write

    def write(self, *words, retries=None, **more):
        batch = next(batches, None) if retries == 0 else None
        if batch is not None:
            store(root, batch, [traffic.report("new", batch, T0)])
        original(self, *words, retries=retries, **more)

    monkeypatch.setattr(delta.HistoryTable, "_write", write)
    assert export.forget(root, "m3") == {"nodes": 3}
    assert (count(root), count(root, where="machine = 'm3'")) == (30, 0)


def test_a_compaction_gives_way_to_a_deletion(root, monkeypatch):  # noqa: F811
    groups = maintenance._mergeable(delta.Snapshot(root, tables.NODES), LATER_S)
    export.forget(root, "m3")
    monkeypatch.setattr(maintenance, "_mergeable", lambda *_: groups)  # found before the deletion
    assert maintenance.compact(root, tables.NODES, LATER_S) == 0
    monkeypatch.undo()
    assert maintenance.compact(root, tables.NODES, LATER_S) == 3
    assert (count(root), count(root, where="machine = 'm3'")) == (27, 0)


def test_a_forgotten_machine_does_not_return_with_the_hours_being_computed(root, after_reading):  # noqa: F811
    after_reading(lambda: export.forget(root, "m3"))
    maintenance.update_hourly(root, LATER_S)
    assert count(root, tables.HOURLY, "machine = 'm3'") == 0
    assert count(root, tables.HOURLY) == 27


def test_an_hour_that_two_processes_compute_has_every_report_once(root, after_reading):  # noqa: F811
    """The slower process has read fewer reports: it does not replace the result of the other."""

    def other() -> None:
        store(root, 3, [traffic.report("late", 1, T0)])
        maintenance.update_hourly(root, LATER_S)

    after_reading(other)
    maintenance.update_hourly(root, LATER_S)
    reports = sql.rows(sql.query(root, "SELECT machine, reports FROM hourly WHERE hour = hour").table)
    assert len(reports) == 31
    assert sum(row["reports"] for row in reports) == 31


def test_files_that_were_written_and_not_committed_are_neither_read_nor_kept_for_ever(root):  # noqa: F811
    """The driver is killed between the files and the commit; its successor repeats the batch."""
    rows = test_history.node_rows([traffic.report("again", 1, T0)], 3)
    lost = data_files.write(root, tables.NODES, rows, "r-3-0").files
    assert count(root) == 30
    store(root, 3, [traffic.report("again", 1, T0)])
    assert count(root, where="machine = 'again'") == 1
    os.utime(root / "nodes" / lost[0].path, (1, 1))
    assert maintenance.vacuum(root, tables.NODES, 3600.0) == 1
    assert count(root) == 31


def test_a_snapshot_whose_files_are_gone_is_an_error_with_a_reason(root, tmp_path):  # noqa: F811
    version = delta.Snapshot(root, tables.NODES).delta.version()
    maintenance.compact(root, tables.NODES, LATER_S)
    assert count(root, as_of=version) == 30
    maintenance.purge(root, tables.NODES)
    past = search.HistorySearch(as_of=version)
    for read in (
        lambda: count(root, as_of=version),
        lambda: list(search.search(root, past)),
        lambda: export.write(root, past, tmp_path / "rows.csv"),
    ):
        with pytest.raises(storage.FilesRemoved, match="were removed") as error:
            read()
        assert isinstance(error.value, errors.Conflict)
    assert not (tmp_path / "rows.csv").exists()


@pytest.mark.parametrize(
    "machine",
    [
        "a/b",
        "a'b",
        'a"b',
        "ü" * 100,
        "x" * 256,
        "a\nb",
        "\U0001f600",
        "*",
        "e\u0301",
        "node:1",
        "%s{}",
        "null",
    ],
)
def test_unusual_names_of_machines_are_stored_found_and_forgotten(tmp_path, machine):
    store(tmp_path, 0, [traffic.report(name, 1, T0) for name in (machine, "other")])
    maintenance.run(tmp_path, LATER_S)
    assert {row["machine"] for row in test_history.read(tmp_path)} == {machine, "other"}
    assert export.forget(tmp_path, machine) == {"nodes": 1, "hourly": 1}
    assert [row["machine"] for row in test_history.read(tmp_path, tables.HOURLY)] == ["other"]


BATCHES = 25
WRITERS = 2
GONE = "gone"


def write_batches(root: Path, writer: str) -> None:  # noqa: F811
    """A driver: every batch has a report of each machine, and sometimes of the one that is deleted."""
    for batch in range(BATCHES):
        names = [*(f"{writer}-{number}" for number in range(5)), *([GONE] if batch % 3 == 0 else [])]
        rows = [traffic.report(name, batch + 1, T0 + batch % 4 * HOUR) for name in names]
        written = data_files.write(
            root, tables.NODES, test_history.node_rows(rows, batch), f"{writer}-{batch}"
        )
        assert delta.HistoryTable(root, tables.NODES).commit(written.files, (writer, batch))


def maintain(root: Path, until: Path) -> None:  # noqa: F811
    """Compaction and hourly rows, again and again."""
    hour = 1
    while not until.exists():
        hour += 1
        with contextlib.suppress(storage.ConcurrentChange):
            maintenance.update_hourly(root, T0 / 1000 + hour * 3600)
            maintenance.compact(root, tables.NODES, LATER_S)
            maintenance.compact(root, tables.HOURLY, LATER_S)


def forget_again_and_again(root: Path, until: Path) -> None:  # noqa: F811
    while not until.exists():
        with contextlib.suppress(errors.NotFound, storage.ConcurrentChange):
            export.forget(root, GONE)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.may_leak("files", reason="multiprocessing keeps the process that tracks its resources")
def test_drivers_maintenance_and_deletion_in_processes_of_their_own(tmp_path):
    root, until = tmp_path / "history", tmp_path / "done"  # noqa: F811
    spawn = multiprocessing.get_context("spawn")
    writers = [spawn.Process(target=write_batches, args=(root, f"w{number}")) for number in range(WRITERS)]
    others = [
        spawn.Process(target=work, args=(root, until))
        for work in (maintain, maintain, forget_again_and_again)
    ]
    delta.HistoryTable(root, tables.NODES)
    for process in (*writers, *others):
        process.start()
    for process in writers:
        process.join()
    until.touch()
    for process in others:
        process.join()
    assert [process.exitcode for process in (*writers, *others)] == [0] * 5
    with contextlib.suppress(errors.NotFound):
        export.forget(root, GONE)
    maintenance.run(root, LATER_S)
    rows = test_history.read(root)
    assert len(rows) == WRITERS * BATCHES * 5
    assert len({(row["machine"], row["sequence"]) for row in rows}) == len(rows)
    hours = test_history.read(root, tables.HOURLY)
    assert GONE not in {row["machine"] for row in hours}
    assert len({(row["machine"], row["hour"]) for row in hours}) == len(hours) == WRITERS * 5 * 4
    assert sum(row["reports"] for row in hours) == len(rows)
